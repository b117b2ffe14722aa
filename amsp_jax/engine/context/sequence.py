"""A sequence over the ranks of the mesh axis `context`: which of its tokens a rank has.

It is cut into 2c chunks, and rank r of c holds chunks r and 2c-1-r ("zigzag"), so that causal attention is the same
work for all. Outside of a `shard_map` that is manual over `context` there is one rank, with the whole sequence in
order.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from amsp_jax.engine.parallel import CONTEXT
from amsp_jax.engine.tensor import manual_size
from amsp_jax.errors import UserError


def size() -> int:
    """The number of context ranks."""
    return manual_size(CONTEXT)


def rank() -> jax.Array:
    """This rank's number, a scalar int32."""
    return lax.axis_index(CONTEXT) if size() > 1 else jnp.int32(0)


def zigzag(seq_len: int, num_ranks: int) -> np.ndarray:
    """[seq_len] int: `x[zigzag]`, cut into equal pieces, gives rank r the chunks r and 2c-1-r.

    Example:
      >>> zigzag(8, 2)
      array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if num_ranks == 1:
        return np.arange(seq_len)
    # An early and a late chunk for each rank: with causal attention both together are the same work for all.
    chunks = np.arange(seq_len).reshape(2 * num_ranks, -1)
    return np.concatenate([chunks[[r, 2 * num_ranks - 1 - r]].reshape(-1) for r in range(num_ranks)])


def zigzag_inverse(seq_len: int, num_ranks: int) -> np.ndarray:
    """[seq_len] int: `y[zigzag_inverse]` puts the ranks' pieces, one after the other, back into the order of tokens."""
    return np.argsort(zigzag(seq_len, num_ranks))


def check_sequence(seq_len: int, num_context: int, num_tensor: int) -> None:
    """Checks that each context rank gets two equal chunks, and each tensor rank an equal piece of these.

    Raises:
      UserError: the length does not divide; the message names the nearest lengths that do.
    """
    # Two chunks a context rank, whose tokens are then cut between tensor ranks.
    unit = num_context * math.lcm(2 if num_context > 1 else 1, num_tensor)
    if seq_len % unit == 0:
        return
    nearest = [n for n in (seq_len // unit * unit, (seq_len // unit + 1) * unit) if n]
    raise UserError(
        f"seq_len={seq_len} does not divide between context={num_context} (two chunks a rank, if more than one) x "
        f"tensor={num_tensor}: it must be a multiple of {unit}; use {' or '.join(map(str, nearest))}"
    )


def positions(num_local: int) -> jax.Array:
    """[num_local] int32: the places in the whole sequence of this rank's tokens."""
    return local_sequence(jnp.arange(num_local * size(), dtype=jnp.int32), 0)


def local_sequence(x: jax.Array, dim: int) -> jax.Array:
    """This rank's two chunks, along the sequence `dim`, of an array that every rank has whole."""
    if size() == 1:
        return x
    length = x.shape[dim] // (2 * size())
    places = rank() * length, (2 * size() - 1 - rank()) * length
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, place, length, dim) for place in places], axis=dim)
