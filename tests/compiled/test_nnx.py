"""Models of Flax NNX modules under strategies, and heads that use an embedding which they are not given."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from oracle import batches, split

from amsp_jax import Model, Part, init_state, make_plan, make_train_step, token_loss
from amsp_jax.engine.eval_step import make_logits_step
from amsp_jax.errors import UserError

VOCAB, WIDTH = 61, 16


class Embed(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jax.random.normal(rngs.params(), (VOCAB, WIDTH)))

    def __call__(self, tokens):
        return self.table[...][tokens]


class Block(nnx.Module):
    def __init__(self, *, rngs, width=32):
        self.up, self.down = nnx.Linear(WIDTH, width, rngs=rngs), nnx.Linear(width, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, rng):
        y = self.down(nnx.gelu(self.up(x)))
        return x + jax.vmap(lambda key, row: self.dropout(row, rngs=key))(rng, y)


class Head(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, x):
        return self.out(x)


class TiedHead(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x, embed):
        return (x * self.scale[...]) @ embed.table[...].T


WIDE = functools.partial(Block, width=48)
MODELS = {
    "equal blocks": dict(embed=Embed, block=Block, num_blocks=2, head=Head, loss=token_loss),
    "a list, tied": dict(embed=Embed, block=[Block, WIDE, Block], head=TiedHead, loss=token_loss, tied=True),
}


def trained(model, strategy, num_devices):
    plan = make_plan(strategy, model, devices=jax.devices()[:num_devices], compute_dtype=jnp.float32)
    tx = optax.sgd(0.1)
    state, step = init_state(plan, tx, seed=3), make_train_step(plan, tx)
    numbers = []
    for batch in batches(steps=2):
        state, metrics = step(state, plan.shard(split(batch, 2)))
        numbers.append([float(metrics.loss), float(metrics.grad_norm)])
    return plan, numbers, state


@pytest.mark.parametrize("name", MODELS)
def test_modules_train_as_on_one_device(name):
    model = Model.from_nnx(**MODELS[name])
    assert (
        model.blocks[0] is model.blocks[-1] and len(model.blocks) == len(MODELS[name].get("block"))
        if "list" in name
        else 2
    )
    _, one, expected = trained(model, "ddp", 1)
    plan, many, state = trained(model, "zero3", 4)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    for a, b, leaf in zip(*map(jax.tree.leaves, (state.params, expected.params, plan.leaves)), strict=True):
        np.testing.assert_allclose(np.asarray(a)[tuple(map(slice, leaf.shape))], b, rtol=1e-4, atol=1e-6)
    batch = plan.shard(split(batches(steps=1)[0], 1))
    assert make_logits_step(plan)(state.params, batch).shape == (1, 24, 8, VOCAB)


def test_token_loss_is_the_cross_entropy():
    logits, batch = jax.random.normal(jax.random.key(0), (24, 8, VOCAB)), batches(steps=1)[0]
    (total, weight), aux = token_loss(logits, batch)
    with jax.numpy_dtype_promotion("standard"):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    np.testing.assert_allclose(total, np.sum(losses * batch["weights"]), rtol=1e-5)
    assert weight == np.sum(batch["weights"]) and aux == {}


class Stateful(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": None}, "num_blocks=None: with one module"),
        ({"block": [Block, Block], "num_blocks": 3}, "num_blocks=3 beside a list of 2 blocks"),
        ({"block": Stateful}, "Stateful holds variables that are not nnx.Param"),
    ],
)
def test_modules_that_make_no_model(changes, message):
    with pytest.raises(UserError, match=message):
        Model.from_nnx(**{**MODELS["equal blocks"], **changes})


def lowered(model):
    plan, tx = make_plan("zero1", model), optax.sgd(0.1)
    state = init_state(plan, tx)
    make_train_step(plan, tx).lower(state, plan.shard(split(batches(steps=1)[0], 1)))


def test_a_head_that_uses_its_embedding_without_tied():
    with pytest.raises(UserError, match="takes 'embed'.*a head that uses the embedding needs tied=True"):
        lowered(Model.from_nnx(**{**MODELS["equal blocks"], "head": TiedHead}))

    def loss(params, embed, x, batch, rng):
        return token_loss(x @ embed["table"].T, batch)

    head = Part(lambda key: {"unused": jnp.ones(8)}, loss)
    with pytest.raises(UserError, match=r"the head of model uses its embedding's parameters.*say tied=True"):
        lowered(Model(name="model", embed=Part.from_nnx(Embed, lambda e, batch, rng: e(batch["tokens"])), head=head))
