"""Runs a few steps under jax's profiler."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from amsp_jax.engine.state import TrainState, init_state
from amsp_jax.errors import UserError
from amsp_jax.run.data import Prefetcher
from amsp_jax.run.job import Job, compile_step
from amsp_jax.runtime.launch import own_watch

NUM_WARMUP = 2
# jax's own name of a session is the time, so that a folder would keep the traces of every time.
_SESSION = "amsp_jax"


@dataclasses.dataclass(frozen=True)
class Captured:
    """What is left of the steps.

    Attributes:
      trace: the `.xplane.pb` file.
      program: the text of the compiled step.
    """

    trace: Path
    program: str


def capture(job: Job, num_steps: int, folder: Path) -> Captured:
    """Trains from step 0, and traces `num_steps` steps after the warm-up, and one more, which ends the last of them.

    Every process of a run calls it, and traces its own devices.

    Args:
      job: what to train.
      num_steps: to be complete in the trace.
      folder: for the trace, as TensorBoard wants it, in the place of the one that was captured there before.

    Raises:
      UserError: the step needs more memory than a device has, or the profiler wrote nothing.
    """
    own_watch().doing("compiling the step")
    step: Any = compile_step(job)
    own_watch().doing("running the steps to profile")
    state = init_state(job.plan, job.optimizer, job.config.seed)
    num_total = NUM_WARMUP + num_steps + 1
    session = folder / "plugins" / "profile" / _SESSION
    options = jax.profiler.ProfileOptions()
    options.session_id = _SESSION
    # Calls of Python functions would slow the host down, and are not asked for.
    options.python_tracer_level = 0
    with Prefetcher(lambda i: job.load_batch(job.datasets.train, i), 0, num_total) as batches:
        state = _advance(step, state, batches, range(NUM_WARMUP))
        if session.exists():
            shutil.rmtree(session)
        with jax.profiler.trace(folder, profiler_options=options):
            _advance(step, state, batches, range(NUM_WARMUP, num_total))
    written = list(session.glob("*.xplane.pb"))
    if not written:
        raise UserError(f"--out={folder}: jax's profiler wrote no trace there; see what it said above")
    return Captured(written[0], step.as_text())


def _advance(step: Any, state: TrainState, batches: Iterator[dict[str, jax.Array]], numbers: range) -> TrainState:
    """As the training loop does: it dispatches a step, then waits for the numbers of the step before."""
    last = None
    for number in numbers:
        with jax.profiler.StepTraceAnnotation("train", step_num=number):
            state, metrics = step(state, next(batches))
        jax.block_until_ready(last)
        last = metrics
    return jax.block_until_ready(state)
