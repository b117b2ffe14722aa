"""Your own model and optimizer under any strategy, on 8 simulated devices: `python docs/examples/own_model.py`.

Two models: a pytree of parameters with a loss function, and Flax NNX modules with blocks, whose parameters are
gathered one block at a time. Both are written for one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from amsp_jax import DataRanks, Model, init_state, make_plan, make_train_step, reshard

VOCAB, WIDTH = 256, 64
MICROBATCHES, ROWS, SEQ = 2, 16, 8
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def cross_entropy(logits, batch):
    """((sum of losses, sum of weights), sums to log): sums over the rows given, never means."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    hits = jnp.argmax(logits, -1) == batch["targets"]
    weights = batch["weights"]
    return (jnp.sum(losses * weights), jnp.sum(weights)), {"num_correct": jnp.sum(jnp.where(hits, weights, 0))}


def dropout(key, x, rate=0.1):
    """Zeroes a share `rate` of one row's values. `rng` holds one key per row: so it is the same on every mesh."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


# A pytree and a loss.


def init(key):
    """Parameters: any pytree of arrays."""
    embed_key, head_key = jax.random.split(key)
    return {
        "embed": 0.1 * jax.random.normal(embed_key, (VOCAB, WIDTH)),
        "head": 0.1 * jax.random.normal(head_key, (WIDTH, VOCAB)),
    }


def loss(params, batch, rng):
    """The loss of the rows of a microbatch, [rows, seq] tokens."""
    x = jax.vmap(dropout)(rng, params["embed"][batch["tokens"]])
    return cross_entropy(x @ params["head"], batch)


def loss_model():
    """A model of no blocks."""
    return Model.from_loss(loss, init, name="bigram")


# Flax NNX modules: an embedding, blocks that share one initialisation, a head.


class Block(nnx.Module):
    """A residual MLP."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, rng):
        """[rows, seq, width] to the same."""
        return x + jax.vmap(dropout)(rng, self.down(nnx.gelu(self.up(x))))


def nnx_model(num_blocks=2):
    """A model of blocks. What takes `rngs` can be a module: a class, or a class with some arguments."""
    return Model.from_nnx(
        name="residual-mlp",
        embed=functools.partial(nnx.Embed, VOCAB, WIDTH),
        block=Block,
        num_blocks=num_blocks,
        head=functools.partial(nnx.Linear, WIDTH, VOCAB, use_bias=False),
        loss=cross_entropy,
    )


def make_batch(step):
    """A batch of [microbatches, rows, seq] to learn a permutation of the vocabulary from; the last rows are padding."""
    tokens = np.random.default_rng(step).integers(0, VOCAB, (MICROBATCHES, ROWS, SEQ), dtype=np.int32)
    weights = np.ones(tokens.shape, np.float32)
    weights[:, -3:] = 0
    return {"tokens": tokens, "targets": (5 * tokens + 3) % VOCAB, "weights": weights}


def plan_for(model, strategy, ranks):
    """Where everything lies; float32 here, to compare strategies to many digits."""
    return make_plan(strategy, model, ranks=ranks, devices=jax.devices()[: ranks.total], compute_dtype=jnp.float32)


def train(step_fn, plan, state, steps):
    """Trains from `state`: the new state, and the loss of each step."""
    losses = []
    for step in steps:
        batch = plan.shard(make_batch(step))
        state, metrics = step_fn(state, batch)
        losses.append(float(metrics.loss))
    return state, losses


def run(model, strategy, ranks):
    """Four steps under a strategy: its plan, its compiled step, the state."""
    plan = plan_for(model, strategy, ranks)
    state = init_state(plan, OPTIMIZER, seed=0)
    step_fn = make_train_step(plan, OPTIMIZER)
    state, losses = train(step_fn, plan, state, range(4))
    report(model, strategy, losses)
    return plan, step_fn, state


def report(model, words, losses):
    """One line: what ran, and its losses."""
    print(f"{model.name:13} {words:41}", *(f"{loss:.4f}" for loss in losses))


def main():
    """Trains each model under two strategies, and moves a live state from one to the other."""
    ranks = DataRanks(per_node=4, num_nodes=2)
    for model in (loss_model(), nnx_model()):
        _, _, state = run(model, "zero3", ranks)
        plan, step_fn, _ = run(model, "params=replica grads=node opt_state=full", ranks)
        moved = reshard(state, plan)
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, moved, state))), "a value was lost"
        _, losses = train(step_fn, plan, moved, range(4, 6))
        report(model, "zero3's state, moved and trained on", losses)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
