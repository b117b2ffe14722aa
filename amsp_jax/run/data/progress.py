"""A line now and then while a large corpus is read, with the time that is left."""

from __future__ import annotations

import time

from amsp_jax.runtime.launch import say

_EVERY_S = 10.0


class Progress:
    """Counts what is done of a whole; a pass of less than ten seconds prints nothing.

    Args:
      doing: what the line begins with, such as `tokenising`.
      total: the whole, in bytes or ids.
      unit: of the total.
    """

    def __init__(self, doing: str, total: int, unit: str) -> None:
        self._doing, self._total, self._unit = doing, max(total, 1), unit
        self._done = 0
        self._start_s = self._last_s = time.monotonic()

    def add(self, amount: int) -> None:
        """Counts `amount` more, and prints a line if the last one is ten seconds old."""
        self._done += amount
        now_s = time.monotonic()
        if now_s - self._last_s >= _EVERY_S:
            self._last_s = now_s
            say(self._line(now_s - self._start_s))

    def _line(self, elapsed_s: float) -> str:
        # What is counted may be a little more than the total that was estimated.
        fraction = min(self._done / self._total, 1.0)
        left_s = elapsed_s * (1 - fraction) / fraction if fraction else float("inf")
        left = f"about {_text(left_s)} left" if fraction else "no estimate yet"
        return (
            f"{self._doing}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} M {self._unit}, {fraction:.0%}, {left}"
        )


def _text(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
