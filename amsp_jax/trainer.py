"""The training loop, from a checked job to its last checkpoint.

It is one step ahead of what it reads: it dispatches a step, then waits for the numbers of the step before.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from amsp_jax.checkpoint import Checkpointer
from amsp_jax.config import TrainConfig
from amsp_jax.data import Prefetcher
from amsp_jax.generate import Sampling, generate, make_next_logits
from amsp_jax.job import Job, TrainStep, compile_step, prepare
from amsp_jax.launch import Layout, from_process_0, say
from amsp_jax.metrics import VALIDATION_FILE, ValidationRow, read_rows
from amsp_jax.model import Model, Params
from amsp_jax.plots import plot_losses
from amsp_jax.reporter import Reporter
from amsp_jax.resume import foreign_checkpoint, fresh, meta_of, own_checkpoint, proceed
from amsp_jax.run_folder import TOKENIZER_FILE, RunFolder, find_run_folder
from amsp_jax.state import TrainState
from amsp_jax.step import make_eval_step

_SAMPLE_PROMPT_TOKENS, _SAMPLE_TOKENS = 16, 64


def train(
    config: TrainConfig,
    model: Model,
    vocab_size: int,
    layout: Layout,
    *,
    notes: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
    closing: Callable[[Path, int], str] | None = None,
) -> Path:
    """Trains until STEPS or STOP_AFTER; goes on with the run that RUN_DIR holds.

    Args:
      config: the settings.
      model: the model.
      vocab_size: ids that it knows.
      layout: the devices.
      notes: lines to print with the plan, such as the choice of attention.
      files: names and texts to keep in the run folder.
      closing: a line to print at the end, of the run folder and the step that this process began at.

    Returns:
      The run folder.

    Raises:
      UserError: anything that cannot work, before a file is written.
    """
    folder = _find_folder(config)
    job = prepare(config, model, vocab_size, layout)
    say(str(job.plan), job.datasets.description, f"batch: {job.batch}", *notes)
    before = own_checkpoint(folder, job)
    first, last = before.step if before else 0, config.stop_after or config.steps
    if first >= last:
        say(f"{folder.path} is at step {first} already: nothing to do until {_last_name(config)} is more than {last}")
        return folder.path
    if folder.is_same_run and not before:
        say(f"{folder.path} has no complete checkpoint: starts from the beginning")
    weights = foreign_checkpoint(config.init_from, job) if config.init_from and not before else None

    step = compile_step(job)
    state = proceed(job, before) if before else fresh(job, weights)
    with _claimed(folder, job, files or {}) as folder, _interruptible(folder):
        state = _loop(job, step, state, first, last, folder)
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
    return "STOP_AFTER" if config.stop_after else "STEPS"


@contextlib.contextmanager
def _claimed(folder: RunFolder, job: Job, files: Mapping[str, str]) -> Iterator[RunFolder]:
    """The folder as process 0 made it, with its first files, held against other commands."""
    with contextlib.ExitStack() as stack:

        def claim() -> str:
            mine = stack.enter_context(folder.claimed(job.config))
            for name, text in {**files, "plan.txt": f"{job.plan}\n"}.items():
                mine.write(name, text)
            if job.datasets.tokenizer is not None:
                mine.write(TOKENIZER_FILE, job.datasets.tokenizer.to_json())
            return str(mine.path)

        yield dataclasses.replace(folder, path=Path(from_process_0(claim)))


@contextlib.contextmanager
def _interruptible(folder: RunFolder) -> Iterator[None]:
    """Adds to a Ctrl-C what the person who pressed it wants to know."""
    try:
        yield
    except KeyboardInterrupt:
        there = folder.checkpoints.is_dir()
        step = Checkpointer(folder.checkpoints, keep=None).latest_step() if there else None
        again = f"--gin.RUN_DIR={folder.path}"
        if step is None:
            raise KeyboardInterrupt(f"no checkpoint yet; {again} starts from the beginning") from None
        saved = folder.checkpoints / str(step)
        raise KeyboardInterrupt(f"the last checkpoint is {saved}; {again} goes on from there") from None


def _loop(job: Job, step: TrainStep, state: TrainState, first: int, last: int, folder: RunFolder) -> TrainState:
    """Steps `first + 1` to `last`, with their validations and checkpoints."""
    config = job.config
    seed = np.uint32(config.seed)
    with contextlib.ExitStack() as stack:
        checkpointer = Checkpointer(folder.checkpoints, config.keep_checkpoints)
        stack.enter_context(contextlib.closing(checkpointer))
        reporter = Reporter(
            folder.path,
            first,
            batch=job.batch,
            learning_rates=job.learning_rates,
            numbers=job.model.numbers,
            peak_flops=job.layout.cluster().peak_flops,
        )
        stack.enter_context(contextlib.closing(reporter))
        validate = _make_validation(job, reporter)
        if first == 0:
            validate(0, state.params)
        batches = stack.enter_context(Prefetcher(lambda i: job.load_batch(job.datasets.train, i), first, last))
        reporter.start_clock()
        for number, batch in enumerate(batches, start=first + 1):
            state, metrics = step(state, batch, seed)
            reporter.dispatched(number, metrics)
            validates = _is_due(number, config.eval_every) or number == config.steps
            saves = _is_due(number, config.checkpoint_every) or number == last
            if validates or saves:
                reporter.flush()
                if validates:
                    validate(number, state.params)
                if saves:
                    checkpointer.save(number, state, meta_of(job))
                reporter.start_clock()
    return state


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _make_validation(job: Job, reporter: Reporter) -> Callable[[int, Params], None]:
    """`validate(step, params)`: the mean loss over the tokens of the validation set, or of EVAL_BATCHES of it."""
    dataset = job.datasets.validation
    num_batches = -(-dataset.num_rows // dataset.global_batch)
    if job.config.eval_batches is not None:
        num_batches = min(num_batches, job.config.eval_batches)
    evaluate = make_eval_step(job.model, job.plan, job.settings)

    def validate(step: int, params: Params) -> None:
        if not num_batches:
            return
        with Prefetcher(lambda i: job.load_batch(dataset, i), 0, num_batches) as batches:
            sums = [evaluate(params, batch) for batch in batches]
        loss = sum(float(s.loss) for s in sums)
        weight = sum(float(s.weight) for s in sums)
        reporter.validation(ValidationRow(step=step, loss=loss / max(weight, 1.0), num_tokens=round(weight)))

    return validate


def _finish(job: Job, state: TrainState, folder: RunFolder, last: int) -> None:
    """What a person wants to see at the end."""
    if last < job.config.steps:
        say(
            f"stopped and saved at step {last} of {job.config.steps}; "
            f"the same command without STOP_AFTER, at --gin.RUN_DIR={folder.path}, goes on from there"
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
    if tokenizer is None or job.model.logits is None or not job.datasets.validation.num_windows:
        return
    prompt = job.datasets.validation.rows(0, [0])["tokens"][0, :_SAMPLE_PROMPT_TOKENS].tolist()
    next_logits = make_next_logits(job.model, job.plan, job.settings, job.batch.seq_len)
    drawn = generate(next_logits, params, prompt, Sampling(), tokenizer.end_of_document, tokenizer.vocab_size)
    text = tokenizer.decode(list(islice(drawn, _SAMPLE_TOKENS)))
    say("sample, the prompt before the bar:", f"{tokenizer.decode(prompt)}|{text}")
