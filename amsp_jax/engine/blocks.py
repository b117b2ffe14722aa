"""The loop over blocks, inside `shard_map`: gather at use, rematerialise, and say who waits for whom backwards.

`jax.checkpoint` ties a block's re-gather to the cotangent that enters the block, so it cannot start before the
block above is done, and XLA starts reductions as late as it can, so that full gradients pile up. Here the backward
pass is our own: each block's barrier waits for the cotangent one block earlier (gathers run ahead by one block) and for
the reduced gradient `reduction_window` blocks earlier (at most that many full gradients are alive); inside a node, most
blocks make their gradients before the next begins.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from amsp_jax.engine.collectives import GATHERED, Reduction, gather, gather_last
from amsp_jax.engine.context import RING_ATTENTION
from amsp_jax.engine.mesh import level
from amsp_jax.engine.parallel import TENSOR
from amsp_jax.engine.plan import LeafPlan
from amsp_jax.model import Batch, Params, Part

PROJECTIONS = ("qkv", "attention_residual", "mlp_gate", "mlp_up")
"""The `checkpoint_name`s that the policy `projections` keeps: results of matrix products, queries and keys rotated and
attention's added to the residual stream, as the backward pass needs them."""

PALLAS_ATTENTION = "mha"
"""The function of jax's Pallas attention, whose results are attention's and its log-sum-exp."""


class Remat(StrEnum):
    """What a block keeps for its backward pass; gathered parameters never are."""

    NONE = "none"
    PROJECTIONS = "projections"
    FULL = "full"


def checkpointed(apply: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """A block's function that keeps what `remat` says for its backward pass."""

    def run(*args: Any) -> Any:
        # A policy is asked of a product before it meets the name of its result: so the function is traced beforehand.
        keeps_products = remat is Remat.PROJECTIONS and not _has_names(jax.make_jaxpr(apply)(*args).jaxpr)
        return jax.checkpoint(apply, policy=policy(remat, keeps_products), prevent_cse=False)(*args)

    return run


def policy(remat: Remat, keeps_products: bool = False) -> Callable[..., Any]:
    """The `jax.checkpoint` policy. Full keeps the block's input alone, projections also what `PROJECTIONS` names and
    the results of fused attention, none everything but the gathered parameters.

    Args:
      remat: which.
      keeps_products: projections keeps results of matrix products as well, where no dimension is batched: not scores of
        attention, nor what stacked experts compute. For a block that names nothing.
    """
    if remat is Remat.FULL:
        return jax.checkpoint_policies.nothing_saveable
    if remat is Remat.NONE:
        return _all_but_gathered
    keep = jax.checkpoint_policies.save_only_these_names(*PROJECTIONS, RING_ATTENTION)
    if keeps_products:
        products = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        keep = jax.checkpoint_policies.save_from_both_policies(keep, products)
    # The fused kernel's own outputs, its softmax statistics included: or its forward would run twice.
    return jax.checkpoint_policies.save_from_both_policies(keep, _is_fused_attention)


def _has_names(jaxpr: Any) -> bool:
    """Whether a policy meets one of `PROJECTIONS` in it, or in a function that it calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] in PROJECTIONS:
            return True
        # What has a gradient of its own reaches a policy as one call.
        params = [] if eqn.primitive.name.startswith("custom_vjp") else list(eqn.params.values())
        bodies = [getattr(body, "jaxpr", body) for body in jax.tree.leaves(params)]
        if any(hasattr(body, "eqns") and _has_names(body) for body in bodies):
            return True
    return False


def _is_fused_attention(primitive: Any, *_: Any, **params: Any) -> bool:
    return "dot_product_attention_fwd" in primitive.name or _is_call_of(PALLAS_ATTENTION, params)


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    is_params = primitive.name == "all_gather" and TENSOR not in params["axis_name"]
    return not is_params and params.get("name") != GATHERED and not _is_call_of(GATHERED, params)


def _is_call_of(name: str, params: dict[str, Any]) -> bool:
    """Whether a primitive calls a function that holds what has this name.

    A function with a gradient of its own reaches a policy as one call: its results are saved or not, whatever is named
    inside it.
    """
    body = params.get("call_jaxpr")
    return body is not None and any(eqn.params.get("name") == name for eqn in body.eqns)


@dataclasses.dataclass(frozen=True)
class Gather:
    """Gathers trees of leaves.

    Attributes:
      dtype: of the results.
      reduction: how gradients are summed.
      is_last: for the last microbatch of a step, whose gradients are added to those before and reduced to OS shards.
        A shard is then the pair of a P shard and the accumulated gradient or None.
    """

    dtype: jnp.dtype
    reduction: Reduction
    is_last: bool = False

    def __call__(self, leaves: Params, shards: Params, sinks: Params) -> Params:
        """Whole parameters; their reduced gradients go to `sinks` (see `collectives.gather` and `gather_last`)."""
        return jax.tree.map(self._one, leaves, shards, sinks)

    def _one(self, leaf: LeafPlan, shard: Any, sink: jax.Array) -> jax.Array:
        if self.is_last:
            return gather_last(leaf, self.dtype, self.reduction, *shard, sink)
        return gather(leaf, self.dtype, self.reduction, shard, sink)


def reduction_window(leaves: Params, is_last: bool = False) -> int | None:
    """How many blocks a gradient's reduction may lag; None where blocks reduce nothing.

    In the last microbatch of a step what is reduced once counts, too. Chosen on compiled schedules: 6 where other
    collectives need the network between reductions, as with 4 and fewer those turned synchronous; 4 where only
    gradients are sharded; 3 for reductions of once a step alone, which then begin early enough on a slow network.
    """
    plans: list[LeafPlan] = jax.tree.leaves(leaves)
    has_params, has_grads = any(leaf.param_axes for leaf in plans), any(leaf.grad_axes for leaf in plans)
    if is_last and any(leaf.opt_axes or leaf.replica_axes for leaf in plans):
        return 6 if has_params or has_grads else 3
    if has_params:
        return 6
    return 4 if has_grads else None


def run_blocks(
    blocks: Sequence[Part],
    leaves: Sequence[Params],
    gather_tree: Gather,
    remat: Remat,
    shards: Sequence[Params],
    sinks: Sequence[Params],
    x: Any,
    batch: Batch,
    keys: Sequence[jax.Array],
) -> Any:
    """Applies the blocks in turn, each gathered at use and rematerialised.

    Differentiable in `sinks` and `x` alone.

    Args:
      blocks, leaves, shards, sinks, keys: one item a block.
      gather_tree: the gather.
      remat: what a block keeps.
      x: what flows between blocks, any pytree.
      batch: the microbatch's arrays.
    """
    if not blocks:
        return x
    window = reduction_window(leaves, gather_tree.is_last)
    num_free = num_untied(leaves, window)
    applies = []
    for ties, some in ((False, slice(num_free)), (True, slice(num_free, None))):
        applies += shared(functools.partial(_gathered_block, gather_tree, remat, ties), blocks[some], leaves[some])
    stack = _stack(applies, window)
    return stack(list(sinks), x, (list(shards), batch, list(keys)))


def num_untied(leaves: Sequence[Params], window: int | None) -> int:
    """Of how many blocks, from the first, XLA may put off the products that make gradients; of the others, which go
    backward while most activations are alive, these are made before the next block begins, or each keeps its operands.

    All blocks where gradients are reduced between nodes, as XLA hides more of that beside products it has put off, or
    not reduced in a microbatch; else as many as a reduction may lag, for the last reductions to have something to hide
    behind.
    """
    axes = {axis for leaf in jax.tree.leaves(leaves) for axis in (*leaf.param_axes, *leaf.grad_axes)}
    is_tied = window is not None and axes and all(level(axis) == "intra" for axis in axes)
    return min(window or 0, len(leaves)) if is_tied else len(leaves)


def shared(make: Callable[..., Any], blocks: Sequence[Part], leaves: Sequence[Params]) -> list[Callable[..., Any]]:
    """`make(block, leaves)` of each, jitted; equal blocks share one, which jax traces, transposes and lowers once."""
    functions: dict[Any, Callable[..., Any]] = {}
    kinds = []
    for part, tree in zip(blocks, leaves, strict=True):
        plans, structure = jax.tree.flatten(tree)
        kinds.append((id(part.apply), structure, *(leaf.kind for leaf in plans)))
        if kinds[-1] not in functions:
            functions[kinds[-1]] = jax.jit(make(part, tree))
    return [functions[kind] for kind in kinds]


def _gathered_block(gather_tree: Gather, remat: Remat, ties: bool, part: Part, leaves: Params) -> Callable[..., Any]:
    def apply(sinks: Params, x: Any, shards: Params, batch: Batch, key: jax.Array) -> Any:
        params = gather_tree(leaves, shards, sinks)
        if ties:
            x, params = together(x, params)
        return part.apply(params, x, batch, key)

    return checkpointed(apply, remat)


def _stack(applies: Sequence[Callable[..., Any]], window: int | None) -> Callable[..., Any]:
    @jax.custom_vjp
    def stack(sinks: list[Params], x: Any, constants: Any) -> Any:
        for apply, sink, *rest in zip(applies, sinks, *constants_of(constants), strict=True):
            x = apply(sink, x, *rest)
        return x

    def constants_of(constants: Any) -> tuple[Any, Any, Any]:
        shards, batch, keys = constants
        return shards, [batch] * len(applies), keys

    def forward(sinks: list[Params], x: Any, constants: Any) -> Any:
        vjps = []
        for apply, sink, shards, batch, key in zip(applies, sinks, *constants_of(constants), strict=True):
            block = functools.partial(_with_constants, apply, shards, batch, key)
            x, vjp = jax.vjp(block, sink, x)
            vjps.append(vjp)
        return x, vjps

    def backward(vjps: list[Any], cotangent: Any) -> Any:
        cotangents: list[Any] = [cotangent]
        grads: list[Params] = []
        for vjp in reversed(vjps):
            ready = cotangents[max(0, len(cotangents) - 2)]
            late = len(grads) - window if window else -1
            if late >= 0:
                vjp, grads[late] = _after_reduction(ready, vjp, grads[late])
            else:
                vjp = after(ready, vjp)
            grad, cotangent = vjp(cotangent)
            grads.append(grad)
            cotangents.append(cotangent)
        return grads[::-1], cotangent, None

    stack.defvjp(forward, backward)
    return stack


def _with_constants(apply: Any, shards: Params, batch: Batch, key: jax.Array, sinks: Params, x: Any) -> Any:
    return apply(sinks, x, shards, batch, key)


def _after_reduction(ready: Any, vjp: Any, grads: Params) -> tuple[Any, Params]:
    """`vjp`, which XLA may not touch before `ready` and the reduced gradients are there; and those gradients.

    One number of each gradient passes the barrier in its place: gradients that did would be written out in float32
    there, and read again by the optimizer.
    """
    leaves, structure = jax.tree.flatten(grads)
    if not leaves:
        return after(ready, vjp), grads
    probe = sum(leaf[(0,) * leaf.ndim] for leaf in leaves)
    vjp, probe = after(ready, (vjp, probe))
    # XLA forgets a number that nothing uses. What is added is 0, also where the number is NaN: that is another leaf's.
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = leaves[smallest] + jnp.where(jnp.isnan(probe), 0, jnp.minimum(jnp.abs(probe), 0))
    return vjp, jax.tree.unflatten(structure, leaves)


@jax.custom_vjp
def together(x: Any, params: Params) -> tuple[Any, Params]:
    """Both as they are. Backward, no cotangent is used before all are there: a product that makes parameters'
    gradients, which XLA would put off, does not keep its operands, and the reduction of its result begins. What gets
    no gradient gets none here, or zeros would be reduced."""
    return x, params


def _together_forward(x: Any, params: Params) -> tuple[tuple[Any, Params], None]:
    return jax.tree.map(lambda leaf: leaf.value, (x, params)), None


def _together_backward(residual: None, cotangents: tuple[Any, Params]) -> tuple[Any, Params]:
    del residual
    leaves, structure = jax.tree.flatten(cotangents)
    made = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, SymbolicZero)]
    tied: list[Any] = [None] * len(leaves)
    for i, leaf in zip(made, after((), [leaves[i] for i in made]), strict=True):
        tied[i] = leaf
    return jax.tree.unflatten(structure, tied)


together.defvjp(_together_forward, _together_backward, symbolic_zeros=True)


def after(ready: Any, tree: Any) -> Any:
    """`tree`, whose arrays XLA may not touch before `ready` is there; `ready` is not consumed."""
    leaves, structure = jax.tree.flatten(tree)
    tied = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    barred, _ = lax.optimization_barrier(([leaves[i] for i in tied], ready))
    for i, leaf in zip(tied, barred, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)
