"""`amsp-jax tune --gin_file=FILE --trials 30`: the fastest settings of a run, found by running it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from amsp_jax.cli import settings as cli
from amsp_jax.cli.commands.workload import cluster_of, planned_model
from amsp_jax.cli.tune.forecast import Forecast, forecast, kept_calibration
from amsp_jax.cli.tune.point import DIMENSIONS, Point
from amsp_jax.cli.tune.space import SearchSpace, search_space
from amsp_jax.cli.tune.trial import LOG_FILE, RAN, Interrupted, Runner
from amsp_jax.cli.tune.trial_setup import TrialSetup
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.planner import Workload
from amsp_jax.run.auto import workload_of
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.resolved import optimizer_of
from amsp_jax.runtime import exit_codes
from amsp_jax.runtime.launch.accelerator import count_gpus, find_platform

_NUM_PLANNED = 5
_BEST_FILE = "best.gin"
# Nothing but steps: no checkpoint, no more than one batch of validation, no weights to read.
_BARE = {
    "CLUSTER": None, "CHECKPOINT_EVERY": 0, "EVAL_EVERY": 0, "EVAL_BATCHES": 1, "STOP_AFTER": None,
    "CHECK_REPLICAS_EVERY": 0, "INIT_FROM": None,
}  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Runs what is left of the study and reports it; ends the program with 85 or 130 where a signal asked for it.

    Raises:
      UserError: a mistake in the arguments, or no trial that could be measured.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UserError("tune needs optuna, which is not installed; pip install -e '.[tune]'")
    if not 0 <= args.seed < 2**32:
        raise UserError(f"--seed {args.seed}: it is from 0 to 2**32 - 1")
    if not 0 <= args.warmup < args.steps:
        raise UserError(f"--warmup {args.warmup}: it is at least 0 and below --steps {args.steps}")
    files = cli.find_gin_files(args.gin_file)
    config = cli.load_config(files, [cli.binding(flag) for flag in args.settings])
    setup = _trial_setup(args, config)
    space = search_space(args.search, setup, context=config.context, microbatch_group=config.microbatch_group)
    with _stop_requests() as stopped:
        _search(args, files, config, setup, space, stopped)
    if stopped:
        print(f"stopped by {stopped[0].name}: the same command goes on with the study in {args.out}", file=sys.stderr)
        sys.exit(exit_codes.INTERRUPTED if stopped[0] is signal.SIGINT else exit_codes.STOPPED)


def _trial_setup(args: argparse.Namespace, config: TrainConfig) -> TrialSetup:
    """The devices that a trial will have, without starting one."""
    platform, _ = find_platform(os.environ.get("JAX_PLATFORMS", ""))
    spanned = _nodes_of_job() if args.launcher else 1
    num_nodes, per_node = args.nodes or spanned, count_gpus(platform) if platform != "cpu" else 0
    if platform == "cpu":
        num_nodes, per_node = config.simulated_nodes or 1, config.simulated_devices_per_node or 1
    elif per_node == 0:
        raise UserError(f"this machine has no {platform} device to count; run tune on a node that has those of a trial")
    elif config.devices_per_node:
        num_nodes, per_node = num_nodes * per_node // config.devices_per_node, config.devices_per_node
    return TrialSetup(
        num_nodes=num_nodes,
        devices_per_node=per_node,
        model=cli.build_model(config).model,
        global_batch=config.global_batch,
        seq_len=config.seq_len,
    )


def _nodes_of_job() -> int:
    """SLURM's, 1 without it."""
    text = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"SLURM_JOB_NUM_NODES={text!r}: no number of nodes; say how many a trial spans with --nodes")
    return int(text)


def _search(
    args: argparse.Namespace,
    files: list[Path],
    config: TrainConfig,
    setup: TrialSetup,
    space: SearchSpace,
    stopped: list[signal.Signals],
) -> None:
    # They need optuna.
    from amsp_jax.cli.tune import report
    from amsp_jax.cli.tune.study import Record, Study, held

    points = [point for point in space.points() if setup.why_invalid(point) is None]
    if not points:
        raise UserError(f"--search: no point can run; the first one: {setup.why_invalid(next(space.points()))}")
    print(f"{setup.num_nodes} x {setup.devices_per_node} devices, {len(points)} points that can run", flush=True)
    expected = _forecast(args, config, setup, points)
    with held(args.out) as lock:
        study = Study(args.out, space, setup, _identity(args, config, setup, space), args.seed)
        if study.is_new:
            study.begin_with(_first(config, setup, space, expected))
        runner = Runner(
            command=_command(args, files, config),
            num_steps=args.steps,
            num_warmup=args.warmup,
            limit_s=args.time_limit,
            should_stop=lambda: bool(stopped),
            held_files=(lock.fileno(),),
        )

        def told(record: Record) -> None:
            if record.outcome.kind in RAN:
                best = report.measured(study.records())[:1]
                is_best = bool(best) and best[0].number == record.number
                print(report.line(record, study.num_run(), args.trials, is_best), flush=True)

        with contextlib.suppress(Interrupted):
            if not study.search(args.trials, runner.run, expected, told):
                print(f"every point that can run was tried: {study.num_run()} trials")
        _report(args, study, config)
        if not stopped and not report.measured(study.records()):
            raise UserError(f"none of {study.num_run()} trials was measured; mend what their logs say, and start anew")


def _report(args: argparse.Namespace, study: Any, config: TrainConfig) -> None:
    from amsp_jax.cli.tune import report
    from amsp_jax.cli.tune.study import TRIALS

    records = study.records()
    best = report.measured(records)
    if failed := report.failures(records):
        print(f"\n{failed}\nlogs: {args.out / TRIALS / 'TRIAL' / LOG_FILE}")
    if not best:
        return
    shares = report.importance(study.optuna)
    lines = report.gin_lines(best[0].point)
    # For a strategy of its own it would have no effect, which is an error.
    lines += ["CLUSTER = None"] if config.cluster else []
    (args.out / _BEST_FILE).write_text("\n".join(lines) + "\n")
    print(report.table(records), report.importance_lines(shares, len(best)), sep="\n\n")
    print("", f"the best, also in {args.out / _BEST_FILE}:", *lines, sep="\n")


def _forecast(args: argparse.Namespace, config: TrainConfig, setup: TrialSetup, points: list[Point]) -> Forecast:
    """What the planner says; nothing where it has no numbers to stand on."""
    name = args.cluster or config.cluster
    is_cpu = find_platform(os.environ.get("JAX_PLATFORMS", ""))[0] == "cpu"
    if name is None and (kept := kept_calibration(setup, is_cpu)):
        name = str(kept)
    if config.rules:
        print("no forecast: the planner predicts one strategy for all leaves, and the run has RULES", flush=True)
        return Forecast()
    if name is None:
        print("no forecast: neither --cluster nor a kept calibration", flush=True)
        return Forecast()
    cluster = dataclasses.replace(
        cluster_of(name, None), num_nodes=setup.num_nodes, devices_per_node=setup.devices_per_node
    )
    expected = forecast(points, setup, _workload(config, cluster), cluster)
    print(f"the planner, by {name}: {len(expected.too_large)} of them do not fit", flush=True)
    return expected


def _workload(config: TrainConfig, cluster: Cluster) -> Workload:
    model = planned_model(config.model, config.model_overrides, cluster, config.seq_len, config.compute_dtype)
    return workload_of(config, model, optimizer_of(config))


def _first(config: TrainConfig, setup: TrialSetup, space: SearchSpace, expected: Forecast) -> list[Point]:
    """The run as its files have it, where that is a point of the space; then the planner's best."""
    values: dict[str, Any] = {name: getattr(config, name) for name in DIMENSIONS}
    own = space.canonical(Point(**values))
    return [*([own] if own in space else []), *expected.best(_NUM_PLANNED, setup)]


def _identity(
    args: argparse.Namespace, config: TrainConfig, setup: TrialSetup, space: SearchSpace
) -> Mapping[str, Any]:
    """What must not change within a study."""
    free = {*DIMENSIONS, *map(str.lower, _BARE), "run_dir"}
    settings = {name: text for name, text in config.settings().items() if name not in free}
    search = {f"--search {name}": list(values) for name, values in space.values.items()}
    timed = {"--steps": args.steps, "--warmup": args.warmup}
    return {**settings, **search, **timed, "devices": f"{setup.num_nodes} x {setup.devices_per_node}"}


def _launcher(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--launcher {text}: {str(error).lower()}; write it as in a shell, 'srun --nodes 2'") from None


def _command(args: argparse.Namespace, files: list[Path], config: TrainConfig) -> list[str]:
    """What starts a trial, without the settings of its point."""
    # The trial is ended at its last step: a run that ends by itself writes a checkpoint.
    bare = {**_BARE, "STEPS": max(config.steps, args.steps + 1)}
    return [
        *_launcher(args.launcher),
        *(sys.executable, "-m", "amsp_jax", "train"),
        *(f"--gin_file={file}" for file in files),
        *args.settings,
        *(f"--gin.{name}={value}" for name, value in bare.items()),
    ]


@contextlib.contextmanager
def _stop_requests() -> Iterator[list[signal.Signals]]:
    """A list of the signals that asked to stop; what is done about them is the runner's business."""
    stopped: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        stopped.append(signal.Signals(number))

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
