"""A step whose loss or gradient norm is not finite changes no bit of parameters and optimizer state; any other step is
the plain update, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle import batches, plan_for

from amsp_jax.engine.microbatch import LossSums
from amsp_jax.engine.nonfinite import NonFinite, make_find_nonfinite
from amsp_jax.engine.optimizer import OPTIMIZERS, make_optimizer, num_updates, to_storage, to_true
from amsp_jax.engine.state import abstract_state, init_state, true_state
from amsp_jax.engine.train_step import make_grad_fn, make_train_step, make_update_fn, mean_scale
from amsp_jax.model import Model, Part
from amsp_jax.strategy import DataRanks

SEED = np.uint32(0)
STRATEGIES = ["ddp", "zero1", "zero3", "mics(4)"]
# Without them, as conftest has it for jax 0.10, two programs that are fused differently round differently.
EMITTERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else None


def slow(value):
    """A parameter of a wide test."""
    return pytest.param(value, marks=pytest.mark.slow)


def poisoned(batch, value=np.nan):
    """One token's weight on one device is not finite."""
    return {**batch, "weights": np.where(np.arange(oracle.ROWS)[:, None] == 5, np.float32(value), batch["weights"])}


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]


@functools.cache
def gradient(strategy, accumulation):
    """Compiled once for all optimizers."""
    model = oracle.model("llama", 1)
    plan = plan_for(strategy, model)
    compiled = jax.jit(make_grad_fn(plan))
    return lambda state, batch: compiled(state.params, oracle.placed(plan, batch, accumulation), SEED, state.step)


@functools.cache
def updating(strategy, optimizer_name):
    """A state at step 0, and the compiled update."""
    model, optimizer = oracle.model("llama", 1), oracle.optimizer(optimizer_name)
    plan = plan_for(strategy, model)
    state = oracle.initial_state(model, optimizer, plan)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    return state, jax.jit(make_update_fn(plan, optimizer), out_shardings=(shardings, plan.replicated))


def setting(strategy, accumulation, optimizer_name):
    """A step that keeps its argument, and a state after one step."""
    grads_of, (fresh, update) = gradient(strategy, accumulation), updating(strategy, optimizer_name)

    def step(state, batch):
        sums, grads = grads_of(state, batch)
        return update(state, grads, sums)

    first, metrics = step(fresh, batches()[0])
    assert metrics.is_finite and metrics.num_updates == 0
    return step, first


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bad_batch_leaves_no_trace(strategy, optimizer, accumulation):
    check_no_trace(*setting(strategy, accumulation, optimizer))


def test_a_bad_batch_leaves_no_trace_in_a_donated_state():
    model, optimizer = oracle.model("llama", 1), oracle.optimizer("adamw")
    plan = plan_for("zero1", model)
    compiled = make_train_step(plan, optimizer)

    def step(state, batch):
        return compiled(jax.tree.map(jnp.copy, state), oracle.placed(plan, batch, 3))

    check_no_trace(step, step(oracle.initial_state(model, optimizer, plan), batches()[0])[0])
    assert compiled._cache_size() == 1


def check_no_trace(step, state):
    after, metrics = step(state, poisoned(batches()[1]))
    assert not metrics.is_finite and np.isnan(metrics.loss) and np.isnan(metrics.grad_norm)
    assert after.step == 2 and metrics.num_updates == 1
    assert bits((after.params, after.opt_state)) == bits((state.params, state.opt_state))
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, state)

    # The next step is that of a run which never saw the batch, up to the number of the step.
    met, metrics = step(after, batches()[2])
    unmet, expected = step(state, batches()[2])
    assert met.step == 3 and unmet.step == 2 and metrics.num_updates == expected.num_updates == 1
    assert metrics.is_finite and bits(metrics) == bits(expected)
    assert bits((met.params, met.opt_state)) == bits((unmet.params, unmet.opt_state))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", *map(slow, sorted({*OPTIMIZERS} - {"adamw", "sgd"}))])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_finite_step_is_the_plain_update_bit_for_bit(strategy, optimizer):
    """At the tests' level of optimization; above it XLA on CPUs fuses, and so rounds, the two programs differently."""
    model, optimizer = oracle.model("llama", 1), oracle.optimizer(optimizer)
    plan = plan_for(strategy, model)
    state = oracle.initial_state(model, optimizer, plan)
    true, stored = true_state(plan, optimizer), abstract_state(plan, optimizer)

    def plain(state, grads, sums):
        grads = jax.tree.map(lambda g: g * mean_scale(sums.weight), to_true(grads, true.params))
        params, opt_state = to_true(state.params, true.params), to_true(state.opt_state, true.opt_state)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return to_storage(params, stored.params), to_storage(opt_state, stored.opt_state)

    shardings = jax.tree.map(lambda x: x.sharding, state)
    plain = jax.jit(plain, out_shardings=(shardings.params, shardings.opt_state), compiler_options=EMITTERS)
    ours = jax.jit(
        make_update_fn(plan, optimizer), out_shardings=(shardings, plan.replicated), compiler_options=EMITTERS
    )
    for batch in batches(steps=2):
        sums, grads = gradient(strategy, 1)(state, batch)
        expected = plain(state, grads, sums)
        state, _ = ours(state, grads, sums)
        assert bits((state.params, state.opt_state)) == bits(expected)


@functools.cache
def update_alone():
    model, optimizer = oracle.model("llama", 1), oracle.optimizer("adamw")
    plan = plan_for("zero3", model)
    state = oracle.initial_state(model, optimizer, plan)
    return jax.jit(make_update_fn(plan, optimizer)), state


@pytest.mark.parametrize(
    ("loss", "gradient", "applied"),
    [
        (1.0, 1.0, True),
        (np.nan, 1.0, False),
        (np.inf, 1.0, False),
        (1.0, np.nan, False),
        (1.0, -np.inf, False),
        # Finite values whose squares are not: Adam's second moment would be infinite from then on.
        (1.0, 1e30, False),
        (1.0, 1e15, True),
    ],
)
def test_what_counts_as_finite(loss, gradient, applied):
    update, state = update_alone()
    grads = jax.tree.map(jnp.zeros_like, state.params)
    grads["head"]["norm"]["scale"] = grads["head"]["norm"]["scale"].at[0].set(gradient)
    after, metrics = update(state, grads, LossSums(loss=jnp.float32(loss), weight=jnp.float32(1), aux={}))
    assert metrics.is_finite == applied and after.step == 1
    assert (bits(after.params) == bits(state.params)) != applied
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


def test_no_valid_token_is_no_error():
    step, state = setting("zero3", 3, "adamw")
    after, metrics = step(state, {**batches()[1], "weights": np.zeros((oracle.ROWS, oracle.SEQ), np.float32)})
    assert metrics.is_finite and metrics.loss == 0
    assert num_updates(after.opt_state, None) == 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_counted_by_every_optimizer(optimizer):
    optimizer = make_optimizer(optimizer, 0.1, weight_decay=0.1)
    params = {"embed": jnp.ones((2, 2)), "count": jnp.full((2, 3), 7.0)}
    state = optimizer.init(params)
    with jax.numpy_dtype_promotion("standard"):
        _, state = optimizer.update(params, state, params)
    assert num_updates(state, None) == 1


def test_an_optimizer_that_counts_nothing_has_as_many_updates_as_steps():
    assert num_updates(optax.sgd(0.1).init({"w": jnp.ones(2)}), jnp.int32(5)) == 5


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_the_select_copies_no_state(strategy):
    """Every leaf of the state is donated to its successor: a select on a copy would need the bytes twice."""
    model, optimizer = oracle.model("llama", 1), oracle.optimizer("adamw")
    plan = plan_for(strategy, model)
    state = abstract_state(plan, optimizer)
    batch = oracle.placed(plan, batches()[0], 1)
    compiled = make_train_step(plan, optimizer).lower(state, batch).compile()
    shards = [x.dtype.itemsize * np.prod(x.sharding.shard_shape(x.shape), dtype=int) for x in jax.tree.leaves(state)]
    assert compiled.memory_analysis().alias_size_in_bytes == sum(shards)
    assert " conditional(" not in compiled.as_text()


def squares(broken=""):
    """Two leaves, one of which grows without bound where the batch says so."""

    def loss(params, batch, rng):
        del rng
        x = params["w"].sum() * batch["x"] + params["v"].sum()
        return (jnp.sum(x * x), jnp.float32(x.size)), {}

    def init(key):
        del key
        values = {"w": jnp.ones((8, 3)), "v": jnp.ones(8)}
        return {name: x.at[0].set(jnp.nan) if name == broken else x for name, x in values.items()}

    return Model.from_loss(loss, init)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_leaves_of_a_model_without_blocks_are_named(strategy):
    model = squares()
    plan = plan_for(strategy, model, DataRanks(4, 2))
    state = init_state(plan, oracle.optimizer("sgd"), seed=0)
    find = make_find_nonfinite(plan)
    good, large = ({"x": np.full((2, 8, 1), x, np.float32)} for x in (1.0, 1e12))
    found = find(state.params, plan.shard(good), SEED, 0)
    assert found == NonFinite(loss=False, params=(), grads=(), num_leaves=2)
    assert str(found) == "loss, leaves and gradients are finite, each by itself"
    found = find(state.params, plan.shard(large), SEED, 0)
    assert (found.loss, found.grads) == (False, ("w",))
    assert str(found) == "not finite: the gradients of w"
    broken = init_state(plan_for(strategy, squares("v"), DataRanks(4, 2)), oracle.optimizer("sgd"), seed=0)
    found = find(broken.params, plan.shard(good), SEED, 0)
    assert (found.loss, found.params, found.grads) == (True, ("v",), ("v", "w"))


@pytest.mark.parametrize("strategy", ["zero3", *map(slow, ["ddp", "zero1", "mics(4)"])])
def test_leaves_are_named_from_the_head_to_the_embedding(strategy):
    model = oracle.model("llama", 2)
    plan = plan_for(strategy, model)
    params = oracle.initial_state(model, oracle.optimizer("sgd"), plan).params
    find = make_find_nonfinite(plan)
    batch = oracle.placed(plan, batches()[0], 3)
    assert not find(params, batch, SEED, 0).grads
    found = find(params, oracle.placed(plan, poisoned(batches()[0]), 3), SEED, 0)
    assert found.loss and not found.params and len(found.grads) == found.num_leaves
    assert found.grads[0].startswith("head.") and found.grads[-1].startswith("embed.")
    assert [path[:8] for path in found.grads[1:3]] == ["blocks.1"] * 2
    assert str(found).endswith(f", ... ({found.num_leaves} of {found.num_leaves} leaves)")


def with_a_root(num_blocks, broken):
    """Blocks of which one has a gradient that is NaN in one leaf, and in no other of the model."""

    def block(params, x, batch, rng):
        return jnp.tanh(x @ params["w"]) + params["bias"] + 0 * jnp.sqrt(params["root"])[0]

    def head(params, embed, x, batch, rng):
        losses = jnp.sum((x @ params["w"]) ** 2, axis=-1)
        return (jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])), {}

    def part(apply, root=1.0):
        return Part(lambda key: {"w": jnp.eye(8), "bias": jnp.ones(8), "root": jnp.full((16, 8), root)}, apply)

    blocks = tuple(part(block, 0.0 if i == broken else 1.0) for i in range(num_blocks))
    embed = part(lambda params, batch, rng: params["w"][batch["tokens"] % 8])
    return Model(name="own", embed=embed, blocks=blocks, head=part(head))


@pytest.mark.parametrize("strategy", ["zero3", *map(slow, ["ddp", "zero1", "zero2"])])
def test_no_leaf_is_named_for_another_of_its_block(strategy):
    model = with_a_root(num_blocks=8, broken=6)
    plan = plan_for(strategy, model)
    params = init_state(plan, oracle.optimizer("sgd"), seed=0).params
    found = make_find_nonfinite(plan)(params, oracle.placed(plan, batches()[0], 1), SEED, 0)
    assert (found.loss, found.params, found.grads) == (False, (), ("blocks.6.root",))
