"""The gradient of a step: microbatches one after another, the first and the last outside of the loop.

    masters --> [first] --> loop over the others --> [last] --> OS shards of the summed gradient
                   |                                    |
       gathers of once a step               reductions of once a step

Peeled, the first and the last microbatch hide the collectives of once a step. Barriers keep the microbatches apart: XLA
would hoist the parameter gathers out of the loop, merge the gathers of different microbatches, so that whole parameters
stay alive, and start the last microbatch before the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from amsp_jax.engine.collectives import reduce_accumulated
from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.microbatch import LossSums, apply_model, block_keys, gather_of, param_shards, row_keys
from amsp_jax.engine.microbatch_groups import Group, group_grads
from amsp_jax.engine.parts import Gather, PartState, Uses, grad_shape, split
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.trees import GradShard, Master, OptGrad, ParamShard, Sink, Tree, tree_map
from amsp_jax.model import Model


class Total(NamedTuple):
    """What is added up over microbatches: local sums, and G shards of the gradient."""

    sums: LossSums
    grads: Tree[GradShard | None]


Result = tuple[LossSums, Tree[OptGrad | None]]
"""Local sums of a step, and the OS shards of its summed gradient."""


def unknown_zero(step: Any) -> jax.Array:
    """Returns 0, which XLA does not know to be 0."""
    return jnp.minimum(step, 0)


def in_groups(size: int, data: Any) -> Any:
    """Arrays [microbatches, ...] as [groups, size, ...]; groups of one are the microbatches."""
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), data) if size > 1 else data


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """What a step does with one item of its data: a microbatch and the numbers of its rows, or a group of them."""

    model: Model
    plan: Plan
    settings: StepSettings
    seed: Any
    step: Any

    def peels(self) -> tuple[bool, bool]:
        """Whether the first and the last item are outside the loop."""
        # Without collectives of once a step there is nothing to hide, and one program less to compile.
        once = self.plan.has_work_once_a_step
        return once and self.settings.peel_first, once and self.settings.peel_last

    def shards(self, masters: Tree[Master]) -> Tree[ParamShard]:
        """The P shards of the step."""
        return param_shards(self.plan, masters)

    def only(self, masters: Tree[Master], data: Any) -> Result:
        """The sums and gradient of a step that has one item."""
        if self.settings.microbatch_group > 1:
            return self._group_grads(masters, None, data, is_first=True, is_last=True)[:2]
        return self.last(self.shards(masters), None, data)

    def first(self, masters: Tree[Master], data: Any) -> tuple[Total, Tree[ParamShard]]:
        """The sums and gradient of the first item, and the P shards that it makes from the master's shards."""
        if self.settings.microbatch_group > 1:
            sums, grads, shards = self._group_grads(masters, None, data, is_first=True, is_last=False)
            return Total(sums, grads), shards
        shards = self.shards(masters)
        return self.inner(shards, data), shards

    def inner(self, shards: Tree[ParamShard], data: Any) -> Total:
        """The sums and gradient of an item in the middle."""
        if self.settings.microbatch_group > 1:
            return Total(*self._group_grads(shards, None, data, is_first=False, is_last=False)[:2])
        gather = gather_of(self.plan, self.settings)
        return Total(*self._grads(gather, shards, None, data))

    def last(self, shards: Tree[ParamShard], total: Tree[GradShard | None] | None, data: Any) -> Result:
        """The sums of the last item, and the gradient of the whole step: `total` and its own, reduced together."""
        if self.settings.microbatch_group > 1:
            return self._group_grads(shards, total, data, is_first=False, is_last=True)[:2]
        return self._grads(gather_of(self.plan, self.settings, is_last=True), shards, total, data)

    def reduced(self, total: Tree[GradShard | None]) -> Tree[OptGrad | None]:
        """The OS shards of an accumulated gradient, with nothing beside the reductions."""

        def one(leaf: LeafPlan, grad: GradShard | None) -> OptGrad | None:
            return None if grad is None else reduce_accumulated(leaf, grad, self.settings.reduction)

        return tree_map(one, self.plan.leaves, total)

    def _group_grads(
        self, shards: Tree[Any], totals: Tree[Any] | None, data: Any, is_first: bool, is_last: bool
    ) -> tuple[LossSums, Any, Tree[ParamShard]]:
        batch, rows = data
        keys = jax.vmap(lambda rows: row_keys(self.seed, self.step, rows))(rows)
        numbers = range(1, len(self.model.blocks) + 1)
        part_keys = [keys, *(jax.vmap(lambda k, i=i: block_keys(k, i))(keys) for i in numbers), keys]
        # A counter of loops that XLA cannot follow: see `accumulate`.
        settings, leaves, zero = self.settings, self.plan.leaves, unknown_zero(self.step)
        group = Group(self.plan.compute_dtype, settings.reduction, settings.remat, is_first, is_last)
        sums, grads, shards = group_grads(self.model, leaves, group, shards, totals, batch, part_keys, zero)
        return LossSums.of(sums), grads, shards

    def _grads(
        self, gather: Gather, shards: Tree[ParamShard], total: Tree[GradShard | None] | None, data: Any
    ) -> tuple[LossSums, Any]:
        """Differentiates the model on one microbatch. A gradient is the cotangent of its sink, reduced as `gather`."""
        batch, rows = data
        keys, plan = row_keys(self.seed, self.step, rows), self.plan

        def loss(sinks: Tree[Sink | None]) -> tuple[jax.Array, tuple[jax.Array, Any]]:
            states = self._states(shards, total, sinks)
            (sum_of_losses, weight), aux = apply_model(self.model, gather, self.settings.remat, states, batch, keys)
            return sum_of_losses, (weight, aux)

        # Sinks are never read; they are there because a cotangent needs an argument of its shape and dtype.
        sinks = tree_map(lambda leaf: _sink(leaf, gather.is_last), plan.leaves)
        (sum_of_losses, (weight, aux)), gradient = jax.value_and_grad(loss, has_aux=True)(sinks)
        return LossSums.of(((sum_of_losses, weight), aux)), gradient

    def _states(
        self, shards: Tree[ParamShard], total: Tree[GradShard | None] | None, sinks: Tree[Sink | None]
    ) -> Sequence[PartState]:
        model, leaves = self.model, self.plan.leaves
        total = tree_map(lambda leaf: None, leaves) if total is None else total
        # Every use of a leaf reduces its own gradient, and one of them adds the microbatches before.
        added = Uses(model, leaves).first_only(split(model, total))
        parts = zip(split(model, leaves), split(model, shards), split(model, sinks), added, strict=True)
        return [PartState(*part) for part in parts]


def _sink(leaf: LeafPlan, is_last: bool) -> Sink | None:
    return None if leaf.frozen else Sink(jnp.zeros(grad_shape(leaf, is_last), jnp.float32))


def accumulate(microbatches: Microbatches, data: Any, masters: Tree[Master], zero: jax.Array) -> Result:
    """Adds up local sums and gradients over the leading dimension of `data`.

    Args:
      microbatches: what to do with each item.
      data: arrays [items, ...].
      masters: the master's shards.
      zero: 0, which XLA must not know. A slice whose place XLA computes from the loop's counter becomes an asynchronous
        copy on GPUs, with which a run on one H200 (jax 0.11.2) failed in its first step.
    """
    items = _Items(data, zero)
    if items.count == 1:
        return microbatches.only(masters, items[0])
    peels_first, peels_last = microbatches.peels()
    stop = items.count - 1 if peels_last else items.count
    total, shards, start = (_peeled_first if peels_first else _from_zeros)(microbatches, items, masters)
    total, shards = _loop(microbatches, items, shards, total, start, stop)
    if peels_last:
        return _peeled_last(microbatches, items, shards, total)
    return total.sums, microbatches.reduced(total.grads)


class _Items:
    """The items of a step's data, each sliced where it is used."""

    def __init__(self, data: Any, zero: jax.Array) -> None:
        self.data, self.zero = data, zero
        self.count: int = jax.tree.leaves(data)[0].shape[0]

    def __getitem__(self, i: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), self.data)


def _peeled_first(
    microbatches: Microbatches, items: _Items, masters: Tree[Master]
) -> tuple[Total, Tree[ParamShard], int]:
    """The first item by itself: (its total, P shards, the item that follows)."""
    # Without a barrier: the first microbatch may start on the blocks whose once-a-step gathers have arrived.
    return *microbatches.first(masters, items[0]), 1


def _from_zeros(
    microbatches: Microbatches, items: _Items, masters: Tree[Master]
) -> tuple[Total, Tree[ParamShard], int]:
    """A total of zeros, for a loop that has the first item, too."""
    shards = microbatches.shards(masters)
    shapes = jax.eval_shape(lambda shards, item: _apart(microbatches, shards, item), shards, items[0])
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), shards, 0


def _loop(
    microbatches: Microbatches, items: _Items, shards: Tree[ParamShard], total: Total, start: int, stop: int
) -> tuple[Total, Tree[ParamShard]]:
    """Adds the items from `start` to `stop`: (the total, P shards)."""
    if stop - start == 1:
        # A loop of one trip is inlined. XLA would begin it beside the first microbatch, whose activations are still
        # there, and would add the two gradients before it reduces them, both whole.
        total, shards = lax.optimization_barrier((total, shards))

    def body(_: Any, carry: Any) -> Any:
        total, i = carry
        return _add(total, _apart(microbatches, shards, items[i])), i + 1

    if stop > start:
        # A counter of our own: see `zero`.
        total = lax.fori_loop(start, stop, body, (total, start + items.zero))[0]
    return total, shards


def _apart(microbatches: Microbatches, shards: Tree[ParamShard], item: Any) -> Total:
    """One item in the middle, whose gathers XLA may not merge with those of other items."""
    return microbatches.inner(*lax.optimization_barrier((shards, item)))


def _peeled_last(microbatches: Microbatches, items: _Items, shards: Tree[ParamShard], total: Total) -> Result:
    """The last item by itself, which reduces the gradient of the whole step."""
    # The last item depends on the loop by its total alone, so XLA would start it before the loop.
    total, shards, item = lax.optimization_barrier((total, shards, items[items.count - 1]))
    sums, grads = microbatches.last(shards, total.grads, item)
    return _add(total.sums, sums), grads


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
