"""Where a run begins: at its own newest checkpoint, at the weights of another run, or at step 0."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from amsp_jax.checkpoint import Checkpointer
from amsp_jax.errors import UserError
from amsp_jax.job import Job, Wanted, params_alone, true_shapes, whole_state
from amsp_jax.launch import say
from amsp_jax.run_folder import CHECKPOINTS, RunFolder, identity
from amsp_jax.state import TrainState, init_state, true_state


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint that has what is wanted of it."""

    checkpointer: Checkpointer
    step: int
    wanted: Wanted

    def __str__(self) -> str:
        return str(self.checkpointer.directory / str(self.step))

    def read(self) -> Any:
        """What is wanted, on the devices."""
        with contextlib.closing(self.checkpointer):
            return self.checkpointer.restore(self.step, *self.wanted)


def _open(directory: Path, step: int | None, wanted: Wanted) -> Saved | None:
    """A checkpoint, the newest where `step` is None; None if there is none. One that does not fit is an error."""
    checkpointer = Checkpointer(directory, keep=None)
    step = checkpointer.latest_step() if step is None else step
    if step is None:
        return None
    checkpointer.check(step, *wanted)
    return Saved(checkpointer, step, wanted)


def own_checkpoint(folder: RunFolder, job: Job) -> Saved | None:
    """Where this run goes on; None for a run that has saved nothing."""
    if not folder.is_same_run or not folder.checkpoints.is_dir():
        return None
    return _open(folder.checkpoints, None, whole_state(job.model, job.optimizer, job.plan))


def foreign_checkpoint(init_from: str, job: Job) -> Saved:
    """The weights that INIT_FROM names: of a run folder's newest checkpoint, or of one of them."""
    path, wanted = Path(init_from).expanduser(), params_alone(job.model, job.plan)
    saved: Saved | None = None
    # What cannot even be looked at has no checkpoint either.
    with contextlib.suppress(OSError):
        if (path / CHECKPOINTS).is_dir():
            saved = _open(path / CHECKPOINTS, None, wanted)
        elif path.is_dir() and path.name.isdecimal():
            saved = _open(path.parent, int(path.name), wanted)
    if saved is None:
        raise UserError(
            f"INIT_FROM={path} has no complete checkpoint; name a run folder, or a step in its {CHECKPOINTS}"
        )
    return saved


def fresh(job: Job, weights: Saved | None) -> TrainState:
    """The state of step 0; its parameters are those of INIT_FROM, if there is one."""
    if weights is None:
        return init_state(job.model, job.optimizer, job.plan, job.config.seed)
    say(f"the weights are those of {weights}")
    state = init_state(job.model, job.optimizer, job.plan, job.config.seed)
    return dataclasses.replace(state, **weights.read())


def proceed(job: Job, saved: Saved) -> TrainState:
    """The state of a checkpoint of this run, and what has changed since."""
    meta = saved.checkpointer.meta(saved.step)
    say(f"goes on from {saved}, saved under '{meta['strategy']}' on {meta['ranks']}")
    if meta["steps"] != job.config.steps:
        say(f"STEPS was {meta['steps']} and is {job.config.steps}: the learning rate now follows the new schedule")
    return saved.read()


def meta_of(job: Job) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it."""
    return {
        **identity(job.config),
        "shapes": true_shapes(true_state(job.model, job.optimizer)),
        "steps": job.config.steps,
        "strategy": job.config.strategy,
        "ranks": str(job.plan.degrees.ranks),
    }
