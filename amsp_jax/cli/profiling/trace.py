"""A profiler's trace as events by device, cut into executions of the step.

On a GPU an event is a kernel on a stream; on the CPU it is an operation on a thread of the device.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.profiler import ProfileData

_GPU_PLANE = re.compile(r"/device:GPU:(\d+)")
_CPU_PLANE = "/host:CPU"
_ASYNC_START = re.compile(r"-start(\.\d+)*$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that ran on a device.

    Attributes:
      name: the kernel's; on the CPU the operation's.
      op, module: the HLO operation and module that it belongs to; empty for a copy that no program made.
      start_ns, end_ns: since the trace began.
      launch: grows with the order of launches; on the CPU it is one number for each execution of a program.
    """

    name: str
    op: str
    module: str
    start_ns: float
    end_ns: float
    launch: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What a process recorded of its own devices.

    Attributes:
      is_cpu: its devices are simulated on the CPU.
      events: of each device, by its local number.
      starts: the asynchronous start that launched an operation, `all-gather-start.1` of `all-gather.17`: XLA:GPU names
        kernels by the latter, which the program's text leaves out.
    """

    is_cpu: bool
    events: Mapping[int, tuple[Event, ...]]
    starts: Mapping[str, str]

    def executions(self, device: int, module: str) -> list[tuple[Event, ...]]:
        """The events of each execution of a module on a device, in order."""
        found = [event for event in self.events[device] if event.module == module]
        return _by_number(found) if self.is_cpu else _by_first(found)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads an `.xplane.pb` file."""
    planes = list(ProfileData.from_file(os.fspath(path)).planes)
    events = {int(found[1]): tuple(_kernels(plane)) for plane in planes if (found := _GPU_PLANE.fullmatch(plane.name))}
    host = [plane for plane in planes if plane.name == _CPU_PLANE]
    if events:
        return Trace(is_cpu=False, events=dict(sorted(events.items())), starts=_starts(host))
    return Trace(is_cpu=True, events=_cpu_operations(host), starts={})


def _kernels(plane: Any) -> Iterator[Event]:
    for line in plane.lines:
        if line.name.startswith("Stream"):
            for event in line.events:
                stats = dict(event.stats)
                yield _event(event, stats, stats.get("correlation_id", 0))


def _cpu_operations(planes: Iterable[Any]) -> dict[int, tuple[Event, ...]]:
    """Events of threads; a thread serves several devices."""
    found: dict[int, list[Event]] = {}
    for plane in planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    device = found.setdefault(int(stats.get("device_ordinal", 0)), [])
                    device.append(_event(event, stats, stats.get("run_id", 0)))
    return {device: tuple(found[device]) for device in sorted(found)}


def _event(event: Any, stats: Mapping[str, Any], launch: int) -> Event:
    return Event(
        name=event.name,
        op=str(stats.get("hlo_op", "")),
        module=str(stats.get("hlo_module", "")),
        start_ns=event.start_ns,
        end_ns=event.end_ns,
        launch=int(launch),
    )


def _starts(planes: Iterable[Any]) -> dict[str, str]:
    """By what the host did: launching `all-gather-start.1`, it launched `all-gather.17`."""
    starts: dict[str, str] = {}
    for plane in planes:
        for line in plane.lines:
            start, until = "", 0.0
            for event in sorted(line.events, key=lambda event: (event.start_ns, -event.end_ns)):
                if _ASYNC_START.search(event.name):
                    start, until = event.name, event.end_ns
                elif event.end_ns <= until:
                    starts.setdefault(event.name, start)
    return starts


def _by_number(events: Iterable[Event]) -> list[tuple[Event, ...]]:
    runs: dict[int, list[Event]] = {}
    for event in sorted(events, key=lambda event: event.start_ns):
        runs.setdefault(event.launch, []).append(event)
    return [tuple(run) for run in runs.values()]


def _by_first(events: Iterable[Event]) -> list[tuple[Event, ...]]:
    """Cut where the kernel that was launched first comes again: every execution launches it first, and once.

    By the order of launches, as a kernel on one stream can run before an earlier one on another.
    """
    ordered = sorted(events, key=lambda event: (event.launch, event.start_ns))
    firsts = [i for i, event in enumerate(ordered) if (event.op, event.name) == (ordered[0].op, ordered[0].name)]
    return [_in_time(ordered[i:j]) for i, j in itertools.pairwise([*firsts, len(ordered)])]


def _in_time(events: Sequence[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: event.start_ns))
