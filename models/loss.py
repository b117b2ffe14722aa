"""The loss of a microbatch, from all its logits or from those of a chunk of its tokens at a time.

Logits [T, V] of a vocabulary of 128k and their cotangents may outweigh all else in the memory of a step. Shape suffixes
as in `models.layers`; T tokens, of a microbatch or of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from amsp_jax.engine import tensor
from amsp_jax.errors import UserError


def cross_entropy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, vocab_size: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of the tokens' cross-entropies in nats, and the sum of the weights, float32.

    Targets of weight 0 may be any integer.

    Args:
      logits: [..., V], all logits, or this rank's columns.
      targets, weights: [...], of the same tokens.
      vocab_size: columns of the whole without padding, which does not count; those of `logits` if None.
    """
    logits = logits.astype(jnp.float32)
    columns = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    num_columns = logits.shape[-1]
    if tensor.size() > 1:
        columns = columns + (tensor.rank() * num_columns).astype(targets.dtype)
    # take_along_axis would make the backward a float32 scatter into [..., V]; a masked sum fuses with the softmax.
    is_target = columns == targets[..., None]
    if vocab_size is not None and vocab_size < num_columns * tensor.size():
        is_target &= columns < vocab_size
        logits = jnp.where(columns < vocab_size, logits, -jnp.inf)
    target = tensor.total(jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1))
    weights = weights.astype(jnp.float32)
    return jnp.sum((tensor.logsumexp(logits) - target) * weights), jnp.sum(weights)


@dataclasses.dataclass(frozen=True)
class ChunkedLoss:
    """`cross_entropy` of the products of hidden states and the head's matrix, with one chunk's logits alive at a time.

    Differentiated, the forward pass makes the gradients of both beside the loss, so that no product is computed twice.
    That of the matrix is summed over chunks in float32 and rounded once. Chunks are written out one after another: as a
    scan they took more memory (docs/design/step.md).

    Attributes:
      num_chunks: of a microbatch's tokens on a device, as equal as can be.
      vocab_dim: of the matrix: 1 of a kernel [D, V], 0 of a table [V, D].
      vocab_size: entries of the whole vocabulary, without padding.
    """

    num_chunks: int
    vocab_dim: int
    vocab_size: int

    def __call__(
        self, x_BSD: jax.Array, matrix: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As `cross_entropy` of all logits. Differentiable in `x_BSD` and `matrix` alone.

        Args:
          x_BSD: what the matrix multiplies.
          matrix: in the dtype of `x_BSD`; with tensor ranks this rank's part of the vocabulary.
          targets_BS, weights_BS: of the same tokens.

        Raises:
          UserError: there are fewer tokens than chunks.
        """
        num_tokens = targets_BS.size
        if self.num_chunks > num_tokens:
            raise UserError(
                f"loss_chunks={self.num_chunks} is more than the {num_tokens} tokens of a microbatch on one device "
                f"(rows x tokens of a row: {targets_BS.shape}); set the model's loss_chunks to {num_tokens} or less"
            )
        x_TD, targets_T, weights_T = x_BSD.reshape(-1, x_BSD.shape[2]), targets_BS.reshape(-1), weights_BS.reshape(-1)
        return _loss(self, x_TD, matrix, targets_T, weights_T), jnp.sum(weights_T.astype(jnp.float32))

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """The tokens of each."""
        edges = (num_tokens * i // self.num_chunks for i in range(self.num_chunks + 1))
        return (slice(start, stop) for start, stop in itertools.pairwise(edges))

    def logits(self, x_TD: jax.Array, matrix: jax.Array) -> jax.Array:
        """[T, V] in the compute dtype."""
        return _product(x_TD, matrix, 1, 1 - self.vocab_dim, x_TD.dtype)

    def loss(self, logits_TV: jax.Array, targets_T: jax.Array, weights_T: jax.Array) -> jax.Array:
        """The sum of losses."""
        return cross_entropy(logits_TV, targets_T, weights_T, self.vocab_size)[0]

    def gradients(self, dlogits_TV: jax.Array, x_TD: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the hidden states, in their dtype, and of the matrix, in float32."""
        dx_TD = _product(dlogits_TV, matrix, 1, self.vocab_dim, x_TD.dtype)
        pair = (x_TD, dlogits_TV) if self.vocab_dim == 1 else (dlogits_TV, x_TD)
        return dx_TD, _product(*pair, 0, 0, jnp.float32)


def _product(a: jax.Array, b: jax.Array, dim_a: int, dim_b: int, dtype: DTypeLike) -> jax.Array:
    """Summed over one dimension of each."""
    return lax.dot_general(a, b, (((dim_a,), (dim_b,)), ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(
    form: ChunkedLoss, x_TD: jax.Array, matrix: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> jax.Array:
    total = jnp.float32(0)
    for chunk in form.chunks(len(x_TD)):
        # Each chunk waits for the one before: or XLA would make all logits first.
        x, total = lax.optimization_barrier((x_TD[chunk], total))
        total = total + form.loss(form.logits(x, matrix), targets_T[chunk], weights_T[chunk])
    return total


Residuals = tuple[jax.Array, jax.Array]
"""The gradients of the hidden states and, in float32, of the matrix."""


def _loss_forward(
    form: ChunkedLoss, x_TD: jax.Array, matrix: jax.Array, targets_T: jax.Array, weights_T: jax.Array
) -> tuple[jax.Array, Residuals]:
    first, *others = form.chunks(len(x_TD))

    def one(x: jax.Array, chunk: slice) -> tuple[jax.Array, jax.Array, jax.Array]:
        loss = functools.partial(form.loss, targets_T=targets_T[chunk], weights_T=weights_T[chunk])
        value, vjp = jax.vjp(loss, form.logits(x, matrix))
        (dlogits,) = vjp(jnp.ones_like(value))
        return value, *form.gradients(dlogits, x, matrix)

    total, dx, dmatrix = one(x_TD[first], first)
    dxs = [dx]
    for chunk in others:
        # All that a chunk's logits and their cotangents are for comes before the next chunk, or XLA keeps them.
        x, dxs[-1], dmatrix = lax.optimization_barrier((x_TD[chunk], dxs[-1], dmatrix))
        value, dx, more = one(x, chunk)
        total, dmatrix = total + value, dmatrix + more
        dxs.append(dx)
    return total, (jnp.concatenate(dxs), dmatrix)


def _loss_backward(
    form: ChunkedLoss, residuals: Residuals, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
    del form
    dx_TD, dmatrix = residuals
    dx_TD = dx_TD * cotangent.astype(dx_TD.dtype)
    dmatrix = (dmatrix * cotangent).astype(dx_TD.dtype)
    # XLA would keep the float32 sum and the last chunk's cotangents until the matrix's gradient is reduced.
    dx_TD, dmatrix = lax.optimization_barrier((dx_TD, dmatrix))
    return dx_TD, dmatrix, None, None


_loss.defvjp(_loss_forward, _loss_backward)
