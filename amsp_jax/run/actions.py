"""The hooks of the loop itself: guards of the numbers, checkpoints and validations; their errors end the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from amsp_jax.engine.eval_step import make_eval_step
from amsp_jax.engine.replicas import make_replica_check
from amsp_jax.errors import BadNumbersError, NonFiniteError
from amsp_jax.run.data import Prefetcher
from amsp_jax.run.hooks import Hook
from amsp_jax.run.job import Job
from amsp_jax.run.metrics import TrainRow, ValidationRow
from amsp_jax.run.reporter import named_sums
from amsp_jax.run.run import Run
from amsp_jax.runtime.launch import from_process_0, own_watch

VALIDATION_LIMIT_S = 600.0
"""A batch of validation compiles, the first time."""
_NUM_SHOWN = 3


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps, 0 for never, happens at this one."""
    return every > 0 and step % every == 0


class Action(Hook):
    """A hook of the loop: its errors are those of the run, not of a hook that failed."""


class NonFiniteGuard(Action):
    """Raises NonFiniteError, in all processes alike, after more non-finite steps in a row than are allowed."""

    def __init__(self, max_skipped: int) -> None:
        self._max_skipped, self._skipped_in_a_row = max_skipped, 0

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if math.isfinite(metrics.loss) and math.isfinite(metrics.grad_norm):
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        numbers = f"loss {metrics.loss:.4g} and gradient norm {metrics.grad_norm:.4g}"
        what = f"step {metrics.step}: {numbers} are not both finite"
        if self._skipped_in_a_row > self._max_skipped:
            raise NonFiniteError(what, metrics.step)
        run.say(f"{what}: no update, number {self._skipped_in_a_row} in a row of at most {self._max_skipped}")


class CompareReplicas(Action):
    """Raises BadNumbersError where replicas of the state differ."""

    def __init__(self, job: Job) -> None:
        self._every = job.config.check_replicas_every
        self._compare = make_replica_check(job.plan, job.optimizer)

    def needs_state(self, step: int) -> bool:
        return is_due(step, self._every)

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if not self.needs_state(metrics.step):
            return
        own_watch().doing("comparing replicas", VALIDATION_LIMIT_S)
        differences = self._compare(run.state)
        if differences:
            more = ["..."] if len(differences) > _NUM_SHOWN else []
            raise BadNumbersError(
                f"step {metrics.step}: replicas are no longer equal in {len(differences)} places: "
                f"{'; '.join([*map(str, differences[:_NUM_SHOWN]), *more])}. A device or its memory may be at fault: "
                "leave it out, and go on from the last checkpoint before this step."
            )


class SaveCheckpoints(Action):
    """Begins a checkpoint every so many steps and at the last one."""

    def __init__(self, every: int, last: int) -> None:
        self._every, self._last = every, last

    def needs_state(self, step: int) -> bool:
        return is_due(step, self._every) or step == self._last

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if self.needs_state(metrics.step):
            run.save()


class Validation(Action):
    """Computes the mean loss over the validation set's tokens, or over `eval_batches` of its batches."""

    def __init__(self, job: Job, report: Callable[[ValidationRow], None]) -> None:
        """Compiles nothing yet; `report` takes the numbers of each validation."""
        self._job, self._report = job, report
        self._dataset = job.datasets.validation
        self._num_batches = -(-self._dataset.num_rows // self._dataset.global_batch)
        if job.config.eval_batches is not None:
            self._num_batches = min(self._num_batches, job.config.eval_batches)
        self._evaluate = make_eval_step(job.plan, job.settings)

    def needs_state(self, step: int) -> bool:
        return is_due(step, self._job.config.eval_every) or step == self._job.config.steps

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if self.needs_state(metrics.step):
            self.validate(run)

    def before_first_step(self, run: Run) -> None:
        """Validates the parameters that the run starts from, unless an earlier command finished that."""
        if from_process_0(lambda: self._lacks(run)):
            self.validate(run)

    def _lacks(self, run: Run) -> bool:
        first = run.first_step
        if first == 0 or not is_due(first, self._job.config.eval_every):
            return first == 0
        return all(row["step"] != first for row in run.validations)

    def validate(self, run: Run) -> None:
        """Reports a validation. A stop cuts it short, to be made up for, except the one of the last step."""
        if not self._num_batches:
            return
        may_stop = run.step < self._job.config.steps
        loss = weight = 0.0
        aux: Any = None
        with Prefetcher(lambda i: self._job.load_batch(self._dataset, i), 0, self._num_batches) as batches:
            for number, batch in enumerate(batches, start=1):
                own_watch().doing(f"validating, batch {number} of {self._num_batches}", VALIDATION_LIMIT_S)
                sums = self._evaluate(run.state.params, batch)
                loss, weight = loss + float(sums.loss), weight + float(sums.weight)
                aux = sums.aux if aux is None else jax.tree.map(jnp.add, aux, sums.aux)
                if may_stop and own_watch().stops_here():
                    return
        row = ValidationRow(
            step=run.step, loss=loss / max(weight, 1.0), num_tokens=round(weight), aux=named_sums(jax.device_get(aux))
        )
        self._report(row)


def non_finite_leaves(job: Job, run: Run, step: int) -> Any:
    """What is not finite in the batch of a step that was just passed over."""
    from amsp_jax.engine.nonfinite import make_find_nonfinite

    own_watch().doing("looking for what is not finite", VALIDATION_LIMIT_S)
    find = make_find_nonfinite(job.plan, job.settings)
    state = run.next_state
    return find(state.params, job.load_batch(job.datasets.train, step - 1), state.seed, np.int32(step - 1))
