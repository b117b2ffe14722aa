"""Plans of models cut into stages, context and tensor ranks: their bytes, what they say of padding, and bad input."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule, assign_blocks
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.state import abstract_state
from amsp_jax.errors import UserError
from amsp_jax.model import Model, Part
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

ODD = {"num_layers": 5, "hidden": 60, "ffn": 22, "num_heads": 6, "num_kv_heads": 3, "vocab_size": 61}


def plan(model: Model, strategy: str, nodes: int, per_node: int, **parallel: int) -> Plan:
    cut = ModelParallel(**parallel)
    return make_plan(strategy, model, ranks=cut.data_ranks(nodes, per_node), compute_dtype=jnp.bfloat16, parallel=cut)


def shard_bytes(tree) -> int:
    """Of what one device holds of arrays, counters aside."""
    return sum(4 * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree) if x.shape)


# --- bytes, without devices


@pytest.mark.parametrize(
    ("name", "overrides", "strategy", "nodes", "per_node", "parallel"),
    [
        ("gpt-175b", {}, "zero1", 128, 8, {"pipeline": 16, "tensor": 4}),
        ("gpt-1t", {}, "zero1", 384, 8, {"pipeline": 64, "tensor": 8}),
        ("gpt-1t", {}, "params=2x1 grads=2x1 opt_state=2x4", 256, 8, {"pipeline": 32, "tensor": 4, "context": 1}),
        ("llama-7b", {}, "hpz(2)", 4, 8, {"pipeline": 2, "tensor": 2, "context": 2}),
        ("llama-tiny", ODD, "zero3", 4, 8, {"pipeline": 4, "tensor": 4}),
        ("llama-tiny", ODD, "ddp", 2, 8, {"pipeline": 2, "tensor": 2, "context": 2}),
        ("llama-tiny", ODD, "mics(2)", 2, 8, {"pipeline": 2, "tensor": 4}),
    ],
)
def test_bytes_of_the_state_are_those_of_its_shards(name, overrides, strategy, nodes, per_node, parallel):
    model = build_model(name, overrides)
    planned = plan(model, strategy, nodes, per_node, **parallel)
    assert isinstance(planned.mesh, AbstractMesh) and planned.mesh.size == nodes * per_node
    state = abstract_state(planned, make_optimizer("adamw", 1e-3, clip_norm=1.0))
    bytes_ = planned.bytes_per_device()
    assert (bytes_.master, bytes_.moments) == (shard_bytes(state.params), shard_bytes(state.opt_state))


def test_bytes_of_the_175b_recipe_by_hand():
    """Every dimension divides: 12 bytes of OS over all that holds it, P and G of six of 96 blocks and of both ends."""
    hidden, tensor, stages, ranks = 12288, 4, 16, 16
    matrices, split_biases, whole = 12 * hidden**2, 7 * hidden, 6 * hidden
    table, positions, norm = 51200 * hidden, 2048 * hidden, 2 * hidden
    of_a_rank = [(matrices + split_biases) // tensor + whole, table // tensor + positions + norm]
    got = plan(build_model("gpt-175b"), "zero1", 128, 8, pipeline=stages, tensor=tensor).bytes_per_device()
    assert got.master == 4 * (96 * of_a_rank[0] + of_a_rank[1]) // (stages * ranks)
    assert got.moments == 2 * got.master
    assert got.params == 2 * (6 * of_a_rank[0] + of_a_rank[1])
    assert got.grads == 2 * got.params


@pytest.mark.parametrize(("num_blocks", "fullest"), [(96, 6), (97, 7), (111, 7), (112, 7)])
def test_a_stage_counts_the_blocks_of_the_fullest(num_blocks, fullest):
    model = build_model("gpt-175b", {"num_layers": num_blocks})
    got = plan(model, "zero1", 128, 8, pipeline=16, tensor=4)
    one = plan(build_model("gpt-175b", {"num_layers": 16}), "zero1", 128, 8, pipeline=16, tensor=4)
    two = plan(build_model("gpt-175b", {"num_layers": 32}), "zero1", 128, 8, pipeline=16, tensor=4)
    first, second = (p.bytes_per_device().params for p in (one, two))
    assert got.bytes_per_device().params == first + (fullest - 1) * (second - first)


def test_context_ranks_hold_equal_states():
    model = build_model("llama-7b")
    without = plan(model, "zero1", 2, 8, tensor=2).bytes_per_device()
    assert plan(model, "zero1", 4, 8, tensor=2, context=2).bytes_per_device() == without


# --- what the plan says of padding


def test_padding_for_tensor_ranks_is_printed():
    text = str(plan(build_model("llama-tiny", ODD), "ddp", 1, 4, tensor=4))
    assert "parallel  tensor=4" in text
    for line in (
        "  embed.table: dimension 0, 61 vocabulary entries, padded 61 -> 64 for 4 tensor ranks",
        "  blocks.*.attention.q.kernel: dimension 1, 6 heads, padded 60 -> 80 for 4 tensor ranks",
        "  blocks.*.attention.k.kernel: whole on each of 4 tensor ranks: it has 3 heads",
        "  blocks.*.mlp.down.kernel: dimension 0, 22 MLP columns, padded 22 -> 24 for 4 tensor ranks",
    ):
        assert line in text.splitlines(), text


def test_sizes_that_divide_need_no_word():
    assert not re.search("padded|whole on|replicated", str(plan(build_model("llama-7b"), "zero1", 1, 8, tensor=8)))


# --- bad input: one line with the numbers and the nearest choices

TINY = build_model("llama-tiny")
BLOCKLESS = Model.from_loss(lambda params, batch, rng: ((jnp.sum(params), 1.0), {}), lambda key: jnp.ones(8))


@pytest.mark.parametrize(
    ("nodes", "per_node", "parallel", "message"),
    [
        (1, 8, {"pipeline": 8}, "pipeline=8 is more stages than llama-tiny has blocks, 4; choose at most 4"),
        (1, 8, {"tensor": 8}, r"tensor=8 is more than the 4 heads of blocks.0.*; choose tensor=4 or fewer"),
        (1, 8, {"tensor": 3}, "tensor=3 take 3 devices, which do not divide the 8 devices .* 2 or 4 would"),
        (1, 8, {"tensor": 16}, "tensor=16 take 16 devices, which do not divide the 8 devices .* 4 or 8 would"),
        (2, 6, {"tensor": 4}, r"tensor=4 x context=1 = 4 must divide the 6 devices of a node.*; 2 or 3 would"),
        (2, 4, {"tensor": 4, "context": 2}, "tensor=4 x context=2 = 8 must divide the 4 devices of a node"),
        (3, 8, {"pipeline": 4}, "pipeline=4 stages of 6 devices fill neither .* 3 or 6 would"),
        (1, 8, {"tensor": 0}, "tensor=0: it must be an integer of at least 1"),
    ],
)
def test_layouts_that_do_not_fit(nodes, per_node, parallel, message):
    with pytest.raises(UserError, match=message) as caught:
        plan(TINY, "zero1", nodes, per_node, **parallel)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "per_node", "parallel", "blocks", "message"),
    [
        (1, 8, {"pipeline": 64}, 4, "pipeline=64 take 64 devices, .* 8 devices of 1 nodes x 8; 2 or 4 would"),
        (1, 8, {"pipeline": 64}, 0, "pipeline=64 take 64 devices, .*; 1 would"),
        (1, 8, {"pipeline": 16, "tensor": 2}, 2, "pipeline=16 x tensor=2 take 32 devices, .*; 2 or 4 would"),
        (1, 8, {"pipeline": 3, "tensor": 3}, 4, "pipeline=3 x tensor=3 take 9 devices, .*; 4 or 8 would"),
        (3, 8, {"pipeline": 5}, 40, "pipeline=5 take 5 devices, .*; 3 or 6 would"),
        (3, 8, {"pipeline": 4}, 4, "pipeline=4 stages of 6 devices fill neither .*; 1 or 3 would"),
    ],
)
def test_only_numbers_of_stages_that_the_blocks_allow_are_suggested(nodes, per_node, parallel, blocks, message):
    with pytest.raises(UserError, match=message):
        ModelParallel(**parallel).data_ranks(nodes, per_node, blocks)


@pytest.mark.parametrize(("grid", "tensor"), [((1, 8), 4), ((3, 8), 1), ((3, 8), 2), ((4, 6), 3), ((6, 4), 2)])
def test_what_is_suggested_is_taken(grid, tensor):
    with pytest.raises(UserError) as caught:
        ModelParallel(pipeline=35, tensor=tensor).data_ranks(*grid)
    for suggested in re.search(r"; (\d+) or (\d+) would$", str(caught.value)).groups():
        ModelParallel(pipeline=int(suggested) // tensor, tensor=tensor).data_ranks(*grid)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 2}, "^tensor=2: model does not say how its parameters are split"),
        ({"tensor": 2, "context": 2}, "^tensor=2 and context=2: model does not say"),
        ({"pipeline": 2}, "pipeline=2: model declares no blocks"),
    ],
)
def test_models_that_are_not_made_for_it(parallel, message):
    with pytest.raises(UserError, match=message):
        plan(BLOCKLESS, "zero1", 1, 8, **parallel)


def test_a_part_without_splits_names_the_model():
    head = Part(TINY.head.init, TINY.head.apply)
    with pytest.raises(UserError, match="^tensor=2: llama-tiny does not say"):
        plan(dataclasses.replace(TINY, head=head), "zero1", 1, 8, tensor=2)


def test_without_splits_stages_are_no_error():
    assert make_plan("zero1", TINY, ranks=DataRanks(4), parallel=ModelParallel(pipeline=2)).mesh.size == 8


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (("1f1b", 4, 1, 3), "3 microbatches in a step are fewer than the pipeline=4 stages.*use pipeline=3, or"),
        (("1f1b", 4, 2, 6), "groups of pipeline=4, and 6 is no multiple.* 4 or 8 microbatches .*or virtual_stages=1"),
        (("gpipe", 1, 2, 6), "virtual_stages=2 with pipeline=1"),
        (("zb", 2, 1, 2), "pipeline_schedule='zb': it must be one of gpipe, 1f1b"),
    ],
)
def test_schedules_that_do_not_exist(schedule, message):
    with pytest.raises(UserError, match=message):
        PipelineSchedule(*schedule)


def test_more_virtual_stages_than_blocks():
    with pytest.raises(UserError, match="8 virtual stages.* has 6; use at most virtual_stages=1 or pipeline="):
        assign_blocks(6, 4, 2)
