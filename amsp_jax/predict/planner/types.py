"""What is asked of the planner, and what it answers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from enum import StrEnum
from typing import Any

import jax.numpy as jnp
import optax

from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.cost.memory import MemoryEstimate
from amsp_jax.predict.cost.timeline import Timeline
from amsp_jax.strategy import DataRanks, Degree, Degrees, PartialSharding, Strategy, parse

_MODEL_PARALLEL = ("tensors", "pipelines", "contexts", "virtual_stages")


class Objective(StrEnum):
    """What is minimised."""

    STEP_TIME = "step_time"
    """The predicted step time, with overlap."""
    PAPER = "paper"
    """AMSP's sum of communication terms, under its memory formula and in its space (arXiv 2311.00257, IV)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained.

    Attributes:
      model: with the attention that it will run with.
      optimizer: any optax transform.
      global_batch: sequences a step.
      seq_len: tokens of a sequence.
      compute_dtype: of gathered parameters.
      reduce_dtype, inter_node_dtype: of gradients, as in `StepSettings`.
      peel: the first and the last microbatch, as in `StepSettings`.
      frozen: patterns of parameters that are not trained, as in `make_plan`. Bytes and reductions leave frozen
        parameters out; the time to compute and activations are predicted as if every parameter were trained.
    """

    model: Model
    optimizer: optax.GradientTransformation
    global_batch: int
    seq_len: int
    compute_dtype: Any = jnp.bfloat16
    reduce_dtype: Any = jnp.float32
    inter_node_dtype: Any = None
    peel: bool = True
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _require_counts("Workload", global_batch=(self.global_batch,), seq_len=(self.seq_len,))
        Reduction.of(self.reduce_dtype, self.inter_node_dtype)

    @property
    def reduction(self) -> Reduction:
        """How gradients are summed."""
        return Reduction.of(self.reduce_dtype, self.inter_node_dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: every nested strategy, with each of these.

    Attributes:
      microbatches: sequences a rank computes at once.
      remats: what blocks keep.
      microbatch_groups: how many microbatches go through each block before the next block, as in `StepSettings`; a
        pipeline has 1 alone.
      fill_nodes: leave out strategies that span nodes before they fill one.
      tensors, pipelines, contexts: parts of a model, as in `ModelParallel`.
      virtual_stages: chunks of blocks a stage.
      pipeline_schedule: order of work in the pipeline, `1f1b` or `gpipe`.
    """

    microbatches: tuple[int, ...]
    remats: tuple[Remat, ...]
    fill_nodes: bool = True
    microbatch_groups: tuple[int, ...] = (1,)
    tensors: tuple[int, ...] = (1,)
    pipelines: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (1,)
    virtual_stages: tuple[int, ...] = (1,)
    pipeline_schedule: str = "1f1b"

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("microbatches", "microbatch_groups", *_MODEL_PARALLEL)}
        _require_counts("Space", **counts)
        empty = [name for name, values in {**counts, "remats": self.remats}.items() if not values]
        if empty:
            raise UserError(f"Space: {', '.join(f'{name}=()' for name in empty)}; give one or more of each")

    @property
    def is_data_parallel(self) -> bool:
        """Whether no part of a model is cut."""
        return all(getattr(self, name) == (1,) for name in _MODEL_PARALLEL)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A point of the space.

    Attributes:
      degrees: over the data ranks of a stage.
      microbatch: sequences a data rank computes at once.
      remat: what blocks keep; in a pipeline, what the second pass over a stage keeps.
      parallel: into how many parts the model is cut.
      virtual_stages: chunks of blocks a stage.
      pipeline_schedule: order of work in the pipeline, `1f1b` or `gpipe`.
      microbatch_group: microbatches that go through each block before the next.
    """

    degrees: Degrees
    microbatch: int
    remat: Remat
    parallel: ModelParallel = ModelParallel()
    virtual_stages: int = 1
    pipeline_schedule: str = "1f1b"
    microbatch_group: int = 1

    def __str__(self) -> str:
        text = f"{self.degrees}, "
        sizes = (
            ("tensor", self.parallel.tensor),
            ("pipeline", self.parallel.pipeline),
            ("context", self.parallel.context),
        )
        text += "".join(f"{name} {size}, " for name, size in sizes if size > 1)
        if self.parallel.pipeline > 1:
            chunks = f" of {self.virtual_stages} virtual stages" if self.virtual_stages > 1 else ""
            text += f"schedule {self.pipeline_schedule}{chunks}, "
        group = f" in groups of {self.microbatch_group}" if self.microbatch_group > 1 else ""
        return f"{text}microbatch {self.microbatch}{group}, remat {self.remat}"

    @property
    def inner(self) -> ModelParallel:
        """The ranks that share a microbatch; to them it matters whether there are stages, not how many."""
        return dataclasses.replace(self.parallel, pipeline=min(2, self.parallel.pipeline))

    @property
    def kept(self) -> Remat:
        """What a block keeps when it runs for its backward pass: in a pipeline that is a second pass, which keeps all
        unless told otherwise."""
        return Remat.NONE if self.parallel.pipeline > 1 and self.remat is Remat.FULL else self.remat

    @property
    def num_devices(self) -> int:
        """Of the whole job."""
        return self.degrees.ranks.total * self.parallel.total

    def accumulation(self, global_batch: int) -> int:
        """Microbatches of a step."""
        return global_batch // (self.microbatch * self.degrees.ranks.total)

    def rounds(self, global_batch: int) -> int:
        """Groups of a step: how often parameters are gathered and gradients reduced."""
        return self.accumulation(global_batch) // self.microbatch_group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What is predicted of a candidate.

    Attributes:
      candidate: the point.
      accumulation: microbatches of a step.
      rounds: groups of a step.
      memory: by part, bytes of one device.
      timeline: of the simulated step.
      terms_s: seconds of collectives in a step by phase, hidden or not.
      objective_s: what was minimised.
      tokens_per_s_per_device: tokens of the global batch.
      mfu, hfu: model FLOP/s over the peak, without and with recomputation; None where the peak is not known.
      unmeasured: `all-reduce 1x4`: collectives whose times come from link numbers, not from a measurement.
    """

    candidate: Candidate
    accumulation: int
    rounds: int
    memory: MemoryEstimate
    timeline: Timeline
    terms_s: dict[Phase, float]
    objective_s: float
    tokens_per_s_per_device: float
    mfu: float | None
    hfu: float | None
    unmeasured: tuple[str, ...]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.timeline.step_s


class Reason(StrEnum):
    """Why a candidate is not ranked."""

    NODE_NOT_FULL = "spans nodes before its own node is full"
    NOT_IN_PAPER = "gradients are sharded neither as parameters nor as optimizer states"
    BATCH = "the global batch does not divide by microbatch x data ranks"
    MICROBATCH_GROUP = "the microbatches of a step do not divide by those of a group"
    MEMORY = "needs more memory than a device has"
    DEVICES = "stages, tensor and context ranks do not divide the devices of nodes and cluster"
    SPLIT = "the model does not split over so many tensor, context or pipeline ranks"
    PIPELINE_SCHEDULE = "the microbatches of a step do not fill the schedule"
    SLOWER = "cannot be as fast as the best: a bound on their step is longer"


@dataclasses.dataclass(frozen=True)
class Rejection:
    """A candidate that is not ranked, and by how many bytes it misses where memory is the reason."""

    candidate: Candidate
    reason: Reason
    missing_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ranking:
    """The outcome of a search.

    Attributes:
      ranked: the best first.
      rejected: one entry for each of the others.
      memory_bytes: the limit.
      objective: what was minimised.
      not_scored: how many more candidates were left out without a look at each, by reason.
    """

    ranked: tuple[Estimate, ...]
    rejected: tuple[Rejection, ...]
    memory_bytes: int
    objective: Objective
    not_scored: Counter[Reason] = dataclasses.field(default_factory=Counter)

    @property
    def best(self) -> Estimate:
        """The winner."""
        return self.ranked[0]

    @property
    def num_rejected(self) -> Counter[Reason]:
        """How many, by reason."""
        return Counter(rejection.reason for rejection in self.rejected) + self.not_scored


def degrees_of(strategy: Strategy | str, ranks: DataRanks) -> Degrees:
    """The degrees of a strategy that the planner can predict.

    Raises:
      UserError: the strategy does not fit the ranks, or it has rules, which the planner does not predict.
    """
    parsed = parse(strategy)
    if parsed.rules:
        raise UserError(
            f"strategy '{strategy}' has rules for {len(parsed.rules)} patterns of leaves, and the planner predicts one "
            "strategy for all leaves; predict it without rules, or print make_plan(strategy, model, ranks=...) for the "
            "exact bytes of its states"
        )
    return parsed.resolve(ranks)


def strategy_of(degrees: Degrees) -> Strategy:
    """The strategy in canonical form, `params=4x1 grads=4x1 opt_state=8x1`."""

    def sharding(degree: Degree) -> PartialSharding:
        return PartialSharding(degree.intra, degree.inter)

    return Strategy(
        params=sharding(degrees.params), grads=sharding(degrees.grads), opt_state=sharding(degrees.opt_state)
    )


def _require_counts(where: str, **counts: tuple[int, ...]) -> None:
    for name, values in counts.items():
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{where}: {name}={value!r}, but it is an integer of at least 1")
