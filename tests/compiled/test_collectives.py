"""The compiled step holds the collectives of the design and no others: kind, group, shape, count, in a loop or not.

Compiling it is the price, so what the cost model says of the step is held against the same program: its collectives
by kind, axes, bytes and count, and the bytes of its arguments.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import QUICKSTART, RANKS, THREE_DEGREES, plan_for
from oracle_step import ROWS, lowered, predicted, predicted_argument_bytes

from amsp_jax.compile import hlo
from amsp_jax.engine import block_backward
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.model import Model, Part
from amsp_jax.strategy import DataRanks, all_degrees, parse

STRATEGIES = [
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "mics(4)",
    "hpz(4)",
    "hfsdp(2)",
    QUICKSTART,
    THREE_DEGREES,
]
# The triples that none of them is.
OTHERS = sorted({str(d) for d in all_degrees(RANKS)} - {str(parse(s).resolve(RANKS)) for s in STRATEGIES})


def expected(plan, accumulation):
    """The list of docs/design/architecture.md, as (kind, groups, shape, in loop) with counts."""
    result = Counter()
    model = oracle.model("llama")
    peeled = plan.has_work_once_a_step
    in_loop = accumulation - 2 if peeled else accumulation
    # A loop of one trip is inlined, and one of none is not there.
    outside = accumulation if in_loop <= 1 else accumulation - in_loop
    places = [(False, outside), (True, 1 if in_loop > 1 else 0)]
    embed, blocks, head = model.split(plan.leaves)

    def add(kind, axes, shape, loop, count):
        if axes and count:
            result[kind, hlo.mesh_groups(plan.mesh, axes), shape, loop] += count

    for part, gathers in [(embed, 1), (head, 1), *[(block, 2) for block in blocks]]:
        for leaf in jax.tree.leaves(part):
            p, g, o, r = leaf.param_axes, leaf.grad_axes, leaf.opt_axes, leaf.replica_axes
            add("all-gather", g + o, leaf.shard_shape(p), False, 1)
            one_level = len({axis.split("_")[0] for axis in p + g}) == 1
            for loop, count in places:
                add("all-gather", p, leaf.storage_shape, loop, gathers * count)
                if one_level:
                    add("reduce-scatter", p + g, leaf.shard_shape(p + g), loop, count)
                else:
                    add("reduce-scatter", p, leaf.shard_shape(p), loop, count)
                    add("reduce-scatter", g, leaf.shard_shape(p + g), loop, count)
            add("reduce-scatter", o, leaf.shard_shape(p + g + o), False, 1)
            add("all-reduce", r, leaf.shard_shape(p + g + o), False, 1)
    return result


def trips(plan, accumulation, found):
    """By (kind, groups, bytes), how often each collective of arrays runs in a step."""
    in_loop = accumulation - 2 if plan.has_work_once_a_step else accumulation
    counts = Counter()
    for c in found:
        if not c.is_scalar:
            counts[c.kind, c.groups, c.num_bytes] += in_loop if c.in_loop else 1
    return counts


def check(strategy, accumulation):
    model = oracle.model("llama")
    plan = plan_for(strategy, model)
    program = lowered(plan, accumulation).compile()
    found = hlo.collectives(program.as_text())
    arrays = Counter((c.kind, c.groups, c.shape, c.in_loop) for c in found if not c.is_scalar)
    assert arrays == expected(plan, accumulation)
    scalars = {(c.kind, c.in_loop, c.op) for c in found if c.is_scalar}
    # The sums of loss and weight, and those of the gradient norm, combined or not.
    assert all(kind == "all-reduce" and not in_loop for kind, in_loop, _ in scalars) and 1 <= len(scalars) <= 5
    assert trips(plan, accumulation, found) == predicted(plan, accumulation)
    num_bytes = predicted_argument_bytes(model, strategy, oracle.optimizer("adamw"), accumulation * ROWS)
    assert program.memory_analysis().argument_size_in_bytes == num_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_compiled_step_is_the_designs_and_the_predicted_one(strategy):
    """Of four microbatches: one before the loop, two in it, one after it."""
    check(strategy, 4)


@pytest.mark.parametrize("strategy", ["zero1", "zero3", THREE_DEGREES])
def test_one_microbatch_is_first_and_last(strategy):
    check(strategy, 1)


@pytest.mark.parametrize("strategy", ["ddp", THREE_DEGREES])
def test_two_microbatches_leave_no_loop(strategy):
    """Of ranks that reduce, the first and the last microbatch are outside."""
    check(strategy, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "accumulation"), [(triple, (4, 1)[i % 2]) for i, triple in enumerate(OTHERS)])
def test_of_every_other_triple(strategy, accumulation):
    check(strategy, accumulation)


def test_no_triple_is_left_out():
    assert len({str(parse(s).resolve(RANKS)) for s in STRATEGIES} | set(OTHERS)) == 40


def test_one_device_has_none():
    plan = plan_for("zero3", oracle.model("llama"), DataRanks(1))
    assert hlo.collectives(lowered(plan, 4).compile().as_text()) == []


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_dtypes_on_the_wire(reduce_dtype):
    """Parameters travel in the compute dtype, gradients in the reduction dtype, whatever the backend makes of it."""
    plan = plan_for(THREE_DEGREES, oracle.model("llama"), dtype=jnp.bfloat16)
    text = lowered(plan, 2, settings=StepSettings(reduce_dtype=jnp.dtype(reduce_dtype))).as_text()
    wire = {"float32": "f32", "bfloat16": "bf16"}[reduce_dtype]
    assert set(re.findall(r'"stablehlo.all_gather".*-> tensor<[\dx]+x(\w+)>', text)) == {"bf16"}
    scattered = re.findall(r'"stablehlo.reduce_scatter"[\s\S]*?\}\) : \(tensor<[\dx]+x(\w+)>\)', text)
    assert set(scattered) == {wire} and len(scattered) > 20


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("lion", marks=pytest.mark.slow), "lamb"])
def test_other_optimizers_move_no_whole_leaf(optimizer):
    """XLA adds norms and factored statistics for the optimizer, no gathers of matrices."""
    plan = plan_for("zero3", oracle.model("llama"))
    text = lowered(plan, 1, optimizer).compile().as_text()
    found = Counter((c.kind, c.groups, c.shape, c.in_loop) for c in hlo.collectives(text))
    extra = found - expected(plan, 1)
    assert all(np.prod(shape, dtype=int) <= 64 for _, _, shape, _ in extra), extra


def test_a_parameter_without_a_gradient_is_not_reduced(monkeypatch):
    """More blocks than are left free, a frozen matrix in each."""

    def apply(params, x, batch, key):
        return x + jnp.tanh(x @ (jax.lax.stop_gradient(params["frozen"]) + params["w"]))

    block = Part(lambda key: {name: jax.random.normal(key, (64, 64)) for name in ("frozen", "w")}, apply)
    head = Part(lambda key: {}, lambda params, embed, x, batch, key: ((jnp.sum(x**2), jnp.float32(1)), {}))
    embed = Part(lambda key: {}, lambda params, batch, key: batch["x"])
    model, optimizer = Model(name="frozen", embed=embed, blocks=(block,) * 12, head=head), oracle.optimizer("sgd")

    def counts(strategy):
        plan = plan_for(strategy, model, DataRanks(4))
        batch = plan.shard({"x": np.ones((1, 8, 64), np.float32)})
        step = make_train_step(plan, optimizer)
        program = step.lower(abstract_state(plan, optimizer), batch).compile()
        return Counter(found.kind for found in hlo.collectives(program.as_text()))

    tied = [counts(strategy) for strategy in ("zero2", "zero3")]
    monkeypatch.setattr(block_backward, "num_untied", lambda leaves, window: len(leaves))
    assert tied == [counts(strategy) for strategy in ("zero2", "zero3")]
    assert tied[0]["reduce-scatter"] > 0
