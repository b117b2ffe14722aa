"""Hooks: what is done beside training, at its start, after each step, validation and checkpoint, and at its end.

    class Wandb(amsp.hooks.Hook):
        def on_step(self, run, metrics):
            if run.is_process_0:
                wandb.log({"loss": metrics.loss, **metrics.aux}, step=metrics.step)

    amsp.Trainer(..., hooks=[Wandb(), amsp.hooks.every(500, my_eval)])

The files of metrics, TensorBoard's events, the progress line and the picture of the loss are hooks too: `defaults()`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amsp_jax.errors import UserError
from amsp_jax.run.loss_spikes import LossSpikes
from amsp_jax.run.metrics import EventWriter, MetricsWriter, ProgressLine, TrainRow, ValidationRow

if TYPE_CHECKING:
    from amsp_jax.run.run import Run


class Hook:
    """A hook that does nothing; a subclass overrides the methods that it needs.

    The loop starts a step before it reads the numbers of the step before. When `on_step` gets the numbers of a step,
    the devices may already be in the next one, and `run.state` is refused. A hook whose `on_step` reads `run.state` or
    `run.params` returns True from `needs_state` for that step; the loop then waits for the step, which costs time.

    On several processes every process calls every hook, in the same order at the same step. A hook that computes with
    `run.params` does so in every process; one that writes a file does so where `run.is_process_0`.

    A hook that raises ends the run: it gets no more calls, a checkpoint is saved, and `Trainer.fit` raises `HookError`,
    which names the hook and the step.
    """

    @property
    def name(self) -> str:
        """The name of the hook in messages."""
        return type(self).__name__

    def needs_state(self, step: int) -> bool:
        """Whether `on_step` reads `run.state` or `run.params` at this step."""
        return False

    def on_start(self, run: Run) -> None:
        """Runs once, before the first step; the run folder is there."""

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        """Runs after each step, with its numbers."""

    def on_eval(self, run: Run, metrics: ValidationRow) -> None:
        """Runs after each validation, with its numbers."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Runs when a checkpoint is complete on disk.

        A lone process calls it at the first step after that; several processes call it at the next checkpoint or at
        the end, as only there they know alike that the files are complete.
        """

    def on_end(self, run: Run) -> None:
        """Runs once, however the run ended; `run.error` is None if it reached its last step.

        Where `run.error` is set the other processes may be gone: compute nothing on the devices then.
        """


def every(num_steps: int, call: Callable[[Run, TrainRow], Any]) -> Hook:
    """Calls `call(run, metrics)` after each step that `num_steps` divides; it may read `run.state` and `run.params`.

    Raises:
      UserError: `num_steps` is no whole number above 0, or `call` cannot be called.
    """
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
        raise UserError(f"every({num_steps!r}, ...): the number of steps must be a whole number above 0")
    if not callable(call):
        raise UserError(f"every({num_steps}, {call!r}): it calls a function(run, metrics), and this cannot be called")
    return _Every(num_steps, call)


class _Every(Hook):
    def __init__(self, num_steps: int, call: Callable[[Run, TrainRow], Any]) -> None:
        self._num_steps, self._call = num_steps, call

    @property
    def name(self) -> str:
        return getattr(self._call, "__name__", type(self._call).__name__)

    def needs_state(self, step: int) -> bool:
        return step % self._num_steps == 0

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if self.needs_state(metrics.step):
            self._call(run, metrics)


class JsonLines(Hook):
    """Writes `metrics.jsonl` and `validation.jsonl`, a line for each step and each validation."""

    def __init__(self) -> None:
        self._writer: MetricsWriter | None = None

    def on_start(self, run: Run) -> None:
        if run.is_process_0:
            self._writer = MetricsWriter(run.run_dir, run.first_step or None)

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if self._writer:
            self._writer.train(metrics)

    def on_eval(self, run: Run, metrics: ValidationRow) -> None:
        if self._writer:
            self._writer.validation(metrics)

    def on_end(self, run: Run) -> None:
        if self._writer:
            self._writer.close()


class TensorBoard(Hook):
    """Writes TensorBoard's events into the folder `tensorboard`; does nothing if tensorboard is not installed."""

    def __init__(self) -> None:
        self._events: EventWriter | None = None

    def on_start(self, run: Run) -> None:
        if run.is_process_0 and importlib.util.find_spec("tensorboard") is not None:
            self._events = EventWriter(run.run_dir / "tensorboard", run.first_step)

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if self._events:
            self._events.add("train", metrics)

    def on_eval(self, run: Run, metrics: ValidationRow) -> None:
        if self._events:
            self._events.add("validation", metrics)

    def on_end(self, run: Run) -> None:
        if self._events:
            self._events.close()


class Progress(Hook):
    """Shows a live line with the step, the loss and the time left; a line now and then where there is no terminal."""

    def __init__(self) -> None:
        self._line: ProgressLine | None = None

    def on_start(self, run: Run) -> None:
        if run.is_process_0:
            self._line = ProgressLine(run.config.steps, stream=sys.stdout)
            run.print_with(self._line.print)

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if self._line:
            self._line.update(metrics)

    def on_eval(self, run: Run, metrics: ValidationRow) -> None:
        run.say(f"step {metrics.step}: validation loss {metrics.loss:.4f} over {metrics.num_tokens:,} tokens")

    def on_end(self, run: Run) -> None:
        if self._line:
            self._line.close()
            run.print_with(None)


class LossSpikeNotes(Hook):
    """Prints a line where the loss stands out from the losses before."""

    def __init__(self) -> None:
        self._spikes = LossSpikes()

    def on_step(self, run: Run, metrics: TrainRow) -> None:
        if line := self._spikes.seen(metrics.step, metrics.loss, metrics.grad_norm):
            run.say(line)


class LossPlot(Hook):
    """Draws `loss.png` from the files of metrics when the run has reached its last step."""

    def on_end(self, run: Run) -> None:
        if run.error is not None or not run.is_process_0:
            return
        # matplotlib takes a second to import.
        from amsp_jax.run.plots import plot_losses

        title = f"{run.run_dir.name}: {run.model.name}, {run.plan.strategy}"
        run.say(f"run folder: {run.run_dir}", f"loss curve: {plot_losses(run.run_dir, title)}")


def defaults() -> Sequence[Hook]:
    """The hooks of a run for which nothing else is asked."""
    return [JsonLines(), TensorBoard(), Progress(), LossSpikeNotes(), LossPlot()]
