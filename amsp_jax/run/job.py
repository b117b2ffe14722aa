"""What a run is made of, checked as a whole before anything is computed or written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from amsp_jax.engine.mesh import level
from amsp_jax.engine.optimizer import abstract_storage
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.state import TrainState, abstract_state, true_state
from amsp_jax.engine.train_step import StepMetrics, make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Batch
from amsp_jax.run.checkpoint import leaf_paths
from amsp_jax.run.checks import require_compiled_memory, require_memory
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import Dataset, Datasets, Source, global_batch, open_dataset, open_sources
from amsp_jax.run.resolved import Resolved, compiler_options
from amsp_jax.runtime.launch import from_process_0, process_0_first

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]
"""`(state, batch) -> (state, metrics)`."""


_ANY_VOCABULARY = (1 << 31) - 1
"""Ids of rows from Python are not checked where the model does not say how many it knows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(Resolved):
    """What does not change between the first step and the last: a resolved config with its plan and its data."""

    plan: Plan
    datasets: Datasets

    @property
    def batch_line(self) -> str:
        """How a step's batch is cut up, groups of microbatches included."""
        group = self.settings.microbatch_group
        return f"batch: {self.batch}" + (f", in groups of {group} microbatches" if group > 1 else "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines on what has no effect, or not all of it, under this plan."""
        parallel, lines = self.plan.parallel, list[str]()
        is_between_nodes = any(
            level(axis) == "inter" for axes in self.plan.all_axes for axis in axes.param + axes.grad + axes.opt
        )
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


def prepare(resolved: Resolved, data: Source | None = None, validation: Source | None = None) -> Job:
    """Makes the plan and opens the data, the cheapest check first.

    Args:
      resolved: the settings on their devices, with a strategy.
      data: rows of training, in place of the corpus that `config.data` names.
      validation: rows of validation, with `data` only.

    Raises:
      UserError: the strategy, the memory or the data do not fit.
    """
    plan = resolved.make_plan()
    require_memory(plan, resolved.layout.memory_bytes)
    datasets = _open_data(resolved.config, resolved.model.vocab_size, data, validation)
    _require_one_corpus(datasets, resolved.config.data)
    fields = {field.name: getattr(resolved, field.name) for field in dataclasses.fields(Resolved)}
    return Job(**fields, plan=plan, datasets=datasets)


def _open_data(config: TrainConfig, vocab_size: int | None, data: Source | None, validation: Source | None) -> Datasets:
    if data is not None:
        return open_sources(
            data,
            validation,
            global_batch=config.global_batch,
            seq_len=config.seq_len,
            vocab_size=vocab_size or _ANY_VOCABULARY,
            steps=config.steps,
            eval_batches=config.eval_batches,
        )
    if validation is not None:
        raise UserError(
            f"validation={type(validation).__name__} has no effect with data={config.data!r}, which is split into "
            "training and validation; give both as sources, or neither"
        )
    assert vocab_size is not None, "a corpus needs a model that says its vocab_size"
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
    compiled = lowered.compile(compiler_options=compiler_options(job.plan, job.settings, job.layout))
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
