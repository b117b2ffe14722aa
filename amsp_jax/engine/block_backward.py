"""The loop over blocks, inside `shard_map`, and its own backward pass.

`jax.checkpoint` ties the second gather of a block to the cotangent that enters the block, so the gather cannot start
before the block above is done. Here the backward pass says who waits for whom:

    the cotangent enters block k            -> block k-1 may gather its parameters again, one block ahead
    the gradients of block k+w are reduced  -> block k may go backward, so w blocks' whole gradients are alive at most

`w` is `reduction_window`. Where reductions stay inside a node, most blocks also finish their own parameter gradients
before the next block begins (`num_untied`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from amsp_jax.engine.barriers import gather_gate, reduction_gate, tie_cotangents
from amsp_jax.engine.leaves import LeafPlan, LeafPlans
from amsp_jax.engine.mesh import level
from amsp_jax.engine.parts import Gather, PartState
from amsp_jax.engine.rematerialization import Remat, checkpointed
from amsp_jax.engine.trees import Sink, Tree
from amsp_jax.model import Batch, Part

Apply = Callable[..., Any]
"""A block as `(sinks, x, (shards, totals), batch, key) -> x`."""


def reduction_window(leaves: Sequence[LeafPlans], is_last: bool = False) -> int | None:
    """How many blocks the reduction of a block's gradients may lag; None where blocks reduce nothing.

    In the last microbatch of a step the reductions of once a step count, too. The numbers were chosen on compiled
    schedules: 6 where other collectives need the network between reductions, as with 4 and fewer they turned
    synchronous; 4 where only gradients are sharded; 3 for reductions of once a step alone, which then begin early
    enough on a slow network.
    """
    plans: list[LeafPlan] = jax.tree.leaves(leaves)
    trained = [leaf for leaf in plans if not leaf.frozen]
    if not trained:
        return None
    has_params, has_grads = any(leaf.param_axes for leaf in plans), any(leaf.grad_axes for leaf in trained)
    # More collectives share the network in the last microbatch.
    if is_last and any(leaf.opt_axes or leaf.replica_axes for leaf in trained):
        return 6 if has_params or has_grads else 3
    if has_params:
        return 6
    return 4 if has_grads else None


def num_untied(leaves: Sequence[LeafPlans], window: int | None) -> int:
    """Number of leading blocks whose weight-gradient products XLA may delay.

    The remaining blocks, which go backward while most activations are alive, run theirs before the next block's
    backward pass; otherwise the products' operands stay alive and raise peak memory.

    All blocks are untied where gradients are reduced between nodes, as XLA hides more of that beside delayed products,
    and where a microbatch reduces nothing. Elsewhere as many are untied as a reduction may lag: the last reductions
    have only those products to hide behind.
    """
    trained = [leaf for leaf in jax.tree.leaves(leaves) if not leaf.frozen]
    axes = {axis for leaf in trained for axis in (*leaf.param_axes, *leaf.grad_axes)}
    is_tied = window is not None and axes and all(level(axis) == "intra" for axis in axes)
    return min(window or 0, len(leaves)) if is_tied else len(leaves)


def run_blocks(
    blocks: Sequence[Part],
    states: Sequence[PartState],
    gather: Gather,
    remat: Remat,
    x: Any,
    batch: Batch,
    keys: Sequence[jax.Array],
) -> Any:
    """Applies the blocks in turn, each gathered at use and rematerialised.

    Differentiable in the sinks of `states` and in `x` alone.

    Args:
      blocks, states, keys: one item a block.
      gather: how parameters are gathered.
      remat: what a block keeps.
      x: what flows between blocks, any pytree.
      batch: the microbatch's arrays.
    """
    # Leading blocks without a gradient have a loop of their own: below a frozen embedding it has no backward pass.
    num_frozen = next((i for i, state in enumerate(states) if jax.tree.leaves(state.sinks)), len(states))
    for some in (slice(num_frozen), slice(num_frozen, None)):
        if blocks[some]:
            x = _run_loop(blocks[some], states[some], gather, remat, x, batch, keys[some])
    return x


def _run_loop(
    blocks: Sequence[Part],
    states: Sequence[PartState],
    gather: Gather,
    remat: Remat,
    x: Any,
    batch: Batch,
    keys: Sequence[jax.Array],
) -> Any:
    leaves = [state.leaves for state in states]
    window = reduction_window(leaves, gather.is_last)
    num_free = num_untied(leaves, window)
    # Two kinds of program: leading blocks are free to delay their weight gradients, the others are tied.
    applies: list[Apply] = []
    for ties, some in ((False, slice(num_free)), (True, slice(num_free, None))):
        applies += shared(functools.partial(_gathered_block, gather, remat, ties), blocks[some], leaves[some])
    params = [(state.shards, state.totals) for state in states]
    constants = params, [batch] * len(blocks), list(keys)
    return _loop(tuple(applies), window, [state.sinks for state in states], x, constants)


def shared(make: Callable[..., Any], blocks: Sequence[Part], leaves: Sequence[LeafPlans]) -> list[Callable[..., Any]]:
    """Jits `make(block, leaves)` of each block; equal blocks share one, which jax traces and lowers once."""
    functions: dict[Any, Callable[..., Any]] = {}
    kinds = []
    for part, tree in zip(blocks, leaves, strict=True):
        plans, structure = jax.tree.flatten(tree)
        # Plans without names: blocks that are stored and communicated alike are one program.
        kinds.append((id(part.apply), structure, *(leaf.kind for leaf in plans)))
        if kinds[-1] not in functions:
            functions[kinds[-1]] = jax.jit(make(part, tree))
    return [functions[kind] for kind in kinds]


def _gathered_block(gather: Gather, remat: Remat, ties: bool, part: Part, leaves: LeafPlans) -> Apply:
    # The gather is inside the checkpointed function, so gathered parameters are never kept for the backward pass.
    def apply(sinks: Tree[Sink | None], x: Any, params: Any, batch: Batch, key: jax.Array) -> Any:
        whole = gather(PartState(leaves, params[0], sinks, params[1]))
        if ties:
            x, whole = tie_cotangents(x, whole)
        return part.apply(whole, x, batch, key)

    return checkpointed(apply, remat)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _loop(applies: tuple[Apply, ...], window: int | None, sinks: list[Any], x: Any, constants: Any) -> Any:
    """Runs the blocks in turn. `constants` are lists of one item a block, without a gradient."""
    del window
    for apply, sink, *rest in zip(applies, sinks, *constants, strict=True):
        x = apply(sink, x, *rest)
    return x


def _loop_forward(
    applies: tuple[Apply, ...], window: int | None, sinks: list[Any], x: Any, constants: Any
) -> tuple[Any, list[Any]]:
    """Also returns the vjp function of each block: a pytree of what the block keeps."""
    del window
    vjps = []
    for apply, sink, *rest in zip(applies, sinks, *constants, strict=True):
        # The constants are bound, so that no cotangent is made for them.
        x, vjp = jax.vjp(functools.partial(_with_constants, apply, *rest), sink, x)
        vjps.append(vjp)
    return x, vjps


def _loop_backward(
    applies: tuple[Apply, ...], window: int | None, vjps: list[Any], cotangent: Any
) -> tuple[list[Any], Any, None]:
    del applies
    cotangents = [cotangent]
    grads: list[Any] = []
    for vjp in reversed(vjps):
        # The cotangent that the block above received, not the one it returns: the gather of this block's parameters
        # runs beside the block above.
        ready = cotangents[max(0, len(cotangents) - 2)]
        late = len(grads) - window if window else -1
        if late >= 0:
            vjp, grads[late] = reduction_gate(ready, vjp, grads[late])
        else:
            vjp = gather_gate(ready, vjp)
        grad, cotangent = vjp(cotangent)
        grads.append(grad)
        cotangents.append(cotangent)
    return grads[::-1], cotangent, None


_loop.defvjp(_loop_forward, _loop_backward)


def _with_constants(apply: Apply, params: Any, batch: Batch, key: jax.Array, sinks: Any, x: Any) -> Any:
    return apply(sinks, x, params, batch, key)
