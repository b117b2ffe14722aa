"""What the network reaches as a picture: bus bandwidth by message size."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from amsp_jax.errors import UserError
from amsp_jax.predict.calibrate.collectives import KINDS, size_text
from amsp_jax.predict.cluster import Cluster
from amsp_jax.strategy import Degree

_TICKS = [2**18 * 16**i for i in range(4)]


def plot_network(cluster: Cluster, path: Path) -> None:
    """Draws bus bandwidth by message size, a panel for each kind and a line for each group shape. Needs no display.

    Bus bandwidth is what a device sends and receives at once on a ring: bytes (n - 1) / n over seconds, and twice
    that for an all-reduce. So it can be compared with the link's, whatever the group.

    Raises:
      UserError: no collective was measured.
    """
    if cluster.network is None or not cluster.network.measured:
        raise UserError(
            f"{path} cannot be drawn: no collective was measured on {cluster.ranks}; leave the plot out".replace(
                "data rank", "device"
            )
        )
    groups = sorted({group for _, group in cluster.network.measured}, key=lambda g: (g.inter > 1, g.intra, g.inter))
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(KINDS), sharex=True, sharey=True)
    for axes, kind in zip(panels, KINDS, strict=True):
        for group in groups:
            points = cluster.network.measured.get((kind, group), ())
            _draw(axes, kind, group, points, _style(group, groups))
        _dress(axes, kind)
    panels[0].set_ylabel("bus bandwidth (GB/s a device)")
    handles = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside right upper",
        frameon=False,
        title="group\ndevices a node x nodes",
    )
    what = f"{cluster.device_kind}, {cluster.ranks}".replace("data rank", "device")
    figure.suptitle(f"{what}, {cluster.date}", x=0.01, ha="left", fontweight="bold")
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, kind: str, group: Degree, points: tuple[tuple[int, float], ...], style: dict[str, Any]) -> None:
    traffic = (2 if kind == "all-reduce" else 1) * (group.total - 1) / group.total
    sizes = [num_bytes for num_bytes, _ in points]
    rates = [num_bytes * traffic / seconds / 1e9 for num_bytes, seconds in points]
    axes.plot(sizes, rates, linewidth=1.6, markersize=4, label=str(group), **style)


def _dress(axes: Axes, kind: str) -> None:
    axes.set_title(kind, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda num_bytes, _: size_text(num_bytes)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.set_xlabel("message")
    axes.grid(color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _style(group: Degree, groups: list[Degree]) -> dict[str, Any]:
    """Blue inside a node, red across whole nodes, green for one device a node; lighter for smaller groups."""
    level, marker, hue = _level(group)
    alike = [other for other in groups if _level(other)[0] == level]
    share = alike.index(group) / max(len(alike) - 1, 1) if len(alike) > 1 else 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.72 - 0.37 * share, 0.55)
    return {"color": f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}", "marker": marker}


def _level(group: Degree) -> tuple[str, str, float]:
    if group.inter == 1:
        return "inside a node", "o", 0.58
    return ("one device a node", "^", 0.36) if group.intra == 1 else ("whole nodes", "s", 0.01)
