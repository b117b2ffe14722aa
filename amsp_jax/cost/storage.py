"""What of a model is stored on one device, leaf by leaf, read off the plan of its sketch: exact."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import optax

from amsp_jax.cost.sketch import Sketch
from amsp_jax.optimizer import abstract_opt_state, moment_plans
from amsp_jax.plan import LeafPlan, Plan, key_name


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf of the optimizer's state: bytes on a device, and how many of it the whole model has."""

    num_bytes: int
    count: int


def leaf_counts(sketch: Sketch, plan: Plan) -> list[tuple[LeafPlan, int]]:
    """The leaves of a sketch's plan, and how many of each the whole model has."""
    return list(zip(jax.tree.leaves(plan.leaves), jax.tree.leaves(_counts(sketch, plan.leaves)), strict=True))


def _counts(sketch: Sketch, tree: Any) -> Any:
    """In place of each leaf of a tree of the sketch's parameters: how many the whole model has."""
    model = sketch.model
    embed, blocks, head = model.split(tree)
    ones = jax.tree.map(lambda _: 1, (embed, head))
    counts = [jax.tree.map(lambda _, n=n: n, block) for block, n in zip(blocks, sketch.counts, strict=True)]
    return model.join(ones[0], counts, ones[1])


def stored_opt_state(sketch: Sketch, plan: Plan, optimizer: optax.GradientTransformation) -> list[StoredLeaf]:
    """The optimizer's state on one device: moments at the OS sharding, anything else whole."""
    find = moment_plans(plan)
    return [
        StoredLeaf(_stored_values(find(path, x), x) * x.dtype.itemsize, count)
        for path, x, count in _true_opt_state(sketch, optimizer)
    ]


def _stored_values(leaf: LeafPlan | None, x: jax.ShapeDtypeStruct) -> int:
    return leaf.num_opt_shard if leaf else math.prod(x.shape)


@functools.lru_cache(maxsize=32)
def _true_opt_state(
    sketch: Sketch, optimizer: optax.GradientTransformation
) -> tuple[tuple[Any, jax.ShapeDtypeStruct, int], ...]:
    """(path, true shape, count) of each leaf; one that belongs to no parameter, such as a counter, is there once."""
    params = sketch.model.abstract_params()
    flat, _ = jax.tree_util.tree_flatten_with_path(_counts(sketch, params))
    counts = {_names(path): count for path, count in flat}
    state, _ = jax.tree_util.tree_flatten_with_path(abstract_opt_state(optimizer, params))

    def count_of(path: Any) -> int:
        names = _names(path)
        return next((counts[names[i:]] for i in range(len(names)) if names[i:] in counts), 1)

    return tuple((path, x, count_of(path)) for path, x in state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(key_name(key) for key in path)
