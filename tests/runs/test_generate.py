"""Sampling: the draws alone, and the logits of a sharded model against the whole model on one device."""

from collections.abc import Sequence
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.state import init_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.run.generate import Sampling, generate, make_next_logits
from amsp_jax.strategy import DataRanks


def table(*rows: Sequence[float]):
    """The logits depend on the last token alone."""
    return lambda params, tokens: np.array(rows[tokens[-1]], np.float32)


def test_temperature_0_takes_the_likeliest() -> None:
    chain = table([0, 1, 0], [0, 0, 1], [1, 0, 0])
    assert list(islice(generate(chain, None, [0], Sampling(temperature=0)), 5)) == [1, 2, 0, 1, 2]


def test_it_stops_at_the_end_and_never_draws_beyond_the_tokenizer() -> None:
    chain = table([0, 1, 0, 9], [0, 0, 1, 9], [0, 0, 0, 9])
    assert list(generate(chain, None, [0], Sampling(temperature=0), end=2, vocab_size=3)) == [1]


def test_draws_follow_the_distribution_and_the_seed() -> None:
    chain = table(*[[np.log(0.7), np.log(0.2), np.log(0.1)]] * 3)
    drawn = [
        list(islice(generate(chain, None, [0], Sampling(temperature=1, top_p=1, seed=s)), 2000)) for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    np.testing.assert_allclose(np.bincount(drawn[0]) / 2000, [0.7, 0.2, 0.1], atol=0.03)


@pytest.mark.parametrize(("top_p", "expected"), [(0.6, {0}), (0.75, {0, 1}), (0.95, {0, 1, 2})])
def test_top_p_keeps_the_likeliest_that_reach_it(top_p: float, expected: set[int]) -> None:
    chain = table(*[[np.log(0.7), np.log(0.2), np.log(0.1)]] * 3)
    assert set(islice(generate(chain, None, [0], Sampling(temperature=1, top_p=top_p)), 300)) == expected


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}])
def test_numbers_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=str(next(iter(wrong.values())))):
        Sampling(**wrong)


def test_logits_of_a_sharded_model_are_those_of_the_whole() -> None:
    sizes = {"num_layers": 1, "hidden": 16, "ffn": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 32}
    model = build_model("llama-tiny", sizes)
    plan = make_plan("mics(2)", model, ranks=DataRanks(4), devices=jax.devices()[:4], compute_dtype=jnp.float32)
    params = init_state(plan, optax.sgd(1.0), seed=0).params
    next_logits = make_next_logits(plan, StepSettings(), seq_len=8)

    def whole(tokens: list[int]) -> np.ndarray:
        local = jax.tree.map(jnp.asarray, jax.device_get(params))
        batch = {"tokens": jnp.array([tokens], jnp.int32)}
        x = model.embed.apply(local["embed"], batch, None)
        for block, block_params in zip(model.blocks, local["blocks"], strict=True):
            x = block.apply(block_params, x, batch, None)
        return np.asarray(model.logits(local["head"], None, x))[0, -1]

    for tokens in ([5], [1, 2, 3], list(range(8))):
        np.testing.assert_allclose(next_logits(params, tokens), whole(tokens), rtol=1e-4, atol=1e-6)
    # Of a longer text the last 8 tokens count.
    np.testing.assert_array_equal(next_logits(params, [9, 9, *range(8)]), next_logits(params, list(range(8))))
