"""The planner's predictions beside what `regret.py` measured: the tables and the plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from regret_settings import COMPUTE_DTYPE, REDUCE_DTYPE, REMAT, Row, Setting, Size, build, optimizer, read_rows

from amsp_jax.cluster import Cluster, load_cluster
from amsp_jax.planner import Candidate, Estimate, Scorer, Workload

Case = tuple[str, int]
"""Size and accumulation: what the strategies compete on."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """A measured setting and what was predicted of it."""

    row: Row
    setting: Setting
    step_s: float
    predicted_s: float
    default: bool
    """Whether `plan` looks at it unasked: nodes are filled first."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.step_s - 1


@dataclasses.dataclass(frozen=True)
class Pick:
    """The planner's choice in one case, and the fastest that was measured."""

    case: Case
    num_measured: int
    pick: Compared
    best: Compared

    @property
    def regret(self) -> float:
        """Time of the pick over that of the best, less one."""
        return self.pick.step_s / self.best.step_s - 1


def picks(compared: Sequence[Compared]) -> list[Pick]:
    """One for each case, by size and accumulation."""
    cases: dict[Case, list[Compared]] = {}
    for each in compared:
        cases.setdefault((each.setting.size, each.setting.accumulation), []).append(each)
    return [
        Pick(
            case=case,
            num_measured=len(members),
            pick=min((m for m in members if m.default), key=lambda m: m.predicted_s),
            best=min(members, key=lambda m: m.step_s),
        )
        for case, members in sorted(cases.items())
        if any(m.default for m in members)
    ]


def repeats(rows: Sequence[Row]) -> list[tuple[Setting, float]]:
    """Of what was measured twice: the setting, and the second time over the first, less one."""
    times = {Setting.of(row): row["step_s"] for row in rows if "step_s" in row}
    return [
        (setting, seconds / times[first] - 1)
        for setting, seconds in times.items()
        if setting.repeat and (first := dataclasses.replace(setting, repeat=0)) in times
    ]


def workload(row: Row, cluster: Cluster) -> Workload:
    """What the planner is asked about a row."""
    size = Size(**{field.name: row[field.name] for field in dataclasses.fields(Size)})
    return Workload(
        model=build(size, row["attention"]),
        optimizer=optimizer(),
        global_batch=row["accumulation"] * size.microbatch * cluster.num_devices,
        seq_len=size.seq_len,
        compute_dtype=COMPUTE_DTYPE,
        reduce_dtype=REDUCE_DTYPE,
    )


def estimates(rows: Sequence[Row], cluster: Cluster) -> Iterator[tuple[Row, Estimate]]:
    """What the planner says of each row that has a time."""
    scorers: dict[Case, Scorer] = {}
    for row in rows:
        if "step_s" not in row:
            continue
        setting = Setting.of(row)
        case = setting.size, setting.accumulation
        if case not in scorers:
            scorers[case] = Scorer(workload(row, cluster), cluster)
        candidate = Candidate(setting.degrees(cluster.ranks), row["microbatch"], REMAT)
        yield row, scorers[case].estimate(candidate)


def write(folder: Path, out: Path) -> None:
    """Writes `regret.md` and `regret.png` into `out`, and prints the former."""
    rows, cluster = read_rows(folder / "measured.jsonl"), load_cluster(folder / "cluster.json")
    both = list(estimates(rows, cluster))
    compared = [
        Compared(row, Setting.of(row), row["step_s"], estimate.step_s, not estimate.candidate.degrees.warnings)
        for row, estimate in both
        if not row["repeat"]
    ]
    text = "\n\n".join(
        [
            _heading(rows, cluster),
            _picks_table(picks(compared)),
            _summary(compared, repeats(rows)),
            "## Step time\n\n" + _times_table(both),
            "## Memory\n\n" + _memory_table(both),
        ]
    )
    (out / "regret.md").write_text(text + "\n")
    plot(compared, out / "regret.png")
    print(text)


def _heading(rows: Sequence[Row], cluster: Cluster) -> str:
    row = rows[0]
    sizes = {
        name: f"{name}: {r['model']} {dict(r['overrides'])}, {r['microbatch']} sequences of {r['seq_len']} a device"
        for r in rows
        for name in [r["size"]]
    }
    return "\n".join(
        [
            "# Does the planner pick the fastest strategy?",
            "",
            f"{row['num_nodes']} nodes of {row['devices_per_node']} {row['device_kind']}, jax {row['jax']}, "
            f"{row['date']}; {cluster.source}. Made by `benchmarks/regret.sh` and `regret.py report`.",
            "",
            *(f"- {line}" for line in sizes.values()),
        ]
    )


def _picks_table(found: Sequence[Pick]) -> str:
    heads = ["model", "microbatches", "measured", "the planner's pick", "ms", "the fastest", "ms", "regret"]
    return _table(
        heads,
        [
            [
                p.case[0], str(p.case[1]), str(p.num_measured), p.pick.setting.strategy, _ms(p.pick.step_s),
                p.best.setting.strategy, _ms(p.best.step_s), f"{p.regret:.1%}",
            ]
            for p in found
        ],
    )  # fmt: skip


def _summary(compared: Sequence[Compared], twice: Sequence[tuple[Setting, float]]) -> str:
    errors = [abs(each.error) for each in compared]
    spreads = [(each.row["max_s"] - each.row["min_s"]) / each.step_s for each in compared]
    lines = [
        f"- {len(errors)} settings: median error of the predicted step time {statistics.median(errors):.1%}, "
        f"largest {max(errors):.1%}.",
        f"- Within a setting, slowest step less fastest, over the median: {statistics.median(spreads):.1%} (median).",
        *(f"- Measured again, {s.size} x{s.accumulation} {s.strategy}: {change:+.1%}." for s, change in twice),
    ]
    return "\n".join(lines)


def _times_table(both: Sequence[tuple[Row, Estimate]]) -> str:
    heads = ["model", "microbatches", "strategy", "measured ms (min, max)", "predicted ms", "error"]
    heads += ["compute ms", "collectives ms", "exposed ms"]
    lines = []
    for row, estimate in both:
        timeline = estimate.timeline
        lines.append(
            [
                row["size"], str(row["accumulation"]), row["strategy"] + " again" * row["repeat"],
                f"{_ms(row['step_s'])} ({_ms(row['min_s'])}, {_ms(row['max_s'])})", _ms(estimate.step_s),
                f"{estimate.step_s / row['step_s'] - 1:+.1%}", _ms(timeline.compute_s),
                _ms(timeline.communication_s), _ms(timeline.exposed_s),
            ]
        )  # fmt: skip
    return _table(heads, lines)


def _memory_table(both: Sequence[tuple[Row, Estimate]]) -> str:
    """The process's peak is a setting's where it rose above that of all settings before."""
    heads = [
        "model",
        "microbatches",
        "strategy",
        "predicted GiB",
        "compiled GiB",
        "error",
        "device's peak GiB",
        "error",
    ]
    lines = []
    for row, estimate in both:
        predicted, compiled = estimate.memory.total, row["compiled_bytes"]["total"]
        peak = row["peak_bytes"] if row["peak_bytes"] > row["earlier_peak_bytes"] else None
        lines.append(
            [
                row["size"], str(row["accumulation"]), row["strategy"] + " again" * row["repeat"], _gib(predicted),
                _gib(compiled), f"{predicted / compiled - 1:+.1%}", _gib(peak) if peak else "",
                f"{predicted / peak - 1:+.1%}" if peak else "",
            ]
        )  # fmt: skip
    return _table(heads, lines)


def plot(compared: Sequence[Compared], path: Path) -> None:
    """Predicted against measured step time; a strategy is a marker, a case a colour."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    strategies = list(dict.fromkeys(each.setting.strategy for each in compared))
    cases = sorted({(each.setting.size, each.setting.accumulation) for each in compared})
    markers = "osD^v<>pPX*hd1+x"
    for each in compared:
        axes.plot(
            each.step_s * 1e3,
            each.predicted_s * 1e3,
            markers[strategies.index(each.setting.strategy) % len(markers)],
            color=f"C{cases.index((each.setting.size, each.setting.accumulation))}",
            markersize=7,
            alpha=0.8,
        )
    _decorate(axes, compared)
    for i, strategy in enumerate(strategies):
        axes.plot([], [], markers[i % len(markers)], color="#555555", label=strategy)
    for i, (size, accumulation) in enumerate(cases):
        axes.plot([], [], "s", color=f"C{i}", label=f"{size}, {accumulation} microbatches")
    figure.legend(loc="outside right center", frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def _decorate(axes: Axes, compared: Sequence[Compared]) -> None:
    times = [s * 1e3 for each in compared for s in (each.step_s, each.predicted_s)]
    ends = [0.9 * min(times), 1.1 * max(times)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#eeeeee", label="within 10 %")
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    axes.set_title("Step time: predicted against measured", loc="left", fontweight="bold")
    axes.set_axisbelow(True)
    axes.grid(color="#e6e6e6", which="both")
    axes.spines[["top", "right"]].set_visible(False)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(heads)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *lines))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"
