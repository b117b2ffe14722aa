"""What of a model is stored on one device, leaf by leaf, read off the plan of its distinct blocks: exact."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import optax

from amsp_jax.engine.leaves import MASTER_BYTES, LeafPlan, key_name
from amsp_jax.engine.optimizer import abstract_opt_state, moment_plans
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import Plan
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks, trained
from amsp_jax.strategy import Degrees


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """A leaf of the optimizer's state: bytes on a device, and how many of it the whole model has."""

    num_bytes: int
    count: int


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """A model's states, to bound a device's from below without a plan.

    Attributes:
      num_values: parameters of the whole model.
      num_ends: parameters of embedding and head.
      num_trained, num_trained_ends: the same without frozen parameters.
      stored_bytes: of the master and the optimizer's state of all parameters.
      copy_bytes, grad_bytes: of a value of the step's copy, and of an accumulated gradient.
    """

    num_values: int
    num_ends: int
    num_trained: int
    num_trained_ends: int
    stored_bytes: int
    copy_bytes: int
    grad_bytes: int = 4

    @classmethod
    def of(cls, distinct: DistinctBlocks, plan: Plan, optimizer: optax.GradientTransformation) -> StateBytes:
        """Of a model; `plan` is that of one device."""
        embed, _, head = distinct.model.split(plan.leaves)
        counts = leaf_counts(distinct, plan)
        values = sum(math.prod(leaf.shape) * count for leaf, count in counts)
        num_trained = sum(math.prod(leaf.shape) * count for leaf, count in counts if not leaf.frozen)
        states = sum(leaf.num_bytes * leaf.count for leaf in stored_opt_state(distinct, plan, optimizer))
        ends = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((embed, head)))
        trained_ends = sum(math.prod(leaf.shape) for leaf in trained((embed, head)))
        return cls(values, ends, num_trained, trained_ends, MASTER_BYTES * values + states, plan.compute_dtype.itemsize)

    def least(self, degrees: Degrees, parallel: ModelParallel, accumulates: bool) -> tuple[float, float]:
        """Bytes that no device of these degrees falls below, stored and temporary: all splits, nothing is padded.

            stored / (t p s_os)     [2 n / (t s_p) unless P = OS > 1] + [4 n / (t s_g) if it accumulates]

        n: the values of a stage; of gradients, the trained values.
        """
        t, p = parallel.tensor, parallel.pipeline
        local = self.num_ends + (self.num_values - self.num_ends) / p
        local_trained = self.num_trained_ends + (self.num_trained - self.num_trained_ends) / p
        is_cast_once = degrees.params.total == 1 and self.copy_bytes < MASTER_BYTES
        has_copy = is_cast_once or p * degrees.opt_state.total > degrees.params.total
        copies = self.copy_bytes * local / (t * degrees.params.total) if has_copy else 0.0
        grads = self.grad_bytes * local_trained / (t * degrees.grads.total) if accumulates else 0.0
        return self.stored_bytes / (t * p * degrees.opt_state.total), copies + grads


def leaf_counts(distinct: DistinctBlocks, plan: Plan) -> list[tuple[LeafPlan, int]]:
    """The leaves of the plan of a model's distinct blocks, and how many of each the whole model has."""
    return list(zip(jax.tree.leaves(plan.leaves), jax.tree.leaves(_counts(distinct, plan.leaves)), strict=True))


def _counts(distinct: DistinctBlocks, tree: Any) -> Any:
    """In place of each leaf of a tree of the parameters of `distinct`: how many the whole model has."""
    model = distinct.model
    embed, blocks, head = model.split(tree)
    ones = jax.tree.map(lambda _: 1, (embed, head))
    counts = [jax.tree.map(lambda _, n=n: n, block) for block, n in zip(blocks, distinct.counts, strict=True)]
    return model.join(ones[0], counts, ones[1])


def stored_opt_state(distinct: DistinctBlocks, plan: Plan, optimizer: optax.GradientTransformation) -> list[StoredLeaf]:
    """The optimizer's state on one device: moments at the OS sharding, anything else whole."""
    find, frozen = moment_plans(plan), tuple(leaf.frozen for leaf in jax.tree.leaves(plan.leaves))
    return [
        StoredLeaf(_stored_values(find(path, x), x) * x.dtype.itemsize, count)
        for path, x, count in _true_opt_state(distinct, optimizer, frozen)
    ]


def _stored_values(leaf: LeafPlan | None, x: jax.ShapeDtypeStruct) -> int:
    return leaf.num_opt_shard if leaf else math.prod(x.shape)


@functools.lru_cache(maxsize=32)
def _true_opt_state(
    distinct: DistinctBlocks, optimizer: optax.GradientTransformation, frozen: tuple[bool, ...]
) -> tuple[tuple[Any, jax.ShapeDtypeStruct, int], ...]:
    """(path, true shape, count) of each leaf; one that belongs to no parameter, such as a counter, is there once."""
    params = distinct.model.abstract_params()
    flat, _ = jax.tree_util.tree_flatten_with_path(_counts(distinct, params))
    counts = {_names(path): count for path, count in flat}
    # The optimizer sees None in place of a frozen leaf.
    leaves, tree = jax.tree.flatten(params)
    seen = [None if is_frozen else x for x, is_frozen in zip(leaves, frozen, strict=True)]
    state, _ = jax.tree_util.tree_flatten_with_path(abstract_opt_state(optimizer, jax.tree.unflatten(tree, seen)))

    def count_of(path: Any) -> int:
        names = _names(path)
        return next((counts[names[i:]] for i in range(len(names)) if names[i:] in counts), 1)

    return tuple((path, x, count_of(path)) for path, x in state)


def _names(path: Any) -> tuple[str, ...]:
    return tuple(key_name(key) for key in path)
