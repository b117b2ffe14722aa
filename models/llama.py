"""LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Touvron et al., arXiv 2302.13971 and 2307.09288. Shape suffixes as in `models.layers`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.engine import tensor
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, Model, ModelNumbers, Split
from amsp_jax.models import layers
from amsp_jax.models.attention import causal_attention
from amsp_jax.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(TransformerConfig):
    """A LLaMA's sizes.

    Attributes:
      num_kv_heads: key and value heads, each shared by num_heads / num_kv_heads query heads.
      rope_theta: base of the rotary frequencies.
    """

    num_kv_heads: int
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_divides("num_kv_heads", "num_heads")
        if self.head_dim % 2:
            raise UserError(
                f"LlamaConfig: hidden {self.hidden} / num_heads {self.num_heads} = head dim {self.head_dim} is odd; "
                "rotary positions turn pairs of features. Choose num_heads so that the head dim is even."
            )

    def numbers(self) -> ModelNumbers:
        """Parameters and FLOPs by arithmetic."""
        kv_width = self.num_kv_heads * self.head_dim
        matrices = 2 * self.hidden**2 + 2 * self.hidden * kv_width + 3 * self.hidden * self.ffn
        table = self.vocab_size * self.hidden
        return ModelNumbers(
            num_params=self.num_layers * (matrices + 2 * self.hidden) + self.hidden + table * (1 if self.tied else 2),
            num_matmul_params=self.num_layers * matrices + table,
            num_layers=self.num_layers,
            attention_width=self.hidden,
        )


class Embedding(nnx.Module):
    """Token embedding."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        split = layers.vocabulary(config, dim=0)
        self.table = layers.normal_table(config.vocab_size, config.hidden, config.init_std, rngs, split)
        self.vocab_size = config.vocab_size

    def __call__(self, batch: Batch, rng: jax.Array) -> jax.Array:
        """The tokens' rows, [B, S, D], with t tensor ranks [B, S / t, D]."""
        del rng
        return layers.embed(self.table[...], batch["tokens"], self.vocab_size)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.config = config
        hidden, kv_width, std = config.hidden, config.num_kv_heads * config.head_dim, config.init_std
        # Whole groups of query heads go with their key and value head, while there are enough of those.
        queries, keys = (config.num_kv_heads, config.num_heads), (config.num_kv_heads,)
        by_queries, by_keys = Split(1, queries, name="heads"), Split(1, keys, replicate=True, name="heads")
        self.q = layers.linear(hidden, hidden, std, rngs, split=by_queries)
        self.k = layers.linear(hidden, kv_width, std, rngs, split=by_keys)
        self.v = layers.linear(hidden, kv_width, std, rngs, split=by_keys)
        self.o = layers.linear(hidden, hidden, config.residual_init_std, rngs, split=Split(0, queries, name="heads"))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The whole sequence in, this rank's piece of it out."""
        theta, head_dim = self.config.rope_theta, self.config.head_dim
        q_BSNH = layers.split_heads(self.q(x_BSD), head_dim)
        heads = self._kv_heads(q_BSNH.shape[2])
        k_BSKH = layers.split_heads(_project(self.k, x_BSD, heads, head_dim), head_dim)
        v_BSKH = layers.split_heads(_project(self.v, x_BSD, heads, head_dim), head_dim)
        q_BSNH, k_BSKH = layers.rotate(q_BSNH, theta), layers.rotate(k_BSKH, theta)
        q_BSNH, k_BSKH, v_BSKH = (checkpoint_name(each, "qkv") for each in (q_BSNH, k_BSKH, v_BSKH))
        heads_BSD = causal_attention(q_BSNH, k_BSKH, v_BSKH, self.config.attention)
        return layers.sum_rows(self.o, heads_BSD)

    def _kv_heads(self, num_local: int) -> jax.Array | None:
        """The key and value heads of this rank's queries, where every rank has all heads; None where it has its own.

        One head if its queries are of one group, else one for each of them.
        """
        config = self.config
        if tensor.size() <= config.num_kv_heads:
            return None
        group = config.num_heads // config.num_kv_heads
        queries = jnp.arange(1 if group % num_local == 0 else num_local)
        return (tensor.rank() * num_local + queries) // group


def _project(projection: nnx.Linear, x_BSD: jax.Array, heads: jax.Array | None, head_dim: int) -> jax.Array:
    """[B, S, D] to [B, S, K x H]: all heads of the kernel, or those given."""
    if heads is None:
        return projection(x_BSD)
    kernel_DKH = projection.kernel[...].reshape(x_BSD.shape[-1], -1, head_dim)
    # Padded query heads would have heads beyond the last; their output meets zero rows, so any will do.
    own_DKH = jnp.take(kernel_DKH, heads, axis=1, mode="clip")
    return x_BSD @ own_DKH.reshape(x_BSD.shape[-1], -1)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        by_columns, by_rows = (Split(dim, (config.ffn,), name="MLP columns") for dim in (1, 0))
        self.gate = layers.linear(config.hidden, config.ffn, config.init_std, rngs, split=by_columns)
        self.up = layers.linear(config.hidden, config.ffn, config.init_std, rngs, split=by_columns)
        self.down = layers.linear(config.ffn, config.hidden, config.residual_init_std, rngs, split=by_rows)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The whole sequence in, this rank's piece of it out."""
        gate_BSF = checkpoint_name(self.gate(x_BSD), "mlp_gate")
        up_BSF = checkpoint_name(self.up(x_BSD), "mlp_up")
        return layers.sum_rows(self.down, jax.nn.silu(gate_BSF) * up_BSF)


def llama(config: LlamaConfig, name: str = "llama") -> Model:
    """The model of `config`; the numbers of a batch are those of one device."""

    def norm() -> layers.RMSNorm:
        return layers.RMSNorm(config.hidden, config.norm_eps)

    def block(rngs: nnx.Rngs) -> layers.Block:
        return layers.Block(norm(), Attention(config, rngs), norm(), SwiGLU(config, rngs))

    return layers.transformer(
        name,
        config,
        embedding=lambda rngs: Embedding(config, rngs),
        block=block,
        head=lambda rngs: layers.Head(norm(), config, rngs),
        numbers=config.numbers(),
    )
