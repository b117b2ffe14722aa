"""The best strategy of each model on each number of nodes, as a picture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter

from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.planner.report.text import counted
from amsp_jax.predict.planner.search import NothingFits, search
from amsp_jax.predict.planner.types import Estimate, Objective, Space, Workload

_COLORS = "YlGnBu"
_DARK = 0.55
_NOTHING = "#eeeeee"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """The best of each model on each number of nodes.

    Attributes:
      workloads: the rows.
      cluster: of any number of nodes.
      num_nodes: the columns.
      best: a row for each workload, an estimate for each column; None where nothing fits.
    """

    workloads: tuple[Workload, ...]
    cluster: Cluster
    num_nodes: tuple[int, ...]
    best: tuple[tuple[Estimate | None, ...], ...]


def best_by_size(
    workloads: Sequence[Workload],
    cluster: Cluster,
    num_nodes: Sequence[int],
    space: Space,
    objective: Objective,
    memory_bytes: int | None,
    progress: Callable[[str, float], None],
) -> Grid:
    """Searches each cell of a grid.

    Args:
      workloads: the rows, with the global batch of `cluster`; each column has as many sequences a device.
      cluster: with the number of nodes that the global batch is for.
      num_nodes: the columns.
      space, objective, memory_bytes: as for `search`.
      progress: called before each cell with its name and the share that is done.
    """
    num_cells = len(workloads) * len(num_nodes)
    rows: list[tuple[Estimate | None, ...]] = []
    for workload in workloads:
        row: list[Estimate | None] = []
        for nodes in num_nodes:
            done = (len(rows) * len(num_nodes) + len(row)) / num_cells
            progress(f"{workload.model.name} on {counted(nodes, 'node')}", done)
            here = cluster.with_nodes(nodes)
            batch = workload.global_batch // cluster.num_devices * here.num_devices
            row.append(_best(dataclasses.replace(workload, global_batch=batch), here, space, objective, memory_bytes))
        rows.append(tuple(row))
    return Grid(workloads=tuple(workloads), cluster=cluster, num_nodes=tuple(num_nodes), best=tuple(rows))


def _best(
    workload: Workload, cluster: Cluster, space: Space, objective: Objective, memory_bytes: int | None
) -> Estimate | None:
    try:
        return search(workload, cluster, space, objective, memory_bytes).best
    except NothingFits:
        # The batch divides on every number of nodes if it does on one, so that memory is left as the reason.
        return None


def plot_best(grid: Grid, path: str | os.PathLike[str], asked: tuple[str, int], caption: str) -> Path:
    """Draws a cell for each model and number of nodes: MFU by colour, MFU and strategy in words.

    Args:
      grid: what `best_by_size` found.
      path: of the picture; its ending is the format.
      asked: the model and the number of nodes of the cell that gets a frame.
      caption: one or two lines under the title.
    """
    searched = _searched(grid)
    figure = Figure(figsize=(3 + 1.45 * len(grid.num_nodes), 2.2 + 0.9 * len(grid.best)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    found = [estimate.mfu or 0.0 for row in grid.best for estimate in row if estimate]
    # Not from 0: neighbours differ by little. At least 15 points wide: a difference of nothing is no contrast.
    scale = Normalize(max(0.0, min(*found, max(found) - 0.15) - 0.02), max(found))
    for y, row in enumerate(grid.best):
        for x, estimate in enumerate(row):
            _draw_cell(axes, x, y, estimate, scale, searched)
    _frame(axes, grid, asked)
    _label(axes, grid)
    axes.set_title(
        f"Best predicted MFU and its strategy: {grid.cluster.name}, {grid.cluster.devices_per_node} devices a node",
        loc="left", pad=24, fontweight="bold", fontsize=13,
    )  # fmt: skip
    axes.annotate(
        caption, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=9.5, color="#555555"
    )
    percent = FuncFormatter(lambda value, _: f"{value:.0%}")
    bar = figure.colorbar(ScalarMappable(scale, _COLORS), ax=axes, pad=0.01, aspect=30, format=percent)
    bar.set_label("MFU")
    bar.outline.set_visible(False)
    figure.savefig(path, dpi=150)
    return Path(path)


def _searched(grid: Grid) -> list[str]:
    """Which of microbatch and rematerialisation differ between the best."""
    points = [estimate.candidate for row in grid.best for estimate in row if estimate]
    return [name for name in ("microbatch", "remat") if len({getattr(point, name) for point in points}) > 1]


def _draw_cell(
    axes: Axes, x: int, y: int, estimate: Estimate | None, scale: Normalize, searched: Sequence[str]
) -> None:
    if estimate is None:
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_NOTHING, edgecolor="white", linewidth=2))
        axes.text(x, y, "does not fit", ha="center", va="center", fontsize=9, color="#888888", style="italic")
        return
    mfu = estimate.mfu or 0.0
    face = colormaps[_COLORS](float(scale(mfu)))
    ink = "white" if _luminance(face) < _DARK else "#1a1a1a"
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=face, edgecolor="white", linewidth=2))
    axes.text(x, y - 0.2, f"{mfu:.1%}", ha="center", va="center", fontsize=13, fontweight="bold", color=ink)
    axes.text(x, y + 0.17, _strategy(estimate, searched), ha="center", va="center", fontsize=8.5, color=ink)


def _luminance(color: tuple[float, float, float, float]) -> float:
    red, green, blue, _ = color
    return 0.299 * red + 0.587 * green + 0.114 * blue


def _strategy(estimate: Estimate, searched: Sequence[str]) -> str:
    point = estimate.candidate
    degrees = point.degrees
    lines = [f"P {degrees.params}, G {degrees.grads}", f"OS {degrees.opt_state}"]
    if searched:
        words = {"microbatch": f"b {point.microbatch}", "remat": str(point.remat)}
        lines.append(", ".join(words[name] for name in searched))
    return "\n".join(lines)


def _frame(axes: Axes, grid: Grid, asked: tuple[str, int]) -> None:
    model, nodes = asked
    x, y = grid.num_nodes.index(nodes), [w.model.name for w in grid.workloads].index(model)
    axes.add_patch(Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, edgecolor="#d1495b", linewidth=2))


def _label(axes: Axes, grid: Grid) -> None:
    axes.set_xlim(-0.5, len(grid.num_nodes) - 0.5)
    axes.set_ylim(len(grid.best) - 0.5, -0.5)
    devices = grid.cluster.devices_per_node
    axes.set_xticks(range(len(grid.num_nodes)), [f"{n}\n{n * devices}" for n in grid.num_nodes])
    axes.set_xlabel("nodes, and devices below")
    axes.set_yticks(range(len(grid.best)), [f"{w.model.name}\nseq {w.seq_len}" for w in grid.workloads])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
