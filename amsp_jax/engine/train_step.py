"""The training step of every strategy: docs/design/architecture.md has the algorithm, step.md beside it the reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.accumulate import Microbatches, Result, accumulate, in_groups, unknown_zero
from amsp_jax.engine.arguments import check_has_model, check_optimizer, check_plan, check_state, naming_arrays
from amsp_jax.engine.microbatch import (
    LossSums,
    gather_of,
    global_sums,
    prepared,
    row_keys,
    summing_in_float32,
)
from amsp_jax.engine.microbatch_groups import check_group
from amsp_jax.engine.optimizer import num_updates, to_storage, to_true
from amsp_jax.engine.parallel import STAGE
from amsp_jax.engine.pipeline import make_pipeline
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.state import TrainState, abstract_state, trained, true_state, with_frozen
from amsp_jax.engine.step_settings import DEFAULT, StepSettings
from amsp_jax.engine.trees import Master, OptGrad, Tree, tree_map
from amsp_jax.model import Batch


@flax.struct.dataclass
class StepMetrics:
    """Global values of one step, equal on every device.

    Attributes:
      loss: mean over the valid tokens of the global batch.
      grad_norm: 2-norm of the mean gradient, before clipping; frozen parameters have none.
      num_tokens: sum of the weights of the global batch.
      is_finite: whether loss and gradient norm are finite, and so whether the update was applied.
      num_updates: int32, updates applied before this step: which entry of the learning rates it used.
      aux: the model's `aux`, each leaf summed.
    """

    loss: jax.Array
    grad_norm: jax.Array
    num_tokens: jax.Array
    is_finite: jax.Array
    num_updates: jax.Array
    aux: Any


GradFn = Callable[[Tree[Master], Batch, Any, Any], tuple[LossSums, Tree[OptGrad | None]]]
"""`(params, batch, seed, step) -> (sums, gradients)`."""


def make_train_step(
    plan: Plan, optimizer: optax.GradientTransformation, settings: StepSettings = DEFAULT
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Makes the jitted training step `(state, batch) -> (state, metrics)`; the state is donated.

    Args:
      plan: of the model.
      optimizer: any optax transform, the one of the state.
      settings: how the step computes.

    Returns:
      A function whose batch is a dict of arrays [microbatches, rows, ...] at `plan.batch_sharding` and whose state
      keeps its shardings. It compiles once for each shape of batch. Where loss or gradient norm is not finite, the
      batch is passed over: `state.step` counts it, parameters and optimizer state keep their bits. It raises UserError
      for a state of another optimizer or plan.

    Raises:
      UserError: an argument is of a wrong type, or the plan has no model.
    """
    call = "make_train_step(plan, optimizer)"
    check_plan(plan, call)
    check_has_model(plan, call)
    check_optimizer(optimizer, call)
    grads_of, update = make_grad_fn(plan, settings), make_update_fn(plan, optimizer)
    stored = abstract_state(plan, optimizer)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        # Python runs it while the step is traced, once for each kind of state and batch.
        check_state(state, stored)
        sums, grads = grads_of(state.params, batch, state.seed, state.step)
        return update(state, grads, sums)

    shardings = jax.tree.map(lambda x: x.sharding, stored)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, plan.replicated))


def make_update_fn(
    plan: Plan, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Tree[OptGrad | None], LossSums], tuple[TrainState, StepMetrics]]:
    """Makes `(state, summed gradients, sums) -> (state, metrics)`.

    optax updates leaves of true shape with the mean gradient. The optimizer sees None in place of frozen leaves.
    """
    true, stored = true_state(plan, optimizer), abstract_state(plan, optimizer)
    true_params, stored_params = trained(plan, true.params), trained(plan, stored.params)

    def update(state: TrainState, grads: Tree[OptGrad | None], sums: LossSums) -> tuple[TrainState, StepMetrics]:
        scale = mean_scale(sums.weight)
        grads = jax.tree.map(lambda g: g * scale, to_true(grads, true_params))
        before = trained(plan, state.params)
        params = to_true(before, true_params)
        with jax.numpy_dtype_promotion("standard"):
            norm = optax.tree.norm(grads)
            updates, opt_state = optimizer.update(grads, to_true(state.opt_state, true.opt_state), params)
            params = optax.apply_updates(params, updates)
        metrics = StepMetrics(
            loss=sums.loss * scale,
            grad_norm=norm,
            num_tokens=sums.weight,
            is_finite=jnp.isfinite(sums.loss * scale) & jnp.isfinite(norm),
            num_updates=num_updates(state.opt_state, state.step),
            aux=sums.aux,
        )
        applied = to_storage(params, stored_params), to_storage(opt_state, stored.opt_state)
        params, opt_state = _select(metrics.is_finite, applied, (before, state.opt_state))
        params = with_frozen(plan, params, state.params)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    return update


def mean_scale(weight: jax.Array) -> jax.Array:
    """From a sum over the global batch to the mean; without a valid token a gradient is zero, not 0/0."""
    return jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)


def _select(is_finite: jax.Array, applied: Any, before: Any) -> Any:
    """`applied` where loss and gradient norm are finite, `before` where not.

    A finite norm vouches for every value and its square, which is what second moments are made of; finite gradients
    whose norm overflows float32 would leave infinities in them, so they count as not finite.

    `where` and not `cond`: XLA on GPUs copies the predicate of a `cond` to the host and waits for it. The select is
    fused into the update, which reads and writes the same buffers anyway: compiled for H100, the step has no more
    kernels than without it, and its temporaries are the same within 256 bytes. The predicate comes of global sums, so
    it is equal on every device.
    """
    return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), applied, before)


def make_grad_fn(plan: Plan, settings: StepSettings = DEFAULT) -> GradFn:
    """Makes `(params, batch, seed, step) -> (sums, gradients of the summed loss at the OS sharding)`.

    `params` are the stored master; batch as in `make_train_step`; sums are global; frozen leaves have None for a
    gradient. To be called under `jit`.
    """
    model, num_stages = summing_in_float32(plan.model), plan.parallel.pipeline

    def schedule_of(num_microbatches: int) -> PipelineSchedule:
        return PipelineSchedule(settings.pipeline_schedule, num_stages, settings.virtual_stages, num_microbatches)

    def staged(params: Tree[Master], batch: Batch, rows: jax.Array, seed: Any, step: Any) -> Result:
        gather = gather_of(plan, settings)
        pipeline = make_pipeline(model, plan.leaves, schedule_of(len(rows)), gather, settings.remat)
        shards = pipeline.param_shards(params, plan.compute_dtype)
        outputs, grads = pipeline.grads(shards, (batch, rows), lambda rows: row_keys(seed, step, rows))
        # Only the last stage has sums; the others have zeros.
        sums = lax.psum(LossSums.of(outputs), STAGE)
        return global_sums(plan, sums), pipeline.reduce(grads, settings.reduction)

    def unstaged(params: Tree[Master], batch: Batch, rows: jax.Array, seed: Any, step: Any) -> Result:
        microbatches = Microbatches(model, plan, settings, seed, step)
        data = in_groups(settings.microbatch_group, (batch, rows))
        sums, grads = accumulate(microbatches, data, params, unknown_zero(step))
        return global_sums(plan, sums), grads

    def grads_of(params: Tree[Master], batch: Batch, seed: Any, step: Any) -> tuple[LossSums, Tree[OptGrad | None]]:
        specs = tree_map(lambda leaf: leaf.opt_spec, plan.leaves)
        in_specs = specs, plan.batch_spec, plan.rows_spec, P(), P()
        out_specs = P(), trained(plan, specs)
        whole = staged if num_stages > 1 else unstaged
        mapped = jax.shard_map(whole, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        batch, rows = prepared(plan, batch)
        check_group(settings.microbatch_group, len(rows), num_stages)
        # Its checks, also where there are no stages.
        schedule_of(len(rows))
        with naming_arrays(model.name, batch):
            sums, grads = mapped(params, batch, rows, jnp.asarray(seed), jnp.asarray(step))
        return sums, grads

    return grads_of
