"""Loss spikes: steps whose loss stands out from those before, reported and not acted upon."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WINDOW = 100
"""Finite steps that a loss is compared with."""
MIN_STEPS = 30
"""Fewer have no median worth comparing with: the first steps of a run, or after a resume, are not judged."""
NUM_DEVIATIONS = 6.0
"""How far above the median a spike is, in standard deviations of a normal distribution of the same MAD."""
MIN_RISE = 0.02
"""The least rise that is a spike, of the median: a loss that hardly moves has a MAD of next to nothing."""

_DEVIATIONS_PER_MAD = 1.4826


class LossSpikes:
    """Tells when a loss stands out: the median of the last `WINDOW` finite losses and more than a margin above it.

    The margin is `NUM_DEVIATIONS` standard deviations, estimated from the median absolute deviation (MAD), and at least
    `MIN_RISE` of the median. A spike lasts until the loss is less than half the margin above the median and is told
    once. Its losses enter the window, so a loss that stays high becomes what later ones are compared with.

    Attributes:
      num_spikes: told so far.
    """

    def __init__(self) -> None:
        self.num_spikes = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._grad_norms: deque[float] = deque(maxlen=WINDOW)
        self._in_spike = False

    def seen(self, step: int, loss: float, grad_norm: float) -> str | None:
        """Takes the next step; a line to print where a spike begins, else None.

        A step whose loss or gradient norm is not finite is ignored: it is no spike and nothing is compared with it.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return None
        line = self._judge(step, loss, grad_norm) if len(self._losses) >= MIN_STEPS else None
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)
        return line

    def _judge(self, step: int, loss: float, grad_norm: float) -> str | None:
        median = float(np.median(self._losses))
        deviation = _DEVIATIONS_PER_MAD * float(np.median(np.abs(np.asarray(self._losses) - median)))
        margin = max(NUM_DEVIATIONS * deviation, MIN_RISE * abs(median))
        was_in_spike = self._in_spike
        self._in_spike = loss > median + (margin / 2 if was_in_spike else margin)
        if was_in_spike or not self._in_spike:
            return None
        self.num_spikes += 1
        usual = float(np.median(self._grad_norms))
        return (
            f"loss spike {self.num_spikes} at step {step}: {loss:.4f}, where the median of the last "
            f"{len(self._losses)} steps is {median:.4f} with a deviation of {deviation:.4f}; "
            f"gradient norm {grad_norm:.3g}, usually {usual:.3g}"
        )
