"""From the numbers of steps that run to rows, one step behind the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from amsp_jax.engine.train_step import StepMetrics
from amsp_jax.model import ModelNumbers
from amsp_jax.run.checks import BatchShape
from amsp_jax.run.metrics import TrainRow


class Reporter:
    """Makes a row of each step once it is done; a step's time is that between two completions."""

    def __init__(
        self,
        report: Callable[[TrainRow], None],
        *,
        batch: BatchShape,
        learning_rates: np.ndarray | None,
        numbers: ModelNumbers | None,
        peak_flops: float | None,
    ) -> None:
        """Starts a thread that waits for steps.

        Args:
          report: takes each row, in order.
          batch: of every step.
          learning_rates: by the number of updates applied before, [steps]; None where they are not known.
          numbers: of the model; None leaves FLOPs out.
          peak_flops: FLOP/s of one device; None leaves MFU out.
        """
        self._report_row, self._batch, self._learning_rates = report, batch, learning_rates
        self._numbers, self._peak_flops = numbers, peak_flops
        self._watcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step-watcher")
        self._running: tuple[int, Future[tuple[StepMetrics, float]]] | None = None
        self._completed_at = 0.0

    def start_clock(self) -> None:
        """The next step's time counts from now: what came before was not training."""
        self._completed_at = time.perf_counter()

    def dispatched(self, number: int, metrics: StepMetrics) -> None:
        """Takes the numbers of a step that now runs, then waits for the step before and reports it."""
        before, self._running = self._running, (number, self._watcher.submit(_completion, metrics))
        if before:
            self._report(*before)

    def flush(self) -> None:
        """Waits for the step that runs and reports it."""
        before, self._running = self._running, None
        if before:
            self._report(*before)

    def close(self) -> None:
        """Ends the thread."""
        self._watcher.shutdown()

    def _report(self, number: int, completion: Future[tuple[StepMetrics, float]]) -> None:
        values, now = completion.result()
        step_time_s, self._completed_at = now - self._completed_at, now
        self._report_row(self._row(number, values, step_time_s))

    def _row(self, number: int, values: StepMetrics, step_time_s: float) -> TrainRow:
        tokens_per_s = self._batch.tokens / step_time_s
        per_device = tokens_per_s / self._batch.num_devices
        num_updates = int(values.num_updates)
        seq_len, numbers, peak = self._batch.seq_len, self._numbers, self._peak_flops
        flops = numbers.flops_per_token(seq_len) * per_device if numbers else None
        paper = numbers.flops_per_token_paper(seq_len) * per_device if numbers else None
        return TrainRow(
            step=number,
            loss=float(values.loss),
            grad_norm=float(values.grad_norm),
            learning_rate=None if self._learning_rates is None else float(self._learning_rates[num_updates]),
            num_tokens=round(float(values.num_tokens)),
            num_skipped=number - num_updates - bool(values.is_finite),
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=per_device,
            tflops_per_device=flops / 1e12 if flops is not None else None,
            mfu=flops / peak if flops is not None and peak else None,
            mfu_paper=paper / peak if paper is not None and peak else None,
            peak_memory_bytes=_peak_memory_bytes(),
            aux=named_sums(values.aux),
        )


def named_sums(aux: Any) -> dict[str, Any]:
    """A model's own sums as numbers, or lists of numbers, by their path in the tree."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(aux)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64).tolist()
        for path, leaf in leaves
    }


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
