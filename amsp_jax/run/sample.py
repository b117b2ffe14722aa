"""What a person wants to see at the end of a run: the validation loss, and a text that the model writes."""

from __future__ import annotations

from itertools import islice

import numpy as np

from amsp_jax.run.actions import Action
from amsp_jax.run.generate import Sampling, generate, make_next_logits
from amsp_jax.run.run import Run

_PROMPT_TOKENS, _SAMPLE_TOKENS = 16, 64


class ClosingNotes(Action):
    """Prints the validation losses and a sample where the run is complete, or how to go on with it."""

    def __init__(self, last: int) -> None:
        """`last` is the step that the run was to train up to."""
        self._last = last

    def on_end(self, run: Run) -> None:
        if run.error is not None:
            return
        if self._last < run.config.steps:
            run.say(
                f"stopped and saved at step {self._last} of {run.config.steps}; the same command without "
                f"stop_after={self._last}, with run_dir={run.run_dir}, goes on from there"
            )
            return
        if run.is_process_0 and (rows := run.validations):
            run.say(f"validation loss: {rows[-1]['loss']:.4f}; before training it was {rows[0]['loss']:.4f}")
        _say_sample(run)


def _say_sample(run: Run) -> None:
    """Continues the beginning of a validation window; every process computes it."""
    job = run.job
    tokenizer, validation = job.datasets.tokenizer, job.datasets.validation
    if tokenizer is None or run.model.logits is None or not validation.num_rows:
        return
    prompt = validation.rows(0, np.array([0]))["tokens"][0, :_PROMPT_TOKENS].tolist()
    next_logits = make_next_logits(run.plan, job.settings, job.batch.seq_len)
    drawn = generate(next_logits, run.state.params, prompt, Sampling(), tokenizer.end_of_document, tokenizer.vocab_size)
    text = tokenizer.decode(list(islice(drawn, _SAMPLE_TOKENS)))
    run.say("sample, the prompt before the bar:", f"{tokenizer.decode(prompt)}|{text}")
