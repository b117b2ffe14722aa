"""Seconds of a pipeline's ticks: every half of a tick lasts as long as its slowest stage.

The counts are read off the schedule that the step executes. Its ticks repeat from group to group of microbatches, so
the table of a short step says all of a long one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from amsp_jax.engine.pipeline.schedule import Half, Kind, PipelineSchedule, assign_blocks
from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.cost.timeline import PartTimes, Timeline

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
def tick_counts(schedule: PipelineSchedule) -> TickCounts:
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
def _counted(schedule: PipelineSchedule) -> TickCounts:
    forward = _patterns(schedule.forward, (Kind.FIRST, Kind.MIDDLE))
    return TickCounts(forward, _patterns(schedule.backward, tuple(Kind)[1:]), schedule.num_ticks)


def _patterns(half: Half, kinds: Sequence[Kind]) -> dict[Pattern, int]:
    present = [(half.kind == kind).any(1) for kind in kinds]
    found = Counter(zip(*(flags.tolist() for flags in present), strict=True))
    named = {frozenset(k for k, is_here in zip(kinds, flags, strict=True) if is_here): n for flags, n in found.items()}
    return {pattern: n for pattern, n in named.items() if pattern}


@functools.lru_cache(maxsize=4096)
def num_slots(schedule: PipelineSchedule) -> int:
    """`PipelineSchedule.num_slots`: stage inputs in flight. GPipe keeps all; the others no more in a longer step."""
    p, m = schedule.num_stages, schedule.num_microbatches
    if schedule.name == "gpipe":
        return m * schedule.virtual_stages
    return dataclasses.replace(schedule, num_microbatches=min(m, _GROUPS * p + m % p)).num_slots


VirtualStage = tuple[Kind, tuple[int, ...]]
"""Whether it begins with the embedding or ends with the head; and of each of its blocks which kind of block it is."""


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The virtual stages of a pipeline, those of one stage together; equal stages once."""

    stages: tuple[tuple[VirtualStage, ...], ...]

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, order: tuple[int, ...], num_stages: int, virtual_stages: int) -> Chunks:
        """As `assign_blocks` deals them.

        Args:
          order: for each block of the model its kind.
          num_stages, virtual_stages: p and v.

        Raises:
          UserError: there are more virtual stages than blocks.
        """
        assignment = assign_blocks(len(order), num_stages, virtual_stages)
        kinds = np.full((num_stages, virtual_stages), Kind.MIDDLE)
        kinds[0, 0], kinds[-1, -1] = Kind.FIRST, Kind.LAST
        return cls(
            tuple(
                {
                    tuple(
                        (Kind(kind), tuple(order[row[slot]] for slot in slots if row[slot] >= 0))
                        for kind, slots in zip(of_stage, assignment.chunk_slots, strict=True)
                    ): None
                    for of_stage, row in zip(kinds, assignment.owner, strict=True)
                }
            )
        )

    @functools.cached_property
    def fullest(self) -> tuple[int, ...]:
        """The kinds of the blocks of a stage that has the most."""
        blocks = (tuple(kind for _, own in stage for kind in own) for stage in self.stages)
        return max(blocks, key=len)

    @functools.cached_property
    def virtual(self) -> frozenset[VirtualStage]:
        """Those that differ."""
        return frozenset(one for stage in self.stages for one in stage)


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


def ticks_seconds(counts: TickCounts, times: Mapping[Kind, tuple[float, float]]) -> float:
    """Sum over halves of ticks of the slowest kind at work.

    With equal virtual stages of F and B this is (v m + p - 1)(F + B), less a forward pass that the last leaves out: a
    bubble of (p - 1)/(v m).

    Args:
      counts: of a step.
      times: of each kind of virtual stage the seconds of its forward and its backward half.
    """
    ahead = sum(n * max(times[kind][0] for kind in kinds) for kinds, n in counts.forward.items())
    return ahead + sum(n * max(times[kind][1] for kind in kinds) for kinds, n in counts.backward.items())


def pipeline_timeline(
    schedule: PipelineSchedule,
    chunks: Chunks,
    parts: Sequence[PartTimes],
    once: OnceTimes,
    send_s: float,
    slowdown: float,
) -> Timeline:
    """A step, told from the stage that works longest; what that stage has nothing to do in is the bubble.

        step = once a step + ticks + 2 sends a tick

    What is sent is counted as waited for: that it overlaps the other half of a tick was not seen yet.

    Args:
      schedule: of the pipeline.
      chunks: its virtual stages.
      parts: embedding, each kind of block, head.
      once: what is done once a step.
      send_s: of one hop between stages.
      slowdown: compute beside a collective over compute alone.
    """
    counts, m = tick_counts(schedule), schedule.num_microbatches
    times = {one: half_times(one[0], _parts_of(one, parts), slowdown) for one in chunks.virtual}
    ticks_s, sends_s = ticks_seconds(counts, _slowest(times)), 2 * counts.num_ticks * send_s
    busiest = [times[one] for one in max(chunks.stages, key=lambda stage: sum(times[one].total_s for one in stage))]
    busy_s, computed_s = m * sum(t.total_s for t in busiest), m * sum(t.compute_s for t in busiest)
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


def _parts_of(stage: VirtualStage, parts: Sequence[PartTimes]) -> list[PartTimes]:
    kind, blocks = stage
    own = [parts[1 + block] for block in blocks]
    return {Kind.FIRST: [parts[0], *own], Kind.LAST: [*own, parts[-1]]}.get(kind, own)


def _slowest(times: Mapping[VirtualStage, HalfTimes]) -> dict[Kind, tuple[float, float]]:
    """Of each kind of virtual stage the longest halves."""
    found: dict[Kind, tuple[float, float]] = {}
    for (kind, _), one in times.items():
        ahead, back = found.get(kind, (0.0, 0.0))
        found[kind] = max(ahead, one.forward_s), max(back, one.backward_s)
    return found
