"""A search as pictures: how it converged, and which settings mattered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from amsp_jax.cli.tune.study import Record
from amsp_jax.cli.tune.trial import RAN, Kind

CONVERGENCE_FILE, IMPORTANCE_FILE = "convergence.png", "importance.png"
_MEASURED, _BEST, _FAILED = "#4c78a8", "#d1495b", "#8a8a8a"
_MARKS = {Kind.OUT_OF_MEMORY: "X", Kind.TIMED_OUT: "s", Kind.REFUSED: "D", Kind.CRASHED: "v"}


def plot_convergence(records: Sequence[Record], path: Path, title: str) -> Path:
    """Draws tokens/s of each trial that ran, and the best so far; failures stand at the lower edge, by kind."""
    figure, axes = _figure((8, 4.5))
    ran = list(enumerate((record for record in records if record.outcome.kind in RAN), start=1))
    rates = [(x, record.outcome.tokens_per_s) for x, record in ran if record.outcome.tokens_per_s is not None]
    best: list[float] = []
    for _, rate in rates:
        best.append(max(rate, *best[-1:]) if best else rate)
    axes.plot([x for x, _ in rates], [rate for _, rate in rates], "o", color=_MEASURED, markersize=5, label="measured")
    if rates:
        # The last level holds until the last trial.
        axes.step(
            [*(x for x, _ in rates), len(ran)], [*best, best[-1]], where="post", color=_BEST, linewidth=1.8,
            label=f"best so far, {best[-1]:,.0f} at last",
        )  # fmt: skip
    for kind, mark in _MARKS.items():
        places = [x for x, record in ran if record.outcome.kind is kind]
        if places:
            axes.plot(
                places, [0.03] * len(places), mark, color=_FAILED, markersize=6, transform=axes.get_xaxis_transform(),
                label=f"{kind}, {len(places)}",
            )  # fmt: skip
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("trials that ran, in order")
    axes.set_ylabel("tokens/s")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.set_ylim(bottom=0)
    axes.set_xlim(0.5, max(len(ran), 2) + 0.5)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)
    return path


def plot_importance(shares: Mapping[str, float], path: Path, title: str) -> Path:
    """Draws a bar for each setting, the most important on top."""
    figure, axes = _figure((8, 1.4 + 0.42 * len(shares)))
    names = [name.upper() for name in shares]
    bars = axes.barh(names, list(shares.values()), color=_MEASURED, height=0.62)
    axes.bar_label(bars, [f"{share:.1%}" for share in shares.values()], padding=4)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("share of importance (PED-ANOVA)")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlim(0, 1.12 * max(shares.values()))
    axes.grid(axis="y", visible=False)
    figure.savefig(path, dpi=150)
    return path


def _figure(size: tuple[float, float]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
