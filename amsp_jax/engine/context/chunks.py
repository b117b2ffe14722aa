"""Attention of one rank's two chunks to those of another, and its gradients.

A rank r meets chunks s and 2c-1-s of rank s. Its late chunk 2c-1-r sees all of chunk s; besides, either its early
chunk r sees all of chunk s (s < r), or the late one sees all of chunk 2c-1-s (s > r). So there are two unmasked
products of one chunk with one chunk, half of what they are without causality; only a chunk with itself wants a mask,
the usual one.

Shape suffixes: B rows, S queries and T keys of a rank or chunk, K key and value heads, G query heads of each, H head
dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Partial(NamedTuple):
    """Attention to some of the keys, and the log of the sum of its exponentials, float32."""

    out_BKGSH: jax.Array
    log_sum_BKGS: jax.Array

    def merge(self, other: Partial) -> Partial:
        """Attention to the keys of both. Rows of `other` may have seen none: a log-sum of minus infinity."""
        log_sum = jnp.logaddexp(self.log_sum_BKGS, other.log_sum_BKGS)
        mine, theirs = (jnp.exp(part.log_sum_BKGS - log_sum)[..., None] for part in (self, other))
        return Partial(self.out_BKGSH * mine + other.out_BKGSH * theirs, log_sum)


def _attend(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, *, causal: bool) -> Partial:
    scores = _scores(q_BKGSH, k_BKTH, causal)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum[..., None]).astype(v_BKTH.dtype)
    return Partial(_product("BKGST,BKTH->BKGSH", weights, v_BKTH), log_sum)


def attend_to_own(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array) -> Partial:
    """Each chunk to itself, and the late one to the early one."""
    (early_q, late_q), (early_k, late_k), (early_v, late_v) = (
        _halves(q_BKGSH, 3),
        _halves(k_BKTH, 2),
        _halves(v_BKTH, 2),
    )
    early = _attend(early_q, early_k, early_v, causal=True)
    late = _attend(late_q, early_k, early_v, causal=False).merge(_attend(late_q, late_k, late_v, causal=True))
    return _joined(early, late)


def attend_to_other(q_BKGSH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, *, is_earlier: jax.Array) -> Partial:
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


def _joined(early: Partial, late: Partial) -> Partial:
    return Partial(*(jnp.concatenate(pair, axis=3) for pair in zip(early, late, strict=True)))


class Queries(NamedTuple):
    """What the backward pass knows of queries; delta is the sum of out x grad over a head (Dao et al., 2205.14135)."""

    q_BKGSH: jax.Array
    grad_BKGSH: jax.Array
    log_sum_BKGS: jax.Array
    delta_BKGS: jax.Array


class Gradients(NamedTuple):
    """Of queries, keys and values, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _gradients(queries: Queries, k_BKTH: jax.Array, v_BKTH: jax.Array, *, causal: bool) -> Gradients:
    q_BKGSH, grad_BKGSH, log_sum_BKGS, delta_BKGS = queries
    weights = jnp.exp(_scores(q_BKGSH, k_BKTH, causal) - log_sum_BKGS[..., None])
    grad_weights = _product("BKGSH,BKTH->BKGST", grad_BKGSH, v_BKTH)
    grad_scores = weights * (grad_weights - delta_BKGS[..., None]) * _scale(q_BKGSH)
    grad_scores = grad_scores.astype(q_BKGSH.dtype)
    return Gradients(
        q=_product("BKGST,BKTH->BKGSH", grad_scores, k_BKTH),
        k=_product("BKGST,BKGSH->BKTH", grad_scores, q_BKGSH),
        v=_product("BKGST,BKGSH->BKTH", weights.astype(grad_BKGSH.dtype), grad_BKGSH),
    )


def gradients_of_own(queries: Queries, k_BKTH: jax.Array, v_BKTH: jax.Array) -> Gradients:
    """The gradients of `attend_to_own`."""
    (early_k, late_k), (early_v, late_v) = _halves(k_BKTH, 2), _halves(v_BKTH, 2)
    early, late = (Queries(*half) for half in zip(*(_halves(x, 3) for x in queries), strict=True))
    first = _gradients(early, early_k, early_v, causal=True)
    across = _gradients(late, early_k, early_v, causal=False)
    second = _gradients(late, late_k, late_v, causal=True)
    return Gradients(
        q=jnp.concatenate([first.q, across.q + second.q], axis=3),
        k=jnp.concatenate([first.k + across.k, second.k], axis=2),
        v=jnp.concatenate([first.v + across.v, second.v], axis=2),
    )


def gradients_of_other(queries: Queries, k_BKTH: jax.Array, v_BKTH: jax.Array, *, is_earlier: jax.Array) -> Gradients:
    """The gradients of `attend_to_other`."""
    (early_k, late_k), (early_v, late_v) = _halves(k_BKTH, 2), _halves(v_BKTH, 2)
    early, late = (Queries(*half) for half in zip(*(_halves(x, 3) for x in queries), strict=True))
    first = _gradients(late, early_k, early_v, causal=False)
    operands = jax.tree.map(
        lambda early, late: jnp.where(is_earlier, early, late), (early, early_k, early_v), (late, late_k, late_v)
    )
    second = _gradients(*operands, causal=False)
    if_early = jax.tree.map(lambda x: jnp.where(is_earlier, x, 0.0), second)
    if_late = jax.tree.map(lambda x: jnp.where(is_earlier, 0.0, x), second)
    return Gradients(
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
