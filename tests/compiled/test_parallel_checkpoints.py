"""States move between layouts of stages, context, tensor and data ranks: every bit of every true value is kept."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import parallel_rows
import pytest

from amsp_jax.engine.optimizer import OPTIMIZERS, to_true
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.state import abstract_state, init_state, reshard, true_state
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.job import true_shapes, whole_state
from amsp_jax.strategy import DataRanks

LAYOUTS = {
    "one device": ("ddp", 1, 1, {}),
    "zero3, t4": ("zero3", 1, 8, {"tensor": 4}),
    "zero1, p2, t2, c2": ("zero1", 1, 8, {"pipeline": 2, "tensor": 2, "context": 2}),
    "hpz, p3": ("hpz(2)", 1, 6, {"pipeline": 3}),
    "mics, p4": ("mics(2)", 2, 4, {"pipeline": 4}),
}
# Once around all of them by default.
RING = list(zip(LAYOUTS, [*list(LAYOUTS)[1:], *list(LAYOUTS)[:1]], strict=True))
ALL_PAIRS = list(itertools.permutations(LAYOUTS, 2))
PAIRS = [pytest.param(*pair, marks=[] if pair in RING else pytest.mark.slow) for pair in ALL_PAIRS]


def model():
    return parallel_rows.model("llama", True, 4)


def optimizer():
    return oracle.optimizer("adamw")


@functools.cache
def plan(name):
    strategy, nodes, per_node, parallel = LAYOUTS[name]
    cut, devices = ModelParallel(**parallel), jax.devices()[: nodes * per_node]
    return make_plan(
        strategy,
        model(),
        ranks=cut.data_ranks(nodes, per_node),
        devices=devices,
        compute_dtype=jnp.float32,
        parallel=cut,
    )


@functools.cache
def true_values():
    """A state in which every value is another one."""
    rng = np.random.default_rng(0)
    draw = lambda x: rng.normal(size=x.shape).astype(x.dtype) if x.shape else x.dtype.type(7)  # noqa: E731
    return jax.tree.map(draw, true_state(plan(next(iter(LAYOUTS))), optimizer()))


@functools.cache
def stored(name):
    return oracle.stored(true_values(), abstract_state(plan(name), optimizer()))


def assert_same(state, name):
    """At the shardings of the layout, the true values bit for bit, and zeros for padding."""
    like = stored(name)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, like)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(like))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each layout, by its name."""

    @functools.cache
    def save(name):
        folder = tmp_path_factory.mktemp("saved")
        checkpointer = Checkpointer(folder, keep=1)
        checkpointer.save(3, stored(name), {"shapes": true_shapes(true_state(plan(next(iter(LAYOUTS))), optimizer()))})
        checkpointer.close()
        return folder

    return save


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_checkpoint_is_restored_under_another_layout(saved, old, new):
    checkpointer = Checkpointer(saved(old), keep=None)
    assert_same(checkpointer.restore(3, *whole_state(plan(new), optimizer())), new)
    checkpointer.close()


@pytest.mark.parametrize(
    ("old", "new"), [pytest.param(*pair, marks=[] if pair in RING[1:4] else pytest.mark.slow) for pair in ALL_PAIRS]
)
def test_a_live_state_moves(old, new):
    assert_same(reshard(stored(old), plan(new)), new)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if " p" in name else pytest.mark.slow) for name in LAYOUTS]
)
def test_initial_states_are_bit_identical(name):
    true = true_state(plan(next(iter(LAYOUTS))), optimizer())
    state = to_true(init_state(plan(name), optimizer(), seed=3), true)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), oracle.initial(model(), optimizer()))


def test_the_layouts_pad_differently():
    """Or moving between them would show little."""
    shapes = {tuple(leaf.storage_shape for leaf in jax.tree.leaves(plan(name).leaves)) for name in LAYOUTS}
    # Six shards of stages and ranks divide every leaf, as one device does.
    assert len(shapes) == len(LAYOUTS) - 1
    assert plan("one device").degrees.ranks == DataRanks(1)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("adamw", "sgd", "muon") else pytest.mark.slow) for name in OPTIMIZERS],
)
def test_frozen_leaves_and_the_seed_are_restored_under_another_strategy(tmp_path, name):
    """Frozen parameters are `None` in the optimizer's state, and so are they in what is read."""

    def frozen_plan(strategy, ranks):
        some = {"compute_dtype": jnp.float32, "devices": jax.devices()[: ranks.total]}
        return make_plan(strategy, model(), ranks=ranks, frozen=(r"embed\..*", r".*_norm\.scale"), **some)

    optimizer = oracle.optimizer(name)
    old, new = frozen_plan("zero3", DataRanks(4, 2)), frozen_plan("hpz(2)", DataRanks(2, 3))
    state = init_state(old, optimizer, seed=5)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(0, state, {"shapes": true_shapes(true_state(old, optimizer))})
    checkpointer.wait()
    restored = checkpointer.restore(0, *whole_state(new, optimizer))
    checkpointer.close()
    true = true_state(new, optimizer)
    assert restored.seed == 5 and jax.tree.structure(restored) == jax.tree.structure(state)
    whole = true_state(plan("one device"), optimizer)
    assert name == "sgd" or len(jax.tree.leaves(true.opt_state)) < len(jax.tree.leaves(whole.opt_state))
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(to_true(x, true)) for x in (restored, state)))
    assert [x.sharding for x in jax.tree.leaves(restored)] == [
        x.sharding for x in jax.tree.leaves(abstract_state(new, optimizer))
    ]
