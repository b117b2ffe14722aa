"""The training loop, from a checked job to its last checkpoint.

It is one step ahead of what it reads: it dispatches a step, then waits for the numbers of the step before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from amsp_jax.engine.eval_step import make_eval_step
from amsp_jax.engine.nonfinite import NonFinite, make_find_nonfinite
from amsp_jax.engine.replicas import make_replica_check
from amsp_jax.engine.state import TrainState
from amsp_jax.errors import BadNumbersError, NonFiniteError, Stopped
from amsp_jax.model import Model, Params
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import Prefetcher, Source
from amsp_jax.run.data.source import state_after
from amsp_jax.run.generate import Sampling, generate, make_next_logits
from amsp_jax.run.job import Job, TrainStep, compile_step, prepare
from amsp_jax.run.metrics import VALIDATION_FILE, ValidationRow, read_rows
from amsp_jax.run.plots import plot_losses
from amsp_jax.run.reporter import Reporter
from amsp_jax.run.resume import foreign_checkpoint, fresh, meta_of, own_checkpoint, proceed
from amsp_jax.run.run_folder import TOKENIZER_FILE, RunFolder, find_run_folder
from amsp_jax.runtime.launch import Layout, from_process_0, own_watch, say

_SAMPLE_PROMPT_TOKENS, _SAMPLE_TOKENS = 16, 64
# A file system that takes longer is taken for lost; a batch of validation compiles, the first time.
_SAVE_LIMIT_S, _VALIDATION_LIMIT_S = 1800.0, 600.0
# Batches that take longer are of files that hang, which the step that wants them tells.
_SETTLE_S = 10.0
_NUM_SHOWN = 3
_ADVICE = {
    "stop": "on_nonfinite='skip' passes over such batches; a lower learning rate may avoid them.",
    "skip": "That is more in a row than max_skipped allows; a lower learning rate or an earlier checkpoint may help.",
}


def train(
    config: TrainConfig,
    model: Model,
    vocab_size: int,
    layout: Layout,
    *,
    notes: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    closing: Callable[[Path, int], str] | None = None,
    is_dry_run: bool = False,
    data: Source | None = None,
    validation: Source | None = None,
) -> Path:
    """Trains until `steps` or `stop_after`; goes on with the run that `run_dir` holds.

    Args:
      config: the settings.
      model: the model.
      vocab_size: ids that it knows.
      layout: the devices.
      notes: lines to print with the plan, such as the choice of attention.
      files: names and texts to keep in the run folder.
      closing: a line to print at the end, of the run folder and the step that this process began at.
      is_dry_run: check and print all, write nothing and return.
      data: rows of training, in place of the corpus that `config.data` names.
      validation: rows of validation, with `data` only.

    Returns:
      The run folder.

    Raises:
      UserError: anything that cannot work, before a file is written.
      Stopped: a signal asked for it; what was trained is saved.
      BadNumbersError: the numbers went bad beyond what the settings allow.
    """
    watch = own_watch()
    watch.doing("preparing the data")
    folder = _find_folder(config)
    job = prepare(config, model, vocab_size, layout, data, validation)
    about = str(job.plan), job.datasets.description, job.batch_line, *notes, *job.notes
    say(*([str(layout)] if is_dry_run else []), *about)
    before = own_checkpoint(folder, job)
    first, last = before.step if before else 0, config.stop_after or config.steps
    if first >= last:
        say(f"{folder.path} is at step {first} already: nothing to do; raise {_last_name(config)}={last} to train on")
        return folder.path
    if folder.is_same_run and not before:
        say(f"{folder.path} has no complete checkpoint: starts from the beginning")
    weights = foreign_checkpoint(config.init_from, job) if config.init_from and not before else None
    if is_dry_run:
        say(f"dry run: it would train steps {first + 1} to {last} in {folder.path}; nothing is written")
        return folder.path
    watch.nothing_to_save(f"the last checkpoint is {before}" if before else "there is no checkpoint yet")

    watch.doing("compiling the step")
    step = compile_step(job)
    watch.doing("making the state")
    state = proceed(job, before) if before else fresh(job, weights)
    with _claimed(folder, job, files or {}) as folder:
        if before:
            before.set_damaged_aside()
        state, done = _loop(job, step, state, first, last, folder)
        if done < last:
            raise Stopped(
                f"stopped by {watch.stop_signal} at step {done} of {config.steps}, which is saved; "
                f"the same command, with run_dir={folder.path}, goes on from there"
            )
        watch.nothing_to_save(f"all is saved at step {last}")
        _finish(job, state, folder, last)
        if closing:
            from_process_0(lambda: say(*filter(None, [closing(folder.path, first)])))
    return folder.path


def _find_folder(config: TrainConfig) -> RunFolder:
    """Process 0's choice, as a folder may change between two looks."""

    def find() -> tuple[str, bool, bool]:
        found = find_run_folder(config)
        return str(found.path), found.is_same_run, found.is_numbered

    path, is_same_run, is_numbered = from_process_0(find)
    return RunFolder(Path(path), is_same_run, is_numbered)


def _last_name(config: TrainConfig) -> str:
    return "stop_after" if config.stop_after else "steps"


@contextlib.contextmanager
def _claimed(folder: RunFolder, job: Job, files: Mapping[str, str]) -> Iterator[RunFolder]:
    """The folder as process 0 made it, with its first files, held against other commands."""
    with contextlib.ExitStack() as stack:

        def claim() -> str:
            mine = stack.enter_context(folder.claimed(job.config))
            for name, text in {**files, **_files_of(job)}.items():
                mine.write(name, text)
            if job.datasets.tokenizer is not None:
                mine.write(TOKENIZER_FILE, job.datasets.tokenizer.to_json())
            return str(mine.path)

        yield dataclasses.replace(folder, path=Path(from_process_0(claim)))


def _files_of(job: Job) -> dict[str, str]:
    corrupt = job.datasets.corrupt
    listed = {"corrupt_records.txt": "\n".join(corrupt) + "\n"} if corrupt else {}
    return {"plan.txt": f"{job.plan}\n", **listed}


def _loop(
    job: Job, step: TrainStep, state: TrainState, first: int, last: int, folder: RunFolder
) -> tuple[TrainState, int]:
    """Steps `first + 1` to `last`, with their validations and checkpoints; the state and the step that were reached."""
    config = job.config
    with contextlib.ExitStack() as stack:
        checkpointer = Checkpointer(folder.checkpoints, config.keep_checkpoints, config.keep_every or None)
        stack.enter_context(_closed_by_all(checkpointer))
        reporter = Reporter(
            folder.path,
            first,
            batch=job.batch,
            learning_rates=job.learning_rates,
            numbers=job.model.numbers,
            peak_flops=job.layout.cluster().peak_flops,
            max_skipped=config.max_skipped if config.on_nonfinite == "skip" else 0,
        )
        stack.enter_context(contextlib.closing(reporter))
        running = _Running(job, step, state, first, last, checkpointer, reporter)
        if from_process_0(lambda: _lacks_validation(config, folder, first)):
            running.validate()
        batches = stack.enter_context(Prefetcher(lambda i: job.load_batch(job.datasets.train, i), first, last))
        own_watch().can_save()
        reporter.start_clock()
        try:
            while running.number < last and not own_watch().stops_here():
                running.advance(batches)
            reporter.flush()
        except NonFiniteError as error:
            raise BadNumbersError(
                f"{error}; {running.non_finite_leaves(error.step)}. {_ADVICE[config.on_nonfinite]}"
            ) from None
        if running.number > first:
            running.save()
        own_watch().doing(f"writing the checkpoint of step {running.number}", _SAVE_LIMIT_S)
    return running.state, running.number


@contextlib.contextmanager
def _closed_by_all(checkpointer: Checkpointer) -> Iterator[None]:
    """Waits for the saves at the end, unless one process alone fails: the others would never come to finish one."""
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1 or isinstance(error, BadNumbersError):
            checkpointer.close()
        raise
    checkpointer.close()


def _lacks_validation(config: TrainConfig, folder: RunFolder, first: int) -> bool:
    """Whether the validation of the first step's parameters is yet to do: a stop may have ended it."""
    if first == 0 or not _is_due(first, config.eval_every):
        return first == 0
    path = folder.path / VALIDATION_FILE
    return not path.exists() or all(row["step"] != first for row in read_rows(path))


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


class _Running:
    """The state between two steps, and what is done with it there."""

    def __init__(
        self,
        job: Job,
        step: TrainStep,
        state: TrainState,
        number: int,
        last: int,
        checkpointer: Checkpointer,
        reporter: Reporter,
    ) -> None:
        self.state, self.number, self._last = state, number, last
        self._job, self._step, self._checkpointer, self._reporter = job, step, checkpointer, reporter
        self._is_first = True
        self._validate = _make_validation(job, reporter)
        self._compare = make_replica_check(job.plan, job.optimizer)

    def advance(self, batches: Prefetcher[dict[str, jax.Array]]) -> None:
        """One step, and what is due after it."""
        config = self._job.config
        self.number += 1
        # One whose data do not come is then a step behind the others.
        batch = next(batches)
        own_watch().step(self.number, config.hang_timeout_s)
        self.state, metrics = self._step(self.state, batch)
        if self._is_first:
            # Before the next batch is asked for: see Prefetcher.
            jax.block_until_ready(metrics)
            self._is_first = False
        self._reporter.dispatched(self.number, metrics)
        self._checkpointer.raise_failed()
        due = [
            do
            for do, is_due in (
                (self.compare, _is_due(self.number, config.check_replicas_every)),
                (self.save, _is_due(self.number, config.checkpoint_every) or self.number == self._last),
                (self.validate, _is_due(self.number, config.eval_every) or self.number == config.steps),
            )
            if is_due
        ]
        if due:
            self._reporter.flush()
            batches.settle(_SETTLE_S)
            for do in due:
                do()
            self._reporter.start_clock()

    def validate(self) -> None:
        """Reports the validation loss. A stop cuts it short, to be made up for, but not that of the last step."""
        self._validate(self.number, self.state.params, self.number < self._job.config.steps)

    def save(self) -> None:
        """Begins a checkpoint; a step that has one is left alone."""
        own_watch().doing(f"saving step {self.number}", _SAVE_LIMIT_S)
        own = state_after(self._job.datasets, self.number)
        self._checkpointer.save(self.number, self.state, meta_of(self._job), own)

    def compare(self) -> None:
        """Raises where replicas differ."""
        own_watch().doing("comparing replicas", _VALIDATION_LIMIT_S)
        differences = self._compare(self.state)
        if differences:
            shown = "; ".join(
                [*map(str, differences[:_NUM_SHOWN]), *(["..."] if len(differences) > _NUM_SHOWN else [])]
            )
            raise BadNumbersError(
                f"step {self.number}: replicas are no longer equal in {len(differences)} places: {shown}. A device or "
                "its memory may be at fault: leave it out, and go on from the last checkpoint before this step."
            )

    def non_finite_leaves(self, step: int) -> NonFinite:
        """What is not finite in the batch of a step that was just passed over."""
        own_watch().doing("looking for what is not finite", _VALIDATION_LIMIT_S)
        job = self._job
        find = make_find_nonfinite(job.plan, job.settings)
        return find(
            self.state.params, job.load_batch(job.datasets.train, step - 1), self.state.seed, np.int32(step - 1)
        )


def _make_validation(job: Job, reporter: Reporter) -> Callable[[int, Params, bool], None]:
    """`validate(step, params, may_stop)`: the mean loss over the validation set's tokens, or of `eval_batches` of it.

    Where it may, a stop ends it early, without a row.
    """
    dataset = job.datasets.validation
    num_batches = -(-dataset.num_rows // dataset.global_batch)
    if job.config.eval_batches is not None:
        num_batches = min(num_batches, job.config.eval_batches)
    evaluate = make_eval_step(job.plan, job.settings)

    def validate(step: int, params: Params, may_stop: bool) -> None:
        if not num_batches:
            return
        loss = weight = 0.0
        with Prefetcher(lambda i: job.load_batch(dataset, i), 0, num_batches) as batches:
            for number, batch in enumerate(batches, start=1):
                own_watch().doing(f"validating, batch {number} of {num_batches}", _VALIDATION_LIMIT_S)
                sums = evaluate(params, batch)
                loss, weight = loss + float(sums.loss), weight + float(sums.weight)
                if may_stop and own_watch().stops_here():
                    return
        reporter.validation(ValidationRow(step=step, loss=loss / max(weight, 1.0), num_tokens=round(weight)))

    return validate


def _finish(job: Job, state: TrainState, folder: RunFolder, last: int) -> None:
    """What a person wants to see at the end."""
    if last < job.config.steps:
        say(
            f"stopped and saved at step {last} of {job.config.steps}; "
            f"the same command without stop_after={last}, with run_dir={folder.path}, goes on from there"
        )
    else:
        from_process_0(lambda: _say_validation(folder))
        _say_sample(job, state.params)
    title = f"{folder.path.name}: {job.model.name}, {job.plan.strategy}"
    from_process_0(lambda: say(f"run folder: {folder.path}", f"loss curve: {plot_losses(folder.path, title)}"))


def _say_validation(folder: RunFolder) -> None:
    rows = read_rows(folder.path / VALIDATION_FILE)
    if rows:
        say(f"validation loss: {rows[-1]['loss']:.4f}; before training it was {rows[0]['loss']:.4f}")


def _say_sample(job: Job, params: Params) -> None:
    """Continues the beginning of a validation window."""
    tokenizer = job.datasets.tokenizer
    if tokenizer is None or job.model.logits is None or not job.datasets.validation.num_rows:
        return
    prompt = job.datasets.validation.rows(0, np.array([0]))["tokens"][0, :_SAMPLE_PROMPT_TOKENS].tolist()
    next_logits = make_next_logits(job.model, job.plan, job.settings, job.batch.seq_len)
    drawn = generate(next_logits, params, prompt, Sampling(), tokenizer.end_of_document, tokenizer.vocab_size)
    text = tokenizer.decode(list(islice(drawn, _SAMPLE_TOKENS)))
    say("sample, the prompt before the bar:", f"{tokenizer.decode(prompt)}|{text}")
