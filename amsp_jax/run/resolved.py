"""A config on the devices that it runs on: everything that follows from the settings, computed once."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amsp_jax.compile import xla_flags
from amsp_jax.engine.context import check_sequence
from amsp_jax.engine.learning_rate import LearningRate, make_learning_rate
from amsp_jax.engine.microbatch_groups import check_group
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule, assign_blocks
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Model
from amsp_jax.run.checks import BatchShape, batch_shape
from amsp_jax.run.config import TrainConfig
from amsp_jax.runtime.launch import DeviceLayout
from amsp_jax.strategy import DataRanks, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config, its model and its devices, and what follows from them.

    Attributes:
      config: the settings; the strategy may still be `auto`.
      layout: the devices.
      model: the model.
      parallel: what one copy of the model is cut into.
      ranks: the data ranks of a stage.
      batch: how a step's batch is cut up.
      settings: how the step computes.
      optimizer: clipping and schedule included.
      learning_rates: of each step, [steps] float32, entry 0 for step 1; None where the schedule is not known.
    """

    config: TrainConfig
    layout: DeviceLayout
    model: Model
    parallel: ModelParallel
    ranks: DataRanks
    batch: BatchShape
    settings: StepSettings
    optimizer: optax.GradientTransformation
    learning_rates: np.ndarray | None

    def with_strategy(self, strategy: str) -> Resolved:
        """The same with the strategy that the planner chose; nothing else depends on it."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, strategy=strategy, cluster=None))

    def make_plan(self) -> Plan:
        """The plan of the model on these devices.

        Raises:
          UserError: the strategy does not fit the devices.
        """
        config = self.config
        return make_plan(
            parse(config.strategy, config.rules),
            self.model,
            ranks=self.ranks,
            devices=self.layout.devices,
            compute_dtype=config.compute_dtype,
            parallel=self.parallel,
            frozen=config.frozen,
        )


def resolve(
    config: TrainConfig,
    model: Model,
    layout: DeviceLayout,
    optimizer: optax.GradientTransformation | None = None,
    learning_rate: LearningRate | None = None,
) -> Resolved:
    """Computes what follows from the settings, and checks that it fits together.

    Args:
      config: the settings.
      model: the model.
      layout: the devices.
      optimizer: in place of the one that the settings describe.
      learning_rate: of that optimizer, by the number of updates before; for the metrics alone.

    Raises:
      UserError: what the model is cut into does not divide the devices; the sequence, the batch, the pipeline's
        schedule or the groups of microbatches do not divide; the optimizer's settings are wrong.
    """
    parallel = ModelParallel(pipeline=config.pipeline, context=config.context, tensor=config.tensor)
    max_stages = len(model.blocks) // config.virtual_stages
    ranks = parallel.data_ranks(layout.num_nodes, layout.devices_per_node, max_stages)
    check_sequence(config.seq_len, config.context, config.tensor)
    batch = batch_shape(config.global_batch, config.microbatch, ranks.total, config.seq_len, parallel.total)
    _check_stages(config, model, batch.accumulation)
    check_group(config.microbatch_group, batch.accumulation, config.pipeline)
    if optimizer is None:
        learning_rate = learning_rate_of(config)
        optimizer = optimizer_of(config)
    return Resolved(
        config=config,
        layout=layout,
        model=model,
        parallel=parallel,
        ranks=ranks,
        batch=batch,
        settings=step_settings(config),
        optimizer=optimizer,
        learning_rates=None if learning_rate is None else _by_step(learning_rate, config.steps),
    )


def _check_stages(config: TrainConfig, model: Model, num_microbatches: int) -> None:
    """Raises UserError unless the pipeline's schedule exists for these settings."""
    PipelineSchedule(config.pipeline_schedule, config.pipeline, config.virtual_stages, num_microbatches)
    if config.pipeline > 1:
        assign_blocks(len(model.blocks), config.pipeline, config.virtual_stages)


def _by_step(learning_rate: LearningRate, num_steps: int) -> np.ndarray:
    with jax.numpy_dtype_promotion("standard"):
        return np.asarray(jax.vmap(learning_rate)(jnp.arange(num_steps)))


def learning_rate_of(config: TrainConfig) -> LearningRate:
    """The learning rate of these settings, by the number of updates before."""
    return make_learning_rate(
        config.lr_schedule,
        config.learning_rate,
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        lr_final_fraction=config.lr_final_fraction,
        lr_decay_fraction=config.lr_decay_fraction,
    )


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of these settings, clipping and schedule included."""
    return make_optimizer(
        config.optimizer,
        learning_rate_of(config),
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        momentum=config.momentum,
    )


def compiler_options(plan: Plan, settings: StepSettings, layout: DeviceLayout) -> dict[str, str]:
    """What the step is compiled with beside `XLA_FLAGS`, whose values win; nothing on the CPU."""
    if layout.platform == "cpu":
        return {}
    tensor, dtype = plan.parallel.tensor, plan.compute_dtype
    options = xla_flags.combine_thresholds(plan.model, plan.block_degrees, dtype, settings.reduction, tensor)
    return xla_flags.without(options, os.environ.get("XLA_FLAGS", ""))


def step_settings(config: TrainConfig) -> StepSettings:
    """How the step of these settings computes."""
    return StepSettings(
        reduce_dtype=jnp.dtype(config.reduce_dtype),
        inter_node_dtype=config.inter_node_dtype,
        remat=Remat(config.remat),
        peel_first=config.peel,
        peel_last=config.peel,
        pipeline_schedule=config.pipeline_schedule,
        virtual_stages=config.virtual_stages,
        microbatch_group=config.microbatch_group,
    )
