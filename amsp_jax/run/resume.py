"""Where a run begins: at its own newest checkpoint, at the weights of another run, or at step 0."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amsp_jax.engine.state import TrainState, init_state, true_state
from amsp_jax.errors import UserError
from amsp_jax.run.checkpoint import Checkpointer, Damaged
from amsp_jax.run.data.source import resume
from amsp_jax.run.job import Job, Wanted, params_alone, true_shapes, whole_state
from amsp_jax.run.run_folder import CHECKPOINTS, HOW_COMPUTED, RunFolder, identity
from amsp_jax.runtime.launch import from_process_0, say

_ROUNDING = ("reduce_dtype", "inter_node_dtype", "microbatch_group")
"""Settings that change how gradients are rounded, or the order of their sums; `HOW_COMPUTED` is told like them."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint that has what is wanted of it, and whose files are as they were written.

    Attributes:
      checkpointer: of its folder, for reading.
      step: the checkpoint.
      wanted: what to read.
      passed_over: newer ones, which are damaged.
    """

    checkpointer: Checkpointer
    step: int
    wanted: Wanted
    passed_over: tuple[Damaged, ...] = ()

    def __str__(self) -> str:
        return str(self.checkpointer.directory / str(self.step))

    def read(self) -> Any:
        """What is wanted, on the devices."""
        with contextlib.closing(self.checkpointer):
            return self.checkpointer.restore(self.step, *self.wanted, verify=False)

    def set_damaged_aside(self) -> None:
        """Renames what was passed over, so that later saves of the same steps find their places free."""
        for damaged in self.passed_over:
            place = self.checkpointer.set_aside(damaged.step)
            say(f"checkpoint {damaged.step} is damaged ({damaged.what}); it is now {place}")


def _open(directory: Path, step: int | None, wanted: Wanted, goes_back: bool = False) -> Saved | None:
    """A checkpoint, the newest where `step` is None; None if there is none. One that does not fit is an error."""
    checkpointer = Checkpointer(directory, keep=None)
    passed_over: tuple[Damaged, ...] = ()
    # A network file system may show the others an older list.
    steps = from_process_0(checkpointer.steps)
    if goes_back and step is None:
        step, damaged = checkpointer.newest_intact(steps)
        passed_over = tuple(damaged)
        if step is None and passed_over:
            raise UserError(
                f"{directory}: all {len(passed_over)} checkpoints are damaged, the newest as {passed_over[0].what}. "
                "Restore the folder from a copy, or choose another run folder."
            )
    step = max(steps, default=None) if step is None else step
    if step is None:
        return None
    checkpointer.check(step, *wanted)
    note = checkpointer.verify(step, full=not goes_back)
    say(*([note] if note else []))
    return Saved(checkpointer, step, wanted, passed_over)


def require_same_data(folder: RunFolder, job: Job) -> None:
    """Compares the content of the data with what the run began with; where the data lie makes no difference.

    Raises:
      UserError: the content is another, or it is not known and the data have another name.
    """
    if folder.fingerprint:
        _require_same_data(folder.fingerprint, job)
    elif folder.is_same_run and folder.data != job.config.data:
        raise UserError(
            f"run_dir={folder.path} holds a different run: data={folder.data!r} there and data={job.config.data!r} "
            "here. Choose another folder, or set it as it is there"
        )


def own_checkpoint(folder: RunFolder, job: Job) -> Saved | None:
    """Where this run goes on; None for a run that has saved nothing.

    Raises:
      UserError: it is damaged and `on_damaged` is not 'previous', or it does not fit the model, optimizer or data.
    """
    if not folder.is_same_run or not from_process_0(folder.checkpoints.is_dir):
        return None
    wanted = whole_state(job.plan, job.optimizer)
    saved = _open(folder.checkpoints, None, wanted, goes_back=job.config.on_damaged == "previous")
    if saved:
        _require_same_data(saved.checkpointer.meta(saved.step).get("data_fingerprint", {}), job)
        say(*resume(job.datasets, saved.step, saved.checkpointer.own(saved.step)))
    return saved


def _require_same_data(there: Mapping[str, str], job: Job) -> None:
    here = job.datasets.fingerprint
    changed = [name for name in there if there[name] != here.get(name)]
    if changed:
        raise UserError(
            f"data={job.config.data!r} is not what the run began with: another {changed[0]} "
            f"({there[changed[0]]} then, {here.get(changed[0])} now). Put back the data, or the tokenizers and "
            "Python that read them, or choose another run folder."
        )


def foreign_checkpoint(init_from: str, job: Job) -> Saved:
    """The weights that `init_from` names: of a run folder's newest checkpoint, or of one of them."""
    path, wanted = Path(init_from).expanduser(), params_alone(job.plan)
    saved: Saved | None = None
    is_there = True
    # What cannot even be looked at has no checkpoint either.
    with contextlib.suppress(OSError):
        is_there = path.exists()
        if (path / CHECKPOINTS).is_dir():
            saved = _open(path / CHECKPOINTS, None, wanted)
        elif path.is_dir() and path.name.isdecimal():
            saved = _open(path.parent, int(path.name), wanted)
    if saved is None:
        what = " has no complete checkpoint" if is_there else f": no such folder (looked at {path.absolute()})"
        raise UserError(f"init_from={path}{what}; name a run folder, or a step in its {CHECKPOINTS}")
    return saved


def fresh(job: Job, weights: Saved | None) -> TrainState:
    """The state of step 0; its parameters are those of `init_from`, if there is one."""
    if weights is None:
        return init_state(job.plan, job.optimizer, job.config.seed)
    say(f"the weights are those of {weights}")
    state = init_state(job.plan, job.optimizer, job.config.seed)
    return dataclasses.replace(state, **weights.read())


def proceed(job: Job, saved: Saved) -> TrainState:
    """The state of a checkpoint of this run, and what has changed since."""
    meta = saved.checkpointer.meta(saved.step)
    say(f"goes on from {saved}, saved under '{meta['strategy']}' on {meta['ranks']}")
    if meta["steps"] != job.config.steps:
        say(f"steps={meta['steps']} before, steps={job.config.steps} now: the learning rate follows the new schedule")
    say(*_other_rounding(meta, job))
    return saved.read()


def _other_rounding(meta: dict[str, Any], job: Job) -> list[str]:
    """A line for each of `_rounding` that changed; older checkpoints do not name them."""
    now = _rounding(job)
    return [
        f"{_label(name)}={meta[name]} before, {_label(name)}={value} now: the same run but for rounding"
        for name, value in now.items()
        if name in meta and meta[name] != value
    ]


def _rounding(job: Job) -> dict[str, Any]:
    settings = {name: getattr(job.config, name) for name in _ROUNDING}
    return settings | {name: job.config.model_overrides.get(name) for name in HOW_COMPUTED}


def _label(name: str) -> str:
    return f"model_overrides[{name!r}]" if name in HOW_COMPUTED else name


def _ranks_text(job: Job) -> str:
    ranks, parallel = job.plan.degrees.ranks, job.plan.parallel
    return str(ranks) if parallel.total == 1 else f"{ranks} of {parallel.total} devices ({parallel})"


def meta_of(job: Job) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it."""
    return {
        **identity(job.config),
        "shapes": true_shapes(true_state(job.plan, job.optimizer)),
        **_rounding(job),
        "steps": job.config.steps,
        "strategy": job.config.strategy,
        "data_fingerprint": dict(job.datasets.fingerprint),
        "ranks": _ranks_text(job),
    }
