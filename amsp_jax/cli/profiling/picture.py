"""One step of one device as a picture: what computes, what communicates, what is hidden and what is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from amsp_jax.cli.profiling.breakdown import Collective, Execution, exposed_parts
from amsp_jax.cli.profiling.intervals import Interval, minus, total, union
from amsp_jax.cli.profiling.program import Work

_COLORS = {
    Work.MATMUL: "#33608c",
    Work.ATTENTION: "#57a5a5",
    Work.OTHER: "#e3a857",
    Work.OPTIMIZER: "#8d6aa8",
    Work.COPIES: "#b9b9b9",
}
_HIDDEN, _EXPOSED, _NOTHING = "#9ccb86", "#d1495b", "#222222"
_HEIGHT = 0.72
# Of the whole step, that the lower panel shows.
_CLOSE_UP = 1 / 12
_NUM_PLACES = 96
_FINEST = 6000


def plot_step(execution: Execution, path: Path, title: str) -> Path:
    """Draws a step above and, below, the twelfth of it with the most exposed communication. Needs no display.

    Args:
      execution: the step.
      path: of the picture; its ending is the format.
      title: model, strategy and devices.
    """
    exposed = exposed_parts(execution.kernels)
    lanes = sorted(exposed, key=lambda lane: -_busy_ns(execution, lane))
    figure = Figure(figsize=(15, 3.4 + 0.72 * (len(lanes) + 2)), layout="constrained")
    FigureCanvasAgg(figure)
    whole = execution.start_ns, execution.end_ns
    close_up = _most_exposed([part for parts in exposed.values() for part in parts], whole)
    for axes, window in zip(figure.subplots(2, 1), (whole, close_up), strict=True):
        _draw(axes, execution, lanes, window)
    upper, lower = figure.axes
    upper.axvspan(*_ms(close_up, execution), facecolor="none", edgecolor="#777777", linestyle=":", linewidth=1.2)
    upper.set_title(title, loc="left", fontweight="bold")
    why = ": where the most communication is exposed" if lanes else ""
    lower.set_title(f"The dotted part{why}", loc="left", fontsize=10)
    figure.legend(handles=_legend(execution, bool(lanes)), loc="outside lower left", ncols=8, frameon=False)
    figure.savefig(path, dpi=150)
    return path


def _busy_ns(execution: Execution, lane: Collective) -> float:
    return total(kernel.interval for kernel in execution.kernels if (kernel.op.kind, kernel.op.axes) == lane)


def _most_exposed(parts: Sequence[Interval], whole: Interval) -> Interval:
    start, end = whole
    width = (end - start) * _CLOSE_UP
    places = [start + (end - start - width) * i / (_NUM_PLACES - 1) for i in range(_NUM_PLACES)]
    place = max(places, key=lambda x: total(_clipped(parts, (x, x + width))))
    return place, place + width


def _draw(axes: Axes, execution: Execution, lanes: Sequence[Collective], window: Interval) -> None:
    kernels = execution.kernels
    # The long ones last, so that they are not painted over.
    for work, color in reversed(_COLORS.items()):
        _bars(axes, execution, 0, [kernel.interval for kernel in kernels if kernel.op.work is work], window, color)
    exposed = exposed_parts(kernels)
    for row, lane in enumerate(lanes, start=1):
        ran = [kernel.interval for kernel in kernels if (kernel.op.kind, kernel.op.axes) == lane]
        _bars(axes, execution, row, ran, window, _HIDDEN)
        _bars(axes, execution, row, exposed[lane], window, _EXPOSED, closes_gaps=False)
    busy = union(kernel.interval for kernel in kernels)
    idle = minus((execution.start_ns, execution.end_ns), busy)
    _bars(axes, execution, len(lanes) + 1, idle, window, _NOTHING, closes_gaps=False)
    _dress(axes, ["compute", *(f"{kind}\n{along}" for kind, along in lanes), "nothing runs"])
    axes.set_xlim(*_ms(window, execution))


def _dress(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xlabel("ms since the step began")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for row in range(len(names)):
        axes.axhspan(row - _HEIGHT / 2, row + _HEIGHT / 2, color="#f4f4f4", zorder=0)


def _bars(
    axes: Axes,
    execution: Execution,
    row: int,
    intervals: Iterable[Interval],
    window: Interval,
    color: str,
    closes_gaps: bool = True,
) -> None:
    """Not snapped to pixels: what is thinner than one is as pale as it is short.

    Pale edges of kernels that follow one another would add up to a stripe, so gaps that cannot be seen are closed.
    """
    unseen = (window[1] - window[0]) / _FINEST if closes_gaps else 0.0
    merged = union((start, end + unseen) for start, end in _clipped(intervals, window))
    ends = (_ms((start, end - unseen), execution) for start, end in merged)
    bars = [(start, end - start) for start, end in ends]
    axes.broken_barh(bars, (row - _HEIGHT / 2, _HEIGHT), facecolors=color, linewidth=0, snap=False)


def _clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]


def _ms(interval: Interval, execution: Execution) -> Interval:
    start, end = interval
    return (start - execution.start_ns) / 1e6, (end - execution.start_ns) / 1e6


def _legend(execution: Execution, has_collectives: bool) -> list[Patch]:
    works = {kernel.op.work for kernel in execution.kernels}
    handles = [Patch(color=color, label=str(work)) for work, color in _COLORS.items() if work in works]
    if has_collectives:
        handles += [Patch(color=_HIDDEN, label="communication, hidden"), Patch(color=_EXPOSED, label="exposed")]
    return [*handles, Patch(color=_NOTHING, label="nothing runs")]
