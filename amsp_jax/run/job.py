"""What a run is made of, checked as a whole before anything is computed or written."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from amsp_jax.compile import xla_flags
from amsp_jax.engine.context import check_sequence
from amsp_jax.engine.learning_rate import LearningRate, make_learning_rate
from amsp_jax.engine.mesh import level
from amsp_jax.engine.microbatch_groups import check_group
from amsp_jax.engine.optimizer import abstract_storage, make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule, assign_blocks
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.state import TrainState, abstract_state, true_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import StepMetrics, make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, Model
from amsp_jax.run.checkpoint import leaf_paths
from amsp_jax.run.checks import BatchShape, batch_shape, require_compiled_memory, require_memory
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import Dataset, Datasets, Source, global_batch, open_dataset, open_sources
from amsp_jax.runtime.launch import Layout, from_process_0, process_0_first
from amsp_jax.strategy import DataRanks, parse

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
"""`(state, batch) -> (state, metrics)`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What does not change between the first step and the last.

    Attributes:
      learning_rates: of each step, [steps] float32; entry 0 is that of step 1.
    """

    config: TrainConfig
    layout: Layout
    model: Model
    plan: Plan
    batch: BatchShape
    settings: StepSettings
    optimizer: optax.GradientTransformation
    learning_rates: np.ndarray
    datasets: Datasets

    @property
    def batch_line(self) -> str:
        """How a step's batch is cut up, groups of microbatches included."""
        group = self.settings.microbatch_group
        return f"batch: {self.batch}" + (f", in groups of {group} microbatches" if group > 1 else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what has no effect, or not all of it, under this plan."""
        axes, parallel, lines = self.plan.axes, self.plan.parallel, []
        is_between_nodes = any(level(axis) == "inter" for axis in axes.param + axes.grad + axes.opt)
        if self.settings.reduction.is_narrower_between_nodes and not is_between_nodes:
            lines.append(
                f"inter_node_dtype={self.config.inter_node_dtype} has no effect: {self.plan.degrees} on "
                f"{self.plan.degrees.ranks} shards nothing over nodes; all-reduces are in "
                f"reduce_dtype={self.config.reduce_dtype}"
            )
        if self.settings.microbatch_group > 1 and parallel.tensor * parallel.context > 1:
            lines.append(
                f"microbatch_group={self.settings.microbatch_group} with tensor={parallel.tensor}, "
                f"context={parallel.context}: fewer gathers and reductions, but XLA runs none of them beside loops "
                "with collectives of their own"
            )
        return tuple(lines)

    def load_batch(self, dataset: Dataset, step: int) -> dict[str, jax.Array]:
        """The global batch of the step that counts `step` steps before it, on its devices."""
        return global_batch(
            dataset,
            step,
            num_microbatches=self.batch.accumulation,
            rows_per_microbatch=self.batch.rows,
            sharding=self.plan.batch_sharding,
        )


def prepare(
    config: TrainConfig,
    model: Model,
    vocab_size: int,
    layout: Layout,
    data: Source | None = None,
    validation: Source | None = None,
) -> Job:
    """Checks all settings against the model, the devices and the data, the cheapest first.

    Args:
      config: the settings.
      model: the model.
      vocab_size: ids that it knows; text is tokenised with at most as many.
      layout: the devices.
      data: rows of training, in place of the corpus that `config.data` names.
      validation: rows of validation, with `data` only.

    Raises:
      UserError: the strategy, what the model is cut into, the batch, the memory, the optimizer or the data do not fit.
    """
    parallel, ranks = parallel_of(config), ranks_of(config, model, layout)
    plan = make_plan(
        config.strategy,
        model,
        ranks=ranks,
        devices=layout.devices,
        compute_dtype=config.compute_dtype,
        parallel=parallel,
    )
    batch = batch_of(config, model, layout)
    require_memory(plan, layout.memory_bytes)
    optimizer = optimizer_of(config)
    datasets = _open_data(config, vocab_size, data, validation)
    _require_one_corpus(datasets, config.data)
    return Job(
        config=config,
        layout=layout,
        model=model,
        plan=plan,
        batch=batch,
        settings=step_settings(config),
        optimizer=optimizer,
        learning_rates=_learning_rates(config),
        datasets=datasets,
    )


def _open_data(config: TrainConfig, vocab_size: int, data: Source | None, validation: Source | None) -> Datasets:
    if data is not None:
        return open_sources(
            data,
            validation,
            global_batch=config.global_batch,
            seq_len=config.seq_len,
            vocab_size=vocab_size,
            steps=config.steps,
            eval_batches=config.eval_batches,
        )
    if validation is not None:
        raise UserError(
            f"validation={type(validation).__name__} has no effect with data={config.data!r}, which is split into "
            "training and validation; give both as sources, or neither"
        )
    # Of several processes one trains the tokenizer and fills the cache.
    return process_0_first(
        lambda: open_dataset(
            config.data,
            vocab_size=vocab_size,
            seq_len=config.seq_len,
            global_batch=config.global_batch,
            seed=config.seed,
            end_of_document=config.end_of_document,
            on_corrupt=config.corrupt_records,
        )
    )


def _require_one_corpus(datasets: Datasets, data: str) -> None:
    """Copies of a corpus on the nodes' own disks may differ, and so may `stdlib` of two Pythons."""
    here, there = dict(datasets.fingerprint), from_process_0(lambda: dict(datasets.fingerprint))
    if here != there:
        raise UserError(
            f"data={data!r} is another corpus in process {jax.process_index()} ({here}) than in process 0 ({there}). "
            "Give all nodes the same files and the same Python."
        )


def data_ranks(layout: Layout) -> DataRanks:
    """Every device is a data-parallel rank."""
    return DataRanks(layout.devices_per_node, layout.num_nodes)


def parallel_of(config: TrainConfig) -> ModelParallel:
    """What one copy of the model is cut into by these settings."""
    return ModelParallel(pipeline=config.pipeline, context=config.context, tensor=config.tensor)


def ranks_of(config: TrainConfig, model: Model, layout: Layout) -> DataRanks:
    """The data ranks of a stage.

    Raises:
      UserError: what the model is cut into does not divide the devices.
    """
    max_stages = len(model.blocks) // config.virtual_stages
    return parallel_of(config).data_ranks(layout.num_nodes, layout.devices_per_node, max_stages)


def batch_of(config: TrainConfig, model: Model, layout: Layout) -> BatchShape:
    """How a step's batch is cut up.

    Raises:
      UserError: the sequence, the batch, the pipeline's schedule or groups of microbatches do not divide.
    """
    ranks, parallel = ranks_of(config, model, layout), parallel_of(config)
    check_sequence(config.seq_len, config.context, config.tensor)
    batch = batch_shape(config.global_batch, config.microbatch, ranks.total, config.seq_len, parallel.total)
    check_stages(config, model, batch.accumulation)
    check_group(config.microbatch_group, batch.accumulation, config.pipeline)
    return batch


def check_stages(config: TrainConfig, model: Model, num_microbatches: int) -> None:
    """Raises UserError unless the pipeline's schedule exists for these settings."""
    PipelineSchedule(config.pipeline_schedule, config.pipeline, config.virtual_stages, num_microbatches)
    if config.pipeline > 1:
        assign_blocks(len(model.blocks), config.pipeline, config.virtual_stages)


def compiler_options(config: TrainConfig, model: Model, layout: Layout) -> dict[str, str]:
    """What the step is compiled with beside `XLA_FLAGS`, whose values win; nothing on the CPU.

    Raises:
      UserError: the strategy does not fit the devices.
    """
    if layout.platform == "cpu":
        return {}
    degrees = parse(config.strategy).resolve(ranks_of(config, model, layout))
    reduction = step_settings(config).reduction
    options = xla_flags.combine_thresholds(model, degrees, config.compute_dtype, reduction, config.tensor)
    return xla_flags.without(options, os.environ.get("XLA_FLAGS", ""))


def _learning_rate(config: TrainConfig) -> LearningRate:
    return make_learning_rate(
        config.lr_schedule,
        config.learning_rate,
        steps=config.steps,
        warmup_steps=config.warmup_steps,
        lr_final_fraction=config.lr_final_fraction,
        lr_decay_fraction=config.lr_decay_fraction,
    )


def _learning_rates(config: TrainConfig) -> np.ndarray:
    with jax.numpy_dtype_promotion("standard"):
        return np.asarray(jax.vmap(_learning_rate(config))(jnp.arange(config.steps)))


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """The optimizer of these settings, clipping and schedule included."""
    return make_optimizer(
        config.optimizer,
        _learning_rate(config),
        weight_decay=config.weight_decay,
        clip_norm=config.clip_norm,
        beta1=config.beta1,
        beta2=config.beta2,
        epsilon=config.epsilon,
        momentum=config.momentum,
    )


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


def compile_step(job: Job) -> TrainStep:
    """The compiled training step; being compiled ahead of time, it cannot compile again later.

    Raises:
      UserError: it needs more memory than a device has.
    """
    step: Any = make_train_step(job.plan, job.optimizer, job.settings)
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {
        name: jax.ShapeDtypeStruct(job.batch.shape, dtype, sharding=job.plan.batch_sharding)
        for name, dtype in dtypes.items()
    }
    lowered = step.lower(abstract_state(job.plan, job.optimizer), batch)
    compiled = lowered.compile(compiler_options=compiler_options(job.config, job.model, job.layout))
    if job.layout.platform != "cpu":
        require_compiled_memory(compiled, job.layout.memory_bytes)
    return compiled


class Wanted(NamedTuple):
    """What to read of a checkpoint: the arguments of `Checkpointer.restore` after the step."""

    abstract: Any
    true_shapes: Mapping[str, Sequence[int]]
    partial: bool


def whole_state(plan: Plan, optimizer: optax.GradientTransformation) -> Wanted:
    """The `TrainState` under this plan, whatever it was saved under."""
    true = true_state(plan, optimizer)
    return Wanted(abstract_state(plan, optimizer), true_shapes(true), partial=False)


def params_alone(plan: Plan) -> Wanted:
    """`{"params": ...}` of a `TrainState`: needs neither the memory of the optimizer nor the same one."""
    true = {"params": plan.model.abstract_params()}
    return Wanted({"params": abstract_storage(plan, true["params"])}, true_shapes(true), partial=True)


def true_shapes(tree: Any) -> dict[str, list[int]]:
    """The shape of each leaf of a tree without padding, by its path; a checkpoint keeps them."""
    return {path: list(leaf.shape) for path, leaf in zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True)}
