"""The numbers of a profile as a table and as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amsp_jax.cli.profiling.breakdown import Breakdown
from amsp_jax.cli.profiling.program import Work

_NUM_KERNELS = 4
_LONGEST_NAME = 52
_TOTALS = ("step_s", "compute_s", "communication_s", "exposed_s", "gap_s", "overlap", "matmul_flops_per_s")
CPU_NOTE = (
    "On the CPU the devices are threads that share its cores. A collective there is a meeting of threads: its time is\n"
    "mostly waiting for those that have no core, and what runs beside it is chance. What ran, how often and over\n"
    "which axes is that of the program; no time, and no overlap, says anything about GPUs."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """What a process found.

    Attributes:
      title: model, strategy and devices.
      num_steps: that the medians are of.
      devices: of each local device; the first one's numbers are reported.
      is_cpu: the devices are simulated.
    """

    title: str
    num_steps: int
    devices: Mapping[int, Breakdown]
    is_cpu: bool

    @property
    def first(self) -> Breakdown:
        """That of the first device."""
        return next(iter(self.devices.values()))


def text(profile: Profile) -> str:
    """Step, collectives and kernels, each a table."""
    device = next(iter(profile.devices))
    steps = "one step"
    if profile.num_steps > 1:
        steps = f"median of {profile.num_steps} steps, each number's own, so that they need not add up"
    head = f"{profile.title}\n{steps}; device {device}"
    if len(profile.devices) > 1:
        head += f"; least and most of {len(profile.devices)} local devices where they differ"
    tables = [head, _step_table(profile), _collectives_table(profile.first), _work_table(profile.first)]
    return "\n\n".join([*tables, *([CPU_NOTE] if profile.is_cpu else [])])


def _step_table(profile: Profile) -> str:
    first = profile.first
    rows = [["", "ms", "of the step", *(["least", "most"] if len(profile.devices) > 1 else [])]]
    names = {
        "step_s": "step", "compute_s": "compute", "communication_s": "communication", "exposed_s": "  exposed",
        "gap_s": "gaps, nothing runs",
    }  # fmt: skip
    for field, name in names.items():
        seconds = getattr(first, field)
        rows.append([name, _ms(seconds), f"{seconds / first.step_s:.1%}", *_spread(profile, field, _ms)])
    if first.communication_s:
        rows.append(["overlap", "", f"{first.overlap:.1%}", *_spread(profile, "overlap", lambda share: f"{share:.1%}")])
    table = _table(rows)
    rates = {"matmul": first.matmul_flops_per_s, "attention": first.attention_flops_per_s}
    lines = [f"{name}: {_flops(rate)}/s while it runs" for name, rate in rates.items() if rate]
    return "\n".join([table, *(["; ".join(lines)] if lines else [])])


def _spread(profile: Profile, field: str, show: Callable[[float], str]) -> list[str]:
    """Of the local devices; nothing where all show the same."""
    values = [getattr(one, field) for one in profile.devices.values()]
    shown = [show(min(values)), show(max(values))]
    if len(values) == 1:
        return []
    return shown if shown[0] != shown[1] else ["", ""]


def _collectives_table(first: Breakdown) -> str:
    rows = [["collective", "axes", "count", "ms", "exposed ms", "overlap"]]
    for (kind, axes), (count, seconds, exposed_s) in _longest(first.collectives, by=2):
        # Sums of the same intervals in another order may differ in their last bits.
        overlap = max(0.0, 1 - exposed_s / seconds)
        rows.append([kind, axes, f"{count:.0f}", _ms(seconds), _ms(exposed_s), f"{overlap:.1%}"])
    return _table(rows, left=2) if len(rows) > 1 else "no collectives"


def _work_table(first: Breakdown) -> str:
    """Each class with its longest kernels."""
    whole = sum(first.work.values())
    rows = [["kernels", "count", "ms", "of all"]]
    for work, seconds in sorted(first.work.items(), key=lambda item: -item[1]):
        kernels = _by_stem(first, work)
        count = sum(count for count, _ in kernels.values())
        rows.append([str(work), f"{count:.0f}", _ms(seconds), f"{seconds / whole:.1%}"])
        for name, (number, time) in _longest(kernels, by=1)[:_NUM_KERNELS]:
            rows.append([f"  {name}", f"{number:.0f}", _ms(time), f"{time / whole:.1%}"])
    return _table(rows)


def _by_stem(first: Breakdown, work: Work) -> dict[str, tuple[float, float]]:
    """Count and seconds of kernels whose names differ by a number alone."""
    sums: dict[str, tuple[float, float]] = {}
    for (kind, name), (count, seconds) in first.kernels.items():
        if kind is work:
            before = sums.get(stem(name), (0.0, 0.0))
            sums[stem(name)] = before[0] + count, before[1] + seconds
    return sums


def stem(kernel: str) -> str:
    """A kernel's name without arguments, template, and the number that XLA ends it with."""
    name = re.sub(r"^void |[(<].*", "", kernel)
    name = re.sub(r"[ ._]\d+(_\d+)*$", "", name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}..."


def _longest(table: Mapping[Any, tuple[float, ...]], by: int) -> list[tuple[Any, tuple[float, ...]]]:
    return sorted(table.items(), key=lambda item: -item[1][by])


def to_json(profile: Profile) -> dict[str, Any]:
    """The same numbers and more, seconds and FLOP/s; each total with the least and most of the local devices."""
    first = profile.first
    values = {name: [getattr(one, name) for one in profile.devices.values()] for name in _TOTALS}
    return {
        "title": profile.title,
        "num_steps": profile.num_steps,
        "device": next(iter(profile.devices)),
        "num_local_devices": len(profile.devices),
        "is_cpu": profile.is_cpu,
        **{name: {"value": found[0], "min": min(found), "max": max(found)} for name, found in values.items()},
        "matmul_flops": first.matmul_flops,
        "attention_flops": first.attention_flops,
        "attention_flops_per_s": first.attention_flops_per_s,
        "collectives": [
            {"kind": kind, "axes": axes, "count": count, "seconds": seconds, "exposed_s": exposed_s}
            for (kind, axes), (count, seconds, exposed_s) in _longest(first.collectives, by=2)
        ],
        "work_s": {str(work): seconds for work, seconds in first.work.items()},
        "kernels": [
            {"work": str(work), "name": name, "count": count, "seconds": seconds}
            for (work, name), (count, seconds) in _longest(first.kernels, by=1)
        ],
    }


def _table(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns of one width; the first `left` begin at their left edge."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.4g} TFLOP" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP"
