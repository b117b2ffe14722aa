"""One trial: the trainer in a process of its own, for a few steps, under a time limit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from amsp_jax.cli.tune.point import Point
from amsp_jax.errors import UserError
from amsp_jax.run.metrics import TRAIN_FILE, read_rows
from amsp_jax.run.run_folder import CHECKPOINTS
from amsp_jax.runtime import exit_codes

LOG_FILE, RUN_FOLDER = "log.txt", "run"
_POLL_S = 0.1
# The trainer ends without saving at the second interrupt; srun passes on the second and kills its tasks at the third.
_NUM_INTERRUPTS, _INTERRUPT_EVERY_S = 3, 0.1
_TAIL_BYTES = 1 << 16
_LONGEST_REASON = 300
_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|oom-kill|and a device has [\d.]+ GiB|no strategy for .* fits", re.IGNORECASE
)
# SIGKILL that is not ours: the kernel's or the batch system's answer to too much memory.
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
_IS_LAST = re.compile(r"^(?:error: .+|[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$")


class Kind(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    TIMED_OUT = "timed out"
    REFUSED = "refused by the trainer"
    CRASHED = "crashed"
    INVALID = "cannot run"
    TOO_LARGE = "predicted not to fit"


RAN = (Kind.MEASURED, Kind.OUT_OF_MEMORY, Kind.TIMED_OUT, Kind.REFUSED, Kind.CRASHED)
"""The kinds of trials that had a process; the others were left out before."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trial.

    Attributes:
      kind: how it ended.
      reason: one line; empty where it was measured.
      step_s: median seconds of a step after the warm-up; this and the rest are None unless measured.
      tokens_per_s: of the global batch, padding included, at that step time.
      mfu: share of the devices' peak at that step time; None where the peak is not known.
      peak_memory_bytes: the largest of a device; None where the platform does not tell.
      num_steps: how many the median is of.
      wall_s: from the start of the process to its end.
    """

    kind: Kind
    reason: str = ""
    step_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    peak_memory_bytes: int | None = None
    num_steps: int = 0
    wall_s: float = 0.0


class Interrupted(Exception):
    """The trial's processes were ended because the search was asked to stop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs trials.

    Attributes:
      command: what starts the trainer, launcher included; `--gin.NAME=value` flags are added to it.
      num_steps: of a trial.
      num_warmup: first steps that are not counted.
      limit_s: seconds that a trial may take, start and compilation included.
      grace_s: seconds that its processes have to end by themselves.
      should_stop: asked several times a second.
      held_files: descriptors that stay open in a trial, such as the lock of the study's folder.
    """

    command: Sequence[str]
    num_steps: int
    num_warmup: int
    limit_s: float
    should_stop: Callable[[], bool] = lambda: False
    grace_s: float = 15.0
    held_files: Sequence[int] = ()

    def run(self, point: Point, folder: Path) -> Outcome:
        """Runs one point in a fresh folder, which keeps its log and its run folder.

        Raises:
          Interrupted: `should_stop` said so.
          UserError: the command cannot be started.
        """
        folder.mkdir(parents=True)
        flags = [
            f"--gin.{name}={value}" for name, value in {**point.settings(), "RUN_DIR": folder / RUN_FOLDER}.items()
        ]
        started = time.monotonic()
        with (folder / LOG_FILE).open("wb") as log, self._started([*self.command, *flags], log) as process:
            is_late = not self._wait(process, folder, started + self.limit_s)
        # Of a save that had begun before the trial was ended.
        shutil.rmtree(folder / RUN_FOLDER / CHECKPOINTS, ignore_errors=True)
        outcome = self._judge(process.returncode, folder, is_late)
        return dataclasses.replace(outcome, wall_s=time.monotonic() - started)

    @contextlib.contextmanager
    def _started(self, command: Sequence[str], log: Any) -> Any:
        """The trainer as the leader of a process group, all of which is gone at the end."""
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                pass_fds=self.held_files,
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror}; correct --launcher") from error
        try:
            yield process
        finally:
            _end_group(process, self.grace_s)

    def _wait(self, process: subprocess.Popen, folder: Path, deadline: float) -> bool:
        """Until the trainer ends or has done its steps; False if the time is up before."""
        while process.poll() is None and len(_rows(folder)) < self.num_steps:
            if self.should_stop():
                raise Interrupted
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _judge(self, code: int, folder: Path, is_late: bool) -> Outcome:
        rows = _rows(folder)
        if len(rows) >= self.num_steps:
            return _measured(rows[self.num_warmup : self.num_steps])
        log = _tail(folder / LOG_FILE)
        if is_late:
            return Outcome(kind=Kind.TIMED_OUT, reason=f"{len(rows)} steps in {self.limit_s:g} s; {_last_line(log)}")
        if (found := _OUT_OF_MEMORY.search(log)) or code in _KILLED:
            line = _line_of(log, found.start()) if found else "its process was killed (SIGKILL)"
            return Outcome(kind=Kind.OUT_OF_MEMORY, reason=_short(line))
        kind = Kind.REFUSED if code == exit_codes.USER_ERROR else Kind.CRASHED
        return Outcome(kind=kind, reason=_short(f"exit code {code} after {len(rows)} steps: {_last_line(log)}"))


def _measured(rows: list[dict[str, Any]]) -> Outcome:
    step_s = statistics.median(row["step_time_s"] for row in rows)

    def at_median(rate: str) -> float | None:
        """A rate of the median step: every step has the same work."""
        row = rows[0]
        return None if row.get(rate) is None else row[rate] * row["step_time_s"] / step_s

    return Outcome(
        kind=Kind.MEASURED,
        step_s=step_s,
        tokens_per_s=at_median("tokens_per_s"),
        mfu=at_median("mfu"),
        peak_memory_bytes=max((row["peak_memory_bytes"] for row in rows if row.get("peak_memory_bytes")), default=None),
        num_steps=len(rows),
    )


def _end_group(process: subprocess.Popen, grace_s: float) -> None:
    """Ends what is left of the process group: asked first, as a launcher has tasks elsewhere to end, then killed."""
    deadline = time.monotonic() + grace_s
    for _ in range(_NUM_INTERRUPTS):
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_INTERRUPT_EVERY_S)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, deadline - time.monotonic()))
    # Also where the leader is gone: its own children may not be.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / RUN_FOLDER / TRAIN_FILE
    return read_rows(path) if path.exists() else []


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_line(log: str) -> str:
    """The last line that reads as an error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if _IS_LAST.match(line)]
    return _short((errors or lines or ["it printed nothing"])[-1])


def _line_of(text: str, position: int) -> str:
    return text[text.rfind("\n", 0, position) + 1 :].partition("\n")[0].strip()


def _short(line: str) -> str:
    return line if len(line) <= _LONGEST_REASON else line[:_LONGEST_REASON] + " ..."
