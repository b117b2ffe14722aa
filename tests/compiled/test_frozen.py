"""Frozen leaves train as constants do on one device in plain JAX: no gradient, no state, no reduction."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle import RANKS, batches, split

from amsp_jax.compile import hlo
from amsp_jax.engine.nonfinite import make_find_nonfinite
from amsp_jax.engine.optimizer import OPTIMIZERS, make_optimizer, to_true
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.replicas import make_replica_check
from amsp_jax.engine.state import abstract_state, init_state, reshard, trained, true_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.errors import UserError
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.job import true_shapes, whole_state
from amsp_jax.strategy import DataRanks

STEPS = 2
# The first block and what comes before it; attention in every block, with the head's norm.
BOTTOM = (r"embed\..*", r"blocks\.0\..*")
ATTENTION = (r"blocks\.\d+\.attention\..*", r"head\.norm\..*")


def untied():
    return oracle.model("llama", tied=False)


def frozen_plan(strategy, frozen, ranks=RANKS, parallel=None, model=None, dtype=jnp.float32):
    model = model or untied()
    devices = jax.devices()[: ranks.total * (parallel or ModelParallel()).total]
    return make_plan(
        strategy, model, ranks=ranks, devices=devices, compute_dtype=dtype, parallel=parallel, frozen=frozen
    )


def plain_step(model, plan, optimizer):
    """A step on one device without this engine: the loss in plain JAX, `jax.grad` of the other leaves, optax."""

    def loss(free, params, batch):
        whole = jax.tree.map(lambda leaf, x, y: x if leaf.frozen else y, plan.leaves, params, free)
        embed, blocks, head = model.split(whole)
        keys = jax.random.split(jax.random.key(0), len(batch["tokens"]))
        x = model.embed.apply(embed, batch, keys)
        for part, own in zip(model.blocks, blocks, strict=True):
            x = part.apply(own, x, batch, keys)
        (total, weight), _ = model.head.apply(head, embed if model.tied else None, x, batch, keys)
        return total / weight

    def step(params, opt_state, batch):
        free = trained(plan, params)
        value, grads = jax.value_and_grad(loss)(free, params, batch)
        norm = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, free)
            free = optax.apply_updates(free, updates)
        params = jax.tree.map(lambda leaf, x, y: x if leaf.frozen else y, plan.leaves, params, free)
        return params, opt_state, value, norm

    return jax.jit(step)


def check(plan, optimizer_name, accumulation, settings=None):
    model, optimizer = plan.model, oracle.optimizer(optimizer_name)
    state = init_state(plan, optimizer, seed=3)
    step = make_train_step(plan, optimizer, settings or StepSettings())
    start = params = jax.device_get(to_true(state.params, model.abstract_params()))
    opt_state, plain = optimizer.init(trained(plan, params)), plain_step(model, plan, optimizer)
    before = jax.tree.map(lambda x: x.sharding, state)
    for batch in batches(steps=STEPS):
        state, metrics = step(state, plan.shard(split(batch, accumulation)))
        params, opt_state, loss, norm = plain(params, opt_state, batch)
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    found = jax.device_get(to_true(state, true_state(plan, optimizer)))
    assert oracle.difference(found.params, jax.device_get(params)) < 1e-5
    for leaf, old, new in zip(*map(jax.tree.leaves, (plan.leaves, start, found.params)), strict=True):
        # Every bit of a frozen leaf, and nothing else, is what it was.
        assert np.array_equal(old, new) == leaf.frozen, leaf.path
    return state


@pytest.mark.parametrize(
    ("strategy", "accumulation", "frozen"),
    [
        ("zero1", 3, BOTTOM),
        ("zero2", 1, ATTENTION),
        ("zero3", 3, ATTENTION),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [("zero1", 1, ATTENTION), ("zero2", 3, BOTTOM), ("zero3", 1, BOTTOM), ("mics(4)", 3, BOTTOM)]
        ),
    ],
)
def test_a_step_is_that_of_one_device(strategy, accumulation, frozen):
    check(frozen_plan(strategy, frozen), "sgd", accumulation)


@pytest.mark.parametrize("frozen", [BOTTOM, ATTENTION])
def test_in_a_group_of_microbatches(frozen):
    check(frozen_plan("zero1", frozen), "sgd", 3, StepSettings(microbatch_group=3))


@pytest.mark.parametrize(
    ("parallel", "frozen"),
    [
        ({"tensor": 2}, ATTENTION),
        # Of the blocks in one place of the two stages, one is frozen.
        ({"pipeline": 2}, BOTTOM),
        pytest.param({"pipeline": 2}, ATTENTION, marks=pytest.mark.slow),
    ],
)
def test_beside_tensor_and_pipeline(parallel, frozen):
    check(frozen_plan("zero1", frozen, DataRanks(2), ModelParallel(**parallel)), "sgd", 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_none_in_the_place_of_frozen_leaves(name):
    plan = frozen_plan("zero1", ATTENTION, DataRanks(1))
    optimizer = make_optimizer(name, 1e-3, weight_decay=0.1, clip_norm=0.3)
    state = abstract_state(plan, optimizer)
    grads = trained(plan, state.params)
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = jax.eval_shape(optimizer.update, grads, state.opt_state, grads)
    assert jax.tree.structure(updates) == jax.tree.structure(grads)
    assert jax.tree.structure(opt_state) == jax.tree.structure(state.opt_state)


def test_bytes_of_the_state():
    """The master of every leaf, two moments of those that are trained, the counters of step, seed and AdamW."""
    plan = frozen_plan("zero3", ATTENTION)
    leaves = jax.tree.leaves(plan.leaves)
    values = sum(leaf.num_opt_shard for leaf in leaves)
    moments = sum(2 * leaf.num_opt_shard for leaf in leaves if not leaf.frozen)
    state = init_state(plan, optax.adamw(1e-3), seed=0)
    found = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))
    assert found == 4 * (values + moments) + 3 * 4
    by_plan = plan.bytes_per_device()
    assert (by_plan.master, by_plan.moments) == (4 * values, 4 * moments)
    assert by_plan.grads == 4 * sum(leaf.num_grads_shard for leaf in leaves if not leaf.frozen)


def lowered(plan, accumulation):
    optimizer = oracle.optimizer("adamw")
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    shape = (accumulation, 8, oracle.SEQ)
    batch = {k: jax.ShapeDtypeStruct(shape, d, sharding=plan.batch_sharding) for k, d in dtypes.items()}
    return make_train_step(plan, optimizer).lower(abstract_state(plan, optimizer), batch)


def test_nothing_is_reduced_for_frozen_leaves():
    """zero2 reduces each gradient once in each of three microbatches; the P shards of all leaves are gathered once."""
    plan = frozen_plan("zero2", ATTENTION)
    program = lowered(plan, 3).compile()
    found = [c for c in hlo.collectives(program.as_text()) if not c.is_scalar]
    leaves = jax.tree.leaves(plan.leaves)
    kinds = {kind: sum(c.kind == kind for c in found) for kind in ("reduce-scatter", "all-gather", "all-reduce")}
    num_trained = sum(not leaf.frozen for leaf in leaves)
    # Sharded between nodes, too, so a gradient is reduced over both levels in one collective.
    assert kinds == {"reduce-scatter": 3 * num_trained, "all-gather": len(leaves), "all-reduce": 0}


def test_what_is_below_the_first_trained_leaf_has_no_backward_pass():
    """zero3 gathers parameters of a block again to go backward: not where everything up to it is frozen."""
    found = hlo.collectives(lowered(frozen_plan("zero3", BOTTOM), 1).compile().as_text())
    leaves = untied().split(frozen_plan("zero3", BOTTOM).leaves)
    embed, (first, second), head = (jax.tree.map(lambda leaf: leaf.path, tree) for tree in leaves)
    once = len(jax.tree.leaves((embed, first, head)))
    twice = len(jax.tree.leaves(second))
    assert sum(c.kind == "all-gather" and not c.is_scalar for c in found) == once + 2 * twice


def test_checks_of_replicas_and_numbers_and_another_plan_know_frozen_leaves():
    optimizer = optax.adamw(1e-3)
    plan = frozen_plan("ddp", BOTTOM, DataRanks(2))
    state = init_state(plan, optimizer, seed=0)
    assert make_replica_check(plan, optimizer)(state) == []
    other = frozen_plan("zero3", BOTTOM, DataRanks(4))
    moved = reshard(state, other)
    assert jax.tree.structure(moved) == jax.tree.structure(abstract_state(other, optimizer))
    true = true_state(plan, optimizer)
    jax.tree.map(np.testing.assert_array_equal, to_true(state, true), to_true(moved, true))
    broken = dataclasses.replace(moved, params=jax.tree.map(lambda x: x * jnp.float32(np.nan), moved.params))
    batch = other.shard(split(batches(steps=1)[0], 1))
    found = make_find_nonfinite(other)(broken.params, batch, 0, 0)
    paths = [leaf.path for leaf in jax.tree.leaves(other.leaves)]
    assert sorted(found.params) == sorted(paths)
    free = [path for path in paths if not any(re.fullmatch(pattern, path) for pattern in BOTTOM)]
    assert sorted(found.grads) == sorted(free)


def test_a_checkpoint_moves_to_another_plan_and_names_what_is_missing(tmp_path):
    optimizer = optax.adamw(1e-3)
    plan, other = frozen_plan("zero3", BOTTOM, DataRanks(4)), frozen_plan("mics(2)", BOTTOM, DataRanks(2, 2))
    state = init_state(plan, optimizer, seed=0)
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(0, state, {"shapes": true_shapes(true_state(plan, optimizer))})
    checkpoints.wait()
    restored = checkpoints.restore(0, *whole_state(other, optimizer))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for x, y in zip(
        *(jax.tree.leaves(to_true(s, true_state(plan, optimizer))) for s in (state, restored)), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(UserError, match="opt_state/"):
        checkpoints.restore(0, *whole_state(frozen_plan("zero3", ATTENTION, DataRanks(4)), optimizer))
    checkpoints.close()


def test_a_state_does_not_move_to_a_plan_that_freezes_other_leaves():
    state = init_state(frozen_plan("ddp", BOTTOM, DataRanks(1)), optax.adamw(1e-3), seed=0)
    with pytest.raises(UserError, match="frozen in the new plan"):
        reshard(state, frozen_plan("ddp", ATTENTION, DataRanks(1)))
