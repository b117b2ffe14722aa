"""The reporter waits for the step before, never for the one that was just dispatched."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from amsp_jax.engine.train_step import StepMetrics
from amsp_jax.errors import NonFiniteError
from amsp_jax.model import ModelNumbers
from amsp_jax.run import reporter
from amsp_jax.run.actions import NonFiniteGuard
from amsp_jax.run.checks import batch_shape
from amsp_jax.run.metrics import TrainRow
from amsp_jax.run.reporter import Reporter
from amsp_jax.run.run import Run


def metrics(loss: float, num_updates: int, is_finite: bool = True) -> StepMetrics:
    return StepMetrics(
        loss=jnp.float32(loss),
        grad_norm=jnp.float32(2),
        num_tokens=jnp.float32(60),
        is_finite=jnp.bool_(is_finite),
        num_updates=jnp.int32(num_updates),
        aux={"inner": {"right": jnp.float32(3)}, "counts": jnp.arange(1.0, 3.0)},
    )


class Clock:
    """Steps complete at the given times; the host reads `now`."""

    def __init__(self, completions: list[float]) -> None:
        self.now, self.completions = 100.0, iter(completions)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock([102.0, 106.0, 201.0])
    monkeypatch.setattr(reporter.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(reporter, "_completion", lambda metrics: (metrics, next(clock.completions)))
    return clock


def test_rows_are_one_step_behind(clock: Clock) -> None:
    numbers = ModelNumbers(num_params=1000, num_matmul_params=800, num_layers=2, attention_width=4)
    rates = np.array([0.1, 0.2, 0.3], np.float32)
    rows: list[TrainRow] = []
    report = Reporter(rows.append, batch=batch_shape(8, 1, 2, 8), learning_rates=rates, numbers=numbers, peak_flops=1e6)
    report.start_clock()
    report.dispatched(1, metrics(1.5, num_updates=0))
    assert rows == []
    clock.now = 105.9  # The dispatch of the second step blocked for most of it.
    report.dispatched(2, metrics(1.25, num_updates=1))
    assert [row.step for row in rows] == [1]
    report.flush()
    report.flush()
    clock.now = 200.0  # A validation and a save.
    report.start_clock()
    report.dispatched(3, metrics(1.0, num_updates=2))
    report.flush()
    report.close()

    assert [row.step_time_s for row in rows] == [2, 4, 1]
    assert [row.loss for row in rows] == [1.5, 1.25, 1.0]
    assert [row.learning_rate for row in rows] == [float(rate) for rate in rates]
    first = rows[0]
    assert (first.num_tokens, first.tokens_per_s, first.tokens_per_s_per_device) == (60, 32, 16)
    # 6 x 800 matmul parameters and 6 x 2 layers x 4 wide x 8 tokens of attention; the paper counts 6 N + 12 L h s.
    assert first.tflops_per_device == pytest.approx(16 * (6 * 800 + 6 * 2 * 4 * 8) / 1e12)
    assert first.mfu == pytest.approx(16 * (6 * 800 + 6 * 2 * 4 * 8) / 1e6)
    assert first.mfu_paper == pytest.approx(16 * (6 * 1000 + 12 * 2 * 4 * 8) / 1e6)
    assert first.aux == {"counts": [1.0, 2.0], "inner/right": 3.0}


def test_a_skipped_update_holds_the_learning_rate_and_is_counted(clock: Clock) -> None:
    """Also after a resume: what was skipped before it is in the number of updates, not in the reporter."""
    rows: list[TrainRow] = []
    rates = np.arange(10, dtype=np.float32)
    report = Reporter(rows.append, batch=batch_shape(8, 1, 2, 8), learning_rates=rates, numbers=None, peak_flops=None)
    report.dispatched(7, metrics(1.5, num_updates=5))
    report.dispatched(8, metrics(float("nan"), num_updates=6, is_finite=False))
    report.dispatched(9, metrics(1.0, num_updates=6))
    report.flush()
    report.close()
    assert [row.learning_rate for row in rows] == [5, 6, 6]
    assert [row.num_skipped for row in rows] == [1, 2, 2]


def test_one_skipped_update_too_many_raises(capsys: pytest.CaptureFixture[str]) -> None:
    guard, run = NonFiniteGuard(max_skipped=1), Run.__new__(Run)
    run.print_with(print)
    row = dict.fromkeys((field.name for field in dataclasses.fields(TrainRow)), 1)
    for loss in (math.nan, 1.0, math.nan):
        guard.on_step(run, TrainRow(**{**row, "step": 1, "loss": loss}))
    assert capsys.readouterr().out.count("no update, number 1 in a row of at most 1") == 2
    with pytest.raises(NonFiniteError, match="step 2: loss inf and gradient norm 1") as raised:
        guard.on_step(run, TrainRow(**{**row, "step": 2, "loss": math.inf}))
    assert raised.value.step == 2
