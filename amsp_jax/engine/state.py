"""The training state: created already sharded, described without devices, moved between strategies.

What lives between steps is the OS part alone, the float32 master and the optimizer's state; P shards and G buffers
live inside the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from amsp_jax.engine.arguments import check_optimizer, check_plan
from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.optimizer import abstract_opt_state, abstract_storage, moment_plans, to_storage, to_true
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.trees import A, Tree, tree_map
from amsp_jax.errors import UserError
from amsp_jax.model import Params


@flax.struct.dataclass
class TrainState:
    """What is kept between steps: global arrays at their OS shardings, padded where a leaf is.

    Attributes:
      step: int32, steps done.
      seed: uint32, of the random draws of every step; it never changes.
      params: the float32 master.
      opt_state: of the optax optimizer.
    """

    step: Any
    seed: Any
    params: Params
    opt_state: Any


def true_state(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of true, unpadded shapes, as `ShapeDtypeStruct`s on no device."""
    params = plan.model.abstract_params()
    return TrainState(**_counters(), params=params, opt_state=abstract_opt_state(optimizer, trained(plan, params)))


def _counters(**sharding: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "step": jax.ShapeDtypeStruct((), jnp.int32, **sharding),
        "seed": jax.ShapeDtypeStruct((), jnp.uint32, **sharding),
    }


def abstract_state(plan: Plan, optimizer: optax.GradientTransformation) -> TrainState:
    """The state as it is stored, as `ShapeDtypeStruct`s with shardings: to restore into, or to compile for."""
    return _stored(plan, true_state(plan, optimizer))


def _stored(plan: Plan, true: TrainState) -> TrainState:
    return TrainState(
        **_counters(sharding=plan.replicated),
        params=abstract_storage(plan, true.params),
        opt_state=abstract_storage(plan, true.opt_state),
    )


def init_state(plan: Plan, optimizer: optax.GradientTransformation, seed: int = 0) -> TrainState:
    """Creates a fresh state, already sharded; its values depend on `seed` alone, bit for bit on every mesh.

    Bit for bit where each value is computed by itself, as random draws are; an `init` that sums over a dimension
    may differ in its last bit.

    Args:
      plan: of the model.
      optimizer: any optax transform.
      seed: of the parameters, and of the random draws of each step, such as dropout; the state keeps it.

    Raises:
      UserError: the seed is no integer of 32 bits, or another argument is of a wrong type.
    """
    check_plan(plan, "init_state(plan, optimizer)")
    check_optimizer(optimizer, "init_state(plan, optimizer)")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise UserError(f"seed={seed!r}: it must be an integer from 0 to {2**32 - 1}")
    params = _init_params(plan, int(seed))
    true, stored = true_state(plan, optimizer), abstract_state(plan, optimizer)
    true_params = trained(plan, true.params)

    def init_optimizer(params: Params) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            opt_state = optimizer.init(to_true(params, true_params))
        return to_storage(opt_state, stored.opt_state)

    opt_state = jax.jit(init_optimizer, out_shardings=_shardings(stored.opt_state))(trained(plan, params))
    step, kept = jax.jit(lambda: (jnp.int32(0), jnp.uint32(seed)), out_shardings=plan.replicated)()
    return TrainState(step=step, seed=kept, params=params, opt_state=opt_state)


def _init_params(plan: Plan, seed: int) -> Params:
    """The initial master, from one compiled function for each distinct part: a deep model compiles one block."""
    model = plan.model
    embed, blocks, head = model.split(plan.leaves)
    compiled: dict[Any, Callable[[jax.Array], Params]] = {}
    trees = []
    for i, (part, leaves) in enumerate(zip(model.parts, (embed, *blocks, head), strict=True)):
        # What the compiled function depends on: the initialiser, and how its leaves are stored.
        kind = part.init, tuple((leaf.storage_shape, leaf.opt_spec) for leaf in jax.tree.leaves(leaves))
        if kind not in compiled:
            compiled[kind] = _compiled_init(part.init, leaves, plan)
        trees.append(compiled[kind](jax.random.fold_in(jax.random.key(seed), i)))
    return model.join(trees[0], trees[1:-1], trees[-1])


def _compiled_init(init: Callable[[jax.Array], Params], leaves: Params, plan: Plan) -> Callable[[jax.Array], Params]:
    stored = jax.tree.map(lambda leaf: _stored_leaf(plan, leaf), leaves)

    def fresh(key: jax.Array) -> Params:
        return to_storage(jax.tree.map(lambda x: x.astype(jnp.float32), init(key)), stored)

    return jax.jit(fresh, out_shardings=_shardings(stored))


def _stored_leaf(plan: Plan, leaf: LeafPlan) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.storage_shape, jnp.float32, sharding=NamedSharding(plan.mesh, leaf.opt_spec))


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


# None is a tree without leaves to jax and optax, so a frozen parameter costs neither bytes nor a branch.
def trained(plan: Plan, tree: Tree[A]) -> Tree[A | None]:
    """The tree as the optimizer sees it, with None in place of frozen leaves."""

    def one(leaf: LeafPlan, x: A) -> A | None:
        return None if leaf.frozen else x

    return tree_map(one, plan.leaves, tree)


def with_frozen(plan: Plan, tree: Tree[A | None], frozen: Tree[A]) -> Tree[A]:
    """Puts the frozen leaves of a tree in the places where another one has None."""

    def one(leaf: LeafPlan, x: A | None, kept: A) -> A:
        return kept if x is None else x

    return tree_map(one, plan.leaves, tree, frozen)


def reshard(state: TrainState, plan: Plan) -> TrainState:
    """The same state under another plan, every bit kept: another strategy, mesh or set of devices.

    The old state stays valid: no buffer is shared, so a step that donates one leaves the other alone.

    Args:
      state: a live state under any plan of the same model.
      plan: the new one.
    """
    find = moment_plans(plan, like=state.params)

    def true_moment(path: Any, x: jax.Array) -> jax.ShapeDtypeStruct:
        leaf = find(path, x)
        if leaf and leaf.frozen:
            raise UserError(
                f"{leaf.path} is frozen in the new plan, and the state has optimizer state for it; give both plans the "
                "same `frozen`"
            )
        return jax.ShapeDtypeStruct(leaf.shape if leaf else x.shape, x.dtype)

    true = TrainState(
        **_counters(),
        params=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), plan.leaves),
        opt_state=jax.tree_util.tree_map_with_path(true_moment, state.opt_state),
    )
    return jax.tree.map(_move, state, true, _stored(plan, true))


def _move(x: jax.Array, true: jax.ShapeDtypeStruct, stored: jax.ShapeDtypeStruct) -> jax.Array:
    if x.shape != stored.shape:
        x = jax.jit(lambda x: to_storage(to_true(x, true), stored))(x)
    # device_put keeps shards that already lie where they must, whatever may_alias says: so a copy is moved.
    return jax.device_put(_copy(x), stored.sharding)


_copy = jax.jit(jnp.copy)
