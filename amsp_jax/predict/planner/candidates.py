"""The space with models that are cut: layouts, and the search through them by bounds.

With tensor, pipeline and context ranks there are hundreds of thousands of points. Those that differ in their strategy
alone share a bound: their computing, the collectives of the cut model and its bubble, which no strategy avoids. Each
has a closer bound of its own (`bounds`). Points are looked at by rising bound, until the bound alone is longer than the
best of what was scored in full. So the first of the ranking are those of the whole space; what was left out is counted,
with why.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from amsp_jax.engine.blocks import Remat
from amsp_jax.engine.context import check_sequence
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import assign_blocks
from amsp_jax.errors import UserError
from amsp_jax.predict.planner.bounds import Bounds
from amsp_jax.predict.planner.scorer import Scorer
from amsp_jax.predict.planner.types import Candidate, Estimate, Reason, Rejection, Space
from amsp_jax.strategy import Degrees, all_degrees, parse


@dataclasses.dataclass(frozen=True)
class Group:
    """Points that differ in their strategy alone.

    Attributes:
      point: one of them, with everything sharded over everything.
      degrees: their strategies.
      least_s: no step of any of them is shorter.
    """

    point: Candidate
    degrees: Sequence[Degrees]
    least_s: float


@dataclasses.dataclass
class Found:
    """What a search has come to.

    Attributes:
      ranked, rejected: of the points that were looked at one by one.
      not_scored: of the others.
    """

    ranked: list[Estimate]
    rejected: list[Rejection]
    not_scored: Counter[Reason]


def groups(scorer: Scorer, bounds: Bounds, space: Space) -> tuple[list[Group], Counter[Reason]]:
    """The groups of a space by rising bound, and how many points are in none, by reason."""
    found: list[Group] = []
    left_out: Counter[Reason] = Counter()
    for parallel in layouts(space):
        variants = list(_variants(parallel, space))
        try:
            ranks = parallel.data_ranks(scorer.cluster.num_nodes, scorer.cluster.devices_per_node)
        except UserError:
            left_out[Reason.DEVICES] += len(variants)
            continue
        degrees = all_degrees(ranks)
        kept = [one for one in degrees if not (space.fill_nodes and one.warnings)]
        full = parse("zero3").resolve(ranks)
        for virtual_stages, microbatch, remat, group in variants:
            point = Candidate(full, microbatch, remat, parallel, virtual_stages, space.schedule, group)
            if reason := _refused(scorer, point):
                left_out[reason] += len(degrees)
                continue
            left_out[Reason.NODE_NOT_FULL] += len(degrees) - len(kept)
            found.append(Group(point, kept, bounds.least_s(point)))
    return sorted(found, key=lambda group: group.least_s), +left_out


def layouts(space: Space) -> Iterator[ModelParallel]:
    """Every way to cut a model, stages that are fewer first."""
    for pipeline, context, tensor in itertools.product(space.pipelines, space.contexts, space.tensors):
        yield ModelParallel(pipeline=pipeline, context=context, tensor=tensor)


def _variants(parallel: ModelParallel, space: Space) -> Iterator[tuple[int, int, Remat, int]]:
    """Virtual stages, microbatch, rematerialisation and group, without those that are the same program as another, or
    none."""
    if parallel.pipeline == 1:
        return itertools.product((1,), space.microbatches, space.remats, space.groups)
    remats = space.remats
    if Remat.FULL in remats:
        # In a pipeline `full` and `none` keep the same: see `Candidate.kept`.
        remats = tuple(remat for remat in remats if remat is not Remat.NONE)
    return itertools.product(space.virtual_stages, space.microbatches, remats, (1,))


def _refused(scorer: Scorer, point: Candidate) -> Reason | None:
    """Why no strategy of a group can be had, as the step would say."""
    workload, parallel = scorer.workload, point.parallel
    if workload.global_batch % (point.microbatch * point.degrees.ranks.total):
        return Reason.BATCH
    if point.accumulation(workload.global_batch) % point.group:
        return Reason.GROUP
    try:
        check_sequence(workload.seq_len, parallel.context, parallel.tensor)
        scorer.check_split(parallel)
        if parallel.pipeline > 1:
            assign_blocks(len(scorer.sketch.order), parallel.pipeline, point.virtual_stages)
    except UserError:
        return Reason.SPLIT
    try:
        scorer.schedule(point)
    except UserError:
        return Reason.SCHEDULE
    return None


class _Queue:
    """Candidates by rising bound. Those of a group come in when no other has a smaller one."""

    def __init__(self, pending: Sequence[Group], bounds: Bounds, limit: int) -> None:
        self.pending, self.bounds, self.limit = list(reversed(pending)), bounds, limit
        self.too_large = 0
        self._heap: list[tuple[float, int, Candidate]] = []
        self._count = itertools.count()

    def pop(self) -> tuple[float, Candidate] | None:
        """The next with its bound; None after the last."""
        while self.pending and (not self._heap or self.pending[-1].least_s <= self._heap[0][0]):
            self._open(self.pending.pop())
        if not self._heap:
            return None
        bound_s, _, candidate = heapq.heappop(self._heap)
        return bound_s, candidate

    def _open(self, group: Group) -> None:
        fits = self.bounds.fits(group.point, group.degrees, self.limit)
        self.too_large += len(group.degrees) - len(fits)
        for degrees in fits:
            candidate = dataclasses.replace(group.point, degrees=degrees)
            heapq.heappush(self._heap, (self.bounds.step_s(candidate), next(self._count), candidate))

    def __len__(self) -> int:
        """How many are left."""
        return len(self._heap) + sum(len(group.degrees) for group in self.pending)


def look_through(scorer: Scorer, space: Space, limit: int, num_exact: int) -> Found:
    """Scores candidates by rising bound, until the next bound is longer than the best `num_exact` steps found.

    Args:
      scorer: of the workload on the cluster, by step time.
      space: what to look through.
      limit: bytes of one device.
      num_exact: as many of the first are those of the whole space.
    """
    bounds = Bounds(scorer)
    pending, left_out = groups(scorer, bounds, space)
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
