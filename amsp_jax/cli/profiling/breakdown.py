"""One execution of the step on one device as numbers: what it computed, what it sent, what nothing hid."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from amsp_jax.cli.profiling.intervals import Interval, minus, total, union
from amsp_jax.cli.profiling.program import Op, StepProgram, Work
from amsp_jax.cli.profiling.trace import Event, Trace
from amsp_jax.errors import UserError

Key = TypeVar("Key", bound=Hashable)

Collective = tuple[str, str]
"""Kind and mesh axes, `("all-gather", "intra_param")`."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An event, and what it does."""

    event: Event
    op: Op

    @property
    def interval(self) -> Interval:
        """Its time, ns."""
        return self.event.start_ns, self.event.end_ns

    @property
    def is_communication(self) -> bool:
        """Whether it is a collective's."""
        return self.op.work is Work.COMMUNICATION


@dataclasses.dataclass(frozen=True)
class Execution:
    """A step on one device: its kernels by time, from the first one's start to the start of the next step, ns."""

    kernels: tuple[Kernel, ...]
    start_ns: float
    end_ns: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Seconds of a step on one device, or of several steps the median of each number.

    Attributes:
      step_s: from its first kernel to that of the next step.
      compute_s: something other than a collective ran.
      communication_s: a collective ran, or waited for other devices.
      exposed_s: a collective ran and nothing else did.
      gap_s: nothing ran.
      matmul_flops: of the matrix products that ran.
      attention_flops: of cuDNN's attention; XLA's own is matrix products.
      collectives: count, seconds and exposed seconds of each kind and axes; the latter add up to `exposed_s`.
      work: summed seconds of the kernels of each class.
      kernels: count and summed seconds of each class and kernel.
    """

    step_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    gap_s: float
    matmul_flops: float
    attention_flops: float
    collectives: Mapping[Collective, tuple[float, float, float]]
    work: Mapping[Work, float]
    kernels: Mapping[tuple[Work, str], tuple[float, float]]

    @property
    def overlap(self) -> float:
        """The share of communication beside which something was computed; 1 where there is none."""
        return 1 - self.exposed_s / self.communication_s if self.communication_s else 1.0

    @property
    def matmul_flops_per_s(self) -> float:
        """While matrix products run."""
        return _rate(self.matmul_flops, self.work.get(Work.MATMUL, 0.0))

    @property
    def attention_flops_per_s(self) -> float:
        """While attention runs."""
        return _rate(self.attention_flops, self.work.get(Work.ATTENTION, 0.0))


def _rate(flops: float, seconds: float) -> float:
    return flops / seconds if seconds else 0.0


def all_executions(trace: Trace, program: StepProgram) -> dict[int, list[Execution]]:
    """`executions` of each device of a trace.

    Raises:
      UserError: there is none, or one without steps.
    """
    if not trace.events:
        raise UserError(
            "the trace has no device: jax's profiler could not record any. NVIDIA's driver may allow it to root alone "
            "(NVreg_RestrictProfilingToAdminUsers), and another profiler may be running"
        )
    return {device: executions(trace, program, device) for device in trace.events}


def executions(trace: Trace, program: StepProgram, device: int) -> list[Execution]:
    """The steps that a trace has of a device, without the last, which only ends the one before it.

    Raises:
      UserError: it does not have two.
    """
    runs = [
        [
            Kernel(event, program.find(event.op, event.name, trace.starts))
            for event in run
            if event.op not in program.containers
        ]
        for run in trace.executions(device, program.module)
    ]
    if len(runs) < 2:
        raise UserError(
            f"the trace has {len(runs)} executions of {program.module} on device {device}, and a step ends where the "
            "next begins; profile again, with fewer --steps where the trace was cut short"
        )
    starts = [run[0].event.start_ns for run in runs]
    return [Execution(tuple(runs[i]), starts[i], starts[i + 1]) for i in range(len(runs) - 1)]


def break_down(execution: Execution) -> Breakdown:
    """The numbers of one step."""
    kernels = execution.kernels
    compute = union(kernel.interval for kernel in kernels if not kernel.is_communication)
    communication = union(kernel.interval for kernel in kernels if kernel.is_communication)
    exposed = exposed_parts(kernels)
    step_ns = execution.end_ns - execution.start_ns
    flops = [op.flops * count for op, count in _runs(kernels)]
    return Breakdown(
        step_s=step_ns / 1e9,
        compute_s=total(compute) / 1e9,
        communication_s=total(communication) / 1e9,
        exposed_s=sum(map(total, exposed.values())) / 1e9,
        gap_s=(step_ns - total(union([*compute, *communication]))) / 1e9,
        matmul_flops=sum(one.matmul for one in flops),
        attention_flops=sum(one.attention for one in flops),
        collectives=_collectives(kernels, exposed),
        work={work: seconds for work, (_, seconds) in _sums(kernels, lambda kernel: kernel.op.work).items()},
        kernels=_sums(kernels, lambda kernel: (kernel.op.work, kernel.event.name)),
    )


def median(breakdowns: Sequence[Breakdown]) -> Breakdown:
    """The median of each number; what does not run in a step counts as 0 there."""
    names = [field.name for field in dataclasses.fields(Breakdown)]
    return Breakdown(**{name: _median([getattr(one, name) for one in breakdowns]) for name in names})


def _median(values: Sequence[Any]) -> Any:
    """Of numbers, of tuples of them place by place, of mappings key by key."""
    if all(isinstance(value, Mapping) for value in values):
        keys = dict.fromkeys(key for value in values for key in value)
        nothing = {key: _zero(next(value[key] for value in values if key in value)) for key in keys}
        return {key: _median([value.get(key, nothing[key]) for value in values]) for key in keys}
    if all(isinstance(value, tuple) for value in values):
        return tuple(map(_median, zip(*values, strict=True)))
    return statistics.median(values)


def _zero(value: Any) -> Any:
    return (0.0,) * len(value) if isinstance(value, tuple) else 0.0


def exposed_parts(kernels: Iterable[Kernel]) -> dict[Collective, list[Interval]]:
    """When nothing but communication ran, ns; of collectives at the same time it counts as the earlier one's."""
    kernels = sorted(kernels, key=lambda kernel: kernel.event.start_ns)
    compute = union(kernel.interval for kernel in kernels if not kernel.is_communication)
    exposed: dict[Collective, list[Interval]] = defaultdict(list)
    counted = 0.0
    for kernel in kernels:
        if kernel.is_communication:
            start, end = kernel.interval
            exposed[kernel.op.kind, kernel.op.axes] += minus((max(start, counted), end), compute)
            counted = max(counted, end)
    return dict(exposed)


def _runs(kernels: Sequence[Kernel]) -> list[tuple[Op, int]]:
    """How often each operation ran. A run launches its main kernel once, and may clear memory several times."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    ops = {}
    for kernel in kernels:
        ops[kernel.event.op] = kernel.op
        counts[kernel.event.op][kernel.event.name] += 1
    return [(ops[name], min(counter.values())) for name, counter in counts.items()]


def _collectives(
    kernels: Sequence[Kernel], exposed: Mapping[Collective, Sequence[Interval]]
) -> dict[Collective, tuple[float, float, float]]:
    sums = _sums([k for k in kernels if k.is_communication], lambda kernel: (kernel.op.kind, kernel.op.axes))
    return {key: (count, seconds, total(exposed[key]) / 1e9) for key, (count, seconds) in sums.items()}


def _sums(kernels: Iterable[Kernel], key: Callable[[Kernel], Key]) -> dict[Key, tuple[float, float]]:
    """Count and summed seconds."""
    sums: dict[Key, tuple[float, float]] = {}
    for kernel in kernels:
        count, seconds = sums.get(key(kernel), (0, 0.0))
        start, end = kernel.interval
        sums[key(kernel)] = count + 1, seconds + (end - start) / 1e9
    return sums
