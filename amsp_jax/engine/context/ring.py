"""Causal attention of a sequence in zigzag order: keys and values travel around the ring of `context` ranks.

Each rank merges what its queries see of them by the log-sum-exp of the scores (Liu et al., arXiv 2310.01889).

Shape suffixes: B rows, S queries and keys of a rank, N query heads, K key and value heads, G = N / K, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.engine.context.chunks import (
    Partial,
    Queries,
    attend_to_other,
    attend_to_own,
    gradients_of_other,
    gradients_of_own,
)
from amsp_jax.engine.context.sequence import rank, size
from amsp_jax.engine.parallel import CONTEXT, STAGE
from amsp_jax.engine.tensor import manual_size

RING_ATTENTION = "ring_attention"
"""The `checkpoint_name` of the ring's result and its log-sum-exp: recomputed, they take a way around the ring more."""

_Pair = tuple[jax.Array, jax.Array]
"""Of keys and of values: themselves or their gradients."""


def ring_attention(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """Causal attention of a sequence in zigzag order, in q's dtype: [B, S, N, H]. N is a multiple of K.

    Scores, statistics and sums are float32. Backward, keys and values travel once more, their gradients with them, so
    that no rank ever holds more of the sequence than its own part and two others', one of them on its way.
    """
    batch, seq_len, num_heads, head_dim = q_BSNH.shape
    grouped_BSKGH = q_BSNH.reshape(batch, seq_len, k_BSKH.shape[2], -1, head_dim)
    out_BKGSH = _ring(
        grouped_BSKGH.transpose(0, 2, 3, 1, 4), k_BSKH.transpose(0, 2, 1, 3), v_BSKH.transpose(0, 2, 1, 3)
    )
    return out_BKGSH.transpose(0, 3, 1, 2, 4).reshape(batch, seq_len, num_heads, head_dim)


@jax.custom_vjp
def _ring(q_BKGSH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array) -> jax.Array:
    return _ring_forward(q_BKGSH, k_BKSH, v_BKSH)[0]


def _ring_forward(q_BKGSH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def meet(result: Partial, kv: _Pair, step: jax.Array) -> Partial:
        return result.merge(attend_to_other(q_BKGSH, *kv, is_earlier=rank() >= step))

    result = _around(meet, attend_to_own(q_BKGSH, k_BKSH, v_BKSH), (k_BKSH, v_BKSH))
    out_BKGSH = checkpoint_name(result.out_BKGSH.astype(q_BKGSH.dtype), RING_ATTENTION)
    log_sum_BKGS = checkpoint_name(result.log_sum_BKGS, RING_ATTENTION)
    return out_BKGSH, (q_BKGSH, k_BKSH, v_BKSH, out_BKGSH, log_sum_BKGS)


def _ring_backward(residuals: tuple[jax.Array, ...], grad_BKGSH: jax.Array) -> tuple[jax.Array, ...]:
    q_BKGSH, k_BKSH, v_BKSH, out_BKGSH, log_sum_BKGS = residuals
    delta_BKGS = jnp.sum(out_BKGSH.astype(jnp.float32) * grad_BKGSH.astype(jnp.float32), axis=-1)
    queries = Queries(q_BKGSH, grad_BKGSH, log_sum_BKGS, delta_BKGS)
    # Or XLA merges the first hop with that of the forward pass, and keeps until now what arrived then.
    k_BKSH, v_BKSH, _ = lax.optimization_barrier((k_BKSH, v_BKSH, delta_BKGS))

    def meet(so_far: tuple[jax.Array, _Pair], kv: _Pair, step: jax.Array) -> tuple[jax.Array, _Pair]:
        more = gradients_of_other(queries, *kv, is_earlier=rank() >= step)
        return so_far[0] + more.q, _send_home((more.k, more.v), so_far[1], step)

    own = gradients_of_own(queries, k_BKSH, v_BKSH)
    grad_q, under_way = _around(meet, (own.q, _from_home((own.k, own.v))), (k_BKSH, v_BKSH))
    grad_k, grad_v = _at_home(under_way)
    return grad_q.astype(q_BKGSH.dtype), grad_k.astype(k_BKSH.dtype), grad_v.astype(v_BKSH.dtype)


_ring.defvjp(_ring_forward, _ring_backward)


def _around(meet: Callable[[Any, _Pair, jax.Array], Any], so_far: Any, kv: _Pair) -> Any:
    """`so_far = meet(so_far, kv, step)` for steps 1 to c - 1, while the next keys and values are on their way.

    In `step` rank r has those of rank r - step, which is the earlier of the two if r >= step.
    """
    gathered = lax.all_gather(kv, CONTEXT) if _in_pipeline() else None

    def following(kv: _Pair, step: jax.Array) -> _Pair:
        return _pass_on(kv) if gathered is None else jax.tree.map(lambda x: x[_source(step)], gathered)

    def body(state: tuple[Any, _Pair], step: jax.Array) -> tuple[tuple[Any, _Pair], None]:
        so_far, kv = state
        # Sent before it is needed: the next keys travel while this rank attends to those it has.
        coming = following(kv, step + 1)
        return (meet(so_far, kv, step), coming), None

    # A loop, and so one step after the other: unrolled, the scores of all steps were alive at once.
    steps = jnp.arange(1, size(), dtype=jnp.int32)
    (so_far, kv), _ = lax.scan(body, (so_far, following(kv, steps[0])), steps[:-1])
    return meet(so_far, kv, steps[-1])


def _in_pipeline() -> bool:
    """Then nothing goes around the ring: keys and values are all-gathered, their gradients reduce-scattered.

    A permute is a meeting of all devices of the mesh, and stages of a pipeline may be at different work. The bytes on
    the wire are the same, but a rank holds the keys and values of the whole sequence for as long as it attends to them.
    """
    return manual_size(STAGE) > 1


def _source(step: jax.Array) -> jax.Array:
    """The rank whose keys this one meets in `step`."""
    return (rank() - step) % size()


def _pass_on(pair: _Pair) -> _Pair:
    """To the next rank, and from the one before."""
    return lax.ppermute(pair, CONTEXT, [(r, (r + 1) % size()) for r in range(size())])


def _from_home(own: _Pair) -> _Pair:
    """Gradients of a rank's own keys and values, to which those of other ranks' queries come."""
    if not _in_pipeline():
        return own
    return jax.tree.map(lambda x: jnp.zeros((size(), *x.shape), x.dtype).at[rank()].set(x), own)


def _send_home(more: _Pair, under_way: _Pair, step: jax.Array) -> _Pair:
    """Adds gradients of the keys and values that were met in `step`: around the ring they follow those."""
    if not _in_pipeline():
        return jax.tree.map(jnp.add, _pass_on(under_way), more)
    return jax.tree.map(lambda all_ranks, x: all_ranks.at[_source(step)].add(x), under_way, more)


def _at_home(under_way: _Pair) -> _Pair:
    """After the last step, which met the keys of the next rank: one hop more."""
    if not _in_pipeline():
        return _pass_on(under_way)
    return jax.tree.map(lambda x: lax.psum_scatter(x, CONTEXT), under_way)
