"""The models as single-device mathematics, against a numpy oracle; the registry and its numbers."""

import dataclasses
import math
import re
import time
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import models_reference as reference
import numpy as np
import pytest

from amsp_jax.engine.rematerialization import Remat, checkpointed
from amsp_jax.errors import UserError
from amsp_jax.models import MODELS, GPTConfig, LlamaConfig, build_model, gpt, llama, model_config
from amsp_jax.models.config import TransformerConfig
from amsp_jax.models.layers import embed
from amsp_jax.models.loss import cross_entropy

LLAMA = LlamaConfig(num_layers=2, hidden=32, ffn=48, num_heads=4, num_kv_heads=2, vocab_size=61)
GPT = GPTConfig(num_layers=2, hidden=32, ffn=48, num_heads=4, vocab_size=61, max_seq_len=16)
CONFIGS = {
    "llama": LLAMA,
    "llama-tied": dataclasses.replace(LLAMA, tied=True, num_kv_heads=4),
    "gpt": GPT,
    "gpt-untied": dataclasses.replace(GPT, tied=False),
}


def make(config):
    return llama(config) if isinstance(config, LlamaConfig) else gpt(config)


def draw(model):
    """Parameters drawn in numpy, with norms and biases away from their initial 1 and 0."""
    rng = np.random.default_rng(0)

    def leaf(path, x):
        mean, std = (0.0, 0.2) if x.ndim == 2 else (float(path[-1].key == "scale"), 0.3)
        return rng.normal(mean, std, x.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, model.abstract_params())


def make_batch(vocab_size, rows=2, seq_len=12):
    rng = np.random.default_rng(0)
    weights = (rng.random((rows, seq_len)) < 0.7).astype(np.float32)
    tokens, targets = (rng.integers(0, vocab_size, (rows, seq_len), dtype=np.int32) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "weights": weights}


def forward(model, params, batch):
    """Logits and the head's output, as the engine calls the parts."""
    embed_params, blocks, head_params = model.split(params)
    rng = jax.random.split(jax.random.key(0), batch["tokens"].shape[0])
    x = model.embed.apply(embed_params, batch, rng)
    for part, block in zip(model.blocks, blocks, strict=True):
        x = part.apply(block, x, batch, rng)
        assert x.dtype == embed_params["table"].dtype
    tied_params = embed_params if model.tied else None
    return model.logits(head_params, tied_params, x), model.head.apply(head_params, tied_params, x, batch, rng)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its parameters, a batch, and one function compiled once for all tests."""

    config: TransformerConfig
    params: Any
    batch: dict[str, np.ndarray]
    # (params, batch) -> ((loss_sum, (logits, weight_sum, aux)), grads)
    run: Callable[..., Any]

    @classmethod
    def of(cls, config):
        model = make(config)

        def loss(params, batch):
            logits, ((loss_sum, weight_sum), aux) = forward(model, params, batch)
            return loss_sum, (logits, weight_sum, aux)

        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return cls(config, draw(model), make_batch(config.vocab_size), run)

    def logits(self, tokens):
        (_, (logits, _, _)), _ = self.run(self.params, {**self.batch, "tokens": tokens})
        return np.asarray(logits)


@pytest.fixture(params=CONFIGS, scope="module")
def case(request):
    return Case.of(CONFIGS[request.param])


def test_logits_and_loss_equal_the_reference(case):
    logits_of_row = reference.llama_logits if isinstance(case.config, LlamaConfig) else reference.gpt_logits
    params, batch = reference.float64(case.params), case.batch
    expected = np.stack([logits_of_row(case.config, params, row) for row in batch["tokens"]])
    (loss_sum, (logits, weight_sum, aux)), _ = case.run(case.params, batch)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(loss_sum, reference.loss(expected, batch["targets"], batch["weights"]), rtol=1e-5)
    assert float(weight_sum) == batch["weights"].sum()
    assert aux == {}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shapes_and_dtypes(case, dtype):
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), case.params)
    (loss_sum, (logits, weight_sum, _)), grads = jax.eval_shape(case.run, params, case.batch)
    assert (logits.shape, logits.dtype) == ((2, 12, case.config.vocab_size), dtype)
    for total in (loss_sum, weight_sum):
        assert (total.shape, total.dtype) == ((), jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(grads, params)


@pytest.mark.parametrize("case", ["llama", "gpt"], indirect=True)
def test_bfloat16_is_near_float32(case):
    (exact, _), exact_grads = case.run(case.params, case.batch)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.params)
    traced = case.run.trace(params, case.batch)
    # jax lowers the backward of its bfloat16 attention, a product of float32 and bfloat16, only outside strict mode.
    with jax.numpy_dtype_promotion("standard"):
        compiled = traced.lower().compile()
    (rounded, _), grads = compiled(params, case.batch)
    assert float(rounded) == pytest.approx(float(exact), rel=0.02)
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        assert np.linalg.norm(np.asarray(got, np.float32) - want) <= 0.1 * np.linalg.norm(want) + 1e-2


def test_a_later_token_does_not_change_an_earlier_logit(case):
    tokens = case.batch["tokens"].copy()
    tokens[:, 7] = (tokens[:, 7] + 1) % case.config.vocab_size
    before, after = case.logits(case.batch["tokens"]), case.logits(tokens)
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert np.all(np.abs(before[:, 7:] - after[:, 7:]).max(axis=-1) > 0)


def test_tokens_of_weight_zero_do_not_count(case):
    batch = case.batch
    ignored = {**batch, "targets": np.where(batch["weights"] > 0, batch["targets"], -100).astype(np.int32)}
    chex.assert_trees_all_equal(case.run(case.params, ignored), case.run(case.params, batch))
    nothing = {
        "tokens": np.full_like(batch["tokens"], -1),
        "targets": np.full_like(batch["targets"], -100),
        "weights": np.zeros_like(batch["weights"]),
    }
    (total, _), grads = case.run(case.params, nothing)
    assert float(total) == 0.0
    assert all(np.all(np.asarray(g) == 0.0) for g in jax.tree.leaves(grads))


def test_grouped_queries_equal_repeated_heads():
    grouped = llama(LLAMA).blocks[0]
    full = llama(dataclasses.replace(LLAMA, num_kv_heads=LLAMA.num_heads)).blocks[0]
    params = draw(llama(LLAMA))["blocks"][0]
    x = np.random.default_rng(1).normal(size=(2, 12, LLAMA.hidden)).astype(np.float32)

    def repeat(path, weight):
        if path[-2].key not in ("k", "v"):
            return weight
        heads = weight.reshape(LLAMA.hidden, LLAMA.num_kv_heads, LLAMA.head_dim)
        return jnp.repeat(heads, LLAMA.num_heads // LLAMA.num_kv_heads, axis=1).reshape(LLAMA.hidden, LLAMA.hidden)

    repeated = jax.tree_util.tree_map_with_path(repeat, params)
    got, expected = jax.jit(lambda a, b, x: (grouped.apply(a, x, {}, None), full.apply(b, x, {}, None)))(
        params, repeated, x
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_frequent_token_gradient_in_bfloat16_is_summed_in_float32():
    rng = np.random.default_rng(0)
    tokens = np.where(rng.random((8, 512)) < 0.8, 3, rng.integers(0, 20, (8, 512))).astype(np.int32)
    table = jnp.asarray(rng.normal(size=(20, 16)), jnp.bfloat16)
    upstream = jnp.asarray(rng.normal(0.5, 1.0, (8, 512, 16)), jnp.bfloat16)
    exact = np.zeros((20, 16))
    np.add.at(exact, tokens, np.asarray(upstream, np.float64))

    def error(lookup):
        got = jax.jit(lambda t: jax.vjp(lambda table: lookup(table, tokens), t)[1](upstream)[0])(table)
        assert got.dtype == jnp.bfloat16
        return np.linalg.norm(np.asarray(got[3], np.float64) - exact[3]) / np.linalg.norm(exact[3])

    assert error(embed) < 2**-8 < error(lambda table, tokens: table[tokens])


def test_embedding_keeps_no_table_for_the_backward():
    table = jnp.ones((20, 16))
    _, backward = jax.vjp(lambda t: embed(t, jnp.zeros((2, 3), jnp.int32)), table)
    assert not any(x.shape == table.shape for x in jax.tree.leaves(backward))


def test_the_loss_has_no_scatter_in_its_backward():
    batch = make_batch(61)
    grad = jax.grad(lambda x: cross_entropy(x, batch["targets"], batch["weights"])[0])
    assert "scatter" not in str(jax.make_jaxpr(grad)(jnp.ones((2, 12, 61))))


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (LLAMA, ["attention_residual", "mlp_gate", "mlp_up", "qkv", "qkv", "qkv"]),
        (GPT, ["attention_residual", "mlp_up", "qkv", "qkv", "qkv"]),
    ],
)
def test_projections_are_named_for_rematerialisation(config, names):
    block = make(config).blocks[0]
    x = jax.ShapeDtypeStruct((2, 12, config.hidden), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda key, x: block.apply(block.init(key), x, {}, None))(jax.random.key(0), x)
    assert sorted(re.findall(r"name\[name=(\w+)\]", str(jaxpr))) == names


@pytest.mark.parametrize(("remat", "num_products"), [(Remat.NONE, 8), (Remat.PROJECTIONS, 9), (Remat.FULL, 11)])
@pytest.mark.parametrize("is_jitted", [False, True])
def test_a_block_that_names_nothing_keeps_its_products(remat, num_products, is_jitted):
    """But not the batched one of scores: 3 forward, 5 backward, and what is repeated. A function's name is none."""

    @jax.jit
    def qkv(params, x):
        return x @ params["in"]

    def apply(params, x):
        x = jnp.tanh(qkv(params, x))
        scores = jnp.tanh(jnp.einsum("bsd,btd->bst", x, x))
        return jnp.tanh(scores @ params["out"])

    params, x = {"in": jnp.ones((8, 8)), "out": jnp.ones((4, 8))}, jnp.ones((2, 4, 8))
    block = checkpointed(jax.jit(apply) if is_jitted else apply, remat)
    text = str(jax.make_jaxpr(jax.grad(lambda params: jnp.sum(block(params, x))))(params))
    assert text.count("dot_general") == num_products


@pytest.mark.parametrize("part", [llama(LLAMA).embed, gpt(GPT).blocks[0]], ids=["embed", "block"])
def test_initial_parameters_do_not_depend_on_the_mesh(part):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(x):
        dim = [size % 8 for size in x.shape].index(0)
        return jax.NamedSharding(mesh, jax.P(*(None,) * dim, "data"))

    alone = jax.jit(part.init)(jax.random.key(1))
    sharded = jax.jit(part.init, out_shardings=jax.tree.map(shard, alone))(jax.random.key(1))
    chex.assert_trees_all_equal(jax.device_get(alone), jax.device_get(sharded))


def test_initial_scale():
    config = LlamaConfig(num_layers=8, hidden=128, ffn=256, num_heads=4, num_kv_heads=2, vocab_size=512)
    block = jax.jit(llama(config).blocks[0].init)(jax.random.key(0))
    attention, mlp = block["attention"], block["mlp"]
    for projection, std in [(attention["q"], 0.02), (attention["o"], 0.005), (mlp["up"], 0.02), (mlp["down"], 0.005)]:
        assert np.asarray(projection["kernel"]).std() == pytest.approx(std, rel=0.05)
    assert np.all(np.asarray(block["mlp_norm"]["scale"]) == 1.0)


def test_a_sequence_longer_than_the_positions_is_an_error():
    embedding, batch = gpt(GPT).embed, make_batch(61, seq_len=17)
    with pytest.raises(UserError, match="17 tokens.*max_seq_len 16.*seq_len=16"):
        jax.eval_shape(lambda key: embedding.apply(embedding.init(key), batch, None), jax.random.key(0))


# --- numbers and registry


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_numbers_equal_the_shapes(config):
    model = make(config)
    shapes = model.abstract_params()
    sizes = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(shapes)}
    matmul = sum(x.size for path, x in sizes.items() if x.ndim == 2 and "embed" not in path)
    if config.tied:
        matmul += config.vocab_size * config.hidden
    assert model.numbers.num_params == sum(x.size for x in sizes.values())
    assert model.numbers.num_matmul_params == matmul
    assert len({id(part) for part in model.blocks}) == 1


def test_flops_by_hand():
    # A multiply-add is 2 FLOPs, the backward is twice the forward: 6 a weight. Causal attention, forward: 2 products of
    # 2 x width x seq / 2 FLOPs a token and layer. Head: 8 x 16.
    multi_head = LlamaConfig(num_layers=3, hidden=8, ffn=12, num_heads=2, num_kv_heads=2, vocab_size=16)
    attention = 3 * 3 * 2 * 2 * 8 * 10 // 2
    assert llama(multi_head).numbers.flops_per_token(10) == 6 * (3 * (4 * 8 * 8 + 3 * 8 * 12) + 8 * 16) + attention
    # One key and value head of two: their projections halve, the attention itself does not.
    grouped = dataclasses.replace(multi_head, num_kv_heads=1)
    assert llama(grouped).numbers.flops_per_token(10) == 6 * (3 * (3 * 8 * 8 + 3 * 8 * 12) + 8 * 16) + attention
    # Two matrices in the MLP; the tied table counts as the head.
    plain = GPTConfig(num_layers=3, hidden=8, ffn=12, num_heads=2, vocab_size=16, max_seq_len=10)
    assert gpt(plain).numbers.flops_per_token(10) == 6 * (3 * (4 * 8 * 8 + 2 * 8 * 12) + 8 * 16) + attention


PUBLISHED_BILLIONS = {
    "llama-7b": 6.74,
    "llama-13b": 13.02,
    "llama-30b": 27.57,
    "llama-65b": 65.29,
    "gpt-22b": 22.07,
    "gpt-175b": 174.62,
    "gpt-1t": 1008.04,
}


@pytest.mark.parametrize("name", MODELS)
def test_registry_models_build_without_arrays(name):
    start = time.perf_counter()
    model = build_model(name)
    leaves = jax.tree.leaves(model.abstract_params())
    assert time.perf_counter() - start < 5
    assert all(isinstance(x, jax.ShapeDtypeStruct) and x.dtype == jnp.float32 for x in leaves)
    assert model.name == name
    assert model.numbers.num_params == sum(x.size for x in leaves)
    if name in PUBLISHED_BILLIONS:
        assert round(model.numbers.num_params / 1e9, 2) == PUBLISHED_BILLIONS[name]


def test_the_quickstart_model_divides():
    config = MODELS["llama-tiny"].config
    divisions = [(config.num_layers, 2), (config.num_heads, 4), (config.num_kv_heads, 4), (config.vocab_size, 8)]
    assert [number % divisor for number, divisor in divisions] == [0, 0, 0, 0]


def test_overrides_and_runtime_values():
    assert build_model("llama-7b", {"num_layers": 2}).numbers.num_layers == 2
    assert model_config("llama-7b", {"rope_theta": 500000}).rope_theta == 500000
    assert len(build_model("gpt-22b", {"num_layers": 3}, num_layers=2, attention="cudnn").blocks) == 3


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("llama-7B", {}, "'llama-7B' is not known. Did you mean 'llama-7b'.*gpt-1t"),
        ("bert", {}, "'bert' is not known. Choose one of: llama-tiny"),
        ("llama-7b", {"num_layer": 2}, "llama-7b has no setting 'num_layer'. Did you mean 'num_layers'.*rope_theta"),
        ("llama-7b", {"max_seq_len": 2048}, "no setting 'max_seq_len'"),
        ("llama-7b", {"num_layers": "2"}, "num_layers='2' is of type str; it must be of type int"),
        ("llama-7b", {"num_layers": True}, "num_layers=True is of type bool"),
        ("llama-7b", {"num_layers": 2.0}, "num_layers=2.0 is of type float"),
        ("llama-7b", {"tied": 1}, "tied=1 is of type int; it must be of type bool"),
        ("llama-7b", {"hidden": 0}, "hidden=0 must be greater than 0"),
        ("llama-7b", {"num_layers": 10**9}, "num_layers=1000000000 must be at most 10,000."),
        ("llama-7b", {"hidden": 32 * 10**12}, "hidden=32000000000000 must be at most 100,000,000."),
        ("gpt-22b", {"init_std": math.inf}, "init_std=inf must be finite."),
        ("gpt-22b", {"norm_eps": math.nan}, "norm_eps=nan must be greater than 0"),
        ("llama-7b", {"attention": "flash"}, "attention='flash' must be one of 'auto', 'xla', 'cudnn', 'pallas'"),
        ("llama-7b", {"num_heads": 30}, r"num_heads 30 does not divide hidden 4096 \(remainder 16\).* 32"),
        ("llama-7b", {"num_kv_heads": 5}, "num_kv_heads 5 does not divide num_heads 32.* 4, 8"),
        ("llama-7b", {"num_heads": 4096, "num_kv_heads": 1}, "head dim 1 is odd"),
    ],
)
def test_bad_input_is_named(name, overrides, message):
    with pytest.raises(UserError, match=message):
        build_model(name, overrides)
