"""Seconds of a pipeline's ticks: every half of a tick lasts as long as its slowest stage.

The counts are read off the schedule that the step executes. Its ticks repeat from group to group of microbatches, so
the table of a short step says all of a long one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence

from amsp_jax.cost.communication import Phase
from amsp_jax.cost.timeline import PartTimes, Timeline
from amsp_jax.schedule import Half, Kind, Schedule, assign_blocks

_GROUPS = 4
"""Of p microbatches: from here on a step has only more ticks of the same kinds, and no input more in flight."""

Pattern = frozenset[Kind]
"""The kinds of virtual stages that work in the same half of a tick."""


@dataclasses.dataclass(frozen=True)
class TickCounts:
    """How many halves of ticks have which kinds at work, and how many ticks there are."""

    forward: Mapping[Pattern, int]
    backward: Mapping[Pattern, int]
    num_ticks: int


@functools.lru_cache(maxsize=4096)
def tick_counts(schedule: Schedule) -> TickCounts:
    """Of one step. The last virtual stage goes forward inside its backward half."""
    p, m = schedule.num_stages, schedule.num_microbatches
    groups = max(0, m // p - _GROUPS)
    short = _counted(dataclasses.replace(schedule, num_microbatches=m - groups * p))
    if groups == 0:
        return short
    longer = _counted(dataclasses.replace(schedule, num_microbatches=m - (groups - 1) * p))
    return TickCounts(
        {kinds: _continued(short.forward, longer.forward, kinds, groups) for kinds in longer.forward},
        {kinds: _continued(short.backward, longer.backward, kinds, groups) for kinds in longer.backward},
        schedule.num_ticks,
    )


def _continued(short: Mapping[Pattern, int], longer: Mapping[Pattern, int], kinds: Pattern, groups: int) -> int:
    before = short.get(kinds, 0)
    return before + groups * (longer[kinds] - before)


@functools.lru_cache(maxsize=4096)
def _counted(schedule: Schedule) -> TickCounts:
    forward = _patterns(schedule.forward, (Kind.FIRST, Kind.MIDDLE))
    return TickCounts(forward, _patterns(schedule.backward, tuple(Kind)[1:]), schedule.num_ticks)


def _patterns(half: Half, kinds: Sequence[Kind]) -> dict[Pattern, int]:
    present = [(half.kind == kind).any(1) for kind in kinds]
    found = Counter(zip(*(flags.tolist() for flags in present), strict=True))
    named = {frozenset(k for k, is_here in zip(kinds, flags, strict=True) if is_here): n for flags, n in found.items()}
    return {pattern: n for pattern, n in named.items() if pattern}


@functools.lru_cache(maxsize=4096)
def num_slots(schedule: Schedule) -> int:
    """`Schedule.num_slots`: stage inputs in flight. GPipe keeps all; the others no more in a longer step."""
    p, m = schedule.num_stages, schedule.num_microbatches
    if schedule.name == "gpipe":
        return m * schedule.virtual_stages
    return dataclasses.replace(schedule, num_microbatches=min(m, _GROUPS * p + m % p)).num_slots


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The blocks of virtual stages, as places in the model.

    Attributes:
      of_stage: for each stage its chunks, in order.
    """

    of_stage: tuple[tuple[tuple[int, ...], ...], ...]

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, num_blocks: int, num_stages: int, virtual_stages: int) -> Chunks:
        """As `assign_blocks` deals them.

        Raises:
          UserError: there are more virtual stages than blocks.
        """
        assignment = assign_blocks(num_blocks, num_stages, virtual_stages)
        return cls(
            tuple(
                tuple(tuple(int(row[slot]) for slot in slots if row[slot] >= 0) for slots in assignment.chunk_slots)
                for row in assignment.owner
            )
        )

    @functools.cached_property
    def fullest(self) -> tuple[int, ...]:
        """The blocks of a stage that has the most."""
        return max((sum(chunks, ()) for chunks in self.of_stage), key=len)

    def kind(self, stage: int, chunk: int) -> Kind:
        """Whether it begins with the embedding or ends with the head."""
        if (stage, chunk) == (0, 0):
            return Kind.FIRST
        is_last = (stage, chunk) == (len(self.of_stage) - 1, len(self.of_stage[0]) - 1)
        return Kind.LAST if is_last else Kind.MIDDLE


@dataclasses.dataclass(frozen=True)
class HalfTimes:
    """Seconds of one virtual stage on one microbatch.

    Attributes:
      forward_s, backward_s: of its halves of ticks, with what they wait for.
      compute_s: of both, computing alone.
      wire_s: of both, collectives, hidden or not.
    """

    forward_s: float
    backward_s: float
    compute_s: float
    wire_s: float

    @property
    def total_s(self) -> float:
        """Both halves."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True)
class OnceTimes:
    """Seconds of what a step does once: before the first tick, after the last, and the update."""

    start_s: float
    end_s: float
    optimizer_s: float


def half_times(kind: Kind, parts: Sequence[PartTimes], slowdown: float) -> HalfTimes:
    """Of a virtual stage: forward; and backward, which begins with the same pass again.

    Gathers run one part ahead, a gradient's reduction beside the part before; the first gather and the last reduction
    have nothing beside them, for no collective crosses the bounds of a half.

    Args:
      kind: the last has no forward half.
      parts: in order, embedding or head among them; what is `inline` in them is waiting, too.
      slowdown: compute beside a collective over compute alone.
    """
    ahead = _pass([part.forward_s for part in parts], [part.phase_s(Phase.FORWARD) for part in parts], slowdown)
    back = [part.backward_s + part.accumulate_s for part in parts]
    reduce = [part.phase_s(Phase.REDUCE) for part in parts]
    again = [part.phase_s(Phase.BACKWARD) for part in parts]
    # Backwards, a part runs beside the gather of the part before it and the reduction of the part behind it.
    beside = [a + r for a, r in zip([0.0, *again[:-1]], [*reduce[1:], 0.0], strict=True)]
    backward = again[-1] + sum(_beside(c, w, slowdown) for c, w in zip(back, beside, strict=True)) + reduce[0]
    passes = 1 if kind is Kind.LAST else 2
    inline = sum(passes * part.inline_forward_s + part.inline_backward_s for part in parts)
    computed = sum(passes * part.forward_s for part in parts) + sum(back) - inline
    wire = sum(passes * part.phase_s(Phase.FORWARD) for part in parts) + sum(reduce) + sum(again) + inline
    return HalfTimes(0.0 if kind is Kind.LAST else ahead, ahead + backward, computed, wire)


def _pass(compute: Sequence[float], gathers: Sequence[float], slowdown: float) -> float:
    pairs = zip(compute, [*gathers[1:], 0.0], strict=True)
    return gathers[0] + sum(_beside(seconds, wire, slowdown) for seconds, wire in pairs)


def _beside(compute_s: float, wire_s: float, slowdown: float) -> float:
    """Both at once: compute is slower by a factor for as long as the collective lasts."""
    return max(wire_s, compute_s + wire_s * (1 - 1 / slowdown))


def ticks_seconds(counts: TickCounts, times: Mapping[Kind, HalfTimes]) -> float:
    """Sum over halves of ticks of the slowest kind at work.

    With equal virtual stages of F and B this is (v m + p - 1)(F + B), less the forward passes that the last leaves out:
    a bubble of (p - 1)/(v m).
    """
    ahead = sum(n * max(times[kind].forward_s for kind in kinds) for kinds, n in counts.forward.items())
    return ahead + sum(n * max(times[kind].backward_s for kind in kinds) for kinds, n in counts.backward.items())


def pipeline_timeline(
    schedule: Schedule, chunks: Chunks, parts: Sequence[PartTimes], once: OnceTimes, send_s: float, slowdown: float
) -> Timeline:
    """A step, told from the stage that works longest; what that stage has nothing to do in is the bubble.

        step = once a step + ticks + 2 sends a tick

    What is sent is counted as waited for: that it overlaps the other half of a tick was not seen yet.

    Args:
      schedule: of the pipeline.
      chunks: its virtual stages.
      parts: embedding, blocks, head.
      once: what is done once a step.
      send_s: of one hop between stages.
      slowdown: compute beside a collective over compute alone.
    """
    counts, m = tick_counts(schedule), schedule.num_microbatches
    stages = _stage_times(chunks, parts, slowdown)
    by_kind: dict[Kind, HalfTimes] = {}
    for kind, times in (pair for stage in stages for pair in stage):
        before = by_kind.get(kind, times)
        halves = max(before.forward_s, times.forward_s), max(before.backward_s, times.backward_s)
        by_kind[kind] = HalfTimes(*halves, times.compute_s, times.wire_s)
    ticks_s, sends_s = ticks_seconds(counts, by_kind), 2 * counts.num_ticks * send_s
    busiest = max(([times for _, times in stage] for stage in stages), key=lambda ts: sum(t.total_s for t in ts))
    busy_s, computed_s = (m * sum(t.total_s for t in busiest), m * sum(t.compute_s for t in busiest))
    waits_s = once.start_s + once.end_s + sends_s
    return Timeline(
        step_s=waits_s + ticks_s + once.optimizer_s,
        compute_s=computed_s + once.optimizer_s,
        communication_s=waits_s + m * sum(t.wire_s for t in busiest),
        exposed_s=waits_s + busy_s - computed_s,
        events=(),
        num_loop_trips=0,
        bubble_s=ticks_s - busy_s,
    )


def _stage_times(chunks: Chunks, parts: Sequence[PartTimes], slowdown: float) -> list[list[tuple[Kind, HalfTimes]]]:
    """For each stage its virtual stages; equal ones are computed once."""
    seen: dict[tuple[Kind, tuple[int, ...]], HalfTimes] = {}

    def times_of(kind: Kind, blocks: Sequence[int]) -> HalfTimes:
        own = [parts[1 + block] for block in blocks]
        own = {Kind.FIRST: [parts[0], *own], Kind.LAST: [*own, parts[-1]]}.get(kind, own)
        key = kind, tuple(map(id, own))
        if key not in seen:
            seen[key] = half_times(kind, own, slowdown)
        return seen[key]

    return [
        [(chunks.kind(stage, i), times_of(chunks.kind(stage, i), blocks)) for i, blocks in enumerate(own)]
        for stage, own in enumerate(chunks.of_stage)
    ]
