"""Sampling from a model under any plan: the forward pass of the training step, one token at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from amsp_jax.engine.eval_step import make_logits_step
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, Params


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      temperature: 0 takes the likeliest token, 1 the model's own distribution.
      top_p: draw only among the likeliest tokens that together have this probability.
      seed: of the draws.

    Raises:
      UserError: a number out of range.
    """

    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(f"temperature {self.temperature} must be at least 0; 0 takes the likeliest token")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} must be above 0 and at most 1; 1 leaves every token in")
        if self.seed < 0:
            raise UserError(f"seed {self.seed} must be at least 0")


def make_next_logits(plan: Plan, settings: StepSettings, seq_len: int) -> Callable[[Params, Sequence[int]], np.ndarray]:
    """`next_logits(params, tokens) -> [vocab]` float32: what follows the last `seq_len` of `tokens`.

    Args:
      plan: of a model that has `logits`.
      settings: as of the training step.
      seq_len: longest context; shorter ones are padded, so that it compiles once.
    """
    logits_of = make_logits_step(plan, settings)
    num_ranks = plan.degrees.ranks.total

    def pick(params: Params, batch: Batch, position: jax.Array) -> jax.Array:
        return logits_of(params, batch)[0, 0, position].astype(jnp.float32)

    compiled = jax.jit(pick, out_shardings=plan.replicated)

    def next_logits(params: Params, tokens: Sequence[int]) -> np.ndarray:
        context = tokens[-seq_len:]
        row = np.zeros(seq_len, np.int32)
        row[: len(context)] = context
        batch = _one_row_a_rank(plan, row, num_ranks)
        return np.asarray(compiled(params, batch, np.int32(len(context) - 1)))

    return next_logits


def _one_row_a_rank(plan: Plan, row: np.ndarray, num_ranks: int) -> dict[str, jax.Array]:
    """Every rank needs a row: all get the same one."""
    tokens = np.broadcast_to(row, (1, num_ranks, len(row)))
    arrays = {"tokens": tokens, "targets": tokens, "weights": np.zeros(tokens.shape, np.float32)}
    return {
        name: jax.make_array_from_callback(array.shape, plan.batch_sharding, array.__getitem__)
        for name, array in arrays.items()
    }


def generate(
    next_logits: Callable[[Params, Sequence[int]], np.ndarray],
    params: Params,
    prompt: Sequence[int],
    sampling: Sampling,
    end: int | None = None,
    vocab_size: int | None = None,
) -> Iterator[int]:
    """Draws tokens until `end`, one at a time and without limit; every process draws the same.

    Args:
      next_logits: of `make_next_logits`.
      params: the stored master.
      prompt: at least one token.
      sampling: how to draw.
      end: the token at which to stop; it is not given out.
      vocab_size: ids from here on are never drawn; the table may be longer than the tokenizer.
    """
    rng = np.random.default_rng(sampling.seed)
    tokens = list(prompt)
    while True:
        token = _draw(next_logits(params, tokens)[:vocab_size], sampling, rng)
        if token == end:
            return
        tokens.append(token)
        yield token


def _draw(logits: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    cumulative = np.cumsum(weights[order]) / weights.sum()
    # The token that crosses the threshold is kept, so there is always one.
    kept = order[: int(np.searchsorted(cumulative, sampling.top_p)) + 1]
    return int(rng.choice(kept, p=weights[kept] / weights[kept].sum()))
