"""Seconds of a program and of the whole calibration, equal in all processes.

A process that repeats a collective once more than another waits for ever. So every decision is made on numbers
that the processes have agreed on: of each, the largest that any of them measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

Progress = Callable[[str, float], None]
"""Called with what is measured now and the share of the budget that is spent."""

# A timed run is meant to take the first and repeated if it took less than the second: the dispatch of a program,
# some 0.1 ms, must be lost in it.
_RUN_S, _SHORTEST_RUN_S = 0.03, 0.005
_MAX_REPEATS = 1000
# Of a fresh program: compilation and the first call, in which NCCL connects. Soon replaced by what they take here.
_FIRST_GUESS_S = 0.5

Arrays = tuple[jax.Array, ...]


class Stopwatch:
    """Measures programs within a budget of seconds."""

    def __init__(self, budget_s: float, progress: Progress | None = None):
        """Starts the budget's clock."""
        (self.budget_s,), self._progress = _largest(budget_s), progress
        self.elapsed_s = 0.0
        self._start_s = _FIRST_GUESS_S
        self._begin = time.perf_counter()

    def cost_s(self, predicted_s: float) -> float:
        """What `measure` will take for a body of `predicted_s`."""
        return self._start_s + predicted_s * _num_repeats(predicted_s) * (1 + _num_runs(predicted_s))

    def measure(
        self,
        label: str,
        make_program: Callable[[int], Callable[..., Arrays]],
        arrays: Callable[[], Arrays],
        predicted_s: float,
    ) -> float:
        """Seconds of one repetition: the median of several runs, of which the first, a warm-up, is left out.

        Args:
          label: for the progress line.
          make_program: from the number of repetitions to a program that replaces its arguments.
          arrays: makes its arguments.
          predicted_s: of one repetition; equal in all processes, as it decides the number of runs.
        """
        if self._progress:
            self._progress(label, min(self.elapsed_s / self.budget_s, 1.0))
        num_repeats = _num_repeats(predicted_s)
        begin = time.perf_counter()
        program = make_program(num_repeats)
        state = jax.block_until_ready(program(*arrays()))
        started_s = time.perf_counter() - begin
        runs_s = []
        for _ in range(_num_runs(predicted_s)):
            begin = time.perf_counter()
            state = jax.block_until_ready(program(*state))
            runs_s.append(time.perf_counter() - begin)
        run_s = self._agree(statistics.median(runs_s), started_s)
        if run_s < _SHORTEST_RUN_S and num_repeats < _MAX_REPEATS:
            del state
            return self.measure(label, make_program, arrays, run_s / num_repeats)
        return run_s / num_repeats

    def _agree(self, run_s: float, started_s: float) -> float:
        elapsed_s = time.perf_counter() - self._begin
        run_s, started_s, self.elapsed_s = _largest(run_s, started_s, elapsed_s)
        # Half old, half new: a mean that follows, as the first programs are the slowest to start.
        self._start_s = (self._start_s + max(started_s - run_s, 0.0)) / 2
        return run_s


def _num_repeats(predicted_s: float) -> int:
    return min(max(math.ceil(_RUN_S / max(predicted_s, 1e-9)), 1), _MAX_REPEATS)


def _num_runs(predicted_s: float) -> int:
    run_s = predicted_s * _num_repeats(predicted_s)
    return 5 if run_s < 0.1 else 3 if run_s < 1 else 1


def _largest(*values: float) -> list[float]:
    """Of each value, the largest of all processes."""
    if jax.process_count() == 1:
        return list(values)
    everyone = multihost_utils.process_allgather(np.array(values, np.float32))
    return np.asarray(everyone).reshape(-1, len(values)).max(axis=0).astype(float).tolist()
