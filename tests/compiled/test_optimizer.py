"""Optimizers by name against optax's own, and learning rates against closed forms."""

import functools
import inspect
import itertools
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from amsp_jax import UserError, make_learning_rate, make_optimizer
from amsp_jax.engine.learning_rate import LR_SCHEDULES
from amsp_jax.engine.optimizer import OPTIMIZERS
from amsp_jax.run.config import LrSchedule

PARAMS = {
    "embed": {"table": jnp.linspace(0.5, 1.5, 12).reshape(4, 3)},
    "blocks": [{"norm": {"scale": jnp.full(3, 1.25)}, "up": {"kernel": jnp.eye(3) + 0.1, "bias": jnp.full(3, 0.5)}}],
    "head": {"kernel": jnp.linspace(-1, 1, 12).reshape(3, 4), "temperature": jnp.float32(2)},
}
GRADS = jax.tree.map(lambda x: 0.1 * jnp.cos(3 * x), PARAMS)
RATE, DECAY = 0.1, 0.5
# Of each step's gradient: Lion takes signs, which only such gradients tell apart.
SCALES = (1.0, 1.0, 1.0, -0.05, -0.3)


def updated(optimizer, grads=GRADS, scales=SCALES):
    params, state = PARAMS, optimizer.init(PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        for scale in scales:
            scaled = jax.tree.map(functools.partial(jnp.multiply, scale), grads)
            updates, state = optimizer.update(scaled, state, params)
            params = optax.apply_updates(params, updates)
    return params


def is_matrix(params):
    return jax.tree.map(lambda x: x.ndim >= 2, params)


def hidden(params):
    """`True` for the matrices that Muon orthogonalises."""
    outer = jax.tree.map(lambda _: False, params)
    return {**outer, "blocks": is_matrix(params["blocks"])}


def optax_muon(**own):
    """The AdamW of `contrib.muon` decays all that it updates: here it has no decay, and matrices are decayed after."""
    numbers = lambda params: jax.tree.map(  # noqa: E731
        lambda x, is_hidden: contrib.MuonDimensionNumbers() if is_hidden else None, params, hidden(params)
    )
    outer = jax.tree.map(lambda x, is_hidden: x and not is_hidden, is_matrix(PARAMS), hidden(PARAMS))
    return optax.chain(
        contrib.muon(RATE, weight_decay=DECAY, adam_weight_decay=0.0, muon_weight_dimension_numbers=numbers, **own),
        optax.add_decayed_weights(-RATE * DECAY, outer),
    )


MASKED = {"weight_decay": DECAY, "mask": is_matrix}
PEERS = {
    "adamw": [
        ({}, lambda: optax.adamw(RATE, b1=0.9, b2=0.95, **MASKED)),
        (
            {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
            lambda: optax.adamw(RATE, b1=0.8, b2=0.9, eps=1e-3, **MASKED),
        ),
    ],
    "sgd": [
        ({"momentum": 0.0, "weight_decay": 0.0}, lambda: optax.sgd(RATE)),
        ({"momentum": 0.9, "weight_decay": 0.0}, lambda: optax.sgd(RATE, momentum=0.9)),
        ({}, lambda: optax.chain(optax.add_decayed_weights(DECAY, is_matrix), optax.sgd(RATE))),
    ],
    "adafactor": [
        # optax's decay is not multiplied by the learning rate.
        ({}, lambda: optax.adafactor(RATE, weight_decay_rate=RATE * DECAY, weight_decay_mask=is_matrix)),
        (
            {"momentum": 0.5, "epsilon": 1e-2, "weight_decay": 0.0},
            lambda: optax.adafactor(RATE, momentum=0.5, eps=1e-2),
        ),
    ],
    "lion": [
        ({}, lambda: optax.lion(RATE, **MASKED)),
        ({"beta1": 0.8, "beta2": 0.7}, lambda: optax.lion(RATE, b1=0.8, b2=0.7, **MASKED)),
    ],
    "lamb": [
        ({}, lambda: optax.lamb(RATE, **MASKED)),
        (
            {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
            lambda: optax.lamb(RATE, b1=0.8, b2=0.9, eps=1e-3, **MASKED),
        ),
    ],
    "muon": [
        ({}, optax_muon),
        (
            {"momentum": 0.9, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3},
            lambda: optax_muon(beta=0.9, adam_b1=0.8, adam_b2=0.9, eps=1e-3),
        ),
    ],
}


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in OPTIMIZERS for case in PEERS[name]])
def test_an_optimizer_is_that_of_optax_with_the_same_arguments(name, case):
    own, peer = case
    ours = updated(make_optimizer(name, RATE, **{"weight_decay": DECAY, **own}))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(updated(peer())), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_reaches_matrices_alone(name):
    """With zero gradients nothing but the decay moves a parameter."""
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    after = updated(make_optimizer(name, RATE, weight_decay=DECAY), zero, scales=(1.0,))
    moved = jax.tree.map(lambda x, y: bool((x != y).any()), PARAMS, after)
    assert moved == is_matrix(PARAMS)
    if name != "lamb":  # LAMB divides the decay by its own norm.
        kernel = PARAMS["head"]["kernel"]
        np.testing.assert_allclose(after["head"]["kernel"], kernel * (1 - RATE * DECAY), rtol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_setting_of_an_optimizer_changes_its_updates(name):
    plain = jax.tree.leaves(updated(make_optimizer(name, RATE)))
    settings = [p.name for p in inspect.signature(OPTIMIZERS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for setting in settings:
        other = jax.tree.leaves(updated(make_optimizer(name, RATE, **{setting: 0.37})))
        assert any((x != y).any() for x, y in zip(plain, other, strict=True)), setting


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("adam", {}, ["optimizer='adam'", "adamw"]),
        ("sgd", {"beta2": 0.9}, ["beta2=0.9", "optimizer='sgd'", "momentum", "adamw"]),
        ("adamw", {"momentum": 0.9}, ["momentum=0.9", "optimizer='adamw'", "sgd"]),
        ("lion", {"epsilon": 1e-8}, ["epsilon=1e-08", "optimizer='lion'"]),
        ("adafactor", {"beta1": 0.9}, ["beta1=0.9", "momentum"]),
        ("adamw", {"beta1": 1.0}, ["beta1=1.0", "below 1"]),
        ("adamw", {"beta2": -0.1}, ["beta2=-0.1", "at least 0"]),
        ("adamw", {"epsilon": math.inf}, ["epsilon=inf", "out of range"]),
        ("sgd", {"momentum": math.nan}, ["momentum=nan", "out of range"]),
    ],
)
def test_what_an_optimizer_cannot_use_is_an_error(name, own, words):
    with pytest.raises(UserError) as error:
        make_optimizer(name, RATE, **own)
    assert all(word in str(error.value) for word in words), error.value


PEAK, STEPS, WARMUP = 2.0, 100, 10
# Learning rates by step: the first, the middle of the warm-up, its end, halfway down, one before the end, the end.
CLOSED = {
    "cosine": lambda i, final: final + (PEAK - final) * (1 + math.cos(math.pi * (i - WARMUP) / 90)) / 2,
    "linear": lambda i, final: PEAK + (final - PEAK) * (i - WARMUP) / 90,
    "constant": lambda i, final: PEAK,
    "wsd": lambda i, final: PEAK + (final - PEAK) * max(i - 80, 0) / 20,
}


@pytest.mark.parametrize(
    ("name", "fraction"),
    [("constant", None), *itertools.product(sorted({*LR_SCHEDULES} - {"constant"}), (None, 0.0, 0.5))],
)
def test_learning_rates_are_their_closed_forms(name, fraction):
    rate = make_learning_rate(name, PEAK, steps=STEPS, warmup_steps=WARMUP, lr_final_fraction=fraction)
    final = PEAK * (0.1 if fraction is None else fraction)
    for i in (0, 5):
        assert float(rate(i)) == pytest.approx(PEAK / WARMUP + (PEAK - PEAK / WARMUP) * i / WARMUP)
    for i in (10, 11, 55, 79, 80, 81, 90, 99, 100):
        assert float(rate(i)) == pytest.approx(CLOSED[name](i, final), rel=1e-5, abs=1e-6)


def test_the_setting_has_the_schedules():
    assert typing.get_args(LrSchedule) == LR_SCHEDULES


@pytest.mark.parametrize(
    ("warmup", "decay", "steps", "expected"),
    [
        # No warm-up, and a decay over half of the steps.
        (0, 0.5, 4, [1, 1, 1, 0.55, 0.1]),
        # The decay has what the warm-up leaves.
        (2, 1.0, 4, [0.5, 0.75, 1, 0.55, 0.1]),
        # The warm-up takes all steps, or more than there are.
        (4, None, 4, [0.25, 0.4375, 0.625, 0.8125]),
        (9, None, 4, [0.25, 0.4375, 0.625, 0.8125]),
        (0, None, 1, [1]),
    ],
)
def test_warmup_stable_decay_at_its_edges(warmup, decay, steps, expected):
    rate = make_learning_rate("wsd", 1.0, steps=steps, warmup_steps=warmup, lr_decay_fraction=decay)
    assert [float(rate(i)) for i in range(len(expected))] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "own", "words"),
    [
        ("cosin", {}, ["lr_schedule='cosin'", "wsd"]),
        ("constant", {"lr_final_fraction": 0.0}, ["lr_final_fraction=0.0", "constant", "cosine"]),
        ("cosine", {"lr_decay_fraction": 0.1}, ["lr_decay_fraction=0.1", "cosine", "wsd"]),
        ("linear", {"lr_final_fraction": 1.5}, ["lr_final_fraction=1.5", "at most 1"]),
        ("wsd", {"lr_decay_fraction": -0.5}, ["lr_decay_fraction=-0.5", "at least 0"]),
    ],
)
def test_what_a_schedule_cannot_use_is_an_error(name, own, words):
    with pytest.raises(UserError) as error:
        make_learning_rate(name, 1.0, steps=10, **own)
    assert all(word in str(error.value) for word in words), error.value
