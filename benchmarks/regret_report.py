"""The planner's predictions beside what `regret.py` measured: the tables and the plot."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from measure import COMPUTE_DTYPE, SIZES, Size, adamw, check_file
from regret_settings import PROBE_BYTES, SETTINGS, Picks, Setting
from rows import Row, gibibytes, milliseconds, read_rows, step_times, table

from amsp_jax.errors import UserError
from amsp_jax.predict.calibrate import disturbed_sizes
from amsp_jax.predict.cluster import Cluster, compute_capability, load_cluster
from amsp_jax.predict.planner import Candidate, Estimate, Scorer, Workload
from amsp_jax.strategy import Degree, Degrees, all_degrees

ACCUMULATIONS = (1, 2, 4, 8)
NEAR = 0.15
"""Of the calibrated time, by which the network's may differ and count as the same."""

Case = tuple[str, int]
"""Size and accumulation: what the strategies compete on."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """A measured setting, the time of another run if there was one, and what was predicted of it."""

    row: Row
    setting: Setting
    step_s: float
    predicted_s: float
    mixed: bool
    """Whether something is sharded inside a node only, so that collectives run on both levels."""
    again_s: float = math.inf

    @property
    def least_s(self) -> float:
        """The faster run: what disturbs one makes it slower."""
        return min(self.step_s, self.again_s)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.step_s - 1


@dataclasses.dataclass(frozen=True)
class Pick:
    """The planner's choice in one case, None if it was not measured, and the fastest that was."""

    case: Case
    num_measured: int
    strategy: str
    pick: Compared | None
    best: Compared

    @property
    def regret(self) -> float | None:
        """Time of the pick over that of the best, less one."""
        return self.pick.least_s / self.best.least_s - 1 if self.pick else None


def picks(compared: Sequence[Compared], planned: Picks) -> list[Pick]:
    """One for each case in which strategies competed, by size and accumulation."""
    cases: dict[Case, list[Compared]] = {}
    for each in compared:
        cases.setdefault((each.setting.size, each.setting.accumulation), []).append(each)
    return [
        Pick(
            case=case,
            num_measured=len(members),
            strategy=(strategy := planned[_key(*case)]),
            pick=next((m for m in members if m.setting.strategy == strategy), None),
            best=min(members, key=lambda m: m.least_s),
        )
        for case, members in sorted(cases.items())
        if len(members) > 1
    ]


def planned(cluster: Cluster, sizes: Sequence[str]) -> Picks:
    """The planner's choice in every case."""
    cases = itertools.product(sizes, ACCUMULATIONS)
    return {_key(size, n): str(choice(SIZES[size], n, cluster).degrees) for size, n in cases}


def choice(size: Size, accumulation: int, cluster: Cluster, groups: Sequence[int] = (1,)) -> Candidate:
    """Of the strategies that `plan` looks at unasked, in these groups of microbatches, the fastest predicted; memory is
    not asked."""
    scorer = Scorer(workload(size, accumulation, cluster), cluster)
    filled = (degrees for degrees in all_degrees(cluster.ranks) if not degrees.warnings)
    candidates = [
        Candidate(degrees, size.microbatch, SETTINGS.remat, microbatch_group=group)
        for degrees, group in itertools.product(filled, groups)
        if accumulation % group == 0
    ]
    return min(candidates, key=lambda candidate: scorer.estimate(candidate).step_s)


def _key(size: str, accumulation: int) -> str:
    return f"{size} {accumulation}"


def repeats(rows: Sequence[Row]) -> list[tuple[Setting, float]]:
    """Of what was measured twice: the setting, and the second time over the first, less one."""
    times = {Setting.of(row): row["step_s"] for row in rows if "step_s" in row}
    return [
        (setting, seconds / times[first] - 1)
        for setting, seconds in times.items()
        if setting.repeat and (first := dataclasses.replace(setting, repeat=0)) in times
    ]


def workload(size: Size, accumulation: int, cluster: Cluster) -> Workload:
    """What the planner is asked."""
    capability = compute_capability(cluster.device_kind)
    return Workload(
        model=size.build(size.attention_on("gpu" if capability else "cpu", capability)),
        optimizer=adamw(),
        global_batch=accumulation * size.microbatch * cluster.num_devices,
        seq_len=size.seq_len,
        compute_dtype=COMPUTE_DTYPE,
        reduce_dtype=SETTINGS.reduce_dtype,
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
            size = Size(**{field.name: row[field.name] for field in dataclasses.fields(Size)})
            scorers[case] = Scorer(workload(size, setting.accumulation, cluster), cluster)
        candidate = Candidate(setting.degrees(cluster.ranks), row["microbatch"], SETTINGS.remat)
        yield row, scorers[case].estimate(candidate)


def mixes_levels(degrees: Degrees) -> bool:
    """Whether a degree stays inside a node: some collectives run there, others between nodes."""
    return any(d.inter == 1 and d.total > 1 for d in (degrees.params, degrees.grads, degrees.opt_state))


def compare(both: Sequence[tuple[Row, Estimate]]) -> list[Compared]:
    """What was measured, beside its prediction."""
    again = {dataclasses.replace(setting, repeat=0): row for row, _ in both if (setting := Setting.of(row)).repeat}
    return [
        Compared(
            row,
            Setting.of(row),
            row["step_s"],
            estimate.step_s,
            mixed=mixes_levels(estimate.candidate.degrees),
            again_s=again.get(Setting.of(row), {}).get("step_s", math.inf),
        )
        for row, estimate in both
        if not row["repeat"]
    ]


@dataclasses.dataclass(frozen=True)
class Sitting:
    """What was measured on one machine at one time, beside the planner's predictions from its calibration."""

    cluster: Cluster
    rows: Sequence[Row]
    both: Sequence[tuple[Row, Estimate]]

    @classmethod
    def read(cls, folder: Path) -> Sitting:
        """Of `cluster.json` and `measured.jsonl`.

        Raises:
          UserError: there is nothing measured, or no calibration.
        """
        path = folder / "measured.jsonl"
        rows = read_rows(path)
        if not rows or any("size" not in row for row in rows):
            raise UserError(
                f"{path}: it has no rows of `regret.py measure`, or others too; benchmarks/regret.sh makes it"
            )
        return cls.of(load_cluster(folder / "cluster.json"), rows)

    @classmethod
    def of(cls, cluster: Cluster, rows: Sequence[Row]) -> Sitting:
        return cls(cluster, rows, list(estimates(rows, cluster)))

    @property
    def compared(self) -> list[Compared]:
        return compare(self.both)

    @property
    def picks(self) -> list[Pick]:
        """The planner's choice in every case."""
        return picks(self.compared, planned(self.cluster, list(dict.fromkeys(row["size"] for row in self.rows))))

    @property
    def title(self) -> str:
        row = self.rows[0]
        return f"{row['num_nodes']} nodes of {row['devices_per_node']} {row['device_kind']}"


def write(folders: Sequence[Path], out: Path | None) -> None:
    """Prints the tables; with `out`, writes them into `regret.md` there, and `regret.png`.

    Of each folder: `measured.jsonl`, `cluster.json`, and `notes.md` if there; the one beside them is for all.

    Raises:
      UserError: a folder holds no measurements; `out` cannot be written to.
    """
    if out:
        for name in ("regret.md", "regret.png"):
            check_file(out / name)
    sittings = [Sitting.read(folder) for folder in folders]
    parts = ["# Does the planner pick the fastest strategy?", *_notes(folders[0].parent)]
    for folder, sitting in zip(folders, sittings, strict=True):
        parts += [_heading(sitting), *_notes(folder), _in_short(sitting)]
    for sitting in sittings:
        parts += [f"## Step time, {sitting.title}", _times_table(sitting.both)]
        parts += [f"## Memory, {sitting.title}", _memory_table(sitting.both)]
    text = "\n\n".join(parts)
    print(text)
    if out:
        (out / "regret.md").write_text(text + "\n")
        plot(sittings, out / "regret.png")


def _notes(folder: Path) -> list[str]:
    path = folder / "notes.md"
    return [path.read_text().strip()] if path.exists() else []


def _heading(sitting: Sitting) -> str:
    row = sitting.rows[0]
    sizes = {
        name: f"{name}: {r['model']} {dict(r['overrides'])}, {r['microbatch']} sequences of {r['seq_len']} a device"
        for r in sitting.rows
        for name in [r["size"]]
    }
    return "\n".join(
        [
            f"## {sitting.title}",
            "",
            f"jax {row['jax']}, {row['date']}; {sitting.cluster.source}. `benchmarks/regret.sh`, `regret.py report`.",
            "",
            *(f"- {line}" for line in sizes.values()),
            *(f"- {line}" for line in sitting.cluster.assumptions),
        ]
    )


def _in_short(sitting: Sitting) -> str:
    summary = [_summary(sitting.compared, repeats(sitting.rows)), *_network_summary(sitting), *_quiet_summary(sitting)]
    return "\n\n".join(
        [
            "Of what was measured twice, the faster run counts.",
            _regret_table(sitting.picks),
            "\n".join(summary),
            "Memory:",
            _memory_summary(sitting.both),
        ]
    )


def _regret_table(found: Sequence[Pick]) -> str:
    heads = ["model", "microbatches", "measured", "the planner's choice", "ms", "the fastest", "ms", "regret"]
    return table(
        heads,
        [
            [
                p.case[0], str(p.case[1]), str(p.num_measured), p.strategy,
                _runs(p.pick) if p.pick else "not measured", p.best.setting.strategy, _runs(p.best),
                "" if p.regret is None else f"{p.regret:.1%}",
            ]
            for p in found
        ],
    )  # fmt: skip


def _runs(compared: Compared) -> str:
    return ", ".join(milliseconds(s) for s in (compared.step_s, compared.again_s) if math.isfinite(s))


def _summary(compared: Sequence[Compared], twice: Sequence[tuple[Setting, float]]) -> str:
    spreads = [(each.row["max_s"] - each.row["min_s"]) / each.step_s for each in compared]
    kinds = {
        "All": [abs(each.error) for each in compared],
        "No group inside a node only": [abs(each.error) for each in compared if not each.mixed],
        "Groups on both levels": [abs(each.error) for each in compared if each.mixed],
    }
    lines = [
        *(
            f"- {kind}: {len(errors)} settings, error of the predicted step time "
            f"{statistics.median(errors):.1%} (median), {max(errors):.1%} (largest)."
            for kind, errors in kinds.items()
            if errors
        ),
        f"- Within a setting, slowest step less fastest, over the median: {statistics.median(spreads):.1%} (median).",
        *(f"- Measured again, {s.size} x{s.accumulation} {s.strategy}: {change:+.1%}." for s, change in twice),
    ]
    return "\n".join(lines)


def _network_summary(sitting: Sitting) -> list[str]:
    """Of the settings after which the network was as fast as when it was calibrated, the error."""
    cluster, both = sitting.cluster, sitting.both
    group = Degree(cluster.devices_per_node, cluster.num_nodes)
    calibrated_s = cluster.network.seconds("all-gather", PROBE_BYTES, group)
    ratios = [
        (row["network_s"] / calibrated_s, abs(e.step_s / row["step_s"] - 1)) for row, e in both if "network_s" in row
    ]
    if not ratios:
        return []
    near = [error for ratio, error in ratios if abs(ratio - 1) <= NEAR]
    least, most = min(ratios)[0], max(ratios)[0]
    line = (
        f"- A gather of {PROBE_BYTES >> 20} MiB over all devices, after each setting, took {least:.2f} to {most:.2f} "
        f"of its calibrated time; within {NEAR:.0%} of it after {len(near)} of {len(ratios)} settings"
    )
    return [line + (f", whose error is {statistics.median(near):.1%} (median)." if near else ".")]


def _quiet_summary(sitting: Sitting) -> list[str]:
    """What a calibration with disturbed points would have said without them."""
    network = sitting.cluster.network
    quiet = {
        key: tuple(p for p in points if p[0] not in disturbed_sizes(dict(points)))
        for key, points in network.measured.items()
    }
    num_disturbed = sum(len(network.measured[key]) - len(points) for key, points in quiet.items())
    if not num_disturbed:
        return []
    cluster = dataclasses.replace(sitting.cluster, network=dataclasses.replace(network, measured=quiet))
    without = Sitting.of(cluster, sitting.rows)
    errors = [abs(each.error) for each in without.compared]
    same = [p.strategy for p in without.picks] == [p.strategy for p in sitting.picks]
    return [
        f"- {num_disturbed} points of the calibration took over 1.1 times as long a byte as a smaller message. Without "
        f"them the error is {statistics.median(errors):.1%} (median), {max(errors):.1%} (largest), and the choices are "
        f"{'the same' if same else 'others'}."
    ]


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


def _times_table(both: Sequence[tuple[Row, Estimate]]) -> str:
    heads = ["model", "microbatches", "strategy", "measured ms (min, max)", "predicted ms", "error"]
    heads += ["compute ms", "collectives ms", "exposed ms"]
    lines = []
    for row, estimate in both:
        timeline = estimate.timeline
        lines.append(
            [
                row["size"], str(row["accumulation"]), row["strategy"] + " again" * row["repeat"],
                step_times(row), milliseconds(estimate.step_s),
                f"{estimate.step_s / row['step_s'] - 1:+.1%}", milliseconds(timeline.compute_s),
                milliseconds(timeline.communication_s), milliseconds(timeline.exposed_s),
            ]
        )  # fmt: skip
    return table(heads, lines)


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
                row["size"], str(row["accumulation"]), row["strategy"] + " again" * row["repeat"], gibibytes(predicted),
                gibibytes(compiled), f"{predicted / compiled - 1:+.1%}", gibibytes(peak) if peak else "",
                f"{predicted / peak - 1:+.1%}" if peak else "",
            ]
        )  # fmt: skip
    return table(heads, lines)


def plot(sittings: Sequence[Sitting], path: Path) -> None:
    """Predicted against measured step time, a panel for each sitting, hollow where groups lie on both levels."""
    figure = Figure(figsize=(8 * len(sittings), 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, sitting in zip(figure.subplots(1, len(sittings), squeeze=False)[0], sittings, strict=True):
        _panel(axes, sitting)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, sitting: Sitting) -> None:
    compared = sitting.compared
    cases = sorted({(each.setting.size, each.setting.accumulation) for each in compared})
    _decorate(axes, compared, f"Step time on {sitting.title}")
    for each in compared:
        color = f"C{cases.index((each.setting.size, each.setting.accumulation))}"
        fill = "none" if each.mixed else color
        axes.plot(each.step_s * 1e3, each.predicted_s * 1e3, "o", color=color, markerfacecolor=fill, markersize=8)
    for fill, groups in (("#555555", "no group inside a node only"), ("none", "groups on both levels")):
        if any(each.mixed == (fill == "none") for each in compared):
            axes.plot([], [], "o", color="#555555", markerfacecolor=fill, label=groups)
    for i, (size, accumulation) in enumerate(cases):
        axes.plot([], [], "s", color=f"C{i}", label=f"{size}, {accumulation} microbatch{'es' * (accumulation > 1)}")
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def _decorate(axes: Axes, compared: Sequence[Compared], title: str) -> None:
    times = [s * 1e3 for each in compared for s in (each.step_s, each.predicted_s)]
    ends = [0.9 * min(times), 1.1 * max(times)]
    axes.plot(ends, ends, color="#999999", linewidth=1)
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#eeeeee", label="within 10 %")
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator([250, 300, 400, 500, 700, 1000, 1500, 2000, 3000]))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_axisbelow(True)
    axes.grid(color="#e6e6e6", which="both")
    axes.spines[["top", "right"]].set_visible(False)
