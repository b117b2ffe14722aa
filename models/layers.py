"""Pieces that the models share, as single-device mathematics with the operators of `tensor` and `context` in it.

With tensor ranks each parameter with a `Split` is this rank's piece, so numbers of heads and columns come from shapes.

Parameters are created in float32 and arrive in the compute dtype, which is also the dtype of activations.
Statistics, softmax and loss are computed in float32. Every cast is written out.

Shape suffixes: B rows, S sequence, D hidden, N query heads, K key and value heads, H head dim, F ffn, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from amsp_jax.engine import context, tensor
from amsp_jax.model import Batch, LossOutput, Model, ModelNumbers, Part, Split
from amsp_jax.models.config import TransformerConfig
from amsp_jax.models.loss import ChunkedLoss, cross_entropy


class RMSNorm(nnx.Module):
    """x / rms(x) * scale (Zhang and Sennrich, arXiv 1910.07467); computed in float32, returned in x's dtype."""

    def __init__(self, hidden: int, eps: float):
        self.scale = nnx.Param(jnp.ones((hidden,), jnp.float32), split=None)
        self.eps = eps

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Normalises the last dimension."""
        x = x_BSD.astype(jnp.float32)
        normal = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return (normal * self.scale[...].astype(jnp.float32)).astype(x_BSD.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / std * scale + bias; computed in float32, returned in x's dtype."""

    def __init__(self, hidden: int, eps: float):
        self.scale = nnx.Param(jnp.ones((hidden,), jnp.float32), split=None)
        self.bias = nnx.Param(jnp.zeros((hidden,), jnp.float32), split=None)
        self.eps = eps

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Normalises the last dimension."""
        x = x_BSD.astype(jnp.float32)
        # The mean goes first: E[x^2] - E[x]^2 cancels where the mean is large.
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        normal = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        scaled = normal * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return scaled.astype(x_BSD.dtype)


def linear(num_in: int, num_out: int, std: float, rngs: nnx.Rngs, *, split: Split, bias: bool = False) -> nnx.Linear:
    """A projection with a [num_in, num_out] kernel drawn from a normal distribution, and a zero bias.

    Split along dimension 1 it is called as it is, and gives this rank's columns; along 0, by `sum_rows`.
    """
    bias_split = dataclasses.replace(split, dim=0) if split.dim == 1 else None
    return nnx.Linear(
        num_in,
        num_out,
        use_bias=bias,
        kernel_init=jax.nn.initializers.normal(std),
        kernel_metadata={"split": split},
        bias_metadata={"split": bias_split},
        rngs=rngs,
    )


def sum_rows(projection: nnx.Linear, x_BSF: jax.Array) -> jax.Array:
    """A projection of this rank's features, summed over the ranks, each of which gets its piece of the sequence."""
    x_BSD = tensor.leave(x_BSF @ projection.kernel[...])
    # The bias is whole on every rank, so it is added after the sum.
    return x_BSD if projection.bias is None else x_BSD + projection.bias[...]


def normal_table(num_rows: int, hidden: int, std: float, rngs: nnx.Rngs, split: Split | None) -> nnx.Param:
    """An embedding table [num_rows, hidden] drawn from a normal distribution."""
    return nnx.Param(jax.nn.initializers.normal(std)(rngs.params(), (num_rows, hidden), jnp.float32), split=split)


def vocabulary(config: TransformerConfig, dim: int) -> Split:
    """Between ranks, each of which has some of the rows of the table or of the columns of the head."""
    return Split(dim, (config.vocab_size,), name="vocabulary entries")


def embed(table_VD: jax.Array, tokens_BS: jax.Array, vocab_size: int | None = None) -> jax.Array:
    """Rows of the table in its dtype, [B, S, D]; the gradient is summed in float32 and rounded once.

    With t tensor ranks, [B, S / t, D]: this rank's piece of the sequence.

    A frequent token's gradient is a sum of thousands of small terms: added up in bfloat16 it was off by 2.5 to 5 %.
    Tokens outside the vocabulary, which have weight 0, take its first or last row: never a NaN.

    Args:
      table_VD: the table, or this rank's rows of it.
      tokens_BS: [B, S] integers.
      vocab_size: rows of the whole table without padding; those of `table_VD` if None.
    """
    num_rows = table_VD.shape[0]
    rows_BS = jnp.clip(tokens_BS, 0, (vocab_size or num_rows) - 1)
    if tensor.size() == 1:
        return _lookup(num_rows, table_VD.dtype, table_VD, rows_BS)
    rows_BS = rows_BS - tensor.rank() * num_rows
    is_here = (rows_BS >= 0) & (rows_BS < num_rows)
    x_BSD = _lookup(num_rows, table_VD.dtype, table_VD, jnp.clip(rows_BS, 0, num_rows - 1))
    return tensor.leave(jnp.where(is_here[..., None], x_BSD, 0))


# The table's shape and dtype are static arguments, because a residual would keep the whole table alive.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _lookup(num_rows: int, dtype: DTypeLike, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
    del num_rows, dtype
    return table_VD.at[tokens_BS].get(mode="promise_in_bounds")


def _lookup_forward(
    num_rows: int, dtype: DTypeLike, table_VD: jax.Array, tokens_BS: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _lookup(num_rows, dtype, table_VD, tokens_BS), tokens_BS


def _lookup_backward(
    num_rows: int, dtype: DTypeLike, tokens_BS: jax.Array, grad_BSD: jax.Array
) -> tuple[jax.Array, None]:
    # Zeros that wait for what is added to them: or XLA makes them long before.
    zero, grad_BSD = lax.optimization_barrier((jnp.float32(0), grad_BSD))
    zeros_VD = jnp.broadcast_to(zero, (num_rows, grad_BSD.shape[-1]))
    grad_VD = zeros_VD.at[tokens_BS].add(grad_BSD.astype(jnp.float32), mode="promise_in_bounds")
    return grad_VD.astype(dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def rotate(x_BSNH: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of the two halves of a head, in x's dtype."""
    seq_len, head_dim = x_BSNH.shape[1], x_BSNH.shape[3]
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = context.positions(seq_len).astype(jnp.float32)[:, None] * frequency
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x_BSNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSNH.dtype)


def split_heads(x_BSD: jax.Array, head_dim: int) -> jax.Array:
    """[B, S, heads x head dim] to [B, S, heads, head dim]."""
    return x_BSD.reshape(*x_BSD.shape[:2], -1, head_dim)


class Head(nnx.Module):
    """Final norm, logits and loss; its own matrix [D, V] unless tied to the embedding's `table` [V, D]."""

    def __init__(self, norm: nnx.Module, config: TransformerConfig, rngs: nnx.Rngs):
        self.norm = norm
        if not config.tied:
            self.output = linear(
                config.hidden, config.vocab_size, config.init_std, rngs, split=vocabulary(config, dim=1)
            )
        self.tied = config.tied
        self.vocab_size = config.vocab_size
        self.chunked_loss = ChunkedLoss(config.loss_chunks, 0 if config.tied else 1, config.vocab_size)

    def logits(self, embed_params: Any, x_BSD: jax.Array) -> jax.Array:
        """[B, S, V] in the compute dtype, whole on every rank."""
        return tensor.gather(self._own_logits(embed_params, x_BSD), dim=2)[..., : self.vocab_size]

    def __call__(self, embed_params: Any, x_BSD: jax.Array, batch: Batch, rng: jax.Array) -> LossOutput:
        """((sum of losses, sum of weights), no aux), equal on all tensor ranks."""
        del rng
        targets_BS, weights_BS = batch["targets"], batch["weights"]
        if self.chunked_loss.num_chunks > 1:
            x_BSD = tensor.enter(self.norm(x_BSD))
            matrix = embed_params["table"] if self.tied else self.output.kernel[...]
            return self.chunked_loss(x_BSD, matrix, targets_BS, weights_BS), {}
        return cross_entropy(self._own_logits(embed_params, x_BSD), targets_BS, weights_BS, self.vocab_size), {}

    def _own_logits(self, embed_params: Any, x_BSD: jax.Array) -> jax.Array:
        x_BSD = tensor.enter(self.norm(x_BSD))
        return x_BSD @ embed_params["table"].T if self.tied else self.output(x_BSD)


class Block(nnx.Module):
    """Attention and MLP, each normalised first and added to the residual stream, where `sum_rows` leaves it."""

    def __init__(self, attention_norm: nnx.Module, attention: nnx.Module, mlp_norm: nnx.Module, mlp: nnx.Module):
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x_BSD: jax.Array, batch: Batch, rng: jax.Array) -> jax.Array:
        """[B, S, D] to [B, S, D], the residual stream: with t tensor ranks, [B, S / t, D]."""
        del batch, rng
        x_BSD = checkpoint_name(x_BSD + self.attention(tensor.enter(self.attention_norm(x_BSD))), "attention_residual")
        return x_BSD + self.mlp(tensor.enter(self.mlp_norm(x_BSD)))


def transformer(
    name: str,
    config: TransformerConfig,
    *,
    embedding: Callable[[nnx.Rngs], nnx.Module],
    block: Callable[[nnx.Rngs], nnx.Module],
    head: Callable[[nnx.Rngs], Head],
    numbers: ModelNumbers,
) -> Model:
    """A decoder of equal blocks, which share one compilation of their initial values."""
    part = Part.from_nnx(block)
    return Model(
        name=name,
        embed=Part.from_nnx(embedding),
        blocks=(part,) * config.num_layers,
        head=Part.from_nnx(head),
        tied=config.tied,
        logits=Part.from_nnx(head, Head.logits).apply,
        numbers=numbers,
        vocab_size=config.vocab_size,
    )
