"""A run as hooks and the caller of `Trainer.fit` see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from amsp_jax.engine.leaves import LeafPlan, crop
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.state import TrainState
from amsp_jax.errors import UserError
from amsp_jax.model import Model, Params
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.job import Job
from amsp_jax.run.metrics import TRAIN_FILE, VALIDATION_FILE, read_rows
from amsp_jax.runtime.launch import say


def _of_true_shape(x: jax.Array, leaf: LeafPlan) -> jax.Array:
    # Compiled, as an array of several hosts cannot be sliced outside of a program.
    return jax.jit(crop, static_argnums=1)(x, leaf.shape) if leaf.is_padded else x


class Run:
    """A run that trains, or has trained.

    Attributes:
      run_dir: the run folder.
      first_step: steps that were done before this process began.
      step: the newest step whose numbers are known; in a hook, the step that the hook is called for.
      is_process_0: whether this process is the one of several that writes files.
      error: what ended the run before its last step; None if nothing did.
    """

    def __init__(self, job: Job, run_dir: Path, first_step: int, state: TrainState | Callable[[], TrainState]) -> None:
        """`state` is the one after `first_step` steps, or a function that reads it when it is asked for."""
        self.run_dir, self.first_step, self.step = run_dir, first_step, first_step
        self.is_process_0 = jax.process_index() == 0
        self.error: BaseException | None = None
        self.job = job
        self._state, self._state_step = state, first_step
        self._print: Callable[[str], None] | None = None
        self._save: Callable[[], None] | None = None

    @property
    def config(self) -> TrainConfig:
        """The settings."""
        return self.job.config

    @property
    def model(self) -> Model:
        """The model that is trained."""
        return self.job.model

    @property
    def plan(self) -> Plan:
        """The plan that the state is sharded by."""
        return self.job.plan

    @property
    def state(self) -> TrainState:
        """The training state after `step` steps.

        The next step overwrites it, so a hook that keeps it for later must copy it.

        Raises:
          UserError: the devices are already in the next step.
        """
        if self._state_step != self.step:
            raise UserError(
                f"run.state is of step {self._state_step} already, and the numbers are of step {self.step}: return "
                f"True from needs_state({self.step}) of the hook, or use amsp_jax.hooks.every(n, ...)"
            )
        return self.next_state

    @property
    def params(self) -> Params:
        """The float32 parameters of `state`, of true shape: the model's functions take them as they are.

        Where no leaf is padded they are the state's own arrays, which the next step overwrites: a hook that keeps them
        for later must copy them. On several hosts every process must ask for them.
        """
        return jax.tree.map(_of_true_shape, self.state.params, self.plan.leaves)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, of earlier commands that trained this run too."""
        return self._rows(TRAIN_FILE)

    @property
    def validations(self) -> list[dict[str, Any]]:
        """The rows of `validation.jsonl`."""
        return self._rows(VALIDATION_FILE)

    def save(self) -> None:
        """Begins a checkpoint of `state`, in every process alike; a step that has one is left alone.

        Raises:
          UserError: the run has ended, `state` is not there, or the files cannot be written.
        """
        if self._save is None:
            raise UserError(f"{self.run_dir}: the run has ended; its last checkpoint is that of step {self.step}")
        # Refuses where the devices are a step further: the other processes may not be.
        _ = self.state
        self._save()

    def say(self, *lines: str) -> None:
        """Prints lines in process 0, above the live line if there is one."""
        if self._print is None:
            say(*lines)
            return
        for line in lines:
            self._print(line)

    def print_with(self, print_line: Callable[[str], None] | None) -> None:
        """From now on `say` prints by this function in this process; None: as at the start."""
        self._print = print_line

    # The loop's side.

    def stepped(self, step: int, state: TrainState) -> None:
        """The devices are now in `step`, whose state this will be."""
        self._state, self._state_step = state, step

    def saves_by(self, save: Callable[[], None] | None) -> None:
        """What `save` calls; None: the run has ended."""
        self._save = save

    @property
    def next_state(self) -> TrainState:
        """The state of the step that was started last, whether its numbers are known or not."""
        if callable(self._state):
            self._state = self._state()
        return self._state

    @property
    def started_step(self) -> int:
        """The step that was started last."""
        return self._state_step

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        return read_rows(path) if path.exists() else []
