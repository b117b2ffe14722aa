"""The parts of a model: how the tree of parameters is divided among them, gathered for them, and put together again.

`Model.split` may hand one leaf to several parts, or to one part twice (ALBERT's blocks, a tied table). The gradient of
such a leaf is the sum over its uses, and a value that is to be counted once belongs to its first use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from amsp_jax.engine.collectives import Reduction, gather, gather_last, gathered
from amsp_jax.engine.leaves import LeafPlan, LeafPlans
from amsp_jax.engine.trees import A, B, GradShard, Param, ParamShard, Sink, Tree, tree_map
from amsp_jax.model import Model


def split(model: Model, tree: Tree[A]) -> list[Tree[A]]:
    """Divides a tree: the embedding's part, one for each block, the head's."""
    embed, blocks, head = model.split(tree)
    return [embed, *blocks, head]


def grad_shape(leaf: LeafPlan, is_reduced: bool) -> tuple[int, ...]:
    """The shape of a gradient's G shard, or of its OS shard once it `is_reduced`."""
    return leaf.shard_shape(leaf.param_axes + leaf.grad_axes + (leaf.opt_axes if is_reduced else ()))


class Uses:
    """Which leaf of the parameter tree each leaf of a part is.

    Args:
      model: whose `split` says so.
      leaves: the plans of the whole tree.
    """

    def __init__(self, model: Model, leaves: LeafPlans) -> None:
        # `split` only picks leaves, so a tree of numbers shows what it picks.
        plans, self._structure = jax.tree.flatten(leaves)
        self._plans: list[LeafPlan] = plans
        numbered = split(model, jax.tree.unflatten(self._structure, range(len(plans))))
        self._numbers = [jax.tree.leaves(part) for part in numbered]
        self._structures: list[Any] = [jax.tree.structure(part) for part in numbered]

    def first_only(self, parts: Sequence[Tree[A]]) -> list[Tree[A | None]]:
        """The same parts with None in place of each leaf that has been used before."""
        seen: set[int] = set()
        result: list[Tree[A | None]] = []
        for values, numbers, structure in zip(self._flat(parts), self._numbers, self._structures, strict=True):
            kept: list[A | None] = []
            # A leaf may come twice in one part, too.
            for number, value in zip(numbers, values, strict=True):
                kept.append(None if number in seen else value)
                seen.add(number)
            result.append(jax.tree.unflatten(structure, kept))
        return result

    def first(self, parts: Sequence[Tree[A]], unused: A) -> Tree[A]:
        """The whole tree, of each leaf its first use; a leaf that no part uses is `unused`."""
        return self._joined(parts, lambda first, later: first, lambda plan: unused)

    def total(self, parts: Sequence[Tree[B | None]], unused: Callable[[LeafPlan], B | None]) -> Tree[B | None]:
        """The whole tree, of each leaf the sum over its uses; a leaf that no part uses is `unused(plan)`."""
        # Frozen leaves are None in every use.
        return self._joined(parts, lambda a, b: None if a is None else a + b, unused)

    def _joined(self, parts: Sequence[Tree[Any]], add: Callable[[Any, Any], Any], unused: Callable[..., Any]) -> Any:
        found: dict[int, Any] = {}
        for values, numbers in zip(self._flat(parts), self._numbers, strict=True):
            for number, value in zip(numbers, values, strict=True):
                found[number] = add(found[number], value) if number in found else value
        plans = enumerate(self._plans)
        return jax.tree.unflatten(self._structure, [found[i] if i in found else unused(plan) for i, plan in plans])

    def _flat(self, parts: Sequence[Tree[Any]]) -> list[list[Any]]:
        """The values of each part in the order of `_numbers`; None counts as a value."""
        return [structure.flatten_up_to(part) for structure, part in zip(self._structures, parts, strict=True)]


@dataclasses.dataclass(frozen=True)
class PartState:
    """What the step holds of one part.

    Attributes:
      leaves: its plans.
      shards: P shards of its parameters.
      sinks: where the gradients go; None for frozen leaves.
      totals: G shards of the microbatches before, for `Gather` with `is_last`; None where there is nothing to add.
    """

    leaves: LeafPlans
    shards: Tree[ParamShard]
    sinks: Tree[Sink | None]
    totals: Tree[GradShard | None]

    @classmethod
    def of(cls, leaves: LeafPlans, shards: Tree[ParamShard], sinks: Tree[Sink | None]) -> PartState:
        """The state of a part without earlier gradients."""
        return cls(leaves, shards, sinks, tree_map(lambda leaf: None, leaves))


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers the parameters of a part.

    Attributes:
      dtype: of the results.
      reduction: how gradients are summed.
      is_last: for the last microbatch of a step: gradients are added to the part's `totals` and reduced to OS shards.
    """

    dtype: jnp.dtype
    reduction: Reduction
    is_last: bool = False

    def __call__(self, part: PartState) -> Tree[Param]:
        """Returns whole parameters; their reduced gradients go to the part's sinks (see `collectives.gather`)."""
        return tree_map(self._one, part.leaves, part.shards, part.sinks, part.totals)

    def _one(self, leaf: LeafPlan, shard: ParamShard, sink: Sink | None, total: GradShard | None) -> Param:
        # Frozen, or an evaluation: nothing is differentiated, so no collective goes backward.
        if sink is None:
            return gathered(leaf, self.dtype, shard)
        if self.is_last:
            return gather_last(leaf, self.dtype, self.reduction, shard, total, sink)
        return gather(leaf, self.dtype, self.reduction, shard, sink)
