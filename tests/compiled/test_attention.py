"""Every attention equals XLA's, forward and gradient, and the fastest that works is chosen and named."""

import functools
import sys
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from amsp_jax.cli import settings as cli
from amsp_jax.cli.commands.workload import planned_model
from amsp_jax.engine.rematerialization import Remat, policy
from amsp_jax.errors import UserError
from amsp_jax.models import flash_attention as flash
from amsp_jax.models.attention import causal_attention, choose_attention
from amsp_jax.models.registry import build_model, model_config
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.trace import trace_model

interpreted = functools.partial(flash.flash_attention, interpret=True)


def plain(q, k, v):
    return causal_attention(q, k, v, "xla").reshape(q.shape)


def operands(seq_len, num_heads, num_kv_heads, head_dim, dtype="float32", rows=2):
    """Queries, keys, values and a cotangent."""
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (rows, seq_len, num, head_dim)).astype(dtype)
        for key, num in zip(keys, heads, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(attend, q, k, v, cotangent):
    out, vjp = jax.vjp(attend, q, k, v)
    return out, *vjp(cotangent)


# --- Pallas's against XLA's


@pytest.mark.parametrize(
    ("seq_len", "num_heads", "num_kv_heads", "head_dim"),
    [
        pytest.param(128, 4, 2, 16, id="several tiles, grouped"),
        pytest.param(100, 3, 1, 16, id="padded, one key head"),
        pytest.param(128, 1, 1, 128, id="fewer keys than queries in a tile"),
        pytest.param(5, 1, 1, 16, id="padded to the smallest tile"),
        pytest.param(64, 1, 1, 24, id="a head dim between powers of two"),
    ],
)
def test_pallas_equals_xla(seq_len, num_heads, num_kv_heads, head_dim):
    arguments = operands(seq_len, num_heads, num_kv_heads, head_dim)
    got, want = (value_and_gradients(attend, *arguments) for attend in (interpreted, plain))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_pallas_rounds_about_as_much_as_xla():
    arguments = operands(128, 4, 2, 32, "bfloat16")
    exact = value_and_gradients(plain, *(x.astype(jnp.float32) for x in arguments))
    got = value_and_gradients(interpreted, *arguments)
    # jax lowers the backward of its bfloat16 attention, a product of float32 and bfloat16, only outside strict mode.
    with jax.numpy_dtype_promotion("standard"):
        other = value_and_gradients(plain, *arguments)
    for x, y, truth in zip(got, other, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        error, others = (np.linalg.norm(np.asarray(z, np.float32) - truth) for z in (x, y))
        assert error <= 2 * others


def test_no_query_sees_a_later_key():
    q, k, v, _ = operands(100, 1, 1, 16)
    before = interpreted(q, k, v)
    after = interpreted(q, k.at[:, 60].add(1.0), v.at[:, 60].add(1.0))
    assert np.array_equal(before[:, :60], after[:, :60]) and not np.array_equal(before[:, 60:], after[:, 60:])


def test_pallas_on_each_devices_rows_and_heads():
    """As in the step: rows over the data ranks, heads over the tensor ranks, inside `shard_map`."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    arguments = operands(64, 4, 2, 16)

    def mapped(attend):
        run = functools.partial(value_and_gradients, attend)
        spec = P("data", None, "tensor")
        return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec,) * 4, check_vma=False))

    for x, y in zip(mapped(interpreted)(*arguments), value_and_gradients(plain, *arguments), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_a_block_with_pallas_attention_equals_one_with_xlas(monkeypatch):
    monkeypatch.setattr(flash, "flash_attention", interpreted)
    sizes = {"num_layers": 1, "hidden": 64, "ffn": 64, "num_heads": 4, "num_kv_heads": 2}

    def run(attention):
        block = build_model("llama-tiny", sizes, attention=attention).blocks[0]
        params = block.init(jax.random.key(0))
        x = jax.random.normal(jax.random.key(1), (2, 40, 64))
        return jax.jit(jax.value_and_grad(lambda p: jnp.sum(jnp.sin(block.apply(p, x, {}, None)))))(params)

    chex.assert_trees_all_close(run("pallas"), run("xla"), rtol=1e-4, atol=1e-4)


def test_what_the_kernel_does_not_take_is_refused():
    q, k, v, _ = operands(16, 1, 1, 8)
    with pytest.raises(UserError, match="attention='pallas': .* head dim of 16 to 128 in float32, this is 8; .* 'xla'"):
        flash.flash_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("platform", "kind"), [("cuda", "NVIDIA H100 80GB HBM3"), ("rocm", "gfx942")])
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, "float32"), (80, "float16"), (128, "bfloat16")])
def test_pallas_lowers_for_gpus_that_are_not_there(platform, kind, head_dim, dtype):
    """Up to Triton's program of each kernel; for NVIDIA `test_ahead_of_time` compiles it, too."""
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("data",), abstract_device=device)
    run = functools.partial(value_and_gradients, flash.flash_attention)
    with use_abstract_mesh(mesh):
        traced = jax.jit(run).trace(*jax.eval_shape(lambda: operands(128, 4, 2, head_dim, dtype)))
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3


# --- rematerialisation and what the planner sees


def kernels_in(jaxpr):
    """Names of the Pallas kernels of a jaxpr, those in its calls included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["name"]
            continue
        for body in jaxprs_in_params(eqn.params):
            yield from kernels_in(body)


@pytest.mark.parametrize(("remat", "num_forward"), [(Remat.NONE, 1), (Remat.PROJECTIONS, 1), (Remat.FULL, 2)])
def test_the_forward_kernel_runs_again_only_if_nothing_is_kept(remat, num_forward):
    q, k, v, cotangent = operands(64, 4, 2, 16)
    kept = jax.checkpoint(lambda q, k, v: jnp.sin(interpreted(2 * q, k, v)), policy=policy(remat), prevent_cse=False)
    jaxpr = jax.make_jaxpr(functools.partial(value_and_gradients, kept))(q, k, v, cotangent)
    names = list(kernels_in(jaxpr.jaxpr))
    assert names.count("mha_forward") == num_forward and names.count("mha_backward") == 1


def test_projections_keep_the_kernels_results_and_no_repeated_keys():
    q, k, v, _ = operands(64, 4, 2, 16)
    kept = jax.checkpoint(
        lambda q, k, v: jnp.sum(interpreted(2 * q, k, v)), policy=policy(Remat.PROJECTIONS), prevent_cse=False
    )
    shapes = [x.shape for x in jax.tree.leaves(jax.vjp(kept, q, k, v)[1])]
    log_sum = (2, 4, 64)
    assert sorted(shapes, key=str) == sorted([q.shape, k.shape, v.shape, q.shape, log_sum], key=str)


@pytest.mark.parametrize("remat", list(Remat))
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_the_planner_counts_pallas_as_cudnns(remat, num_kv_heads):
    sizes = {"num_layers": 1, "hidden": 256, "ffn": 512, "num_heads": 4, "num_kv_heads": num_kv_heads}

    def block(attention):
        model = build_model("llama-7b", sizes, attention=attention)
        return trace_model(DistinctBlocks.of(model), 1, 256, remat, jnp.bfloat16).blocks[0]

    pallas, cudnn = block("pallas"), block("cudnn")
    for one, other in ((pallas.forward, cudnn.forward), (pallas.backward, cudnn.backward)):
        assert one.attention_flops == other.attention_flops and one.matmuls == other.matmuls
        # Repeated keys and values, and the product of result and cotangent, are passes of their own.
        assert one.memory_bytes >= other.memory_bytes
    assert pallas.attended_bytes == cudnn.attended_bytes
    if remat is not Remat.NONE or num_kv_heads == 4:
        assert pallas.saved_bytes == cudnn.saved_bytes


# --- the choice


@pytest.mark.parametrize(
    ("arguments", "implementation", "reason"),
    [
        (("gpu", "9.0", 128, jnp.bfloat16, 4096), "cudnn", "cuDNN flash attention: bfloat16, head dim 128, NVIDIA 9.0"),
        (("cuda", "8.0", 128, "float16", 4096), "cudnn", "float16"),
        (("gpu", "9.0", 200, jnp.bfloat16, 4096), "cudnn", "200"),
        (("gpu", "8.6", 200, jnp.bfloat16, 4096), "xla", "at most 128, this is 200"),
        (("gpu", "9.0", 100, jnp.bfloat16, 4096), "xla", "divides by 8"),
        (("gpu", "9.0", 128, jnp.float32, 4096), "xla", "the compute dtype is float32"),
        (("gpu", "9.0", 128, jnp.bfloat16, 4097), "xla", "even sequence length, this is 4097"),
        (
            ("gpu", "gfx90a", 128, jnp.bfloat16, 4096),
            "pallas",
            "Pallas flash attention: bfloat16, head dim 128, AMD gfx90a",
        ),
        (("rocm", "gfx942:sramecc+:xnack-", 64, jnp.bfloat16, 4096), "pallas", "head dim 64, AMD gfx942"),
        (("gpu", "gfx1100", 64, jnp.bfloat16, 4096), "xla", "gfx90a or gfx942, this is gfx1100"),
        (("gpu", "gfx90a", 256, jnp.float32, 4096), "xla", "a head dim of 16 to 128 in float32, this is 256"),
        (("gpu", "9.0", 8, jnp.float32, 4096), "xla", "a head dim of 16 to 128 in float32, this is 8"),
        (("gpu", "9.0", 64, jnp.float64, 4096), "xla", "bfloat16, float16 or float32, the compute dtype is float64"),
        (("gpu", "7.0", 64, jnp.float16, 4096), "xla", "8.0 or later, this is 7.0"),
        (("cpu", None, 128, jnp.bfloat16, 4096), "xla", "a flash attention needs a GPU, the platform is cpu"),
    ],
)
def test_choice_of_attention(arguments, implementation, reason):
    choice = choose_attention(*arguments)
    assert choice.implementation == implementation
    assert reason in choice.reason


def test_a_jax_without_the_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.gpu", None)
    choice = choose_attention("gpu", "gfx942", 128, "bfloat16", 4096)
    assert choice.implementation == "xla" and f"Pallas's is not in jax {jax.__version__}" in choice.reason


@pytest.mark.parametrize("forced", ["xla", "cudnn", "pallas"])
def test_a_forced_attention_is_taken(forced):
    choice = choose_attention("gpu", "9.0", 128, "bfloat16", 4096, forced=forced)
    assert choice.implementation == forced and "as the model's settings say" in choice.reason


def test_a_forced_attention_that_does_not_work():
    with pytest.raises(UserError, match="attention='cudnn': cuDNN's needs an NVIDIA GPU; .* without it"):
        choose_attention("gpu", "gfx942", 128, "bfloat16", 4096, forced="cudnn")
    with pytest.raises(UserError, match="attention='pallas': .* this is cpu; .* without it"):
        choose_attention("cpu", None, 128, "float32", 4096, forced="pallas")


def test_the_ring_replaces_what_was_chosen():
    assert choose_attention("gpu", "9.0", 128, "bfloat16", 4096, num_context=2).reason == (
        "ring attention over 2 context ranks"
    )
    forced = choose_attention("cpu", None, 128, "bfloat16", 4096, forced="pallas", num_context=2)
    assert forced.reason == "ring attention over 2 context ranks, not the model's attention='pallas'"


def test_overrides_and_the_context_reach_the_choice(monkeypatch):
    device = types.SimpleNamespace(platform="gpu", compute_capability="9.0")

    def built(*bindings):
        return cli.build_model(cli.load_config([], bindings), device)

    overrides = "MODEL_OVERRIDES={'attention': 'pallas', 'num_heads': 4}"
    assert built(overrides).attention == "Pallas flash attention, as the model's settings say"
    assert built("CONTEXT=2").attention == "ring attention over 2 context ranks"
    device.compute_capability = "7.0"
    with pytest.raises(UserError, match="attention='pallas': .* 8.0 or later, this is 7.0; model_overrides without it"):
        built(overrides)


@pytest.mark.parametrize(
    ("cluster", "is_fused"), [("v100-dgx2", False), ("a100", True), ("frontier", True), ("mi300x", True)]
)
def test_the_planner_plans_what_a_run_would_choose(cluster, is_fused):
    model = planned_model("llama-tiny", {"num_layers": 1}, named_cluster(cluster, 1), 128)
    block = trace_model(DistinctBlocks.of(model), 1, 128, Remat.FULL, jnp.bfloat16).blocks[0]
    assert (block.forward.attention_flops[0] > 0) == is_fused


@pytest.mark.parametrize(
    ("platform", "capability", "seq_len", "called"),
    [("gpu", "9.0", 64, "cudnn"), ("gpu", "9.0", 63, "xla"), ("gpu", "gfx942", 64, "pallas"), ("cpu", None, 64, "xla")],
)
def test_a_model_built_in_python_takes_the_fastest_of_its_device(monkeypatch, platform, capability, seq_len, called):
    """Without a choice by the command line: by the device, and the shapes and dtype of the queries."""
    device = types.SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    calls = []

    def attend(q, k, v, **settings):
        calls.append(settings.get("implementation", "pallas"))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    monkeypatch.setattr(flash, "flash_attention", attend)
    q = jnp.zeros((1, seq_len, 2, 64), jnp.bfloat16)
    causal_attention(q, q, q, model_config("llama-125m").attention)
    assert calls == [called]
