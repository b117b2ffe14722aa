"""What a trace counts: FLOPs against the model's own numbers, saved bytes against what policies mean, loops, fusion."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.model import Model
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cost import compute
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.program import flatten, peak_bytes, traffic_bytes
from amsp_jax.predict.cost.ranks import rank_trace
from amsp_jax.predict.cost.trace import Matmul, cudnn_assumed, trace_model

ROWS, SEQ = 2, 512
SIZES = {"num_layers": 3, "hidden": 256, "ffn": 768, "num_heads": 4}


@pytest.fixture(scope="module", params=["llama-7b", "gpt-22b"])
def model(request):
    return build(request.param, **({"num_kv_heads": 4} if request.param == "llama-7b" else {}))


def build(name, **others):
    return build_model(name, {**SIZES, **others}, attention="cudnn")


def trace(model, remat=Remat.PROJECTIONS, rows=ROWS):
    return trace_model(DistinctBlocks.of(model), rows, SEQ, remat, jnp.bfloat16)


def test_sketch_holds_each_block_once():
    model = build_model("llama-tiny")
    other = build_model("llama-tiny").blocks[0]
    mixed = Model(name="mixed", head=model.head, blocks=(model.blocks[0], other, model.blocks[0]))
    distinct = DistinctBlocks.of(mixed)
    assert distinct.model.blocks == (model.blocks[0], other)
    assert distinct.order == (0, 1, 0)
    assert distinct.counts == (2, 1)
    assert len(distinct.model.abstract_params()["blocks"]) == 2


@pytest.mark.parametrize("remat", list(Remat))
def test_model_flops_are_the_numbers_of_the_model(model, remat):
    flops = compute.flops(DistinctBlocks.of(model), trace(model, remat))
    assert flops.model == model.numbers.flops_per_token(SEQ) * ROWS * SEQ
    recomputes = remat is Remat.FULL
    assert (flops.hardware > flops.model) == recomputes


def test_full_rematerialisation_recomputes_all_but_the_last_product(model):
    block = trace(model, Remat.FULL).blocks[0]
    *_, down = block.forward.matmuls
    assert block.backward.flops == 3 * block.forward.flops - down.flops


def test_what_each_policy_saves_of_a_llama_block():
    model, bf16 = build("llama-7b", num_kv_heads=2), 2
    tokens = ROWS * SEQ
    x = tokens * SIZES["hidden"] * bf16
    assert trace(model, Remat.FULL).blocks[0].saved_bytes == x
    q, kv, attention_residual, ffn = x, x // 2, x, tokens * SIZES["ffn"] * bf16
    statistics = tokens * SIZES["num_heads"] * 4
    projections = x + q + 2 * kv + attention_residual + 2 * ffn + (x + statistics)
    assert trace(model, Remat.PROJECTIONS).blocks[0].saved_bytes == projections
    assert trace(model, Remat.NONE).blocks[0].saved_bytes > projections + 2 * ffn


def test_bytes_are_in_proportion_to_the_rows(model):
    one, four = (trace(model, rows=rows) for rows in (1, 4))
    assert four.blocks[0].saved_bytes == 4 * one.blocks[0].saved_bytes
    assert four.blocks[0].pending_bytes == 4 * one.blocks[0].pending_bytes
    assert four.batch_bytes == 4 * one.batch_bytes == 4 * SEQ * 12


def test_head_holds_logits_and_their_cotangents(model):
    logits = ROWS * SEQ * model.abstract_params()["embed"]["table"].shape[0] * 2
    head = trace(model).head
    assert 2 * logits < head.backward_bytes < 2.1 * logits
    assert logits < head.pending_bytes < 1.1 * logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_chunks_has_the_same_work_and_one_chunks_logits(tied):
    whole, cut = (build("llama-7b", num_kv_heads=4, tied=tied, loss_chunks=n) for n in (1, 8))
    expected, head = trace(whole).head, trace(cut).head
    assert compute.flops(DistinctBlocks.of(cut), trace(cut)) == compute.flops(DistinctBlocks.of(whole), trace(whole))
    tokens, hidden, vocab = ROWS * SEQ // 8, SIZES["hidden"], 32000
    logits, dx, dmatrix = (tokens, hidden, vocab), (tokens, vocab, hidden), (hidden, tokens, vocab)
    if tied:
        dmatrix = (vocab, tokens, hidden)
    assert head.forward.matmuls == (Matmul(1, *logits, 1),) * 8
    assert head.backward.matmuls == (Matmul(1, *dx, 1), Matmul(1, *dmatrix, 1)) * 8
    # The float32 sum, and a chunk's logits and their cotangents; then the rounded sum waits for its reduction.
    matrix = hidden * vocab
    assert head.backward_bytes == pytest.approx(4 * matrix + 2 * 2 * tokens * vocab, rel=0.05)
    assert head.pending_bytes == 2 * matrix < expected.pending_bytes
    assert (expected.params_bytes, head.params_bytes) == ((0, 0), (4 * matrix, 2 * matrix))
    assert rank_trace(trace(cut), ModelParallel(context=2), Remat.PROJECTIONS).head.pending_bytes == 2 * matrix
    # Each product after the first reads and writes the sum.
    assert head.backward.memory_bytes - expected.backward.memory_bytes > 7 * 2 * 4 * matrix


def test_a_product_is_added_in_place_to_a_barred_array():
    def f(x, w):
        total = x @ w
        for _ in range(3):
            x, total = jax.lax.optimization_barrier((x * 2, total))
            total = total + x @ w
        return total

    program = flatten(jax.make_jaxpr(f)(jnp.ones((64, 64)), jnp.ones((64, 64))))
    products = [op for op in program.operations if op.name == "dot_general"]
    assert [op.outputs for op in products] == [program.outputs] * 4
    # Operands, the sum, and the next product's x.
    assert peak_bytes(program, (), ()) <= 5 * 64 * 64 * 4


def test_a_model_without_blocks_is_a_head():
    def loss(params, batch, rng):
        x = jax.nn.one_hot(batch["tokens"], 8, dtype=params["w"].dtype)
        return (jnp.sum((x @ params["w"]).astype(jnp.float32)), jnp.float32(1)), {}

    model = Model.from_loss(loss, lambda key: {"w": jnp.ones((8, 4))})
    traced = trace(model)
    assert traced.blocks == ()
    assert traced.head.forward.matmuls == (Matmul(1, ROWS * SEQ, 8, 4, 1),)


def test_a_loop_counts_its_trips():
    def f(x, w):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=5)[0]

    program = flatten(jax.make_jaxpr(f)(jnp.ones((2, 3)), jnp.ones((3, 3))))
    assert [(op.name, op.repeats) for op in program.operations] == [("dot_general", 5)]


def test_elementwise_operations_are_fused():
    def f(x, w):
        return jnp.sum(jnp.sin(x) * 2.0), jnp.exp(x) @ w

    program = flatten(jax.make_jaxpr(f)(jnp.ones((64, 64)), jnp.ones((64, 64))))
    array = 64 * 64 * 4
    # The sum reads x; the product's operand is written, from x.
    assert traffic_bytes(program) == (array + 4) + 2 * array
    assert peak_bytes(program, (), program.inputs) == 4 + 2 * array


@pytest.mark.parametrize("name", ["llama-7b", "gpt-22b"])
def test_a_trace_starts_no_backend(name):
    code = (
        "import jax.numpy as jnp; from jax._src import xla_bridge\n"
        "from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks\n"
        "from amsp_jax.predict.cost.trace import trace_model; from amsp_jax.models.registry import build_model\n"
        f"model = build_model({name!r}, attention='cudnn')\n"
        "trace_model(DistinctBlocks.of(model), 1, 512, 'projections', jnp.bfloat16)\n"
        "assert not xla_bridge._backends"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_assumption_of_cudnn_ends():
    from jax._src.cudnn import fused_attention_stablehlo

    before = fused_attention_stablehlo.check_cudnn_version
    with pytest.raises(ZeroDivisionError), cudnn_assumed():
        assert fused_attention_stablehlo.check_cudnn_version() > 90000
        raise ZeroDivisionError
    assert fused_attention_stablehlo.check_cudnn_version is before
