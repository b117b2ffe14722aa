"""Metrics files, the progress line and the loss curve."""

import dataclasses
import io
import json
import math

import pytest

from amsp_jax.errors import UserError
from amsp_jax.run.metrics import (
    EventWriter,
    MetricsWriter,
    ProgressLine,
    TrainRow,
    ValidationRow,
    read_rows,
    row_values,
)
from amsp_jax.run.plots import plot_losses


def row(step: int, loss: float = 1 / 3, **changes) -> TrainRow:
    base = TrainRow(
        step=step,
        loss=loss,
        grad_norm=0.1 + 0.2,
        learning_rate=1e-3,
        num_tokens=1024,
        num_skipped=0,
        step_time_s=0.5,
        tokens_per_s=123456.0,
        tokens_per_s_per_device=15432.0,
        tflops_per_device=None,
        mfu=None,
        mfu_paper=None,
        peak_memory_bytes=None,
    )
    return dataclasses.replace(base, **changes)


def write(run_dir, resume_step, steps):
    writer = MetricsWriter(run_dir, resume_step)
    for step in steps:
        writer.train(row(step, loss=step / 3))
    writer.validation(ValidationRow(step=max(steps), loss=2.5, num_tokens=77))
    writer.close()


def test_one_object_a_step_with_unrounded_floats_and_nulls(tmp_path):
    write(tmp_path, None, [1, 2])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row_values(row(s, loss=s / 3)) for s in (1, 2)]
    assert '"grad_norm": 0.30000000000000004' in lines[0] and '"mfu": null' in lines[0]
    assert read_rows(tmp_path / "validation.jsonl") == [{"step": 2, "loss": 2.5, "num_tokens": 77}]


def test_a_row_is_on_disk_at_once(tmp_path):
    writer = MetricsWriter(tmp_path, None)
    writer.train(row(1))
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 1
    writer.close()


def test_a_resume_drops_the_rows_after_its_checkpoint(tmp_path):
    write(tmp_path, None, [1, 2, 3, 4])
    write(tmp_path, 2, [3])
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [r["step"] for r in read_rows(tmp_path / "validation.jsonl")] == [3]
    write(tmp_path, None, [1])
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1]
    assert not list(tmp_path.glob("*.tmp"))


def test_not_finite_is_a_string_on_disk_and_comes_back(tmp_path):
    writer = MetricsWriter(tmp_path, None)
    writer.train(row(1, loss=math.nan, grad_norm=-math.inf))
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (strict["loss"], strict["grad_norm"]) == ("nan", "-inf")
    (back,) = read_rows(tmp_path / "metrics.jsonl")
    assert math.isnan(back["loss"]) and back["grad_norm"] == -math.inf
    write(tmp_path, 1, [2])
    assert '"loss": "nan"' in (tmp_path / "metrics.jsonl").read_text()


def test_a_torn_last_line_is_dropped_and_a_torn_middle_line_named(tmp_path):
    write(tmp_path, None, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    write(tmp_path, 2, [3])
    assert [r["step"] for r in read_rows(path)] == [1, 3]
    path.write_text("{\n{}\n")
    with pytest.raises(UserError, match=r"metrics.jsonl, line 1 is not"):
        read_rows(path)


def test_a_full_disk_is_one_line_and_leaves_whole_rows(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, None)
    writer.train(row(1))

    class Full:
        """A file on a disk with room for ten more bytes."""

        def __init__(self, file):
            self._file, self._is_full = file, False

        def write(self, data):
            if self._is_full:
                raise OSError(28, "No space left on device")
            self._is_full = True
            return self._file.write(data[:10])

        def __getattr__(self, name):
            return getattr(self._file, name)

    monkeypatch.setitem(writer._files, "metrics.jsonl", Full(writer._files["metrics.jsonl"]))
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: No space left on device\. Make room"):
        writer.train(row(2))
    assert [r["step"] for r in read_rows(tmp_path / "metrics.jsonl")] == [1]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_a_row_that_cannot_be_written_leaves_no_file_open(tmp_path):
    """A hook that raises gets no more calls, so nothing else closes them."""
    writer = MetricsWriter(tmp_path, None)
    with pytest.raises(TypeError):
        writer.validation(ValidationRow(step=1, loss=1.0, num_tokens=1, aux={"sum": object()}))
    assert all(file.closed for file in writer._files.values())


def test_a_models_own_sums_are_a_column(tmp_path):
    writer = MetricsWriter(tmp_path, None)
    writer.train(row(1, aux={"experts": [1.0, math.inf], "right": 3.0}))
    writer.close()
    assert read_rows(tmp_path / "metrics.jsonl")[0]["aux"] == {"experts": [1.0, math.inf], "right": 3.0}
    assert '"inf"' in (tmp_path / "metrics.jsonl").read_text()


def test_a_folder_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        MetricsWriter(tmp_path / "absent", None)


def write_events(folder, last_step, steps):
    events = EventWriter(folder, last_step)
    for step in steps:
        events.add("train", row(step, loss=step / 3, aux={"right": 2.0, "experts": [1.0, 2.0]}))
    events.add("validation", ValidationRow(step=max(steps), loss=2.5, num_tokens=77))
    events.close()


def test_tensorboard_events_follow_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_events(tmp_path / "tensorboard", 0, [1, 2, 3])
    (first,) = (tmp_path / "tensorboard").iterdir()
    # The name holds the second of its start, and both runs of this test may start in the same one.
    first.rename(first.with_name(first.name.replace("tfevents.1", "tfevents.0", 1)))
    write_events(tmp_path / "tensorboard", 1, [2])
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, pytest.approx(1 / 3)),
        (2, pytest.approx(2 / 3)),
    ]
    assert [e.step for e in events.Scalars("validation/loss")] == [2]
    tags = events.Tags()["scalars"]
    assert "train/aux/right" in tags and "train/mfu" not in tags and "train/aux/experts" not in tags


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run_line(stream: io.StringIO, num_steps: int, steps: int, seconds: float) -> str:
    clock = Clock()
    line = ProgressLine(num_steps, stream=stream, clock=clock)
    for step in range(1, steps + 1):
        clock.now += seconds
        line.update(row(step, mfu=0.512))
    line.close()
    return stream.getvalue()


def test_a_terminal_has_one_line_rewritten_in_place():
    text = run_line(Terminal(), num_steps=100, steps=40, seconds=1.0)
    assert text.count("\n") == 1 and text.endswith("\n")
    assert text.split("\r\x1b[K")[-1] == "step 40/100  loss 0.3333  123k tokens/s  MFU 51.2 %  1:00 left\n"
    assert len(text.split("\r\x1b[K")) == 41


def test_a_terminal_is_not_redrawn_faster_than_one_can_see():
    assert run_line(Terminal(), num_steps=100, steps=100, seconds=0.001).count("\r") == 2


def test_a_log_file_gets_the_first_the_last_and_a_line_every_few_seconds():
    lines = run_line(io.StringIO(), num_steps=23, steps=23, seconds=1.0).splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 6, 11, 16, 21, 23]
    assert lines[0] == "step 1/23  loss 0.3333  123k tokens/s  MFU 51.2 %"
    assert "\r" not in "".join(lines)


def test_skipped_updates_are_shown():
    stream = io.StringIO()
    ProgressLine(9, stream=stream).update(row(3, num_skipped=2))
    assert stream.getvalue() == "step 3/9  loss 0.3333  123k tokens/s  2 skipped\n"


def test_a_run_that_stops_early_shows_its_last_step_once():
    assert run_line(io.StringIO(), num_steps=100, steps=3, seconds=1.0).splitlines()[-1].startswith("step 3/100")
    assert len(run_line(io.StringIO(), num_steps=3, steps=3, seconds=1.0).splitlines()) == 2


def test_messages_stand_above_the_live_line():
    stream = Terminal()
    line = ProgressLine(10, stream=stream, clock=Clock())
    line.update(row(1))
    line.print("validation loss 2.5")
    assert stream.getvalue().split("\r\x1b[K")[2:] == ["validation loss 2.5\n", "step 1/10  loss 0.3333  123k tokens/s"]


def test_time_left_is_said_in_hours():
    clock = Clock()
    stream = io.StringIO()
    line = ProgressLine(3602, stream=stream, clock=clock)
    line.update(row(1))
    clock.now = 10.0
    line.update(row(2))
    assert stream.getvalue().splitlines()[-1].endswith("10:00:00 left")


def test_loss_curve(tmp_path):
    write(tmp_path, None, range(1, 200))
    path = plot_losses(tmp_path, title="a title")
    assert path == tmp_path / "loss.png" and path.read_bytes().startswith(b"\x89PNG")


def test_loss_curve_of_a_run_without_rows(tmp_path):
    assert plot_losses(tmp_path).stat().st_size > 0
