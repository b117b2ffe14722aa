"""Tensor and sequence parallelism as a model writes it: the operators around each half of a block.

Between blocks a rank holds its piece of the sequence, inside a half the whole sequence and its piece of the matrices:
`enter` all-gathers the one, `leave` sums the ranks' partial results and scatters them, and each is the other's
transpose (Korthikanti et al., arXiv 2205.05198). They act inside a `shard_map` that is manual over the axis `tensor`;
anywhere else there is one rank, and each is the identity.

The loss of a model is equal on all ranks, and each rank seeds it with 1. So what is combined for the loss (`total`) has
the identity for its backward pass; gradients of parameters that are not split are partial, and the step adds them up.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from amsp_jax.engine.parallel import TENSOR


def manual_size(axis: str) -> int:
    """The length of a mesh axis where the code being traced is manual over it, else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return int(mesh.shape[axis]) if axis in mesh.manual_axes else 1


def size() -> int:
    """The number of tensor ranks."""
    return manual_size(TENSOR)


def rank() -> jax.Array:
    """This rank's number, a scalar int32."""
    return lax.axis_index(TENSOR) if size() > 1 else jnp.int32(0)


def enter(x: jax.Array) -> jax.Array:
    """[rows, seq / t, ...] to [rows, seq, ...]: the whole sequence, for a product with this rank's columns."""
    return lax.all_gather(x, TENSOR, axis=1, tiled=True) if size() > 1 else x


def leave(x: jax.Array) -> jax.Array:
    """[rows, seq, ...] of partial sums to [rows, seq / t, ...] of totals; after a product with this rank's rows."""
    return lax.psum_scatter(x, TENSOR, scatter_dimension=1, tiled=True) if size() > 1 else x


def local_sequence(x: jax.Array, dim: int) -> jax.Array:
    """This rank's piece, along the sequence `dim`, of an array that every rank has whole."""
    if size() == 1:
        return x
    length = x.shape[dim] // size()
    return lax.dynamic_slice_in_dim(x, rank() * length, length, dim)


def gather(x: jax.Array, dim: int) -> jax.Array:
    """The ranks' pieces, put together along `dim` on each rank; for results, not for what is differentiated."""
    return lax.all_gather(x, TENSOR, axis=dim, tiled=True) if size() > 1 else x


def total(x: jax.Array) -> jax.Array:
    """The sum over ranks, of which each rank makes the same use: backward, the cotangent is handed on as it is."""
    return _total(x) if size() > 1 else x


@jax.custom_vjp
def _total(x: jax.Array) -> jax.Array:
    return lax.psum(x, TENSOR)


def _total_forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _total(x), None


def _total_backward(residual: None, cotangent: jax.Array) -> tuple[jax.Array]:
    del residual
    # Every rank seeds the same loss with 1: a sum of cotangents would count it once for each rank.
    return (cotangent,)


_total.defvjp(_total_forward, _total_backward)


def maximum(x: jax.Array) -> jax.Array:
    """The largest over ranks; a constant to differentiation."""
    # The maximum only keeps exponentials small: the result does not depend on it, nor does the gradient.
    x = lax.stop_gradient(x)
    return lax.pmax(x, TENSOR) if size() > 1 else x


def logsumexp(x: jax.Array) -> jax.Array:
    """log sum exp of the last dimension, of which each rank has a piece. A piece may be all minus infinity, not all."""
    if size() == 1:
        return jax.nn.logsumexp(x, axis=-1)
    largest = maximum(jnp.max(x, axis=-1))
    return jnp.log(total(jnp.sum(jnp.exp(x - largest[..., None]), axis=-1))) + largest
