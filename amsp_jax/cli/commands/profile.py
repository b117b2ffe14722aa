"""`amsp-jax profile --gin_file=FILE`: where the time of a training step goes, from a profiler's trace."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from amsp_jax.cli import settings as cli
from amsp_jax.cli.profiling import Captured, capture, plot_step, read_program, read_trace, report
from amsp_jax.cli.profiling.breakdown import Execution, all_executions, break_down, median
from amsp_jax.cli.profiling.capture import NUM_WARMUP
from amsp_jax.errors import UserError
from amsp_jax.run import auto
from amsp_jax.run.job import Job, prepare
from amsp_jax.run.resolved import resolve
from amsp_jax.runtime import launch
from amsp_jax.strategy import parse

PICTURE_FILE, JSON_FILE, TABLE_FILE = "timeline.png", "profile.json", "profile.txt"


def run(args: argparse.Namespace) -> None:
    """Traces the steps and reports them.

    Raises:
      UserError: a mistake in the arguments or settings; a trace without steps.
    """
    with _stdout_to_stderr() if args.json else contextlib.nullcontext():
        numbers = _profile(args)
    if args.json:
        launch.say(json.dumps(numbers))


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """The descriptor as well, to which Gloo and NCCL write."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _profile(args: argparse.Namespace) -> dict[str, Any]:
    """Process 0's numbers, in every process: the others stay until they are there."""
    job, lines = _job(args)
    folder = _folder(args.out, job)
    launch.say(str(job.plan), job.batch_line, *lines)
    launch.say(f"{NUM_WARMUP} steps of warm-up, then {args.steps} under the profiler")
    captured = capture(job, args.steps, folder)
    launch.own_watch().doing("reading the trace")
    return launch.from_process_0(lambda: _report(job, captured, folder))


def _report(job: Job, captured: Captured, folder: Path) -> dict[str, Any]:
    """Prints and writes what the trace says."""
    trace, program = read_trace(captured.trace), read_program(captured.program, job.plan.mesh)
    steps = all_executions(trace, program)
    found = report.Profile(
        title=_title(job),
        num_steps=min(map(len, steps.values())),
        devices={device: median([break_down(one) for one in ran]) for device, ran in steps.items()},
        is_cpu=trace.is_cpu,
    )
    table = report.text(found)
    picture = plot_step(_typical(next(iter(steps.values()))), folder / PICTURE_FILE, found.title)
    files = {"trace": str(captured.trace), "picture": str(picture)}
    numbers = {**report.to_json(found), **files}
    (folder / JSON_FILE).write_text(json.dumps(numbers, indent=1) + "\n")
    (folder / TABLE_FILE).write_text(table + "\n")
    view = f"to look at the trace: pip install xprof tensorboard; tensorboard --logdir {folder}"
    print("", table, "", *(f"{name}: {path}" for name, path in files.items()), view, sep="\n")
    return numbers


def _job(args: argparse.Namespace) -> tuple[Job, list[str]]:
    """As `train.py` makes it of the same settings, and lines on its choices."""
    files = cli.find_gin_files(args.gin_file)
    config = cli.load_config(files, [cli.binding(flag) for flag in args.settings])
    if not config.is_auto:
        parse(config.strategy)
    cli.build_model(config)
    _made(args.out)
    layout = cli.set_up(args, config, same={**config.settings(), "--steps": str(args.steps)})
    built = cli.build_model(config, layout.devices[0])
    resolved = resolve(config, built.model, layout)
    chosen = auto.choose(resolved) if config.is_auto else None
    job = prepare(resolved.with_strategy(chosen.strategy) if chosen else resolved)
    return job, [*(chosen.lines if chosen else ()), built.attention, *layout.notes]


def _title(job: Job) -> str:
    parallel = f" {job.plan.parallel}" if job.plan.parallel.total > 1 else ""
    devices = f"{len(job.layout.devices)} x {job.layout.device_kind}"
    return f"{job.model.name}, {job.plan.strategy}{parallel} on {devices}"


def _folder(out: Path, job: Job) -> Path:
    """A folder of this process: of several on one host, jax's profiler gives all traces one name."""
    layout = job.layout
    return _made(out / f"process_{layout.process_index}") if layout.process_count > 1 else out


def _made(folder: Path) -> Path:
    """The folder, which is there and can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"--out={folder}: {error.strerror}; name a folder that can be written to") from None
    return folder


def _typical(ran: Sequence[Execution]) -> Execution:
    """The step of median duration."""
    return sorted(ran, key=lambda one: one.end_ns - one.start_ns)[(len(ran) - 1) // 2]
