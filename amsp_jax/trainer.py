"""The training loop, from a checked job to its last checkpoint.

It is one step ahead of what it reads: it dispatches a step, then waits for the numbers of the step before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from amsp_jax.checkpoint import Checkpointer
from amsp_jax.config import TrainConfig
from amsp_jax.data import Prefetcher
from amsp_jax.errors import UserError
from amsp_jax.generate import Sampling, generate, make_next_logits
from amsp_jax.job import Job, TrainStep, compile_step, prepare, restore_state, true_shapes
from amsp_jax.launch import Layout
from amsp_jax.metrics import VALIDATION_FILE, MetricsWriter, ProgressLine, TrainRow, ValidationRow, read_rows
from amsp_jax.model import Model, Params
from amsp_jax.plots import plot_losses
from amsp_jax.run_folder import CHECKPOINTS, TOKENIZER_FILE, RunFolder, find_run_folder, identity
from amsp_jax.state import TrainState, init_state
from amsp_jax.step import StepMetrics, make_eval_step

_SAMPLE_PROMPT_TOKENS, _SAMPLE_TOKENS = 16, 64


def train(
    config: TrainConfig,
    model: Model,
    vocab_size: int,
    layout: Layout,
    *,
    notes: tuple[str, ...] = (),
    files: Mapping[str, str] | None = None,
) -> Path:
    """Trains until STEPS or STOP_AFTER; goes on with the run that RUN_DIR holds.

    Args:
      config: the settings.
      model: the model.
      vocab_size: ids that it knows.
      layout: the devices.
      notes: lines to print with the plan, such as the choice of attention.
      files: names and texts to keep in the run folder.

    Returns:
      The run folder.

    Raises:
      UserError: anything that cannot work, before a file is written.
    """
    job = prepare(config, model, vocab_size, layout)
    folder = _agree(find_run_folder(config))
    _say(str(job.plan), job.datasets.description, f"batch: {job.batch}", *notes)
    step = compile_step(job)
    state, first = _start(job, folder)
    last = config.stop_after or config.steps
    if first >= last:
        _say(f"{folder.path} is at step {first} already: nothing to do until {_last_name(config)} is more than {last}")
        return folder.path
    _on_process_0(lambda: _write_folder(folder, job, files or {}))
    state = _loop(job, step, state, first, last, folder)
    _finish(job, state, folder, last)
    return folder.path


def _last_name(config: TrainConfig) -> str:
    return "STOP_AFTER" if config.stop_after else "STEPS"


def _start(job: Job, folder: RunFolder) -> tuple[TrainState, int]:
    """The state to begin with, and the number of steps behind it. Reads only."""
    saved = _newest(folder.checkpoints) if folder.is_same_run and folder.checkpoints.is_dir() else None
    if saved is None:
        state = init_state(job.model, job.optimizer, job.plan, job.config.seed)
        return (_with_weights(job, state) if job.config.init_from else state), 0
    checkpointer, step = saved
    meta = checkpointer.meta(step)
    _say(f"{folder.path} goes on from step {step}, saved under '{meta['strategy']}' on {meta['ranks']}")
    if meta["steps"] != job.config.steps:
        _say(f"STEPS was {meta['steps']} and is {job.config.steps}: the learning rate now follows the new schedule")
    return _restore(job, checkpointer, step), step


def _newest(directory: Path) -> tuple[Checkpointer, int] | None:
    checkpointer = Checkpointer(directory, keep=None)
    step = checkpointer.latest_step()
    return None if step is None else (checkpointer, step)


def _with_weights(job: Job, state: TrainState) -> TrainState:
    """`state` with the parameters that INIT_FROM names: a run folder, or one checkpoint of it."""
    path = Path(str(job.config.init_from))
    directory = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path.parent
    checkpointer = Checkpointer(directory, keep=None)
    step = int(path.name) if directory == path.parent else checkpointer.latest_step()
    if step is None:
        raise UserError(f"INIT_FROM={path}: it has no complete checkpoint; name a run that saved one")
    _say(f"the weights are those of {directory / str(step)}")
    return dataclasses.replace(state, params=_restore(job, checkpointer, step).params)


def _restore(job: Job, checkpointer: Checkpointer, step: int) -> TrainState:
    with contextlib.closing(checkpointer):
        return restore_state(checkpointer, step, job.model, job.optimizer, job.plan)


def _meta(job: Job) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it."""
    return {
        **identity(job.config),
        "shapes": true_shapes(job.model, job.optimizer),
        "steps": job.config.steps,
        "strategy": job.config.strategy,
        "ranks": str(job.plan.degrees.ranks),
    }


def _write_folder(folder: RunFolder, job: Job, files: Mapping[str, str]) -> None:
    folder.create(job.config)
    for name, text in {**files, "plan.txt": f"{job.plan}\n"}.items():
        folder.write(name, text)
    if job.datasets.tokenizer is not None:
        folder.write(TOKENIZER_FILE, job.datasets.tokenizer.to_json())


def _loop(job: Job, step: TrainStep, state: TrainState, first: int, last: int, folder: RunFolder) -> TrainState:
    """Steps `first + 1` to `last`, with their validations and checkpoints."""
    config = job.config
    seed = np.uint32(config.seed)
    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(
            contextlib.closing(Checkpointer(folder.checkpoints, config.keep_checkpoints))
        )
        reporter = stack.enter_context(contextlib.closing(Reporter(job, folder, first)))
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
                    checkpointer.save(number, state, _meta(job))
                reporter.start_clock()
    return state


def _is_due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


class Reporter:
    """Turns the numbers of finished steps into rows; the time of a step is that between completions."""

    def __init__(self, job: Job, folder: RunFolder, first: int) -> None:
        self._job = job
        self._writer = MetricsWriter(folder.path, first or None, enabled=_is_process_0())
        self._progress = ProgressLine(job.config.steps) if _is_process_0() else None
        self._pending: tuple[int, StepMetrics] | None = None
        self._completed_at = 0.0

    def start_clock(self) -> None:
        """The next step's time counts from now: what came before was not training."""
        self._completed_at = time.perf_counter()

    def dispatched(self, number: int, metrics: StepMetrics) -> None:
        """Takes the numbers of a step that runs, and reports the step before."""
        before, self._pending = self._pending, (number, metrics)
        if before:
            self._report(*before)

    def flush(self) -> None:
        """Waits for the step that runs and reports it."""
        before, self._pending = self._pending, None
        if before:
            self._report(*before)

    def validation(self, row: ValidationRow) -> None:
        """Writes and prints a validation."""
        self._writer.validation(row)
        if self._progress:
            self._progress.print(f"step {row.step}: validation loss {row.loss:.4f} over {row.num_tokens:,} tokens")

    def close(self) -> None:
        """Ends the progress line and closes the files."""
        if self._progress:
            self._progress.close()
        self._writer.close()

    def _report(self, number: int, metrics: StepMetrics) -> None:
        values = jax.device_get(metrics)
        now = time.perf_counter()
        step_time_s, self._completed_at = now - self._completed_at, now
        row = _train_row(self._job, number, values, step_time_s)
        self._writer.train(row)
        if self._progress:
            self._progress.update(row)


def _train_row(job: Job, number: int, values: StepMetrics, step_time_s: float) -> TrainRow:
    tokens_per_s = job.batch.tokens / step_time_s
    per_device = tokens_per_s / job.batch.num_ranks
    numbers, peak = job.model.numbers, job.layout.cluster().peak_flops
    flops = numbers.flops_per_token(job.batch.seq_len) * per_device if numbers else None
    paper = numbers.flops_per_token_paper(job.batch.seq_len) * per_device if numbers else None
    return TrainRow(
        step=number,
        loss=float(values.loss),
        grad_norm=float(values.grad_norm),
        learning_rate=float(job.learning_rates[number - 1]),
        num_tokens=round(float(values.num_tokens)),
        step_time_s=step_time_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=per_device,
        tflops_per_device=flops / 1e12 if flops is not None else None,
        mfu=flops / peak if flops is not None and peak else None,
        mfu_paper=paper / peak if paper is not None and peak else None,
        peak_memory_bytes=_peak_memory_bytes(),
    )


def _peak_memory_bytes() -> int | None:
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    return max((peak for peak in peaks if peak is not None), default=None)


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
        _say(f"stopped and saved at step {last} of {job.config.steps}; the same command without STOP_AFTER goes on")
    else:
        _on_process_0(lambda: _say_validation(folder))
        _say_sample(job, state.params)
    _on_process_0(lambda: _say(f"run folder: {folder.path}", f"loss curve: {plot_losses(folder.path)}"))


def _say_validation(folder: RunFolder) -> None:
    rows = read_rows(folder.path / VALIDATION_FILE)
    if rows:
        before, after = rows[0], rows[-1]
        _say(f"validation loss: {after['loss']:.4f}, at step {before['step']} it was {before['loss']:.4f}")


def _say_sample(job: Job, params: Params) -> None:
    """Continues the beginning of a validation window."""
    tokenizer = job.datasets.tokenizer
    if tokenizer is None or job.model.logits is None or not job.datasets.validation.num_windows:
        return
    prompt = job.datasets.validation.rows(0, [0])["tokens"][0, :_SAMPLE_PROMPT_TOKENS].tolist()
    next_logits = make_next_logits(job.model, job.plan, job.settings, job.batch.seq_len)
    drawn = generate(next_logits, params, prompt, Sampling(), tokenizer.end_of_document, tokenizer.vocab_size)
    text = tokenizer.decode(list(islice(drawn, _SAMPLE_TOKENS)))
    _say("sample, the prompt before the bar:", f"{tokenizer.decode(prompt)}|{text}")


def _agree(folder: RunFolder) -> RunFolder:
    """Process 0's choice: a number under runs/ may be taken between two looks."""
    if jax.process_count() == 1:
        return folder
    path = np.zeros(4096, np.uint8)
    text = str(folder.path).encode()
    path[: len(text)] = np.frombuffer(text, np.uint8)
    chosen = np.asarray(multihost_utils.broadcast_one_to_all(path)).tobytes().rstrip(b"\0").decode()
    return dataclasses.replace(folder, path=Path(chosen))


def _is_process_0() -> bool:
    return jax.process_index() == 0


def _on_process_0(action: Callable[[], object]) -> None:
    """Runs `action` on process 0 while the others wait."""
    if _is_process_0():
        action()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("process 0 is done")


def _say(*lines: str) -> None:
    if _is_process_0():
        print(*lines, sep="\n", flush=True)
