"""What a run reports: one JSON row a step, TensorBoard events beside it, and a live line.

JSON has no NaN or infinity, so a float that is not finite is written as the string "nan", "inf" or "-inf"
and every line stays readable to any JSON parser; `read_rows` turns them back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any, TextIO

from amsp_jax.errors import UserError

TRAIN_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
_NOT_FINITE = {"nan", "inf", "-inf"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainRow:
    """One training step; numbers are global unless their name says otherwise, None where unknown.

    Attributes:
      step: counts from 1.
      loss: mean over the valid tokens of the global batch.
      grad_norm: before clipping.
      learning_rate: the one this step used, or would have; None with an optimizer whose schedule is not known.
      num_tokens: valid tokens.
      num_skipped: steps up to this one whose update was not applied, as loss or gradient norm was not finite.
      step_time_s: wall time.
      tokens_per_s: tokens of the global batch, padding included, per second.
      tokens_per_s_per_device: the same over the number of devices.
      tflops_per_device: model TFLOP/s without recomputation.
      mfu: of the device's peak, with causal attention counted once.
      mfu_paper: as AMSP counts, without the causal discount.
      peak_memory_bytes: the largest of this process's devices.
      aux: the model's own sums over the global batch, by name; lists where they are arrays.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float | None
    num_tokens: int
    num_skipped: int
    step_time_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    tflops_per_device: float | None
    mfu: float | None
    mfu_paper: float | None
    peak_memory_bytes: int | None
    aux: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationRow:
    """One evaluation after `step` training steps.

    Attributes:
      loss: mean over `num_tokens` valid tokens.
      aux: the model's own sums over them, as in `TrainRow`.
    """

    step: int
    loss: float
    num_tokens: int
    aux: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class MetricsWriter:
    """Writes `metrics.jsonl` and `validation.jsonl`.

    Every row is on disk when the call returns, so a killed run loses none.
    """

    def __init__(self, run_dir: str | pathlib.Path, resume_step: int | None) -> None:
        """Opens the files, dropping the rows that the run will write again.

        Args:
          run_dir: an existing folder.
          resume_step: the step of the checkpoint that the run goes on from; None for a new run.

        Raises:
          UserError: the files cannot be read or written.
        """
        self._folder = pathlib.Path(run_dir)
        self._files: dict[str, IO[bytes]] = {}
        # A run that begins again writes the validation before its first step again, too.
        keep_up_to = -1 if resume_step is None else resume_step
        try:
            for name in (TRAIN_FILE, VALIDATION_FILE):
                _drop_rows_after(self._folder / name, keep_up_to)
            for name in (TRAIN_FILE, VALIDATION_FILE):
                # Without a buffer nothing is left to write, and to fail, when a file is closed.
                self._files[name] = (self._folder / name).open("ab", buffering=0)
        except OSError as error:
            self.close()
            raise UserError(
                f"metrics in {run_dir} cannot be written: {error}. Set run_dir to a folder you own."
            ) from error

    def train(self, row: TrainRow) -> None:
        """Adds the row of one training step; raises UserError where the disk is full."""
        self._write(TRAIN_FILE, row)

    def validation(self, row: ValidationRow) -> None:
        """Adds the row of one evaluation; raises UserError where the disk is full."""
        self._write(VALIDATION_FILE, row)

    def close(self) -> None:
        """Closes the files; the writer is of no use afterwards."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, row: TrainRow | ValidationRow) -> None:
        try:
            line = (_to_json(row_values(row)) + "\n").encode()
        except (TypeError, ValueError):
            # A hook that raises gets no more calls, so nobody else would close the files.
            self.close()
            raise
        file = self._files[name]
        end = file.seek(0, os.SEEK_END)
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            # Half a row in the middle of a file would be an error for whoever reads it.
            with contextlib.suppress(OSError):
                file.truncate(end)
            self.close()
            raise UserError(
                f"{self._folder / name} cannot be written: {error.strerror}. Make room; the same command goes on."
            ) from error


def row_values(row: TrainRow | ValidationRow) -> dict[str, Any]:
    """The numbers of a row by name; a model without sums of its own has no `aux`."""
    values = dataclasses.asdict(row)
    if not values["aux"]:
        del values["aux"]
    return values


def read_rows(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file in order; a last line cut short by a killed process is left out.

    Raises:
      UserError: the file cannot be read, or a line before the last is not a row.
    """
    try:
        lines = pathlib.Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Remove it, or make it readable.") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_from_json(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is not a row of metrics ({error}). Remove that line.") from error
    return rows


def _from_json(line: bytes) -> dict[str, Any]:
    """A row; ValueError says what is wrong with it."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no JSON object")
    row = _numbers(row)
    for key, kind in (("step", int), ("loss", int | float)):
        if not isinstance(row.get(key), kind):
            raise ValueError(f"{key} is {row.get(key)!r}, no number")
    return row


def _numbers(value: Any) -> Any:
    """The value with the texts of numbers that are not finite turned back into numbers."""
    if isinstance(value, dict):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else value


def _to_json(row: dict[str, Any]) -> str:
    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list):
            return [finite(item) for item in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(row), allow_nan=False)


def _drop_rows_after(path: pathlib.Path, last_step: int) -> None:
    """Leaves rows up to `last_step`; a reader or a crash sees the old file or the new one, never a part."""
    if not path.exists():
        return
    kept = [row for row in read_rows(path) if row["step"] <= last_step]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(_to_json(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class EventWriter:
    """TensorBoard's event file, without TensorFlow; tensorboard must be installed."""

    def __init__(self, directory: pathlib.Path, last_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(directory))
        # A session start makes TensorBoard forget what earlier files say of these steps and later ones.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(wall_time=time.time(), step=last_step + 1, session_log=start))

    def add(self, kind: str, row: TrainRow | ValidationRow) -> None:
        """Adds the numbers of a row as `kind/name`; what is no number, such as an array of `aux`, is left out."""
        values = row_values(row)
        step = values.pop("step")
        values |= {f"aux/{name}": value for name, value in values.pop("aux", {}).items()}
        numbers = {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=v) for tag, v in numbers.items()])
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Writes what is left and ends the writer's thread."""
        self._writer.close()


class ProgressLine:
    """Says where the run is: one line rewritten in place on a terminal, now and then a line elsewhere."""

    def __init__(
        self, num_steps: int, *, stream: TextIO = sys.stdout, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Starts silent; `num_steps` is the step at which the run ends, `stream` where the line goes."""
        self._num_steps, self._stream, self._clock = num_steps, stream, clock
        self._is_terminal = stream.isatty()
        self._interval_s = 0.1 if self._is_terminal else 5.0
        self._first: tuple[int, float] | None = None
        self._last_row: TrainRow | None = None
        self._shown_step, self._shown_at = 0, -math.inf

    def update(self, row: TrainRow) -> None:
        """Shows `row` if it is the first, the last, or enough time has passed."""
        now = self._clock()
        self._first = self._first or (row.step, now)
        self._last_row = row
        if row.step >= self._num_steps or now - self._shown_at >= self._interval_s:
            self._show(now)

    def print(self, text: str) -> None:
        """Writes `text` on lines of its own, above the live line."""
        self._stream.write(f"\r\x1b[K{text}\n" if self._is_terminal else f"{text}\n")
        if self._is_terminal and self._last_row:
            self._show(self._clock())
        self._stream.flush()

    def close(self) -> None:
        """Shows the last row, if it was not yet shown, and ends the line."""
        if self._last_row is None:
            return
        if self._last_row.step != self._shown_step:
            self._show(self._clock())
        if self._is_terminal:
            self._stream.write("\n")
        self._stream.flush()

    def _show(self, now: float) -> None:
        assert self._last_row is not None
        text = self._text(self._last_row, now)
        if self._is_terminal:
            # A line that wraps cannot be rewritten.
            self._stream.write("\r\x1b[K" + text[: shutil.get_terminal_size().columns - 1])
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
        self._shown_step, self._shown_at = self._last_row.step, now

    def _text(self, row: TrainRow, now: float) -> str:
        parts = [f"step {row.step}/{self._num_steps}", f"loss {row.loss:.4f}", f"{_short(row.tokens_per_s)} tokens/s"]
        if row.mfu is not None:
            parts.append(f"MFU {100 * row.mfu:.1f} %")
        if row.num_skipped:
            parts.append(f"{row.num_skipped} skipped")
        left_s = self._seconds_left(row.step, now)
        if left_s is not None:
            parts.append(f"{_clock_time(left_s)} left")
        return "  ".join(parts)

    def _seconds_left(self, step: int, now: float) -> float | None:
        """By the mean pace since the first step shown, which leaves compilation out; None before there is one."""
        assert self._first is not None
        first_step, first_at = self._first
        if step == first_step:
            return None
        return (now - first_at) / (step - first_step) * max(self._num_steps - step, 0)


def _short(value: float) -> str:
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{suffix}" if value < 100 * unit else f"{value / unit:.0f}{suffix}"
    return f"{value:.0f}"


def _clock_time(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
