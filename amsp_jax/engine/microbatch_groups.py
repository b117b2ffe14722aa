"""Breadth-first accumulation: a group of microbatches goes through a part, one after another, before the next part.

Depth-first, each microbatch gathers parameters and reduces gradients for itself, and what is done once a step runs
beside the first or the last of them. Breadth-first (Lamy-Poirier, arXiv 2211.05953) a group does so once, beside the
products of all its microbatches, for what blocks keep of each. A part is a loop over the group: no microbatch is
computed otherwise than it would be alone, and gradients are added up in float32.

XLA's scheduler takes such a loop for cheap and would put collectives where nothing hides them. So the order is in the
program: a part's parameters may come once the part two before it is done, gradients are reduced part after part, and a
block runs backward once those of `WINDOW` blocks earlier are reduced.
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

from amsp_jax.engine.blocks import Remat, after, checkpointed, shared
from amsp_jax.engine.collectives import Reduction, gathered, param_shard, reduce, reduce_last, use
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model, Params, Part

WINDOW = 2
"""How many blocks a gradient's reduction may lag: it runs beside the block after its own."""


@dataclasses.dataclass(frozen=True)
class Group:
    """How a group of microbatches computes.

    Attributes:
      dtype: of gathered parameters.
      reduction: how gradients are summed.
      remat: what blocks keep of each microbatch.
      is_first: of its step, so that it makes P shards from the master's, each where it is used.
      is_last: gradients are added to those of the groups before, and reduced to OS shards.
    """

    dtype: jnp.dtype
    reduction: Reduction
    remat: Remat
    is_first: bool
    is_last: bool

    def param_shards(self, leaves: Params, shards: Params) -> Params:
        """P shards, of the master's shards if it `is_first`."""
        if not self.is_first:
            return shards
        return jax.tree.map(lambda leaf, master: param_shard(leaf, master, self.dtype), leaves, shards)

    def whole(self, leaves: Params, shards: Params) -> Params:
        """Parameters gathered from P shards."""
        return jax.tree.map(lambda leaf, shard: gathered(leaf, self.dtype, shard), leaves, shards)

    def reduce(self, leaves: Params, totals: Params | None, grads: Params) -> Params:
        """G shards of whole gradients; if it `is_last`, OS shards of their sums with `totals`, or of them alone."""
        if not self.is_last:
            return jax.tree.map(lambda leaf, grad: reduce(leaf, grad, self.reduction), leaves, grads)
        if totals is None:
            return jax.tree.map(lambda leaf, grad: reduce_last(leaf, self.reduction, None, grad), leaves, grads)
        return jax.tree.map(
            lambda leaf, total, grad: reduce_last(leaf, self.reduction, total, grad), leaves, totals, grads
        )


def group_grads(
    model: Model,
    leaves: Params,
    group: Group,
    shards: Params,
    totals: Params | None,
    batch: Batch,
    keys: Sequence[jax.Array],
    zero: jax.Array,
) -> tuple[LossOutput, Params, Params]:
    """The sums of a group, its gradients as `Group.reduce` gives them, and P shards. To be called inside `shard_map`.

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
    (embed_l, blocks_l, head_l), (embed_w, blocks_w, head_w) = model.split(leaves), model.split(shards)
    embed_t, blocks_t, head_t = model.split(totals) if totals is not None else (None, [None] * len(blocks_l), None)
    loop = _Loop(zero)

    embed_w = group.param_shards(embed_l, embed_w)
    embed = group.whole(embed_l, embed_w)
    x = loop.each(lambda batch, keys: model.embed.apply(embed, batch, keys), batch, keys[0])
    forwards = shared(functools.partial(_forward, group), model.blocks, blocks_l)
    before, used, inputs, kept = x, [], [], []
    for forward, leaf, shard, block_keys in zip(forwards, blocks_l, blocks_w, keys[1:-1], strict=True):
        used.append(group.param_shards(leaf, after(before, shard)))
        inputs.append((x, batch, block_keys))
        y, saved = forward(zero, used[-1], inputs[-1])
        before, x = x, y
        kept.append(saved)
    head_w = group.param_shards(head_l, after(before, head_w))
    params = group.whole(head_l, head_w), embed if model.tied else None
    sums, (grad, tied_grad), cotangent = _head(model.head, params, x, batch, keys[-1], loop)

    # Of the head, the last block, and so on.
    reduced, ready = [group.reduce(head_l, head_t, grad)], cotangent
    backwards = shared(functools.partial(_backward, group), model.blocks, blocks_l)
    for i in reversed(range(len(backwards))):
        late = len(reduced) - WINDOW
        if late >= 0:
            cotangent, reduced[late] = lax.optimization_barrier((cotangent, reduced[late]))
        shard = after(ready, used[i])
        ready, (grad, cotangent) = cotangent, backwards[i](zero, shard, inputs[i], kept[i], cotangent)
        reduced.append(group.reduce(blocks_l[i], blocks_t[i], after(reduced[-1], grad)))
    grad = _embed_grad(model.embed, embed, tied_grad, cotangent, batch, keys[0], loop)
    first = group.reduce(embed_l, embed_t, after(reduced[-1], grad))
    return sums, model.join(first, reduced[:0:-1], reduced[0]), model.join(embed_w, used, head_w)


def check_group(group: int, num_microbatches: int, num_stages: int = 1) -> None:
    """Raises UserError unless the microbatches of a step are in groups of this size."""
    if group < 1:
        raise UserError(f"MICROBATCH_GROUP={group}: it must be at least 1")
    if group > 1 and num_stages > 1:
        raise UserError(
            f"MICROBATCH_GROUP={group} with PIPELINE={num_stages}: a pipeline has an order of its own, "
            "PIPELINE_SCHEDULE; leave MICROBATCH_GROUP at 1"
        )
    if num_microbatches % group:
        count = f"{num_microbatches} microbatch{'es' * (num_microbatches > 1)}"
        sizes = [str(size) for size in range(2, num_microbatches + 1) if num_microbatches % size == 0]
        other = f"set it to {' or '.join(sizes)}, or to 1" if sizes else "leave it at 1"
        raise UserError(f"MICROBATCH_GROUP={group}, but a step has {count} on a rank, to be in equal groups; {other}")


@flax.struct.dataclass
class _Saved:
    """What a block keeps of a group for its backward pass.

    Attributes:
      arrays: [group, ...], those of the `vjp` of a microbatch that are not known.
      known: for each array of the `vjp`, which leaf of the gathered parameters and the block's inputs it is, or None.
        Neither parameters, which are gathered again, nor what the block was given are kept a second time.
      structure: of the `vjp`.
    """

    arrays: list[jax.Array]
    known: tuple[int | None, ...] = flax.struct.field(pytree_node=False)
    structure: Any = flax.struct.field(pytree_node=False)

    def vjp(self, arrays: list[jax.Array], whole: Params, given: Any) -> Any:
        """Of one microbatch."""
        known, others = jax.tree.leaves((whole, given)), iter(arrays)
        return jax.tree.unflatten(self.structure, [next(others) if i is None else known[i] for i in self.known])


def _forward(group: Group, part: Part, leaves: Params) -> Callable[..., tuple[Any, _Saved]]:
    """A block's `(zero, P shards, its inputs) -> (what flows to the next block, [group, ...], _Saved)`."""

    def run(sinks: Params, x: Any, whole: Params, batch: Batch, key: jax.Array) -> Any:
        return part.apply(_used(whole, sinks), x, batch, key)

    run_again = checkpointed(run, group.remat)

    def forward(zero: jax.Array, shards: Params, given: Any) -> tuple[Any, _Saved]:
        whole = group.whole(leaves, shards)
        aside: dict[str, Any] = {}

        def one(x: Any, batch: Batch, key: jax.Array) -> Any:
            floats, joined = _floats(x)

            def differentiable(sinks: Params, floats: list[jax.Array]) -> Any:
                y = run_again(sinks, joined(floats), whole, batch, key)
                return _floats(y)[0], y

            _, vjp, y = jax.vjp(differentiable, _zeros(whole), floats, has_aux=True)
            saved, structure = jax.tree.flatten(vjp)
            places = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((whole, x, batch, key)))}
            known = tuple(places.get(id(leaf)) for leaf in saved)
            aside.update(known=known, structure=structure)
            return y, [leaf for leaf, i in zip(saved, known, strict=True) if i is None]

        y, arrays = _Loop(zero).each(one, *given)
        return y, _Saved(arrays=arrays, **aside)

    return forward


def _backward(group: Group, part: Part, leaves: Params) -> Callable[..., tuple[Params, list[jax.Array]]]:
    """A block's `(zero, P shards, its inputs, _Saved, cotangents) -> (gradient, x's cotangents)`, the gradient that of
    whole parameters, in float32."""
    del part

    def backward(
        zero: jax.Array, shards: Params, given: Any, saved: _Saved, cotangents: list[jax.Array]
    ) -> tuple[Params, list[jax.Array]]:
        whole = group.whole(leaves, shards)

        def one(cotangents: list[jax.Array], given: Any, arrays: list[jax.Array]) -> Any:
            return saved.vjp(arrays, whole, given)(cotangents)

        return _Loop(zero).sum(one, cotangents, given, saved.arrays)

    return backward


def _head(part: Part, params: Any, x: Any, batch: Batch, keys: jax.Array, loop: _Loop) -> tuple[LossOutput, Any, Any]:
    """(sums, gradients of `params`, cotangents of `x`): a microbatch's backward pass follows its forward pass, as the
    logits of a whole group would be large."""

    def one(x: Any, batch: Batch, key: jax.Array) -> Any:
        floats, joined = _floats(x)

        def loss(sinks: Any, floats: list[jax.Array]) -> Any:
            (total, weight), aux = part.apply(*_used(params, sinks), joined(floats), batch, key)
            return total, (weight, aux)

        differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        (total, (weight, aux)), (grad, cotangents) = differentiate(_zeros(params), floats)
        return (((total, weight), aux), grad), cotangents

    (sums, grad), cotangents = loop.sum(one, x, batch, keys)
    return sums, grad, cotangents


def _embed_grad(
    part: Part, params: Params, grad: Params | None, cotangents: Any, batch: Batch, keys: jax.Array, loop: _Loop
) -> Params:
    """The gradient of the embedding, added to `grad`, that of a tied head."""

    def one(cotangents: list[jax.Array], batch: Batch, key: jax.Array) -> Any:
        _, vjp = jax.vjp(lambda sinks: _floats(part.apply(_used(params, sinks), batch, key))[0], _zeros(params))
        return vjp(cotangents)[0], None

    return loop.sum(one, cotangents, batch, keys, start=grad)[0]


def _used(params: Params, sinks: Params) -> Params:
    return jax.tree.map(use, params, sinks)


def _zeros(params: Params) -> Params:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)


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
    """Over the leading dimension of arrays.

    Args:
      zero: 0, which XLA must not know. From a loop's own counter it would make asynchronous copies of slices, see
        `step`, and of stacked results of products, which it would compute twice.
    """

    def __init__(self, zero: jax.Array) -> None:
        self.zero = zero

    def each(self, function: Callable[..., Any], *items: Any) -> Any:
        """What the function returns for each item, stacked."""
        return self.sum(lambda *item: (None, function(*item)), *items)[1]

    def sum(self, function: Callable[..., Any], *items: Any, start: Any = None) -> Any:
        """Of a function that returns `(terms, result)`: the sum of terms and of `start`, and the stacked results."""
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
        terms, result = jax.eval_shape(lambda: function(*item(0)))
        sums = jax.tree.map(lambda like: _spread(zero, like), terms) if start is None else start
        stacks = jax.tree.map(lambda like: _spread(zero, like, count), result)
        sums, stacks, _ = lax.fori_loop(0, count, body, (sums, stacks, zero))
        return sums, stacks
