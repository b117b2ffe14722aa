"""A model with each distinct block once, so that tracing and planning cost the same for any number of equal blocks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax

from amsp_jax.engine.leaves import LeafPlan, path_name
from amsp_jax.model import Model, Part


@dataclasses.dataclass(frozen=True)
class DistinctBlocks:
    """A model in which equal blocks are one block.

    Attributes:
      model: each distinct block once, in the order of its first use; embedding and head as they are.
      order: for each block of the whole model, which of `model.blocks` it is.
      frozen: for each leaf of `model`'s parameters, whether it is frozen; empty if no leaf is.
    """

    model: Model
    order: tuple[int, ...]
    frozen: tuple[bool, ...] = ()

    @classmethod
    def of(cls, model: Model, frozen: Sequence[str] = ()) -> DistinctBlocks:
        """Finds the distinct blocks of a model; blocks are equal where their `Part`s and their frozen leaves are.

        A model with its own tree must have a `split` and `join` that take any number of blocks.
        """
        if not frozen:
            kinds: dict[Part, int] = {}
            order = tuple(kinds.setdefault(block, len(kinds)) for block in model.blocks)
            return cls(dataclasses.replace(model, blocks=tuple(kinds)), order)
        embed, blocks, head = model.split(_frozen_leaves(model, frozen))
        found: dict[tuple[Part, tuple[bool, ...]], int] = {}
        keys = [(part, tuple(jax.tree.leaves(flags))) for part, flags in zip(model.blocks, blocks, strict=True)]
        order = tuple(found.setdefault(key, len(found)) for key in keys)
        distinct = dataclasses.replace(model, blocks=tuple(part for part, _ in found))
        flags = model.join(embed, [blocks[order.index(kind)] for kind in range(len(found))], head)
        return cls(distinct, order, tuple(jax.tree.leaves(flags)))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many blocks of the whole model are each of `model.blocks`."""
        return tuple(self.order.count(kind) for kind in range(len(self.model.blocks)))

    def with_frozen(self, leaves: Any) -> Any:
        """The planned leaves of `model`'s parameters, with frozen leaves marked as frozen."""
        if not self.frozen:
            return leaves
        flat, tree = jax.tree.flatten(leaves)
        marked = [dataclasses.replace(leaf, frozen=flag) for leaf, flag in zip(flat, self.frozen, strict=True)]
        return jax.tree.unflatten(tree, marked)


def trained(leaves: Any) -> list[LeafPlan]:
    """The planned leaves of a tree that have a gradient and optimizer state."""
    return [leaf for leaf in jax.tree.leaves(leaves) if not leaf.frozen]


def _frozen_leaves(model: Model, patterns: Sequence[str]) -> Any:
    """In place of each parameter, whether a pattern matches its whole name."""

    def is_frozen(path: Any, _: Any) -> bool:
        return any(re.fullmatch(pattern, path_name(path)) for pattern in patterns)

    return jax.tree_util.tree_map_with_path(is_frozen, model.abstract_params())
