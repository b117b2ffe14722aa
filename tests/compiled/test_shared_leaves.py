"""One leaf in several places of the model: `Model.split` hands it to several blocks, or to embedding and head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from amsp_jax.engine.nonfinite import make_find_nonfinite
from amsp_jax.engine.optimizer import to_true
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.state import init_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.model import Model, Part
from amsp_jax.strategy import DataRanks

WIDTH, SEQ, ROWS = 12, 4, 12
SGD = optax.sgd(0.5)


def _matrix(key):
    return {"w": jax.random.normal(key, (WIDTH, WIDTH)) / 2}


def _embed(params, batch, rng):
    return jax.nn.one_hot(batch["tokens"], WIDTH, dtype=params["w"].dtype) @ params["w"]


def _block(params, x, batch, rng):
    return x + jnp.tanh(x @ params["w"])


def _head(params, embed, x, batch, rng):
    logits = (x @ params["w"].T).astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    return (jnp.sum(-chosen * batch["weights"]), jnp.sum(batch["weights"])), {}


EMBED, BLOCK, HEAD = Part(_matrix, _embed), Part(_matrix, _block), Part(_matrix, _head)
COMMON = {"embed": EMBED, "blocks": (BLOCK,) * 4, "head": HEAD}
MODELS = {
    # ALBERT: every block is the same.
    "blocks": Model(
        name="albert",
        split=lambda p: (p["embed"], [p["block"]] * 4, p["head"]),
        join=lambda embed, blocks, head: {"embed": embed, "block": blocks[0], "head": head},
        **COMMON,
    ),
    # A tied table that `split` makes, in place of `tied=True`.
    "table": Model(
        name="tied",
        split=lambda p: (p["table"], p["blocks"], p["table"]),
        join=lambda embed, blocks, head: {"table": embed, "blocks": blocks},
        **COMMON,
    ),
    # One leaf everywhere.
    "all": Model(name="one", split=lambda p: (p, [p] * 4, p), join=lambda embed, blocks, head: blocks[-1], **COMMON),
}


def batch():
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, WIDTH, (ROWS, SEQ + 1), dtype=np.int32)
    weights = (rng.random((ROWS, SEQ)) < 0.7).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def expected(model, params):
    """(loss, gradient norm, parameters) of one step of SGD in plain JAX."""
    data = batch()

    def loss(params):
        embed, blocks, head = model.split(params)
        x = model.embed.apply(embed, data, None)
        for part, own in zip(model.blocks, blocks, strict=True):
            x = part.apply(own, x, data, None)
        (total, weight), _ = model.head.apply(head, None, x, data, None)
        return total / weight

    value, grads = jax.value_and_grad(loss)(params)
    return value, optax.tree.norm(grads), jax.tree.map(lambda x, g: x - 0.5 * g, params, grads)


def check(name, strategy, accumulation, settings=None, parallel=None):
    ranks = DataRanks(2)
    model = MODELS[name]
    devices = jax.devices()[: ranks.total * (parallel or ModelParallel()).total]
    plan = make_plan(strategy, model, ranks=ranks, devices=devices, compute_dtype=jnp.float32, parallel=parallel)
    state = init_state(plan, SGD, seed=1)
    loss, norm, params = expected(model, jax.device_get(to_true(state.params, model.abstract_params())))
    data = plan.shard({key: x.reshape(accumulation, -1, SEQ) for key, x in batch().items()})
    state, metrics = make_train_step(plan, SGD, settings or StepSettings())(state, data)
    np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    found = jax.device_get(to_true(state.params, model.abstract_params()))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_all_uses_are_added_up(name, strategy, accumulation):
    check(name, strategy, accumulation)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("group", [2, 6])
def test_in_groups_of_microbatches(name, group):
    check(name, "zero1", 6, StepSettings(microbatch_group=group))


@pytest.mark.parametrize("name", MODELS)
def test_on_pipeline_stages(name):
    check(name, "zero1", 2, parallel=ModelParallel(pipeline=2))


def test_a_leaf_that_no_part_uses_keeps_its_value():
    unused = dataclasses.replace(
        MODELS["blocks"],
        split=lambda p: (p["embed"], [p["block"]] * 4, p["head"]),
        join=lambda embed, blocks, head: {"embed": embed, "block": blocks[0], "head": head, "unused": blocks[1]},
    )
    for settings, parallel in [(StepSettings(microbatch_group=2), None), (None, ModelParallel(pipeline=2))]:
        MODELS["unused"] = unused
        check("unused", "zero1", 2, settings, parallel)
    del MODELS["unused"]


def test_a_shared_leaf_is_named_once():
    model = MODELS["blocks"]
    plan = make_plan("zero1", model, ranks=DataRanks(2), devices=jax.devices()[:2], compute_dtype=jnp.float32)
    params = jax.tree.map(lambda x: x * jnp.float32(np.nan), init_state(plan, SGD, seed=1).params)
    data = plan.shard({key: x[None] for key, x in batch().items()})
    found = make_find_nonfinite(plan)(params, data, 0, 0)
    assert sorted(found.params) == sorted(found.grads) == ["block.w", "embed.w", "head.w"]
