"""Does the planner pick the fastest strategy? Calibrates, measures strategies, and compares with what was predicted.

    benchmarks/regret.sh OUT                      a host of GPUs as two nodes: calibrate, then measure
    python benchmarks/regret.py report --in OUT   the planner's predictions beside them; --out DIR keeps them

`calibrate` and `measure` are started as training is: alone, or several processes with their coordinator.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import measure
from measure import SIZES
from regret_settings import PROBE_BYTES, Setting, next_setting, read_picks
from rows import Row, append_row, gibibytes, read_rows, step_times

from amsp_jax.cli import exits, parsing
from amsp_jax.predict import calibrate
from amsp_jax.predict.cluster import load_cluster, save_cluster
from amsp_jax.runtime import launch
from amsp_jax.strategy import DataRanks, Degree

NUM_WARMUP, NUM_STEPS, MOST_S = 2, 8, 12.0
# Of a setting, before one has been measured.
FIRST_GUESS_S = 45.0
# Longer, and it hangs.
MAX_SETTING_S = 120.0
# Settings of one process: each new one takes as long to start as many a setting takes.
NUM_TOGETHER = 8
NOTHING_LEFT = 3
"""Exit status of `measure_some` without a setting to measure, or time for it."""


def main() -> None:
    args = parse_args()
    args.run(args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    dump = commands.add_parser("dump-target", help="write XLA's description of the device, for absent devices")
    dump.add_argument("--out", type=Path, required=True)
    dump.set_defaults(run=dump_target)
    tables = commands.add_parser("calibrate", help="write DIR/cluster.json")
    tables.add_argument("--budget-s", type=float, default=calibrate.DEFAULT_BUDGET_S)
    tables.set_defaults(run=run_calibrate)
    choices = commands.add_parser("picks", help="write DIR/picks.json: what the planner chooses, by DIR/cluster.json")
    choices.set_defaults(run=run_picks)
    steps = commands.add_parser("measure", help="add to DIR/measured.jsonl every setting that is not in it")
    steps.add_argument("--budget-s", type=float, default=1e9, help="begin nothing that would end later")
    steps.add_argument("--together", type=int, default=NUM_TOGETHER, help="settings measured in one process")
    steps.set_defaults(run=run_measure)
    for command in (tables, choices, steps):
        command.add_argument("--out", type=Path, required=True, metavar="DIR")
    for command in (choices, steps):
        command.add_argument("--sizes", nargs="+", default=["wide", "narrow"], choices=SIZES)
    for command in (tables, steps):
        parsing.add_device_arguments(command)
    report = commands.add_parser("report", help="print the tables")
    report.add_argument("--in", dest="folders", type=Path, nargs="+", required=True, metavar="DIR", help="of sittings")
    report.add_argument("--out", type=Path, metavar="DIR", help="write regret.md and regret.png there, too")
    report.set_defaults(run=run_report)
    return parser.parse_args()


def dump_target(args: argparse.Namespace) -> None:
    """XLA writes the description beside whatever it compiles."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder}"
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
        found = sorted(Path(folder).glob("*gpu_target_config.pbtxt"))
        if not found:
            sys.exit(f"XLA wrote no *gpu_target_config.pbtxt for {jax.devices()[0].device_kind}")
        shutil.copy(found[0], args.out)
    print(f"{args.out}: {jax.devices()[0].device_kind}")


def run_calibrate(args: argparse.Namespace) -> None:
    """In a process of its own: its buffers would hide the peak memory of the settings."""
    layout = measure.set_up(args)
    progress = calibrate.ProgressLine() if layout.process_index == 0 else None
    cluster = calibrate.calibrate(layout, args.budget_s, progress)
    if layout.process_index == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_cluster(cluster, args.out / "cluster.json")
        print("\n".join([cluster.source, *cluster.assumptions]), flush=True)


def run_report(args: argparse.Namespace) -> None:
    import regret_report

    regret_report.write(args.folders, args.out)


def run_picks(args: argparse.Namespace) -> None:
    """Before anything is measured: the strategy that `plan` would choose in every case."""
    import regret_report

    chosen = regret_report.planned(load_cluster(args.out / "cluster.json"), args.sizes)
    (args.out / "picks.json").write_text(json.dumps(chosen, indent=1) + "\n")


def run_measure(args: argparse.Namespace) -> None:
    """A few settings in each process, as those before leave their communicators, and a run has only its own.

    Processes are forked, as imports take as long as many a setting. After a failure a new one goes on, once.
    """
    end, num_failed = time.monotonic() + args.budget_s, 0
    for number in itertools.count():
        child = multiprocessing.get_context("fork").Process(target=measure_some, args=(args, number, end))
        child.start()
        child.join(MAX_SETTING_S * args.together)
        if child.exitcode is None:
            child.kill()
            child.join()
        num_failed = 0 if child.exitcode == 0 else num_failed + 1
        if child.exitcode == NOTHING_LEFT or num_failed == 2:
            return


def measure_some(args: argparse.Namespace, number: int, end: float) -> None:
    """Settings without a row, in order. Process 0 keeps the file and decides; ends the process, and says how.

    Args:
      args: of the command.
      number: of processes before it, whose coordinators had other ports.
      end: no setting may last longer, on the clock of `time.monotonic`.
    """
    begin = time.monotonic()
    if args.coordinator:
        host, _, port = args.coordinator.rpartition(":")
        args.coordinator = f"{host}:{int(port) + number}"
    layout = measure.set_up(args)
    has_more = True
    for place in range(args.together):
        has_more = measure_next(args, layout, place, begin, end)
        if not has_more:
            break
        begin = time.monotonic()
    if layout.process_count > 1:
        # A forked process leaves without what Python does at its end; the others would take it for lost.
        jax.distributed.shutdown()
        launch.own_watch().leave(0)
    sys.exit(0 if has_more else NOTHING_LEFT)


def measure_next(args: argparse.Namespace, layout: launch.DeviceLayout, place: int, begin: float, end: float) -> bool:
    """Measures the first setting without a row, if there is one and time for it: whether it did.

    Args:
      args, end: as in `measure_some`.
      layout: the devices.
      place: how many settings this process has measured.
      begin: when this one's time began.
    """
    path, ranks = args.out / "measured.jsonl", DataRanks(layout.devices_per_node, layout.num_nodes)

    def choose() -> dict[str, Any] | None:
        rows = read_rows(path)
        setting = next_setting(rows, ranks, args.sizes, read_picks(args.out))
        late = begin + expected_s(rows, setting) > end
        return None if setting is None or late else vars(setting)

    chosen = launch.from_process_0(choose)
    if chosen is None:
        return False
    row = measure.measured(
        layout,
        SIZES[chosen["size"]],
        chosen["strategy"],
        chosen["accumulation"],
        num_warmup=NUM_WARMUP,
        num_steps=NUM_STEPS,
        most_s=MOST_S,
    )
    row |= {**chosen, "place": place, "network_s": network_seconds(layout)}
    row["wall_s"] = round(time.monotonic() - begin, 1)
    if layout.process_index == 0:
        append_row(path, row)
        print(summary(row), flush=True)
    return True


def network_seconds(layout: launch.DeviceLayout) -> float:
    """Of a gather over all devices, now: the network of this sitting may be slower at one time than at another."""
    group = Degree(layout.devices_per_node, layout.num_nodes)
    series = calibrate.Series("all-gather", group, (PROBE_BYTES,))
    return calibrate.message_seconds(layout, calibrate.Stopwatch(math.inf), series, PROBE_BYTES / 4e9)


def expected_s(rows: list[Row], setting: Setting | None) -> float:
    """The longest of its kind so far."""
    alike = [row["wall_s"] for row in rows if setting and row["accumulation"] == setting.accumulation]
    return max(alike or [row["wall_s"] for row in rows] or [FIRST_GUESS_S])


def summary(row: Row) -> str:
    peak = f", peak {gibibytes(row['peak_bytes'])} GiB" if row["peak_bytes"] else ""
    return (
        f"{row['size']:6} x{row['accumulation']} {row['strategy']}: {step_times(row)} ms, compiled in "
        f"{row['compile_s']} s, all {row['wall_s']} s{peak}"
    )


if __name__ == "__main__":
    launch.end_process(exits.run(main))
