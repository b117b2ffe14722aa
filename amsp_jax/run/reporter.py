"""From the numbers of steps that run to rows, one step behind the device."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from amsp_jax.engine.train_step import StepMetrics
from amsp_jax.errors import NonFiniteError
from amsp_jax.model import ModelNumbers
from amsp_jax.run.checks import BatchShape
from amsp_jax.run.loss_spikes import LossSpikes
from amsp_jax.run.metrics import MetricsWriter, ProgressLine, TrainRow, ValidationRow


class Reporter:
    """Writes and shows each step once it is done; a step's time is that between two completions.

    In a run of several processes all of them report, and process 0 alone writes.
    """

    def __init__(
        self,
        run_dir: Path,
        first: int,
        *,
        batch: BatchShape,
        learning_rates: np.ndarray,
        numbers: ModelNumbers | None,
        peak_flops: float | None,
        max_skipped: int = 0,
    ) -> None:
        """Opens the files of a run that has `first` steps behind it.

        Args:
          run_dir: the run folder.
          first: steps done; rows of later ones are dropped.
          batch: of every step.
          learning_rates: by the number of updates applied before, [steps].
          numbers: of the model; None leaves FLOPs out.
          peak_flops: FLOP/s of one device; None leaves MFU out.
          max_skipped: steps in a row whose loss or gradient norm may be non-finite; one more raises.
        """
        self._batch, self._learning_rates = batch, learning_rates
        self._numbers, self._peak_flops = numbers, peak_flops
        is_process_0 = jax.process_index() == 0
        self._writer = MetricsWriter(run_dir, first or None, enabled=is_process_0)
        self._progress = ProgressLine(len(learning_rates)) if is_process_0 else None
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-watcher")
        self._running: tuple[int, Future[tuple[StepMetrics, float]]] | None = None
        self._completed_at = 0.0
        self._spikes = LossSpikes()
        self._max_skipped, self._skipped_in_a_row = max_skipped, 0

    def start_clock(self) -> None:
        """The next step's time counts from now: what came before was not training."""
        self._completed_at = time.perf_counter()

    def dispatched(self, number: int, metrics: StepMetrics) -> None:
        """Takes the numbers of a step that now runs, then waits for the step before and reports it.

        Raises:
          NonFiniteError: `max_skipped` is exceeded, in every process at the same step.
        """
        before, self._running = self._running, (number, self._watcher.submit(_completion, metrics))
        if before:
            self._report(*before)

    def flush(self) -> None:
        """Waits for the step that runs and reports it; raises as `dispatched` does."""
        before, self._running = self._running, None
        if before:
            self._report(*before)

    def validation(self, row: ValidationRow) -> None:
        """Writes and prints a validation."""
        self._writer.validation(row)
        if self._progress:
            self._progress.print(f"step {row.step}: validation loss {row.loss:.4f} over {row.num_tokens:,} tokens")

    def close(self) -> None:
        """Ends the progress line and closes the files."""
        if self._progress:
            self._progress.close()
        self._writer.close()
        self._watcher.shutdown()

    def _report(self, number: int, completion: Future[tuple[StepMetrics, float]]) -> None:
        values, now = completion.result()
        step_time_s, self._completed_at = now - self._completed_at, now
        row = self._row(number, values, step_time_s)
        self._writer.train(row)
        if self._progress:
            self._progress.update(row)
        self._judge(row, bool(values.is_finite))

    def _judge(self, row: TrainRow, is_finite: bool) -> None:
        """Tells of a loss spike and of numbers that are not finite; of too many of the latter, raises."""
        spike = self._spikes.seen(row.step, row.loss, row.grad_norm)
        if spike and self._progress:
            self._progress.print(spike)
        self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
        if is_finite:
            return
        what = f"step {row.step}: loss {row.loss:.4g} and gradient norm {row.grad_norm:.4g} are not both finite"
        if self._skipped_in_a_row > self._max_skipped:
            raise NonFiniteError(what, row.step)
        if self._progress:
            self._progress.print(
                f"{what}: no update, number {self._skipped_in_a_row} in a row of at most {self._max_skipped}"
            )

    def _row(self, number: int, values: StepMetrics, step_time_s: float) -> TrainRow:
        tokens_per_s = self._batch.tokens / step_time_s
        per_device = tokens_per_s / self._batch.num_devices
        seq_len, numbers, peak = self._batch.seq_len, self._numbers, self._peak_flops
        flops = numbers.flops_per_token(seq_len) * per_device if numbers else None
        paper = numbers.flops_per_token_paper(seq_len) * per_device if numbers else None
        return TrainRow(
            step=number,
            loss=float(values.loss),
            grad_norm=float(values.grad_norm),
            learning_rate=float(self._learning_rates[int(values.num_updates)]),
            num_tokens=round(float(values.num_tokens)),
            num_skipped=number - int(values.num_updates) - bool(values.is_finite),
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=per_device,
            tflops_per_device=flops / 1e12 if flops is not None else None,
            mfu=flops / peak if flops is not None and peak else None,
            mfu_paper=paper / peak if paper is not None and peak else None,
            peak_memory_bytes=_peak_memory_bytes(),
        )


def _completion(metrics: StepMetrics) -> tuple[StepMetrics, float]:
    """A step's numbers and the moment they were there.

    In a thread of its own: a dispatch may block for most of a step (a loop whose end the host must see), and the
    main thread would then read the clock late.
    """
    jax.block_until_ready(metrics)
    now = time.perf_counter()
    return jax.device_get(metrics), now


def _peak_memory_bytes() -> int | None:
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)
