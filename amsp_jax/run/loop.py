"""The training loop: steps, and the hooks that are called between them.

It is one step ahead of what it reads: it starts a step, then waits for the numbers of the step before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from amsp_jax.errors import BadNumbersError, HookError, NonFiniteError, Stopped, UserError, text_of
from amsp_jax.run.actions import Action, CompareReplicas, NonFiniteGuard, SaveCheckpoints, Validation, non_finite_leaves
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.data import Prefetcher
from amsp_jax.run.data.source import state_after
from amsp_jax.run.hooks import Hook
from amsp_jax.run.job import TrainStep
from amsp_jax.run.metrics import TrainRow, ValidationRow
from amsp_jax.run.reporter import Reporter
from amsp_jax.run.resume import meta_of
from amsp_jax.run.run import Run
from amsp_jax.runtime.launch import own_watch

# A file system that takes longer is taken for lost.
_SAVE_LIMIT_S = 1800.0
# Batches that take longer are of files that hang, which the step that wants them tells.
_SETTLE_S = 10.0
_ADVICE = {
    "stop": "on_nonfinite='skip' passes over such batches; a lower learning rate may avoid them.",
    "skip": "That is more in a row than max_skipped={max_skipped} allows; a lower learning rate or an earlier "
    "checkpoint may help.",
}
_UNCHECKED_IDS = (
    "The ids of data={data} were not checked, as the model does not say how many it knows: with vocab_size given to "
    "Model.from_nnx, Model.from_loss or Model, an id outside the vocabulary is named."
)


class Loop:
    """Trains a run up to a step; hooks and actions see each step, validation and checkpoint."""

    def __init__(self, run: Run, step: TrainStep, last: int, *, files: Sequence[Hook], hooks: Sequence[Hook]) -> None:
        """Prepares the loop; nothing runs and nothing is written.

        Args:
          run: with the state to start from.
          step: the compiled training step.
          last: the step to train up to.
          files: hooks that see a step before it is judged: what they write is there if the run ends at it.
          hooks: hooks that see a step after the checkpoint and the validation that are due at it.
        """
        job = run.job
        self._run, self._job, self._step, self._last = run, job, step, last
        self._validation = Validation(job, self._evaluated)
        max_skipped = job.config.max_skipped if job.config.on_nonfinite == "skip" else 0
        actions = [
            NonFiniteGuard(max_skipped),
            CompareReplicas(job),
            SaveCheckpoints(job.config.checkpoint_every, last),
        ]
        self._hooks: list[Hook] = [*files, *actions, self._validation, *hooks]
        self._failed: HookError | None = None
        # The step of the newest checkpoint that this process began, and whether its hooks are still to be called.
        self._saved: int | None = None
        self._is_saving = False

    def train(self, directory: Path) -> None:
        """Trains until the last step, a stop or a hook that raises, and saves; `directory` is that of the checkpoints.

        Raises:
          BadNumbersError: the numbers went bad beyond what the settings allow.
          HookError: a hook raised; what was trained is saved.
        """
        run, job = self._run, self._job
        with contextlib.ExitStack() as stack:
            self._checkpointer = Checkpointer(directory, job.config.keep_checkpoints, job.config.keep_every or None)
            stack.enter_context(_closed_by_all(self._checkpointer))
            run.saves_by(self._save)
            stack.callback(run.saves_by, None)
            self._call_all("on_start")
            if self._failed:
                raise self._failed
            self._reporter = Reporter(
                self._stepped,
                batch=job.batch,
                learning_rates=job.learning_rates,
                numbers=job.model.numbers,
                peak_flops=job.layout.cluster().peak_flops,
            )
            stack.enter_context(contextlib.closing(self._reporter))
            self._validation.before_first_step(run)
            first = run.first_step
            batches = stack.enter_context(
                Prefetcher(lambda i: job.load_batch(job.datasets.train, i), first, self._last)
            )
            own_watch().can_save()
            self._reporter.start_clock()
            with self._explained():
                while run.started_step < self._last and not self._ends():
                    self._advance(batches)
                self._reporter.flush()
            self._save_the_end()
        self._checkpoint_done()
        if self._failed:
            raise self._failed

    def end(self, error: BaseException | None) -> None:
        """Tells the hooks that the run has ended.

        Raises:
          HookError: one of them raised, where there was no error before.
        """
        self._run.error = error
        self._failed = None
        self._call_all("on_end")
        if self._failed and error is None:
            raise self._failed

    def _ends(self) -> bool:
        # Every process asks at each boundary; one whose hook raised has asked all of them to stop.
        stops = own_watch().stops_here()
        return stops or (self._failed is not None and jax.process_count() == 1)

    def _advance(self, batches: Prefetcher[dict[str, jax.Array]]) -> None:
        """Starts a step, hears of the step before, and of this one too where a hook needs its state."""
        number = self._run.started_step + 1
        # A process whose data do not come is then a step behind the others.
        batch = self._next(batches)
        own_watch().step(number, self._job.config.hang_timeout_s)
        state, metrics = self._step(self._run.next_state, batch)
        self._run.stepped(number, state)
        batches.used_by(metrics)
        self._reporter.dispatched(number, metrics)
        self._checkpointer.raise_failed()
        if self._is_saving and jax.process_count() == 1 and not self._checkpointer.is_saving():
            # It may have failed since the line before last.
            self._checkpointer.raise_failed()
            self._checkpoint_done()
        if self._needs_state(number):
            self._reporter.flush()
            batches.settle(_SETTLE_S)
            self._reporter.start_clock()

    def _needs_state(self, number: int) -> bool:
        """Whether a hook reads the state of this step; one that raises is left out, as in `_call_all`."""
        needs = False
        for hook in list(self._hooks):
            try:
                needs = needs or hook.needs_state(number)
            except Exception as error:
                if isinstance(hook, Action):
                    raise
                self._fail(hook, "needs_state", error)
        return needs

    def _next(self, batches: Prefetcher[dict[str, jax.Array]]) -> dict[str, jax.Array]:
        """The next batch; where the data fail, what was trained is saved before the error goes on."""
        try:
            return next(batches)
        except Exception as error:
            run = self._run
            # Of several processes the others are in the step already, and would not come to save with this one.
            if jax.process_count() > 1 or run.started_step == run.first_step:
                raise
            self._reporter.flush()
            self._save()
            self._checkpointer.wait()
            saved = f"step {run.started_step} is saved in {run.run_dir}"
            if isinstance(error, UserError):
                raise UserError(f"{str(error).rstrip('.')}; {saved}") from error.__cause__
            error.add_note(saved)
            raise

    def _stepped(self, row: TrainRow) -> None:
        self._run.step = row.step
        self._call_all("on_step", row)

    def _evaluated(self, row: ValidationRow) -> None:
        self._call_all("on_eval", row)

    def _save(self) -> None:
        """Begins a checkpoint of the newest state, unless there is one."""
        number = self._run.started_step
        if number == self._saved:
            return
        own_watch().doing(f"saving step {number}", _SAVE_LIMIT_S)
        own = state_after(self._job.datasets, number)
        self._checkpointer.save(number, self._run.next_state, meta_of(self._job), own)
        # The save waited for the one before.
        self._checkpoint_done()
        self._saved, self._is_saving = number, True

    def _checkpoint_done(self) -> None:
        if self._is_saving:
            self._is_saving = False
            self._call_all("on_checkpoint", self._checkpointer.directory / str(self._saved))

    def _save_the_end(self) -> None:
        run = self._run
        try:
            if run.started_step > run.first_step:
                self._save()
            own_watch().doing(f"writing the checkpoint of step {run.started_step}", _SAVE_LIMIT_S)
            if self._failed:
                self._checkpointer.wait()
        except UserError as error:
            if not self._failed:
                raise
            raise HookError(f"{self._failed}; {error}") from self._failed.__cause__
        if self._failed:
            saved = f"step {run.started_step} is saved in {run.run_dir}"
            nothing = "nothing was trained"
            text = f"{self._failed}; {saved if run.started_step else nothing}"
            self._failed = _with_cause(HookError(text), self._failed.__cause__)

    def _call_all(self, event: str, *values: Any) -> None:
        """Calls a method of each hook; one that raises is left out from then on, and the run ends after this step."""
        for hook in list(self._hooks):
            try:
                getattr(hook, event)(self._run, *values)
            except (BadNumbersError, Stopped):
                raise
            except Exception as error:
                if isinstance(hook, Action):
                    raise
                self._fail(hook, event, error)

    def _fail(self, hook: Hook, event: str, error: Exception) -> None:
        # By identity: a hook of anyone's may compare itself in its own way.
        self._hooks = [other for other in self._hooks if other is not hook]
        name, what = _hook_name(hook), text_of(error)
        failure = HookError(f"hook {name} failed in {event} at step {self._run.step}: {what}")
        if self._failed is None:
            self._failed = _with_cause(failure, error)
            if jax.process_count() > 1:
                own_watch().ask_to_stop(f"hook {name} of process {jax.process_index()}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says of a loss that is not finite where it comes from."""
        try:
            yield
        except NonFiniteError as error:
            leaves = non_finite_leaves(self._job, self._run, error.step)
            config = self._job.config
            advice = _ADVICE[config.on_nonfinite].format(max_skipped=config.max_skipped)
            if self._job.model.vocab_size is None:
                advice += f" {_UNCHECKED_IDS.format(data=config.data)}"
            raise BadNumbersError(f"{error}; {leaves}. {advice}") from None


def _hook_name(hook: Hook) -> str:
    """The hook's own name; its class's where asking for it raises."""
    try:
        return str(hook.name)
    except Exception:
        return type(hook).__name__


def _with_cause(error: HookError, cause: BaseException | None) -> HookError:
    error.__cause__ = cause
    return error


@contextlib.contextmanager
def _closed_by_all(checkpointer: Checkpointer) -> Iterator[None]:
    """Waits for the saves at the end, unless one process alone fails: the others would never come to finish one."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, BadNumbersError):
            # The first error is the one to report.
            with contextlib.suppress(UserError):
                checkpointer.close()
        raise
    checkpointer.close()
