"""The planner's predictions beside what `regret.py` measured: the tables and the plot."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from regret_settings import COMPUTE_DTYPE, REDUCE_DTYPE, REMAT, Row, Setting, Size, build, optimizer, read_rows

from amsp_jax.cluster import Cluster, load_cluster
from amsp_jax.planner import Candidate, Estimate, Scorer, Workload
from amsp_jax.strategy import Degrees

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

    mixed: bool
    """Whether something is sharded inside a node only, so that collectives run on both levels."""

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


def mixes_levels(degrees: Degrees) -> bool:
    """Whether a degree stays inside a node: some collectives run there, others between nodes."""
    return any(d.inter == 1 and d.total > 1 for d in (degrees.params, degrees.grads, degrees.opt_state))


def compare(both: Sequence[tuple[Row, Estimate]]) -> list[Compared]:
    """What was measured for the first time, beside its prediction."""
    return [
        Compared(
            row, Setting.of(row), row["step_s"], estimate.step_s,
            default=not estimate.candidate.degrees.warnings,
            mixed=mixes_levels(estimate.candidate.degrees),
        )
        for row, estimate in both
        if not row["repeat"]
    ]  # fmt: skip


def write(folder: Path, out: Path) -> None:
    """Writes `regret.md` and `regret.png` into `out`, and prints the former.

    Of `folder`: `measured.jsonl` and `cluster.json`; `second.jsonl`, rows of another sitting, and `notes.md` if there.
    """
    cluster = load_cluster(folder / "cluster.json")
    rows, second_rows = read_rows(folder / "measured.jsonl"), read_rows(folder / "second.jsonl")
    both, second_both = list(estimates(rows, cluster)), list(estimates(second_rows, cluster))
    first, second = compare(both), compare(second_both)
    notes = folder / "notes.md"
    parts = [
        _heading(rows, cluster),
        "## Regret\n\n" + _regret_table({"A": picks(first), "B": picks(second)}),
        _summary(first, repeats(rows)),
        "## Memory, in short\n\n" + _memory_summary([*both, *second_both]),
        *([notes.read_text().strip()] if notes.exists() else []),
        "## Step time, sitting A\n\n" + _times_table(both),
    ]
    if second:
        parts.append("## Step time, sitting B beside A\n\n" + _sittings_table(first, second))
    parts.append("## Memory, sitting A\n\n" + _memory_table(both))
    text = "\n\n".join(parts)
    (out / "regret.md").write_text(text + "\n")
    plot({"A": first, "B": second}, out / "regret.png")
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
            *(f"- {line}" for line in cluster.assumptions),
        ]
    )


def _regret_table(sittings: Mapping[str, Sequence[Pick]]) -> str:
    """The pick is among what was measured in the sitting, and so is the fastest."""
    heads = ["sitting", "model", "microbatches", "measured", "the planner's pick", "ms", "the fastest", "ms", "regret"]
    return _table(
        heads,
        [
            [
                sitting, p.case[0], str(p.case[1]), str(p.num_measured), p.pick.setting.strategy, _ms(p.pick.step_s),
                p.best.setting.strategy, _ms(p.best.step_s), f"{p.regret:.1%}",
            ]
            for sitting, found in sittings.items()
            for p in found
        ],
    )  # fmt: skip


def _summary(compared: Sequence[Compared], twice: Sequence[tuple[Setting, float]]) -> str:
    spreads = [(each.row["max_s"] - each.row["min_s"]) / each.step_s for each in compared]
    kinds = {
        "no group inside a node only": [abs(each.error) for each in compared if not each.mixed],
        "groups on both levels": [abs(each.error) for each in compared if each.mixed],
    }
    lines = [
        *(
            f"- Sitting A, {kind}: {len(errors)} settings, error of the predicted step time "
            f"{statistics.median(errors):.1%} (median), {max(errors):.1%} (largest)."
            for kind, errors in kinds.items()
            if errors
        ),
        f"- Within a setting, slowest step less fastest, over the median: {statistics.median(spreads):.1%} (median).",
        *(f"- Measured again, {s.size} x{s.accumulation} {s.strategy}: {change:+.1%}." for s, change in twice),
    ]
    return "\n".join(lines)


def _memory_summary(both: Sequence[tuple[Row, Estimate]]) -> str:
    compiled = [e.memory.total / row["compiled_bytes"]["total"] - 1 for row, e in both]
    device = [
        e.memory.total / row["peak_bytes"] - 1 for row, e in both if row["peak_bytes"] > row["earlier_peak_bytes"]
    ]
    lines = [
        f"- {what}, {len(errors)} settings: predicted is {min(errors):+.1%} to {max(errors):+.1%} off, "
        f"{statistics.median(map(abs, errors)):.1%} (median)."
        for what, errors in (("Against the compiled step", compiled), ("Against the device's peak", device))
        if errors
    ]
    return "\n".join(lines)


def _sittings_table(first: Sequence[Compared], second: Sequence[Compared]) -> str:
    heads = ["model", "microbatches", "strategy", "predicted ms", "A, ms", "error", "B, ms", "error", "B over A"]
    earlier = {each.setting: each for each in first}
    lines = []
    for each in second:
        a = earlier.get(each.setting)
        lines.append(
            [
                each.setting.size, str(each.setting.accumulation), each.setting.strategy, _ms(each.predicted_s),
                _ms(a.step_s) if a else "", f"{a.error:+.1%}" if a else "", _ms(each.step_s), f"{each.error:+.1%}",
                f"{each.step_s / a.step_s - 1:+.1%}" if a else "",
            ]
        )  # fmt: skip
    return _table(heads, lines)


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


def plot(sittings: Mapping[str, Sequence[Compared]], path: Path) -> None:
    """Predicted against measured step time: a sitting is a marker, hollow where groups lie on both levels."""
    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    everything = [each for compared in sittings.values() for each in compared]
    cases = sorted({(each.setting.size, each.setting.accumulation) for each in everything})
    markers = dict(zip(sittings, "o^", strict=True))
    _decorate(axes, everything)
    for sitting, compared in sittings.items():
        for each in compared:
            color = f"C{cases.index((each.setting.size, each.setting.accumulation))}"
            fill = "none" if each.mixed else color
            x, y = each.step_s * 1e3, each.predicted_s * 1e3
            axes.plot(x, y, markers[sitting], color=color, markerfacecolor=fill, markersize=8)
    for sitting, compared in sittings.items():
        for fill, groups in (("#555555", "no group inside a node only"), ("none", "groups on both levels")):
            if any(each.mixed == (fill == "none") for each in compared):
                label = f"sitting {sitting}, {groups}"
                axes.plot([], [], markers[sitting], color="#555555", markerfacecolor=fill, label=label)
    for i, (size, accumulation) in enumerate(cases):
        axes.plot([], [], "s", color=f"C{i}", label=f"{size}, {accumulation} microbatch{'es' * (accumulation > 1)}")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _decorate(axes: Axes, compared: Sequence[Compared]) -> None:
    times = [s * 1e3 for each in compared for s in (each.step_s, each.predicted_s)]
    ends = [0.9 * min(times), 1.1 * max(times)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#eeeeee", label="within 10 %")
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([250, 300, 400, 500, 700, 1000, 1500, 2000, 3000]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
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
