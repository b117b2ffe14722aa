"""Step time with overlap: compute in program order on one stream, collectives one at a time on the other.

What may start when is what the step says (`step.py`, `stack.py`), and what XLA's scheduler does with it:
- a gather may run while the part before is computed, one part ahead; a gather goes before a reduction that waits, too;
- the gathers of once a step are there from the start, in the order of use, and overlap the first microbatch;
- of once a step, several parts' collectives may be one: XLA combines by the bytes of results, which are small there;
- a gradient's reduction follows its backward pass; at most `reduction_window` blocks of them may be late;
- reductions of once a step follow the last microbatch's, overlap what is left of its backward pass, and may be as late;
- a trip of the accumulation loop begins when all of the trip before is done;
- the optimizer waits for every gradient.
Groups of microbatches, whose parts are loops over them, have an order of their own, which is all in the program
(`breadth.py`): see `_group`.
While a collective runs, compute is slower by a measured factor.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from amsp_jax.predict.cost.communication import Phase


@dataclasses.dataclass(frozen=True)
class PartTimes:
    """One part's seconds.

    Attributes:
      forward_s, backward_s: compute of one microbatch or of one group of them, recomputation in the latter.
      messages_s: for each phase the seconds of its collectives, which run one after another.
      accumulate_s: compute that adds the gradients of a microbatch, or of a group, to those before it.
      inline_forward_s, inline_backward_s: of `forward_s` and `backward_s`, what is no computing but collectives that
        the part itself waits for: those over tensor and context.
    """

    forward_s: float
    backward_s: float
    messages_s: dict[Phase, tuple[float, ...]]
    accumulate_s: float = 0.0
    inline_forward_s: float = 0.0
    inline_backward_s: float = 0.0

    def phase_s(self, phase: Phase) -> float:
        """Of all its collectives of a phase."""
        return sum(self.messages_s.get(phase, ()))


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """A step's seconds: its parts in order, and what follows them.

    Attributes:
      parts: embedding, blocks, head.
      optimizer_s: the update, on one device.
      window, end_window: blocks a gradient's reduction may lag, in any microbatch and in the last; None: as many as
        there are.
      overlap_slowdown: compute time beside a collective over compute time alone.
      num_start_parts, num_end_parts: adjacent parts whose collectives of once a step travel as one.
      is_grouped: what is said of a microbatch here is of a group of several, in the order of `breadth.py`.
      num_beside: of a group, how many messages run beside one part's loop; None: as many as there is time for.
    """

    parts: Sequence[PartTimes]
    optimizer_s: float
    window: int | None
    overlap_slowdown: float
    num_start_parts: int = 1
    num_end_parts: int = 1
    end_window: int | None = None
    is_grouped: bool = False
    num_beside: int | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """Something on one of the two streams.

    Attributes:
      stream: `compute` or `communication`.
      name: `forward 3`, `gather 4`; the number is the part's.
      start_s, end_s: since the step began.
      num_parts: adjacent parts whose collectives travel together, from that number on.
    """

    stream: str
    name: str
    start_s: float
    end_s: float
    num_parts: int = 1


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Attributes:
      step_s: from its beginning to its end.
      compute_s: the compute stream was busy, slowed by collectives beside it.
      communication_s: the other stream was busy.
      exposed_s: compute waited for a collective.
      events: if recorded, of the microbatches that were simulated: the first, one of the loop, the last.
      num_loop_trips: for how many trips the loop's one stands.
      bubble_s: a pipeline's slowest stage had nothing to do.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    events: tuple[Event, ...]
    num_loop_trips: int
    bubble_s: float = 0.0

    def with_inline(self, inline_s: float) -> Timeline:
        """The same, with seconds that were simulated as computing told as waiting for collectives."""
        return dataclasses.replace(
            self,
            compute_s=self.compute_s - inline_s,
            communication_s=self.communication_s + inline_s,
            exposed_s=self.exposed_s + inline_s,
        )


def simulate(times: StepTimes, rounds: int, peel: bool, record: bool = False) -> Timeline:
    """Runs a step of `rounds` microbatches, or groups of them, through the two streams.

    Args:
      times: of its parts.
      rounds: microbatches or groups, one after another.
      peel: the first and the last are outside the loop (`StepSettings`); else what is done once a step overlaps
        no microbatch, unless there is one alone.
      record: keep the events.
    """
    streams = _Streams(times.overlap_slowdown, record, times.num_beside)
    loop_trips = 0
    one_round = _group if times.is_grouped else _microbatch
    if rounds == 1:
        one_round(streams, times, starts=True, ends=True, adds=False)
    elif peel:
        one_round(streams, times, starts=True, ends=False, adds=False)
        loop_trips = rounds - 2
        _loop(streams, times, loop_trips)
        one_round(streams, times, starts=False, ends=True)
    else:
        loop_trips = rounds
        _alone(streams, times, Phase.START)
        _loop(streams, times, loop_trips)
        _alone(streams, times, Phase.END)
    streams.join()
    streams.compute("optimizer", 0, times.optimizer_s)
    return streams.timeline(loop_trips)


BESIDE_A_LOOP = 1
"""`StepTimes.num_beside` as compiled for H100 (jax 0.11.2): of two that could run beside a block, one does."""

_PRIORITY = {Phase.START: 0, Phase.FORWARD: 1, Phase.BACKWARD: 1, Phase.REDUCE: 2, Phase.END: 3}
_NAMES = {
    Phase.START: "P shard",
    Phase.FORWARD: "gather",
    Phase.BACKWARD: "gather again",
    Phase.REDUCE: "reduce",
    Phase.END: "reduce at the end",
}


def _microbatch(streams: _Streams, times: StepTimes, starts: bool, ends: bool, adds: bool = True) -> None:
    """Forward and backward of every part.

    Args:
      streams, times: to run, and what.
      starts, ends: with what is done once a step before and after.
      adds: whether there are gradients to add to.
    """
    parts, last = times.parts, len(times.parts) - 1
    if starts:
        for first in range(0, len(parts), times.num_start_parts):
            streams.release(parts[first : first + times.num_start_parts], Phase.START, first)
    for i, part in enumerate(parts):
        if i == 0:
            streams.release([part], Phase.FORWARD, 0, after=(Phase.START, 0))
        # One part ahead.
        if i < last:
            streams.release([parts[i + 1]], Phase.FORWARD, i + 1, after=_start_of(i + 1, times))
        streams.compute("forward", i, part.forward_s, (_start_of(i, times), (Phase.FORWARD, i)))
    for i in range(last, -1, -1):
        part = parts[i]
        if i == last:
            streams.release([part], Phase.BACKWARD, i)
        if i > 0:
            streams.release([parts[i - 1]], Phase.BACKWARD, i - 1)
        late = ((Phase.REDUCE, i + times.window),) if times.window else ()
        if ends and times.end_window:
            late = (*late, _end_of(i + times.end_window, times))
        seconds = part.backward_s + (part.accumulate_s if adds else 0.0)
        streams.compute("backward", i, seconds, ((Phase.BACKWARD, i), *late))
        streams.release([part], Phase.REDUCE, i)
        num_waiting = (last - i) % times.num_end_parts + 1
        if ends and (num_waiting == times.num_end_parts or i == 0):
            streams.release(parts[i : i + num_waiting], Phase.END, i, after=(Phase.REDUCE, i))
    streams.join()


def _group(streams: _Streams, times: StepTimes, starts: bool, ends: bool, adds: bool = True) -> None:
    """As `_microbatch`, of a group: forward and backward of every part, each on all microbatches of the group.

    A part's gathers begin once the part two before it has run, forward and backward, with that of its P shard in the
    first group. Its gradients are reduced after those of the part behind it, and hold a block back that is `window`
    earlier.

    To XLA a part's loop is one operation. It starts `num_beside` messages before it and ends them after it; others
    that are there by then run with nothing beside them.
    """
    parts, last = times.parts, len(times.parts) - 1

    def gather(i: int) -> None:
        if starts:
            streams.release_behind(parts[i], Phase.START, i, (Phase.FORWARD, i - 1), (Phase.START, i - 1))
        streams.release_behind(parts[i], Phase.FORWARD, i, _start_of(i, times))

    gather(0)
    for i, part in enumerate(parts):
        streams.compute("forward", i, part.forward_s, (_start_of(i, times), (Phase.FORWARD, i)))
        for ahead in (1, 2) if i == 0 else (i + 2,):
            if ahead <= last:
                gather(ahead)
    for i in range(last, -1, -1):
        part, late = parts[i], times.window if i > 0 and times.window else len(parts)
        needs = ((Phase.BACKWARD, i), (Phase.REDUCE, i + late), (Phase.END, i + late))
        streams.compute("backward", i, part.backward_s + (part.accumulate_s if adds else 0.0), needs)
        behind = (Phase.END, i + 1), (Phase.REDUCE, i + 1)
        streams.release_behind(part, Phase.REDUCE, i, *behind)
        if ends:
            streams.release_behind(part, Phase.END, i, (Phase.REDUCE, i), *behind)
        # Embedding and head are not gathered again.
        for ahead in (last - 1, last - 2) if i == last else (i - 2,):
            if ahead > 0:
                streams.release([parts[ahead]], Phase.BACKWARD, ahead)
    streams.join()


def _start_of(part: int, times: StepTimes) -> Key:
    """The message that brings a part's P shard."""
    return Phase.START, part - part % times.num_start_parts


def _end_of(part: int, times: StepTimes) -> Key:
    """The message that reduces a part's gradient once a step: it goes with the last of those that travel as one."""
    last = len(times.parts) - 1
    group = (last - part) // times.num_end_parts
    return Phase.END, max(0, last + 1 - (group + 1) * times.num_end_parts)


def _loop(streams: _Streams, times: StepTimes, trips: int) -> None:
    if trips:
        one_round = _group if times.is_grouped else _microbatch
        streams.repeated(trips, lambda: one_round(streams, times, starts=False, ends=False))


def _alone(streams: _Streams, times: StepTimes, phase: Phase) -> None:
    """A phase of all parts with nothing beside it."""
    for i, part in enumerate(times.parts):
        streams.release([part], phase, i)
    streams.join()


Key = tuple[Phase, int]
"""A phase of a part."""


@dataclasses.dataclass(frozen=True, order=True)
class _Message:
    """Collectives of one phase, which run one after another: of a part, or of adjacent ones from that part on."""

    key: Key
    seconds: float
    num_parts: int


class _Wire:
    """The communication stream: what may run, what runs next, what has run.

    Args:
      record: keep the events.
      in_order: what may run first runs first; else what is more urgent.
    """

    def __init__(self, record: bool, in_order: bool) -> None:
        self.free_at = self.busy_s = 0.0
        self.record, self.in_order = record, in_order
        self.pending: set[Key] = set()
        self.done: dict[Key, float] = {}
        self.events: list[Event] = []
        self._ready: list[tuple[int, int, _Message]] = []
        self._later: list[tuple[float, int, _Message]] = []
        self._behind: dict[Key, list[_Message]] = {}
        self._count = 0

    def release(self, message: _Message, at_s: float, after: Key | None) -> None:
        """The message may run from `at_s`, or once `after` has run."""
        self.pending.add(message.key)
        if after in self.pending:
            assert after is not None
            self._behind.setdefault(after, []).append(message)
        else:
            self._queue(message, at_s)

    def _queue(self, message: _Message, at_s: float) -> None:
        self._count += 1
        heapq.heappush(self._later, (at_s, self._count, message))

    def next_start(self) -> float | None:
        """When the next message will start; None if none is there."""
        if self._ready:
            return self.free_at
        return max(self.free_at, self._later[0][0]) if self._later else None

    def run_next(self) -> float:
        """Runs the most urgent message of those that are there first; returns its start."""
        start = self.next_start()
        assert start is not None
        while self._later and self._later[0][0] <= start:
            _, count, message = heapq.heappop(self._later)
            heapq.heappush(self._ready, (0 if self.in_order else _PRIORITY[message.key[0]], count, message))
        message = heapq.heappop(self._ready)[2]
        self._finish(message, start, start + message.seconds)
        return start

    def _finish(self, message: _Message, start: float, end: float) -> None:
        self.free_at, self.busy_s = end, self.busy_s + message.seconds
        self.pending.discard(message.key)
        self.done[message.key] = end
        if self.record:
            name = f"{_NAMES[message.key[0]]} {message.key[1]}"
            self.events.append(Event("communication", name, start, end, message.num_parts))
        for follower in self._behind.pop(message.key, ()):
            self._queue(follower, end)


class _Streams:
    """Both streams; the compute stream's clock is the program's.

    Args:
      slowdown: of compute beside a collective.
      record: keep the events.
      num_beside: as in `StepTimes`.
    """

    def __init__(self, slowdown: float, record: bool, num_beside: int | None = None) -> None:
        self.slowdown, self.wire, self.record = slowdown, _Wire(record, num_beside is not None), record
        self.num_beside = num_beside
        self.now_s = self.compute_s = self.exposed_s = 0.0
        self.events: list[Event] = []

    def release(self, parts: Sequence[PartTimes], phase: Phase, index: int, after: Key | None = None) -> None:
        """From now on the collectives of this phase may run, as one of that index, or once those of `after` have."""
        self.wire.done.pop((phase, index), None)
        if seconds := sum(part.phase_s(phase) for part in parts):
            self.wire.release(_Message((phase, index), seconds, len(parts)), self.now_s, after)

    def release_behind(self, part: PartTimes, phase: Phase, index: int, *before: Key) -> None:
        """The same of one part, once the first of `before` that still waits to run has run."""
        self.release([part], phase, index, next((key for key in before if key in self.wire.pending), None))

    def compute(self, what: str, index: int, seconds: float, needs: tuple[Key, ...] = ()) -> None:
        """Computes once `needs` have run, slower while a collective runs."""
        self._wait_for(needs)
        if self.num_beside is not None:
            self._run_others(self.num_beside)
        start, left = self.now_s, seconds
        left = self._beside_running(left)
        while left > 0 and (began := self.wire.next_start()) is not None and began < self.now_s + left:
            left -= max(0.0, began - self.now_s)
            self.now_s = max(self.now_s, self.wire.run_next())
            left = self._beside_running(left)
        self.now_s += left
        self.compute_s += self.now_s - start
        if self.record and seconds > 0:
            self.events.append(Event("compute", f"{what} {index}", start, self.now_s))
        if self.num_beside is not None:
            self._wait_until(self.wire.free_at)

    def _run_others(self, num_beside: int) -> None:
        """Waits for messages that are there, until so many are left."""
        while len(self.wire.pending) > num_beside:
            self.wire.run_next()
            self._wait_until(self.wire.free_at)

    def _beside_running(self, left: float) -> float:
        """Computes while the running collective lasts; returns what is left to compute."""
        until = self.wire.free_at
        if until <= self.now_s:
            return left
        needed = left * self.slowdown
        spent = min(needed, until - self.now_s)
        self.now_s += spent
        return (needed - spent) / self.slowdown

    def _wait_for(self, needs: tuple[Key, ...]) -> None:
        """Moves the clock to when all of `needs` have run; collectives that start before then have started."""
        at = self.now_s
        for key in needs:
            while key in self.wire.pending:
                self.wire.run_next()
            at = max(at, self.wire.done.get(key, 0.0))
        while (began := self.wire.next_start()) is not None and began < at:
            self.wire.run_next()
        self._wait_until(at)

    def _wait_until(self, at_s: float) -> None:
        if at_s > self.now_s:
            self.exposed_s += at_s - self.now_s
            self.now_s = at_s

    def join(self) -> None:
        """Waits for everything on both streams."""
        while self.wire.next_start() is not None:
            self.wire.run_next()
        end = max(self.now_s, self.wire.free_at)
        self.exposed_s += end - self.now_s
        self.now_s = self.wire.free_at = end
        self.wire.done.clear()

    def repeated(self, trips: int, run: Callable[[], None]) -> None:
        """Runs once what happens `trips` times, between two joins, and counts it as often."""
        now_s, compute_s, busy_s, exposed_s = self.now_s, self.compute_s, self.wire.busy_s, self.exposed_s
        run()
        more = trips - 1
        self.compute_s += more * (self.compute_s - compute_s)
        self.wire.busy_s += more * (self.wire.busy_s - busy_s)
        self.exposed_s += more * (self.exposed_s - exposed_s)
        self.now_s += more * (self.now_s - now_s)
        self.wire.free_at = self.now_s

    def timeline(self, num_loop_trips: int) -> Timeline:
        """What has been run."""
        return Timeline(
            step_s=self.now_s,
            compute_s=self.compute_s,
            communication_s=self.wire.busy_s,
            exposed_s=self.exposed_s,
            events=tuple(self.events + self.wire.events),
            num_loop_trips=num_loop_trips,
        )
