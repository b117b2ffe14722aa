"""Breadth-first accumulation: a group of microbatches goes through a part, one after another, before the next part.

Depth-first, each microbatch gathers parameters and reduces gradients for itself, and the collectives of once a step run
beside the first or the last of them. Breadth-first (Lamy-Poirier, arXiv 2211.05953) a group gathers and reduces once,
beside the products of all its microbatches. The price is the activations that blocks keep of each microbatch. A part is
a loop over the group: every microbatch is computed as it would be alone, and gradients are added up in float32.

XLA's scheduler takes such a loop for cheap and would put collectives where nothing hides them. So the program says who
waits for whom (an arrow: may start once that is done):

    forward    block 1      block 2          block 3        a part's gather waits for the output of the part two before,
               gather 3 <-- output of 1      gather 5       so it runs beside the part in between

    backward   block 3      block 2          block 1        a block waits until the gradients of `WINDOW` blocks before
               reduce 3 <-- (beside 2)  <-- block 1         it are reduced; reductions come one after another

Reductions, like gathers, have an order among themselves: otherwise XLA combines those of two blocks into one message,
for which both blocks wait.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from amsp_jax.engine.barriers import after
from amsp_jax.engine.block_backward import shared
from amsp_jax.engine.collectives import Reduction, gathered, param_shard, reduce, reduce_last, use
from amsp_jax.engine.leaves import LeafPlan, LeafPlans
from amsp_jax.engine.parts import Uses, grad_shape, split
from amsp_jax.engine.rematerialization import Remat, checkpointed
from amsp_jax.engine.trees import Grad, GradShard, Master, OptGrad, Param, ParamShard, Sink, Tree, tree_map
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model, Part

WINDOW = 2
"""How many blocks the reduction of a block's gradients may lag: it runs beside the block after its own."""


@dataclasses.dataclass(frozen=True)
class Group:
    """How a group of microbatches computes.

    Attributes:
      dtype: of gathered parameters.
      reduction: how gradients are summed.
      remat: what blocks keep of each microbatch.
      is_first: the group is the first of its step and makes P shards from the master's, each where it is used.
      is_last: gradients are added to those of the groups before, and reduced to OS shards.
    """

    dtype: jnp.dtype
    reduction: Reduction
    remat: Remat
    is_first: bool
    is_last: bool

    def param_shards(self, leaves: LeafPlans, shards: Tree[Any]) -> Tree[ParamShard]:
        """P shards, made from the master's shards if the group `is_first`."""
        if not self.is_first:
            return shards
        masters: Tree[Master] = shards
        return tree_map(lambda leaf, master: param_shard(leaf, master, self.dtype), leaves, masters)

    def whole(self, leaves: LeafPlans, shards: Tree[ParamShard]) -> Tree[Param]:
        """Parameters gathered from P shards."""
        return tree_map(lambda leaf, shard: gathered(leaf, self.dtype, shard), leaves, shards)

    def reduce(
        self, leaves: LeafPlans, totals: Tree[GradShard | None], grads: Tree[Grad | None]
    ) -> Tree[GradShard | OptGrad | None]:
        """G shards of whole gradients; if the group `is_last`, OS shards of their sums with `totals`."""

        def one(leaf: LeafPlan, total: GradShard | None, grad: Grad | None) -> GradShard | OptGrad | None:
            if grad is None:
                return None
            return (
                reduce_last(leaf, self.reduction, total, grad) if self.is_last else reduce(leaf, grad, self.reduction)
            )

        return tree_map(one, leaves, totals, grads)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One part in this group: its leaves, and what the group has of them.

    Attributes:
      leaves: its plans.
      shards: P shards, or the master's if the group is the first of its step.
      totals: G shards of the groups before; None where there is nothing to add.
      keys: random keys [group, rows].
    """

    leaves: LeafPlans
    shards: Tree[Any]
    totals: Tree[GradShard | None]
    keys: jax.Array


@dataclasses.dataclass(frozen=True)
class BlockRun:
    """What the forward pass of a block leaves for its backward pass.

    Attributes:
      shard: P shards of the block's parameters, which are gathered again.
      inputs: the block's inputs (x, batch, keys), [group, ...].
      saved: what the block keeps.
    """

    shard: Tree[ParamShard]
    inputs: tuple[Any, Batch, jax.Array]
    saved: _Saved


def group_grads(
    model: Model,
    leaves: LeafPlans,
    group: Group,
    shards: Tree[Any],
    totals: Tree[GradShard] | None,
    batch: Batch,
    keys: Sequence[jax.Array],
    zero: jax.Array,
) -> tuple[LossOutput, Tree[Any], Tree[ParamShard]]:
    """Returns the sums of a group, its gradients as `Group.reduce` gives them, and P shards; for use in `shard_map`.

    Args:
      model: the model.
      leaves: of its plan.
      group: how it computes.
      shards: P shards, or the master's if the group `is_first`.
      totals: G shards of the groups before, if it `is_last` and there are any.
      batch: arrays [group, rows, ...].
      keys: of each part, [group, rows].
      zero: 0, which XLA must not know (see `_Loop`).
    """
    uses, loop = Uses(model, leaves), _Loop(zero)
    added = tree_map(lambda leaf: None, leaves) if totals is None else totals
    parts = split(model, leaves), split(model, shards), uses.first_only(split(model, added)), keys
    first, *blocks, last = (_Run(*part) for part in zip(*parts, strict=True))

    embed_shard = group.param_shards(first.leaves, first.shards)
    embed = group.whole(first.leaves, embed_shard)
    x = loop.each(lambda batch, keys: model.embed.apply(embed, batch, keys), batch, first.keys)
    before, x, runs = forward_blocks(model.blocks, group, blocks, x, batch, zero)
    # Like a block's: the head's gather runs beside the last block.
    head_shard = group.param_shards(last.leaves, after(before, last.shards))
    params = group.whole(last.leaves, head_shard), embed if model.tied else None
    trained = last.leaves, first.leaves if model.tied else None
    sums, (grad, tied_grad), cotangent = _head(model.head, trained, params, x, batch, last.keys, loop)

    reduced = [group.reduce(last.leaves, last.totals, grad)]
    cotangent = backward_blocks(model.blocks, group, blocks, runs, cotangent, reduced, zero)
    grad = _embed_grad(model.embed, first.leaves, embed, tied_grad, cotangent, batch, first.keys, loop)
    reduced.append(group.reduce(first.leaves, first.totals, after(reduced[-1], grad)))

    def nothing(leaf: LeafPlan) -> Any:
        return None if leaf.frozen else jnp.zeros(grad_shape(leaf, group.is_last), jnp.float32)

    used = [embed_shard, *(run.shard for run in runs), head_shard]
    # No part reads the shard of a leaf that no part has.
    shards = uses.first(used, ParamShard(jnp.float32(0)))
    return sums, uses.total(reduced[::-1], nothing), shards


def forward_blocks(
    parts: Sequence[Part], group: Group, blocks: Sequence[_Run], x: Any, batch: Batch, zero: jax.Array
) -> tuple[Any, Any, list[BlockRun]]:
    """Runs the blocks forward: (input of the last block, its output, what each block leaves)."""
    forwards = shared(functools.partial(_forward, group), parts, [block.leaves for block in blocks])
    before, runs = x, []
    for forward, block in zip(forwards, blocks, strict=True):
        # `before` is the input of the block before: its gather runs beside that block.
        shard = group.param_shards(block.leaves, after(before, block.shards))
        inputs = (x, batch, block.keys)
        y, saved = forward(zero, shard, inputs)
        before, x = x, y
        runs.append(BlockRun(shard, inputs, saved))
    return before, x, runs


def backward_blocks(
    parts: Sequence[Part],
    group: Group,
    blocks: Sequence[_Run],
    runs: Sequence[BlockRun],
    cotangent: Any,
    reduced: list[Any],
    zero: jax.Array,
) -> Any:
    """Runs the blocks backward, the last one first, and returns the cotangents of the first block's input.

    Args:
      parts, group, blocks, zero: as in `forward_blocks`.
      runs: what the forward pass has left.
      cotangent: of the last block's output.
      reduced: the head's reduced gradients; those of each block are appended.
    """
    backwards = shared(functools.partial(_backward, group), parts, [block.leaves for block in blocks])
    ready = cotangent
    for backward, block, run in reversed(list(zip(backwards, blocks, runs, strict=True))):
        late = len(reduced) - WINDOW
        if late >= 0:
            # At most `WINDOW` blocks' whole gradients are alive, and no reduction is put off to the end.
            cotangent, reduced[late] = lax.optimization_barrier((cotangent, reduced[late]))
        # The gather runs ahead by one block, as in the forward pass.
        shard = after(ready, run.shard)
        ready, (grad, cotangent) = cotangent, backward(zero, shard, run.inputs, run.saved, cotangent)
        # One reduction after another, or XLA combines them.
        reduced.append(group.reduce(block.leaves, block.totals, after(reduced[-1], grad)))
    return cotangent


def check_group(group: int, num_microbatches: int, num_stages: int = 1) -> None:
    """Raises UserError unless the microbatches of a step are in groups of this size."""
    if group < 1:
        raise UserError(f"microbatch_group={group}: it must be at least 1")
    if group > 1 and num_stages > 1:
        raise UserError(
            f"microbatch_group={group} with pipeline={num_stages}: a pipeline has its own order, pipeline_schedule; "
            "use microbatch_group=1"
        )
    if num_microbatches % group:
        count = f"{num_microbatches} microbatch{'es' * (num_microbatches > 1)}"
        sizes = [str(size) for size in range(2, num_microbatches + 1) if num_microbatches % size == 0]
        raise UserError(
            f"microbatch_group={group} does not divide the {count} of a step on each rank; use "
            f"{' or '.join([*sizes, '1'])}"
        )


@flax.struct.dataclass
class _Saved:
    """What a block keeps of a group for its backward pass.

    Attributes:
      arrays: [group, ...], the arrays of a microbatch's vjp function that are kept here.
      known: for each array of the vjp function the place of an equal array among the gathered parameters and the
        block's inputs, or None. Neither parameters, which are gathered again, nor inputs are kept a second time.
      structure: of the vjp function.
    """

    arrays: list[jax.Array]
    known: tuple[int | None, ...] = flax.struct.field(pytree_node=False)
    structure: Any = flax.struct.field(pytree_node=False)

    def vjp(self, arrays: list[jax.Array], whole: Tree[Param], inputs: Any) -> Any:
        """Puts the vjp function of one microbatch together again."""
        known, others = jax.tree.leaves((whole, inputs)), iter(arrays)
        return jax.tree.unflatten(self.structure, [next(others) if i is None else known[i] for i in self.known])


def _forward(group: Group, part: Part, leaves: LeafPlans) -> Callable[..., tuple[Any, _Saved]]:
    """Makes a block's `(zero, P shards, inputs) -> (what flows to the next block, [group, ...], _Saved)`."""

    def run(sinks: Tree[Sink | None], x: Any, whole: Tree[Param], batch: Batch, key: jax.Array) -> Any:
        return part.apply(_used(leaves, whole, sinks), x, batch, key)

    run_again = checkpointed(run, group.remat)

    def forward(zero: jax.Array, shards: Tree[ParamShard], inputs: Any) -> tuple[Any, _Saved]:
        whole = group.whole(leaves, shards)
        aside: dict[str, Any] = {}

        def one(x: Any, batch: Batch, key: jax.Array) -> Any:
            floats, joined = _floats(x)

            def differentiable(sinks: Tree[Sink | None], floats: list[jax.Array]) -> Any:
                y = run_again(sinks, joined(floats), whole, batch, key)
                return _floats(y)[0], y

            # Sinks of whole gradients in float32, which the loop adds up over the group.
            _, vjp, y = jax.vjp(differentiable, _zeros(leaves, whole), floats, has_aux=True)
            saved, structure = jax.tree.flatten(vjp)
            # A residual that is the very same tracer as a parameter or an input is that array.
            places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((whole, x, batch, key)))}
            known = tuple(places.get(id(leaf)) for leaf in saved)
            aside.update(known=known, structure=structure)
            return y, [leaf for leaf, i in zip(saved, known, strict=True) if i is None]

        y, arrays = _Loop(zero).each(one, *inputs)
        return y, _Saved(arrays=arrays, **aside)

    return forward


def _backward(group: Group, part: Part, leaves: LeafPlans) -> Callable[..., tuple[Tree[Grad | None], list[jax.Array]]]:
    """Makes a block's `(zero, P shards, inputs, _Saved, cotangents) -> (gradient, cotangents of x)`.

    The gradient is that of whole parameters, in float32.
    """
    del part

    def backward(
        zero: jax.Array, shards: Tree[ParamShard], inputs: Any, saved: _Saved, cotangents: list[jax.Array]
    ) -> tuple[Tree[Grad | None], list[jax.Array]]:
        # Gathered again: whole parameters of all blocks would not fit.
        whole = group.whole(leaves, shards)

        def one(cotangents: list[jax.Array], inputs: Any, arrays: list[jax.Array]) -> Any:
            return saved.vjp(arrays, whole, inputs)(cotangents)

        return _Loop(zero).sum(one, cotangents, inputs, saved.arrays)

    return backward


def _head(
    part: Part, leaves: Any, params: Any, x: Any, batch: Batch, keys: jax.Array, loop: _Loop
) -> tuple[LossOutput, Any, Any]:
    """Returns (sums, gradients of `params`, cotangents of `x`).

    The backward pass of a microbatch follows its forward pass: the logits of a whole group would be large.
    """

    def one(x: Any, batch: Batch, key: jax.Array) -> Any:
        floats, joined = _floats(x)

        def loss(sinks: Any, floats: list[jax.Array]) -> Any:
            (total, weight), aux = part.apply(*_used(leaves, params, sinks), joined(floats), batch, key)
            return total, (weight, aux)

        differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (total, (weight, aux)), (grad, cotangents) = differentiate(_zeros(leaves, params), floats)
        return (((total, weight), aux), grad), cotangents

    (sums, grad), cotangents = loop.sum(one, x, batch, keys)
    return sums, grad, cotangents


def _embed_grad(
    part: Part,
    leaves: LeafPlans,
    params: Tree[Param],
    grad: Tree[Grad | None] | None,
    cotangents: Any,
    batch: Batch,
    keys: jax.Array,
    loop: _Loop,
) -> Tree[Grad | None]:
    """Returns the gradient of the embedding, added to `grad`, that of a tied head."""
    sinks = _zeros(leaves, params)
    if not jax.tree.leaves(sinks):
        # Frozen, or an embedding without parameters: the sinks are a tree without arrays already.
        return sinks

    def one(cotangents: list[jax.Array], batch: Batch, key: jax.Array) -> Any:
        def run(sinks: Tree[Sink | None]) -> list[jax.Array]:
            return _floats(part.apply(_used(leaves, params, sinks), batch, key))[0]

        _, vjp = jax.vjp(run, sinks)
        return vjp(cotangents)[0], None

    result: Tree[Grad | None] = loop.sum(one, cotangents, batch, keys, start=grad)[0]
    return result


def _used(leaves: Any, params: Any, sinks: Any) -> Any:
    """The parameters, whose gradients go to `sinks`; frozen ones as constants."""
    return jax.tree.map(lambda _, whole, sink: whole if sink is None else use(whole, sink), leaves, params, sinks)


def _zeros(leaves: Any, params: Any) -> Any:
    """Sinks for the gradients of whole parameters; None for frozen ones."""
    return jax.tree.map(lambda leaf, x: None if leaf.frozen else jnp.zeros(x.shape, jnp.float32), leaves, params)


def _floats(x: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """The floating-point leaves of what flows between parts, which alone have cotangents, and a function that puts
    such leaves in their place."""
    leaves, structure = jax.tree.flatten(x)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(jax.typeof(leaf).dtype, jnp.inexact)]

    def joined(floats: list[jax.Array]) -> Any:
        put = dict(zip(places, floats, strict=True))
        return jax.tree.unflatten(structure, [put.get(i, leaf) for i, leaf in enumerate(leaves)])

    return [leaves[i] for i in places], joined


def _spread(zero: jax.Array, like: jax.ShapeDtypeStruct, *leading: int) -> jax.Array:
    """An array [*leading, ...] of zeros, made of `zero`; of random keys, which come of no number, as a constant."""
    shape = (*leading, *like.shape)
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return lax.full(shape, 0, like.dtype)
    return jnp.broadcast_to(zero.astype(like.dtype), shape)


class _Loop:
    """A loop over the leading dimension of arrays.

    Args:
      zero: 0, which XLA must not know. From a loop's own counter XLA would make asynchronous copies of slices (see
        `accumulate`), and would compute products whose results are stacked a second time.
    """

    def __init__(self, zero: jax.Array) -> None:
        self.zero = zero

    def each(self, function: Callable[..., Any], *items: Any) -> Any:
        """What the function returns for each item, stacked."""
        return self.sum(lambda *item: (None, function(*item)), *items)[1]

    def sum(self, function: Callable[..., Any], *items: Any, start: Any = None) -> Any:
        """For a function that returns `(terms, result)`: the sum of terms and of `start`, and the stacked results."""
        # Slices at places that XLA cannot compute: the counter begins at a zero that XLA does not know.
        # Zeros that are there before the items would be written at once for all loops of a step.
        zero, _ = lax.optimization_barrier((self.zero, items))

        def item(i: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), items)

        def body(_: Any, carry: Any) -> Any:
            sums, stacks, i = carry
            terms, result = function(*item(i))
            stacks = jax.tree.map(lambda stack, x: lax.dynamic_update_index_in_dim(stack, x, i, 0), stacks, result)
            return jax.tree.map(jnp.add, sums, terms), stacks, i + 1

        count = jax.tree.leaves(items)[0].shape[0]
        # Stacks are written in place; `lax.scan` would have XLA compute products a second time to write them.
        terms, result = jax.eval_shape(lambda: function(*item(0)))
        sums = jax.tree.map(lambda like: _spread(zero, like), terms) if start is None else start
        stacks = jax.tree.map(lambda like: _spread(zero, like, count), result)
        sums, stacks, _ = lax.fori_loop(0, count, body, (sums, stacks, zero))
        return sums, stacks
