"""Draws what the benchmarks wrote: pictures for README.md.

    python benchmarks/plot.py --in OUT --out docs/images

`peer.png` of OUT/results.jsonl, `strategies.png` of strategies.jsonl, `groups.png` of groups.jsonl, `ablation.png` of
ablation.jsonl and `loss_curve.png` of loss_curve.json: those that are there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rows import Row, read_rows

COLORS = ("#4c78a8", "#d1495b", "#72b7b2", "#eeca3b", "#b279a2", "#9d755d", "#79706e", "#54a24b")
OURS, PEER = "amsp_jax", "PyTorch FSDP2"

Groups = Mapping[str, Mapping[str, float]]
"""Values of bars: by group along the axis, by series within it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in", dest="folder", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        source = args.folder / name
        if source.exists():
            path = args.out / f"{'peer' if name == 'results.jsonl' else source.stem}.png"
            draw(read_rows(source), path)
            print(path)


def draw_peer(rows: Sequence[Row], path: Path) -> None:
    """MFU of both sides, by model and dtype of the reduction; of several runs of one kind the best."""
    groups: dict[str, dict[str, float]] = {}
    for row in rows:
        group, side, mfu = peer_bar(row)
        bars = groups.setdefault(group, {})
        bars[side] = max(bars.get(side, 0.0), mfu * 100)
    bars_of(groups, "{:.1f}", "MFU, %", "Best settings of each side").savefig(path, dpi=150)


def peer_bar(row: Row) -> tuple[str, str, float]:
    """Group, side and MFU of a line of `gpu_peer.sh`, whose name is `model: side_dtype_...`."""
    model, _, run = row["name"].partition(": ")
    side, dtype = run.split("_")[:2]
    return f"{model}\n{dtype} reduction", OURS if side == "ours" else PEER, row["mfu"]


def draw_strategies(rows: Sequence[Row], path: Path) -> None:
    """Step time over that of the planner's choice, or of the fastest, by number of microbatches."""
    groups: dict[str, dict[str, float]] = {}
    for n in sorted({row["accumulation"] for row in rows}):
        timed = [row for row in rows if row["accumulation"] == n and "step_s" in row]
        base = min(timed, key=lambda row: (not row["is_choice"], row["step_s"]))["step_s"]
        groups[f"{n} microbatch{'es' * (n > 1)}"] = {label(row): row["step_s"] / base for row in timed}
    what = "planner's choice" if any(row["is_choice"] for row in rows) else "fastest"
    figure = bars_of(groups, "{:.2f}", f"step time over that of the {what}", "Strategies: " + place(rows[0]))
    figure.axes[0].axhline(1, color="#333333", linewidth=0.8)
    figure.savefig(path, dpi=150)


def label(row: Row) -> str:
    """The strategy's names, its degrees where it has none, and its group of microbatches."""
    group = row.get("microbatch_group", 1)
    return "\n".join([*(row["names"] or [row["strategy"]]), *([f"groups of {group}"] if group > 1 else [])])


def draw_ablation(rows: Sequence[Row], path: Path) -> None:
    """Step time over that without overlap, by strategy."""
    groups: dict[str, dict[str, float]] = {}
    slowest: dict[str, float] = {}
    for row in rows:
        # The first part is the step without overlap.
        base = slowest.setdefault(row["strategy"], row["step_s"])
        # One word a line: below the axis there is little room.
        groups.setdefault(label(row).replace(" ", "\n"), {})[row["part"]] = row["step_s"] / base
    title = "Overlap, part by part: " + place(rows[0])
    bars_of(groups, "{:.2f}", "step time over that without overlap", title).savefig(path, dpi=150)


def place(row: Row) -> str:
    """Where a row was measured."""
    share = row.get("gpu_share", 1)
    part = f" ({share:.0%} of one each)" if share < 1 else ""
    return f"{row['num_nodes']} nodes of {row['devices_per_node']} {row['device_kind']}{part}"


def draw_loss_curve(rows: Sequence[Row], path: Path) -> None:
    """The curves, and below them their relative differences."""
    losses = rows[0]["losses"]
    base = losses["overlap"]
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    curves, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    steps = range(1, len(base) + 1)
    for (name, curve), color, style in zip(losses.items(), COLORS, ("-", "--", ":"), strict=False):
        curves.plot(steps, curve, style, color=color, label=name)
        if name != "overlap":
            change = [abs(x - y) / abs(y) for x, y in zip(curve, base, strict=True)]
            differences.plot(steps, change, color=color, label=f"{name}, median {statistics.median(change):.1e}")
    curves.set_title(f"{rows[0]['model']}, {rows[0]['strategy']}", loc="left", fontweight="bold")
    curves.set_ylabel("loss (nats per token)")
    differences.set(xlabel="training step", ylabel="relative difference\nfrom overlap", yscale="log")
    for axes in (curves, differences):
        decorate(axes)
    figure.savefig(path, dpi=150)


def bars_of(groups: Groups, form: str, ylabel: str, title: str) -> Figure:
    """Grouped bars with their values over them; a series keeps its colour, and one that a group lacks has no gap."""
    series = list(dict.fromkeys(name for bars in groups.values() for name in bars))
    widest = max(len(bars) for bars in groups.values())
    figure = Figure(figsize=(max(8.0, 0.42 * len(groups) * (widest + 1)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.85 / widest
    for i, bars in enumerate(groups.values()):
        ordered = [name for name in series if name in bars]
        for j, name in enumerate(ordered):
            x = i + (j - (len(ordered) - 1) / 2) * width
            axes.bar(x, bars[name], 0.92 * width, color=COLORS[series.index(name) % len(COLORS)])
            axes.text(x, bars[name], form.format(bars[name]), ha="center", va="bottom", fontsize=7)
    for i, name in enumerate(series):
        axes.bar([0], [0], color=COLORS[i % len(COLORS)], label=name)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontweight="bold")
    decorate(axes)
    return figure


def decorate(axes: Axes) -> None:
    axes.margins(y=0.1)
    axes.grid(axis="y", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


PICTURES: Mapping[str, Callable[[Sequence[Row], Path], None]] = {
    "results.jsonl": draw_peer,
    "strategies.jsonl": draw_strategies,
    "groups.jsonl": draw_strategies,
    "ablation.jsonl": draw_ablation,
    "loss_curve.json": draw_loss_curve,
}


if __name__ == "__main__":
    main()
