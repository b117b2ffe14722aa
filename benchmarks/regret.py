"""Does the planner pick the fastest strategy? Calibrates, measures strategies, and compares with what was predicted.

    benchmarks/regret.sh OUT                      a host of GPUs as two nodes: calibrate, then measure
    python benchmarks/regret.py report --in OUT   the planner's predictions beside them

`calibrate` and `measure` are started as training is: alone, or several processes with their coordinator.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from regret_settings import (
    COMPUTE_DTYPE,
    REDUCE_DTYPE,
    REMAT,
    SIZES,
    Row,
    Setting,
    append_row,
    build,
    next_setting,
    optimizer,
    read_picks,
    read_rows,
)
from train_step import random_batch

from amsp_jax import calibrate, launch, xla_flags
from amsp_jax.cluster import load_cluster, save_cluster
from amsp_jax.plan import Plan, make_plan
from amsp_jax.state import TrainState, abstract_state
from amsp_jax.step import StepSettings, make_train_step
from amsp_jax.strategy import DataRanks
from models.attention import choose_attention
from models.registry import model_config

NUM_WARMUP, NUM_STEPS, NUM_SLOW_STEPS, SLOW_STEP_S = 2, 8, 4, 1.5
# Of a setting, before one has been measured.
FIRST_GUESS_S = 45.0
# Longer, and it hangs.
MAX_SETTING_S = 120.0
NOTHING_LEFT = 3
"""Exit status of `measure_next` without a setting to measure, or time for it."""


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
    steps.set_defaults(run=run_measure)
    for command in (tables, choices, steps):
        command.add_argument("--out", type=Path, required=True, metavar="DIR")
    for command in (choices, steps):
        command.add_argument("--sizes", nargs="+", default=["wide", "narrow"], choices=SIZES)
    for command in (tables, steps):
        command.add_argument("--coordinator")
        for name in ("num-processes", "process-id", "devices-per-node", "simulated-nodes"):
            command.add_argument(f"--{name}", type=int)
        command.add_argument("--simulated-devices-per-node", type=int)
    report = commands.add_parser("report", help="write the table and the plot")
    report.add_argument("--in", dest="folder", type=Path, required=True, metavar="DIR")
    report.add_argument("--out", type=Path, default=Path(__file__).parent, help="for regret.md and regret.png")
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


def set_up(args: argparse.Namespace) -> launch.Layout:
    return launch.setup(
        simulated_nodes=args.simulated_nodes,
        simulated_devices_per_node=args.simulated_devices_per_node,
        devices_per_node=args.devices_per_node,
        coordinator=args.coordinator,
        num_processes=args.num_processes,
        process_id=args.process_id,
    )


def run_calibrate(args: argparse.Namespace) -> None:
    """In a process of its own: its buffers would hide the peak memory of the settings."""
    layout = set_up(args)
    progress = calibrate.ProgressLine() if layout.process_index == 0 else None
    cluster = calibrate.calibrate(layout, args.budget_s, progress)
    if layout.process_index == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        save_cluster(cluster, args.out / "cluster.json")
        print("\n".join([cluster.source, *cluster.assumptions]), flush=True)


def run_report(args: argparse.Namespace) -> None:
    import regret_report

    regret_report.write(args.folder, args.out)


def run_picks(args: argparse.Namespace) -> None:
    """Before anything is measured: the strategy that `plan` would choose in every case."""
    import regret_report

    chosen = regret_report.planned(load_cluster(args.out / "cluster.json"), args.sizes)
    (args.out / "picks.json").write_text(json.dumps(chosen, indent=1) + "\n")


def run_measure(args: argparse.Namespace) -> None:
    """Each setting in a process of its own: one before it would leave its communicators, and a run has only its own.

    They are forked, as imports take as long as many a setting. One that fails is tried again once.
    """
    end, num_failed = time.monotonic() + args.budget_s, 0
    for number in itertools.count():
        child = multiprocessing.get_context("fork").Process(target=measure_next, args=(args, number, end))
        child.start()
        child.join(MAX_SETTING_S)
        if child.exitcode is None:
            child.kill()
            child.join()
        num_failed = 0 if child.exitcode == 0 else num_failed + 1
        if child.exitcode == NOTHING_LEFT or num_failed == 2:
            return


def measure_next(args: argparse.Namespace, number: int, end: float) -> None:
    """The first setting without a row. Process 0 keeps the file and decides; ends the process, and says how.

    Args:
      args: of the command.
      number: of settings before it, whose coordinators had other ports.
      end: no setting may last longer, on the clock of `time.monotonic`.
    """
    begin = time.monotonic()
    if args.coordinator:
        host, _, port = args.coordinator.rpartition(":")
        args.coordinator = f"{host}:{int(port) + number}"
    layout = set_up(args)
    ranks = DataRanks(layout.devices_per_node, layout.num_nodes)
    path = args.out / "measured.jsonl"

    def choose() -> dict[str, Any] | None:
        rows = read_rows(path)
        setting = next_setting(rows, ranks, args.sizes, read_picks(args.out))
        late = begin + expected_s(rows, setting) > end
        return None if setting is None or late else vars(setting)

    chosen = launch.from_process_0(choose)
    if chosen:
        row = {**chosen, **measure(layout, ranks, Setting(**chosen))}
        row["wall_s"] = round(time.monotonic() - begin, 1)
        if layout.process_index == 0:
            append_row(path, row)
            print(summary(row), flush=True)
    if layout.process_count > 1:
        # A forked process leaves without what Python does at its end.
        jax.distributed.shutdown()
    sys.exit(0 if chosen else NOTHING_LEFT)


def expected_s(rows: list[Row], setting: Setting | None) -> float:
    """The longest of its kind so far."""
    alike = [row["wall_s"] for row in rows if setting and row["accumulation"] == setting.accumulation]
    return max(alike or [row["wall_s"] for row in rows] or [FIRST_GUESS_S])


def summary(row: Row) -> str:
    times = row.get("error") or f"{row['step_s'] * 1e3:8.1f} ms ({row['min_s'] * 1e3:.1f}, {row['max_s'] * 1e3:.1f})"
    return (
        f"{row['size']:6} x{row['accumulation']} {row['strategy']}: {times}, compiled in "
        f"{row['compile_s']} s, all {row['wall_s']} s, peak {row['peak_bytes'] / 2**30:.2f} GiB"
    )


def measure(layout: launch.Layout, ranks: DataRanks, setting: Setting) -> Row:
    """Compiles and runs a setting: the rest of its row."""
    size, degrees, device = SIZES[setting.size], setting.degrees(ranks), layout.devices[0]
    head_dim = model_config(size.model, size.overrides).head_dim
    capability = getattr(device, "compute_capability", None)
    attention = choose_attention(device.platform, capability, head_dim, COMPUTE_DTYPE, size.seq_len).implementation
    model = build(size, attention)
    plan = make_plan(setting.strategy, model.abstract_params(), ranks, layout.devices, COMPUTE_DTYPE)
    options: dict[str, str] = {}
    if layout.platform != "cpu":
        options = xla_flags.combine_thresholds(model, degrees, COMPUTE_DTYPE, REDUCE_DTYPE)
    shape = (setting.accumulation, size.microbatch * ranks.total, size.seq_len)
    row: Row = {
        **vars(size), "attention": attention, "device_kind": layout.device_kind, "num_nodes": ranks.num_nodes,
        "devices_per_node": ranks.per_node, "jax": jax.__version__, "date": datetime.date.today().isoformat(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""), "compiler_options": options,
    }  # fmt: skip
    start = time.perf_counter()
    compiled = compile_step(model, plan, shape, options)
    row |= {"compile_s": round(time.perf_counter() - start, 1), "compiled_bytes": compiled_bytes(compiled)}
    row["earlier_peak_bytes"] = row["peak_bytes"] = peak_bytes()
    if layout.platform != "cpu" and row["compiled_bytes"]["total"] > layout.memory_bytes:
        return row | {"error": "needs more memory than a device has"}
    start = time.perf_counter()
    state = jax.block_until_ready(filled_state(abstract_state(model, optimizer(), plan)))
    row["init_s"] = round(time.perf_counter() - start, 1)
    batches = [random_batch(plan, shape, model, i) for i in range(2)]
    return row | time_steps(compiled, state, batches) | {"peak_bytes": peak_bytes()}


def filled_state(abstract: TrainState) -> TrainState:
    """A state that is neither random, which takes seconds to compile, nor zero, whose products run faster."""

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return 0.02 * jnp.sin(jax.lax.broadcasted_iota(leaf.dtype, leaf.shape, len(leaf.shape) - 1))

    def make() -> TrainState:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
        return zeros.replace(params=jax.tree.map(fill, abstract.params))

    return jax.jit(make, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract))()


def compile_step(model: Any, plan: Plan, shape: tuple[int, int, int], options: dict[str, str]) -> Any:
    settings = StepSettings(reduce_dtype=jnp.dtype(REDUCE_DTYPE), remat=REMAT)
    step: Any = make_train_step(model, optimizer(), plan, settings)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {k: jax.ShapeDtypeStruct(shape, dtype, sharding=plan.batch_sharding) for k, dtype in kinds.items()}
    seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=plan.replicated)
    state = abstract_state(model, optimizer(), plan)
    return step.lower(state, batch, seed).compile(compiler_options=options)


def compiled_bytes(compiled: Any) -> dict[str, int]:
    """XLA's own account of one device; donated arguments come back as outputs and count once."""
    analysis = compiled.memory_analysis()
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return {
        "arguments": arguments, "temporary": temporary, "outputs": outputs, "total": arguments + temporary + outputs,
    }  # fmt: skip


def peak_bytes() -> int:
    """The most that this process ever had on its first device; 0 where the backend does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def time_steps(compiled: Any, state: TrainState, batches: list[dict[str, jax.Array]]) -> Row:
    """Seconds of steps one by one; each begins when the one before has ended, so a launch, some 1 ms, is in it."""
    seed = jax.device_put(np.uint32(0), compiled.input_shardings[0][2])
    times: list[float] = []
    losses: list[float] = []

    def run(num_steps: int) -> None:
        nonlocal state
        for _ in range(num_steps):
            start = time.perf_counter()
            state, metrics = compiled(state, batches[len(times) % 2], seed)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - start)
            losses.append(float(metrics.loss))

    run(NUM_WARMUP)
    run(launch.from_process_0(lambda: NUM_SLOW_STEPS if times[-1] > SLOW_STEP_S else NUM_STEPS))
    kept = times[NUM_WARMUP:]
    return {
        "step_s": statistics.median(kept), "min_s": min(kept), "max_s": max(kept),
        "times_s": [round(seconds, 6) for seconds in times], "losses": [round(losses[0], 4), round(losses[-1], 4)],
    }  # fmt: skip


if __name__ == "__main__":
    main()
