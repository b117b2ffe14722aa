"""The whole step of the oracle's model, lowered, and what the cost model predicts of it."""

from collections import Counter

import jax
import jax.numpy as jnp
import oracle
from oracle import RANKS, plan_for

from amsp_jax.compile import hlo
from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.predict.cost import memory
from amsp_jax.predict.cost.communication import WireDtypes, part_plans, step_collectives
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks

FLOAT32 = Reduction.of(jnp.float32)
ROWS = 8


def lowered(plan, accumulation, optimizer="adamw", settings=None):
    optimizer = oracle.optimizer(optimizer)
    step = make_train_step(plan, optimizer, settings or StepSettings())
    shape = (accumulation, ROWS, oracle.SEQ)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {k: jax.ShapeDtypeStruct(shape, d, sharding=plan.batch_sharding) for k, d in dtypes.items()}
    with jax.numpy_dtype_promotion("standard"):  # jax's XLA attention promotes bf16 in its backward pass
        return step.lower(abstract_state(plan, optimizer), batch)


def parts_of(plan, model):
    return part_plans(model, plan.leaves, range(len(model.blocks)))


def result_bytes(collective):
    """Of one device's result, from the message's: what the program's text shows."""
    if collective.kind == "reduce-scatter":
        return collective.num_bytes // collective.group.total
    return collective.num_bytes


def predicted(plan, accumulation, reduction=FLOAT32):
    """By (kind, groups, bytes of the result), how often each collective runs in a step."""
    model = oracle.model("llama")
    wire = WireDtypes(plan.compute_dtype, reduction)
    counts = Counter()
    for c, count in step_collectives(parts_of(plan, model), wire, accumulation).items():
        counts[c.kind, hlo.mesh_groups(plan.mesh, c.axes), result_bytes(c)] += count
    return counts


def predicted_argument_bytes(model, strategy, optimizer, num_rows):
    distinct = DistinctBlocks.of(model)
    batch_bytes = num_rows // RANKS.total * oracle.SEQ * 12
    return memory.argument_bytes(distinct, plan_for(strategy, distinct.model), optimizer, batch_bytes).argument_bytes
