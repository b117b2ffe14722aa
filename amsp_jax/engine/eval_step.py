"""Evaluation and logits: the forward pass of the training step, which gathers parameters as the step does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.arguments import check_has_model, check_params, check_plan, naming_arrays
from amsp_jax.engine.context import zigzag_inverse
from amsp_jax.engine.microbatch import (
    LossSums,
    apply_model,
    gather_of,
    global_sums,
    param_shards,
    prepared,
    row_keys,
    summing_in_float32,
)
from amsp_jax.engine.parts import PartState, split
from amsp_jax.engine.pipeline import make_pipeline
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import DEFAULT, StepSettings
from amsp_jax.engine.trees import Master, Tree, tree_map
from amsp_jax.model import Batch, Model, Part


def make_eval_step(plan: Plan, settings: StepSettings = DEFAULT) -> Callable[[Tree[Master], Batch], LossSums]:
    """Makes the jitted `(params, batch) -> global sums`.

    The batch is as in `make_train_step`; random keys are those of seed 0 and step 0.

    Raises:
      UserError: the plan is none, or has no model.
    """
    check_plan(plan, "make_eval_step(plan)")
    check_has_model(plan, "make_eval_step(plan)")
    model = summing_in_float32(plan.model)

    def local(params: Tree[Master], batch: Batch, rows: jax.Array) -> LossSums:
        sums = LossSums.of(_forward(model, plan, settings, params, batch, rows))
        return global_sums(plan, jax.tree.map(lambda x: jnp.sum(x, axis=0), sums))

    return _mapped(plan, local, P())


def make_logits_step(plan: Plan, settings: StepSettings = DEFAULT) -> Callable[[Tree[Master], Batch], jax.Array]:
    """Makes the jitted `(params, batch) -> logits [microbatches, rows, seq, vocab]`, rows sharded as the batch's.

    Only for a model with `logits`.
    """
    model, logits = plan.model, plan.model.logits
    assert logits is not None, f"{model.name} has no logits"
    head = Part(model.head.init, lambda params, embed, x, batch, rng: logits(params, embed, x))
    speaking = dataclasses.replace(model, head=head)

    def local(params: Tree[Master], batch: Batch, rows: jax.Array) -> jax.Array:
        result: jax.Array = _forward(speaking, plan, settings, params, batch, rows)
        return result

    def in_order(logits: jax.Array) -> jax.Array:
        num_ranks = plan.parallel.context
        return logits if num_ranks == 1 else logits[:, :, zigzag_inverse(logits.shape[2], num_ranks)]

    return _mapped(plan, local, plan.batch_spec, in_order)


def _forward(
    model: Model, plan: Plan, settings: StepSettings, params: Tree[Master], batch: Batch, rows: jax.Array
) -> Any:
    """What the head gives for each microbatch, [microbatches, ...], from the master's shards."""
    gather = gather_of(plan, settings)
    if plan.parallel.pipeline > 1:
        schedule = PipelineSchedule("gpipe", plan.parallel.pipeline, 1, plan.parallel.pipeline)
        pipeline = make_pipeline(model, plan.leaves, schedule, gather, settings.remat)
        stage = pipeline.param_shards(params, plan.compute_dtype)
        return pipeline.forward(stage, (batch, rows), lambda rows: row_keys(0, 0, rows))
    # Nothing is differentiated, so no leaf has a sink.
    no_sinks = tree_map(lambda leaf: None, plan.leaves)
    parts = (split(model, tree) for tree in (plan.leaves, param_shards(plan, params), no_sinks))
    states = [PartState.of(*part) for part in zip(*parts, strict=True)]

    def one(item: Any) -> Any:
        batch, rows = item
        return apply_model(model, gather, settings.remat, states, batch, row_keys(0, 0, rows))

    return lax.map(one, (batch, rows))


def _unchanged(x: Any) -> Any:
    return x


def _mapped(
    plan: Plan, local: Callable[..., Any], out_specs: Any, finish: Callable[[Any], Any] = _unchanged
) -> Callable[[Tree[Master], Batch], Any]:
    stored = tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, jnp.float32), plan.leaves)

    def call(params: Tree[Master], batch: Batch) -> Any:
        check_params(params, stored)
        in_specs = tree_map(lambda leaf: leaf.opt_spec, plan.leaves), plan.batch_spec, plan.rows_spec
        mapped = jax.shard_map(local, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        batch, rows = prepared(plan, batch)
        with naming_arrays(plan.model.name, batch):
            return finish(mapped(params, batch, rows))

    return jax.jit(call)
