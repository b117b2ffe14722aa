"""Context parallelism: a sequence over the ranks of the mesh axis `context`, and attention around their ring.

The sequence is cut into 2c chunks, and rank r of c holds chunks r and 2c-1-r ("zigzag"), so that causal attention is
the same work for all. Keys and values travel around the ring; each rank merges what its queries see of them by the
log-sum-exp of the scores (Liu et al., arXiv 2310.01889). In a step of the ring a rank meets chunks s and 2c-1-s of
another rank s. Its late chunk 2c-1-r sees all of chunk s; besides, either its early chunk r sees all of chunk s
(s < r), or the late one sees all of chunk 2c-1-s (s > r). So each step is two unmasked products of one chunk with one
chunk, half of what they are without causality; only a chunk with itself wants a mask, the usual one.

Outside of a `shard_map` that is manual over `context` there is one rank, with the whole sequence in order.

Shape suffixes: B rows, S queries and T keys of a rank or chunk, N query heads, K key and value heads, G = N / K, H head
dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.errors import UserError
from amsp_jax.parallel import CONTEXT, STAGE
from amsp_jax.tensor import manual_size

RING_ATTENTION = "ring_attention"
"""The `checkpoint_name` of the ring's result and its log-sum-exp: recomputed, they take a way around the ring more."""

_Pair = tuple[jax.Array, jax.Array]
"""Of keys and of values: themselves or their gradients."""


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
    chunks = np.arange(seq_len).reshape(2 * num_ranks, -1)
    return np.concatenate([chunks[[r, 2 * num_ranks - 1 - r]].reshape(-1) for r in range(num_ranks)])


def zigzag_inverse(seq_len: int, num_ranks: int) -> np.ndarray:
    """[seq_len] int: `y[zigzag_inverse]` puts the ranks' pieces, one after the other, back into the order of tokens."""
    return np.argsort(zigzag(seq_len, num_ranks))


def check_sequence(seq_len: int, num_context: int, num_tensor: int) -> None:
    """Checks that each context rank gets two equal chunks, and each tensor rank an equal piece of those.

    Raises:
      UserError: not so; with the nearest lengths that do.
    """
    unit = num_context * math.lcm(2 if num_context > 1 else 1, num_tensor)
    if seq_len % unit == 0:
        return
    nearest = [n for n in (seq_len // unit * unit, (seq_len // unit + 1) * unit) if n]
    raise UserError(
        f"SEQ_LEN={seq_len} does not divide between CONTEXT={num_context} (two chunks a rank, if more than one) x "
        f"TENSOR={num_tensor}: it must be a multiple of {unit}; choose {' or '.join(map(str, nearest))}"
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
    def meet(result: _Partial, kv: _Pair, step: jax.Array) -> _Partial:
        return result.merge(_attend_to_other(q_BKGSH, *kv, is_earlier=rank() >= step))

    result = _around(meet, _attend_to_own(q_BKGSH, k_BKSH, v_BKSH), (k_BKSH, v_BKSH))
    out_BKGSH = checkpoint_name(result.out_BKGSH.astype(q_BKGSH.dtype), RING_ATTENTION)
    log_sum_BKGS = checkpoint_name(result.log_sum_BKGS, RING_ATTENTION)
    return out_BKGSH, (q_BKGSH, k_BKSH, v_BKSH, out_BKGSH, log_sum_BKGS)


def _ring_backward(residuals: tuple[jax.Array, ...], grad_BKGSH: jax.Array) -> tuple[jax.Array, ...]:
    q_BKGSH, k_BKSH, v_BKSH, out_BKGSH, log_sum_BKGS = residuals
    delta_BKGS = jnp.sum(out_BKGSH.astype(jnp.float32) * grad_BKGSH.astype(jnp.float32), axis=-1)
    queries = _Queries(q_BKGSH, grad_BKGSH, log_sum_BKGS, delta_BKGS)
    # Or XLA merges the first hop with that of the forward pass, and keeps until now what arrived then.
    k_BKSH, v_BKSH, _ = lax.optimization_barrier((k_BKSH, v_BKSH, delta_BKGS))

    def meet(so_far: tuple[jax.Array, _Pair], kv: _Pair, step: jax.Array) -> tuple[jax.Array, _Pair]:
        more = _gradients_of_other(queries, *kv, is_earlier=rank() >= step)
        return so_far[0] + more.q, _send_home((more.k, more.v), so_far[1], step)

    own = _gradients_of_own(queries, k_BKSH, v_BKSH)
    grad_q, under_way = _around(meet, (own.q, _from_home((own.k, own.v))), (k_BKSH, v_BKSH))
    grad_k, grad_v = _at_home(under_way)
    return grad_q.astype(q_BKGSH.dtype), grad_k.astype(k_BKSH.dtype), grad_v.astype(v_BKSH.dtype)


_ring.defvjp(_ring_forward, _ring_backward)


# --- what travels


def _around(meet: Callable[[Any, _Pair, jax.Array], Any], so_far: Any, kv: _Pair) -> Any:
    """`so_far = meet(so_far, kv, step)` for steps 1 to c - 1, while the next keys and values are on their way.

    In `step` rank r has those of rank r - step, which is the earlier of the two if r >= step.
    """
    gathered = lax.all_gather(kv, CONTEXT) if _in_pipeline() else None

    def following(kv: _Pair, step: jax.Array) -> _Pair:
        return _pass_on(kv) if gathered is None else jax.tree.map(lambda x: x[_source(step)], gathered)

    def body(state: tuple[Any, _Pair], step: jax.Array) -> tuple[tuple[Any, _Pair], None]:
        so_far, kv = state
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


# --- attention to one rank's keys


class _Partial(NamedTuple):
    """Attention to some of the keys, and the log of the sum of its exponentials, float32."""

    out_BKGSH: jax.Array
    log_sum_BKGS: jax.Array

    def merge(self, other: _Partial) -> _Partial:
        """Attention to the keys of both. Rows of `other` may have seen none: a log-sum of minus infinity."""
        log_sum = jnp.logaddexp(self.log_sum_BKGS, other.log_sum_BKGS)
        mine, theirs = (jnp.exp(part.log_sum_BKGS - log_sum)[..., None] for part in (self, other))
        return _Partial(self.out_BKGSH * mine + other.out_BKGSH * theirs, log_sum)


def _attend(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, *, causal: bool) -> _Partial:
    scores = _scores(q_BKGSH, k_BKTH, causal)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum[..., None]).astype(v_BKTH.dtype)
    return _Partial(_product("BKGST,BKTH->BKGSH", weights, v_BKTH), log_sum)


def _attend_to_own(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array) -> _Partial:
    """Each chunk to itself, and the late one to the early one."""
    (early_q, late_q), (early_k, late_k), (early_v, late_v) = (
        _halves(q_BKGSH, 3),
        _halves(k_BKTH, 2),
        _halves(v_BKTH, 2),
    )
    early = _attend(early_q, early_k, early_v, causal=True)
    late = _attend(late_q, early_k, early_v, causal=False).merge(_attend(late_q, late_k, late_v, causal=True))
    return _joined(early, late)


def _attend_to_other(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, *, is_earlier: jax.Array) -> _Partial:
    """Attention to another rank's chunks: the two products of the module's text, the second a choice of operands."""
    (early_q, late_q), (early_k, late_k), (early_v, late_v) = (
        _halves(q_BKGSH, 3),
        _halves(k_BKTH, 2),
        _halves(v_BKTH, 2),
    )
    first = _attend(late_q, early_k, early_v, causal=False)
    operands = jax.tree.map(
        lambda early, late: jnp.where(is_earlier, early, late), (early_q, early_k, early_v), (late_q, late_k, late_v)
    )
    second = _attend(*operands, causal=False)
    early = second._replace(log_sum_BKGS=jnp.where(is_earlier, second.log_sum_BKGS, -jnp.inf))
    late = first.merge(second._replace(log_sum_BKGS=jnp.where(is_earlier, -jnp.inf, second.log_sum_BKGS)))
    return _joined(early, late)


def _joined(early: _Partial, late: _Partial) -> _Partial:
    return _Partial(*(jnp.concatenate(pair, axis=3) for pair in zip(early, late, strict=True)))


class _Queries(NamedTuple):
    """What the backward pass knows of queries; delta is the sum of out x grad over a head (Dao et al., 2205.14135)."""

    q_BKGSH: jax.Array
    grad_BKGSH: jax.Array
    log_sum_BKGS: jax.Array
    delta_BKGS: jax.Array


class _Gradients(NamedTuple):
    """Of queries, keys and values, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _gradients(queries: _Queries, k_BKTH: jax.Array, v_BKTH: jax.Array, *, causal: bool) -> _Gradients:
    q_BKGSH, grad_BKGSH, log_sum_BKGS, delta_BKGS = queries
    weights = jnp.exp(_scores(q_BKGSH, k_BKTH, causal) - log_sum_BKGS[..., None])
    grad_weights = _product("BKGSH,BKTH->BKGST", grad_BKGSH, v_BKTH)
    grad_scores = weights * (grad_weights - delta_BKGS[..., None]) * _scale(q_BKGSH)
    grad_scores = grad_scores.astype(q_BKGSH.dtype)
    return _Gradients(
        q=_product("BKGST,BKTH->BKGSH", grad_scores, k_BKTH),
        k=_product("BKGST,BKGSH->BKTH", grad_scores, q_BKGSH),
        v=_product("BKGST,BKGSH->BKTH", weights.astype(grad_BKGSH.dtype), grad_BKGSH),
    )


def _gradients_of_own(queries: _Queries, k_BKTH: jax.Array, v_BKTH: jax.Array) -> _Gradients:
    """The gradients of `_attend_to_own`."""
    (early_k, late_k), (early_v, late_v) = _halves(k_BKTH, 2), _halves(v_BKTH, 2)
    early, late = (_Queries(*half) for half in zip(*(_halves(x, 3) for x in queries), strict=True))
    first = _gradients(early, early_k, early_v, causal=True)
    across = _gradients(late, early_k, early_v, causal=False)
    second = _gradients(late, late_k, late_v, causal=True)
    return _Gradients(
        q=jnp.concatenate([first.q, across.q + second.q], axis=3),
        k=jnp.concatenate([first.k + across.k, second.k], axis=2),
        v=jnp.concatenate([first.v + across.v, second.v], axis=2),
    )


def _gradients_of_other(
    queries: _Queries, k_BKTH: jax.Array, v_BKTH: jax.Array, *, is_earlier: jax.Array
) -> _Gradients:
    """The gradients of `_attend_to_other`."""
    (early_k, late_k), (early_v, late_v) = _halves(k_BKTH, 2), _halves(v_BKTH, 2)
    early, late = (_Queries(*half) for half in zip(*(_halves(x, 3) for x in queries), strict=True))
    first = _gradients(late, early_k, early_v, causal=False)
    operands = jax.tree.map(
        lambda early, late: jnp.where(is_earlier, early, late), (early, early_k, early_v), (late, late_k, late_v)
    )
    second = _gradients(*operands, causal=False)
    if_early = jax.tree.map(lambda x: jnp.where(is_earlier, x, 0.0), second)
    if_late = jax.tree.map(lambda x: jnp.where(is_earlier, 0.0, x), second)
    return _Gradients(
        q=jnp.concatenate([if_early.q, first.q + if_late.q], axis=3),
        k=jnp.concatenate([first.k + if_early.k, if_late.k], axis=2),
        v=jnp.concatenate([first.v + if_early.v, if_late.v], axis=2),
    )


def _scores(q_BKGSH: jax.Array, k_BKTH: jax.Array, causal: bool) -> jax.Array:
    """[B, K, G, S, T] float32; where causal, minus infinity for later keys."""
    scores = _product("BKGSH,BKTH->BKGST", q_BKGSH, k_BKTH) * _scale(q_BKGSH)
    if not causal:
        return scores
    query, key = (lax.broadcasted_iota(jnp.int32, scores.shape[-2:], dim) for dim in (0, 1))
    return jnp.where(key <= query, scores, -jnp.inf)


def _scale(q_BKGSH: jax.Array) -> float:
    return float(q_BKGSH.shape[-1] ** -0.5)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def _halves(x: jax.Array, dim: int) -> list[jax.Array]:
    """The early and the late chunk."""
    return jnp.split(x, 2, axis=dim)
