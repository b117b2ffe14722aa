"""Candidates where models are cut over tensor, pipeline or context ranks, and the search through them by bounds.

Such a space has hundreds of thousands of candidates. Candidates that differ in their strategy alone are a family. A
family has one bound: the time to compute, the collectives of the cut model, and the pipeline's bubble, which no
strategy avoids. Each candidate has a closer bound of its own (`bounds`). The search takes candidates by rising bound,
and stops when the next bound is longer than the best steps scored in full. So the head of the ranking is the same as if
every candidate had been scored. Candidates that are left out are counted by reason.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from amsp_jax.engine.context import check_sequence
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import assign_blocks
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.predict.planner.bounds import Bounds
from amsp_jax.predict.planner.scorer import Scorer
from amsp_jax.predict.planner.types import Candidate, Estimate, Reason, Rejection, Space
from amsp_jax.strategy import Degrees, all_degrees, parse


@dataclasses.dataclass(frozen=True)
class Family:
    """Candidates that differ in their strategy alone.

    Attributes:
      example: one candidate of the family, with everything sharded over everything.
      degrees: the strategies of the family's candidates.
      least_s: seconds that no step of the family falls below.
    """

    example: Candidate
    degrees: Sequence[Degrees]
    least_s: float


@dataclasses.dataclass
class Found:
    """The outcome of a search.

    Attributes:
      ranked, rejected: candidates that were looked at one by one.
      not_scored: how many other candidates were left out, by reason.
    """

    ranked: list[Estimate]
    rejected: list[Rejection]
    not_scored: Counter[Reason]


def families(scorer: Scorer, bounds: Bounds, space: Space) -> tuple[list[Family], Counter[Reason]]:
    """The families of a space by rising bound, and how many candidates belong to no family, by reason."""
    found: list[Family] = []
    left_out: Counter[Reason] = Counter()
    for parallel in model_cuts(space):
        variants = list(_variants(parallel, space))
        try:
            ranks = parallel.data_ranks(scorer.cluster.num_nodes, scorer.cluster.devices_per_node)
        except UserError:
            left_out[Reason.DEVICES] += len(variants)
            continue
        degrees = all_degrees(ranks)
        kept = [one for one in degrees if not (space.fill_nodes and one.warnings)]
        full = parse("zero3").resolve(ranks)
        for virtual_stages, microbatch, remat, size in variants:
            example = Candidate(full, microbatch, remat, parallel, virtual_stages, space.pipeline_schedule, size)
            if reason := _refused(scorer, example):
                left_out[reason] += len(degrees)
                continue
            left_out[Reason.NODE_NOT_FULL] += len(degrees) - len(kept)
            found.append(Family(example, kept, bounds.least_s(example)))
    return sorted(found, key=lambda family: family.least_s), +left_out


def model_cuts(space: Space) -> Iterator[ModelParallel]:
    """Every way to cut a model, fewer pipeline stages first."""
    for pipeline, context, tensor in itertools.product(space.pipelines, space.contexts, space.tensors):
        yield ModelParallel(pipeline=pipeline, context=context, tensor=tensor)


def _variants(parallel: ModelParallel, space: Space) -> Iterator[tuple[int, int, Remat, int]]:
    """Every (virtual stages, microbatch, rematerialisation, microbatch group), each program once."""
    if parallel.pipeline == 1:
        return itertools.product((1,), space.microbatches, space.remats, space.microbatch_groups)
    remats = space.remats
    if Remat.FULL in remats:
        # In a pipeline `full` and `none` keep the same: see `Candidate.kept`.
        remats = tuple(remat for remat in remats if remat is not Remat.NONE)
    return itertools.product(space.virtual_stages, space.microbatches, remats, (1,))


def _refused(scorer: Scorer, point: Candidate) -> Reason | None:
    """Why the step would refuse every candidate of a family; None if it would not."""
    workload, parallel = scorer.workload, point.parallel
    if workload.global_batch % (point.microbatch * point.degrees.ranks.total):
        return Reason.BATCH
    if point.accumulation(workload.global_batch) % point.microbatch_group:
        return Reason.MICROBATCH_GROUP
    try:
        check_sequence(workload.seq_len, parallel.context, parallel.tensor)
        scorer.check_split(parallel)
        if parallel.pipeline > 1:
            assign_blocks(len(scorer.distinct.order), parallel.pipeline, point.virtual_stages)
    except UserError:
        return Reason.SPLIT
    try:
        scorer.schedule(point)
    except UserError:
        return Reason.PIPELINE_SCHEDULE
    return None


class _Queue:
    """Candidates by rising bound; a family is opened when no queued candidate has a smaller bound."""

    def __init__(self, pending: Sequence[Family], bounds: Bounds, limit: int) -> None:
        self.pending, self.bounds, self.limit = list(reversed(pending)), bounds, limit
        self.too_large = 0
        self._heap: list[tuple[float, int, Candidate]] = []
        self._count = itertools.count()

    def pop(self) -> tuple[float, Candidate] | None:
        """Takes the next candidate with its bound; None after the last."""
        while self.pending and (not self._heap or self.pending[-1].least_s <= self._heap[0][0]):
            self._open(self.pending.pop())
        if not self._heap:
            return None
        bound_s, _, candidate = heapq.heappop(self._heap)
        return bound_s, candidate

    def _open(self, family: Family) -> None:
        fits = self.bounds.fits(family.example, family.degrees, self.limit)
        self.too_large += len(family.degrees) - len(fits)
        for degrees in fits:
            candidate = dataclasses.replace(family.example, degrees=degrees)
            heapq.heappush(self._heap, (self.bounds.step_s(candidate), next(self._count), candidate))

    def __len__(self) -> int:
        """How many candidates are left."""
        return len(self._heap) + sum(len(family.degrees) for family in self.pending)


def search_by_bound(scorer: Scorer, space: Space, limit: int, num_exact: int) -> Found:
    """Scores candidates by rising bound, until the next bound is longer than the best `num_exact` steps found.

    Args:
      scorer: of the workload on the cluster, by step time.
      space: the candidates.
      limit: bytes of one device.
      num_exact: how many candidates at the head of the ranking are certain to be those of the whole space.
    """
    bounds = Bounds(scorer)
    pending, left_out = families(scorer, bounds, space)
    queue, found = _Queue(pending, bounds, limit), Found([], [], left_out)
    times: list[float] = []
    while item := queue.pop():
        bound_s, candidate = item
        if len(times) >= num_exact and bound_s > times[num_exact - 1]:
            found.not_scored[Reason.SLOWER] += 1 + len(queue)
            break
        if (missing := scorer.needed_bytes(candidate) - limit) > 0:
            found.rejected.append(Rejection(candidate, Reason.MEMORY, missing))
            continue
        found.ranked.append(scorer.estimate(candidate))
        bisect.insort(times, found.ranked[-1].step_s)
    found.not_scored[Reason.MEMORY] += queue.too_large
    return found
