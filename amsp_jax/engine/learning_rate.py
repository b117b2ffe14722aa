"""Learning rates by step: a linear warm-up, then one of four schedules.

The names of the arguments are the names of the settings of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from amsp_jax.errors import UserError

LearningRate = Callable[[Any], Any]
"""Learning rate of the update that follows `count` earlier updates."""

LR_SCHEDULES = ("cosine", "linear", "constant", "wsd")
_FINAL_FRACTION, _DECAY_FRACTION = 0.1, 0.2


def make_learning_rate(
    lr_schedule: str,
    learning_rate: float,
    *,
    steps: int,
    warmup_steps: int = 0,
    lr_final_fraction: float | None = None,
    lr_decay_fraction: float | None = None,
) -> LearningRate:
    """Builds a learning rate that rises to `learning_rate` in `warmup_steps` steps and then follows a schedule.

    The warm-up begins at `learning_rate / warmup_steps`, not at 0, so that the first step already trains.

    Args:
      lr_schedule: `cosine` and `linear` fall from the warm-up to the last step. `constant` stays. `wsd`
        (warm-up, stable, decay) stays and falls linearly at the end.
      learning_rate: the highest value.
      steps: steps of the whole run; the falling schedules reach their floor there.
      warmup_steps: more than `steps` count as `steps`.
      lr_final_fraction: the floor, as a fraction of `learning_rate`; None is 0.1.
      lr_decay_fraction: the part of `steps` in which `wsd` falls, at most what the warm-up leaves; None is 0.2.

    Raises:
      UserError: the schedule is unknown, a fraction is out of range, or the schedule has no such fraction.
    """
    if lr_schedule not in LR_SCHEDULES:
        raise UserError(f"lr_schedule={lr_schedule!r} is unknown; use one of {', '.join(LR_SCHEDULES)}")
    if lr_schedule == "constant":
        _refuse("lr_final_fraction", lr_final_fraction, lr_schedule, "cosine, linear and wsd")
    if lr_schedule != "wsd":
        _refuse("lr_decay_fraction", lr_decay_fraction, lr_schedule, "wsd")
    final_fraction = _fraction("lr_final_fraction", lr_final_fraction, _FINAL_FRACTION)
    decay_fraction = _fraction("lr_decay_fraction", lr_decay_fraction, _DECAY_FRACTION)

    warmup_steps = min(warmup_steps, steps)
    first, final = learning_rate / max(warmup_steps, 1), final_fraction * learning_rate
    # A schedule of no steps is an error of optax's; where the warm-up takes all steps it is never reached.
    falling_steps = max(steps - warmup_steps, 1)
    if lr_schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            first, learning_rate, warmup_steps, warmup_steps + falling_steps, final
        )
    warmup = optax.linear_schedule(first, learning_rate, warmup_steps)
    if lr_schedule == "linear":
        return optax.join_schedules(
            [warmup, optax.linear_schedule(learning_rate, final, falling_steps)], [warmup_steps]
        )
    stable = optax.constant_schedule(learning_rate)
    if lr_schedule == "constant":
        return optax.join_schedules([warmup, stable], [warmup_steps])
    decay_steps = min(max(round(decay_fraction * steps), 1), falling_steps)
    decay = optax.linear_schedule(learning_rate, final, decay_steps)
    # The decay ends at the last step; it begins where the warm-up ends if that is later.
    decay_start = max(steps - decay_steps, warmup_steps)
    return optax.join_schedules([warmup, stable, decay], [warmup_steps, decay_start])


def _refuse(name: str, value: float | None, lr_schedule: str, schedules: str) -> None:
    if value is not None:
        raise UserError(
            f"{name}={value} has no effect with lr_schedule={lr_schedule!r}: {schedules} use it; leave it out"
        )


def _fraction(name: str, value: float | None, default: float) -> float:
    if value is not None and not 0 <= value <= 1:
        raise UserError(f"{name}={value} is out of range: it is a fraction, at least 0 and at most 1")
    return default if value is None else value
