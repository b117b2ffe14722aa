"""Barriers of the compiled program: which arrays XLA may not touch before others are there.

XLA merges gathers of the same parameters, starts reductions as late as it believes it may, and puts off products that
only make gradients. Each function here states one order that XLA would not choose by itself. None changes a value.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero


def after(ready: Any, tree: Any) -> Any:
    """Returns `tree`, whose floating-point arrays XLA may not touch before `ready` is there."""
    leaves, structure = jax.tree.flatten(tree)
    tied = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    barred, _ = lax.optimization_barrier(([leaves[i] for i in tied], ready))
    for i, leaf in zip(tied, barred, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def gather_gate(ready: Any, vjp: Any) -> Any:
    """Returns a block's vjp function, whose parameter shards may not be gathered again before `ready` is there.

    Without the gate XLA merges the gather with the forward pass's, and whole parameters stay alive between the two.
    """
    return after(ready, vjp)


def reduction_gate(ready: Any, vjp: Any, grads: Any) -> tuple[Any, Any]:
    """Does the same, and makes the vjp function wait until the gradients of an earlier block are reduced.

    Without the gate XLA starts reductions as late as it can, and whole gradients of all blocks pile up.

    Args:
      ready: as in `gather_gate`.
      vjp: the block's vjp function, a pytree of the arrays that the block kept.
      grads: reduced gradients of the earlier block.

    Returns:
      The vjp function, and the gradients, of which every value is the same.
    """
    leaves, structure = jax.tree.flatten(grads)
    if not leaves:
        return gather_gate(ready, vjp), grads
    # The barrier needs a value that exists only when every gradient is reduced. One number of each gradient, added up,
    # is such a value. Gradients that passed the barrier themselves would be written out in float32 at this place, and
    # read again by the optimizer.
    probe = sum(leaf[(0,) * leaf.ndim] for leaf in leaves)
    vjp, probe = after(ready, (vjp, probe))
    # XLA removes a number that nothing uses, so the probe is used: min(|probe|, 0) is 0 for every number, infinities
    # included, and a NaN, which is some other leaf's, is replaced by 0. XLA does not simplify it to a constant. It is
    # added to the smallest gradient, the cheapest to write.
    zero = jnp.where(jnp.isnan(probe), 0, jnp.minimum(jnp.abs(probe), 0))
    smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
    leaves[smallest] = leaves[smallest] + zero
    return vjp, jax.tree.unflatten(structure, leaves)


@jax.custom_vjp
def tie_cotangents(x: Any, params: Any) -> tuple[Any, Any]:
    """Returns both arguments as they are; backward, no cotangent is used before all of them are computed.

    XLA puts off the products that make parameter gradients, and each such product keeps its operands alive. Tied, they
    run before the cotangent of `x` leaves the block, and the reductions of their results begin at once. An argument
    without a gradient gets none here: zeros would be reduced.
    """
    return x, params


def _tie_forward(x: Any, params: Any) -> tuple[tuple[Any, Any], None]:
    return jax.tree.map(lambda leaf: leaf.value, (x, params)), None


def _tie_backward(residual: None, cotangents: tuple[Any, Any]) -> tuple[Any, Any]:
    del residual
    leaves, structure = jax.tree.flatten(cotangents)
    made = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, SymbolicZero)]
    tied: list[Any] = [None] * len(leaves)
    for i, leaf in zip(made, after((), [leaves[i] for i in made]), strict=True):
        tied[i] = leaf
    return jax.tree.unflatten(structure, tied)


tie_cotangents.defvjp(_tie_forward, _tie_backward, symbolic_zeros=True)
