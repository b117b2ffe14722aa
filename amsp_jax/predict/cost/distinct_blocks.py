"""A model with each distinct block once, so that tracing and planning cost the same for any number of equal blocks."""

from __future__ import annotations

import dataclasses

from amsp_jax.model import Model, Part


@dataclasses.dataclass(frozen=True)
class DistinctBlocks:
    """A model in which equal blocks are one block.

    Attributes:
      model: each distinct block once, in the order of its first use; embedding and head as they are.
      order: for each block of the whole model, which of `model.blocks` it is.
    """

    model: Model
    order: tuple[int, ...]

    @classmethod
    def of(cls, model: Model) -> DistinctBlocks:
        """Finds the distinct blocks of a model; blocks are equal where their `Part`s are.

        A model with its own tree must have a `split` and `join` that take any number of blocks.
        """
        kinds: dict[Part, int] = {}
        order = tuple(kinds.setdefault(block, len(kinds)) for block in model.blocks)
        return cls(dataclasses.replace(model, blocks=tuple(kinds)), order)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many blocks of the whole model are each of `model.blocks`."""
        return tuple(self.order.count(kind) for kind in range(len(self.model.blocks)))
