"""One line that says what is being measured."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

_BAR = 20


class ProgressLine:
    """Rewrites one line on a terminal; elsewhere it writes a line every few seconds."""

    def __init__(self, stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic):
        """Starts silent."""
        self._stream, self._clock = stream, clock
        self._is_terminal = stream.isatty()
        self._interval_s = 0.1 if self._is_terminal else 10.0
        self._shown_at = -math.inf

    def __call__(self, what: str, spent: float) -> None:
        """Shows `what`, with a bar of the share of the budget that is spent, unless it just did."""
        now = self._clock()
        if now - self._shown_at < self._interval_s:
            return
        self._shown_at = now
        if not self._is_terminal:
            self._stream.write(f"calibrating, {spent:.0%} of the time: {what}\n")
        else:
            bar = "#" * round(_BAR * spent)
            # A line that wraps cannot be rewritten.
            line = f"calibrating [{bar:.<{_BAR}}] {what}"[: shutil.get_terminal_size().columns - 1]
            self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()

    def close(self) -> None:
        """Clears the line of a terminal."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
