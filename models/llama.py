"""LLaMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Touvron et al., arXiv 2302.13971 and 2307.09288. Shape suffixes as in `models.layers`.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.errors import UserError
from amsp_jax.model import Batch, Model, ModelNumbers
from models import layers
from models.config import TransformerConfig


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
        self.table = layers.normal_table(config.vocab_size, config.hidden, config.init_std, rngs)

    def __call__(self, batch: Batch, rng: jax.Array) -> jax.Array:
        """The tokens' rows, [B, S, D]."""
        del rng
        return layers.embed(self.table[...], batch["tokens"])


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        kv_width = config.num_kv_heads * config.head_dim
        self.config = config
        self.q = layers.linear(config.hidden, config.hidden, config.init_std, rngs)
        self.k = layers.linear(config.hidden, kv_width, config.init_std, rngs)
        self.v = layers.linear(config.hidden, kv_width, config.init_std, rngs)
        self.o = layers.linear(config.hidden, config.hidden, config.residual_init_std, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """[B, S, D] to [B, S, D]."""
        config = self.config
        q_BSNH = layers.split_heads(checkpoint_name(self.q(x_BSD), "qkv"), config.num_heads)
        k_BSKH = layers.split_heads(checkpoint_name(self.k(x_BSD), "qkv"), config.num_kv_heads)
        v_BSKH = layers.split_heads(checkpoint_name(self.v(x_BSD), "qkv"), config.num_kv_heads)
        q_BSNH, k_BSKH = layers.rotate(q_BSNH, config.rope_theta), layers.rotate(k_BSKH, config.rope_theta)
        heads_BSD = layers.causal_attention(q_BSNH, k_BSKH, v_BSKH, config.attention)
        return checkpoint_name(self.o(heads_BSD), "attention_out")


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        self.gate = layers.linear(config.hidden, config.ffn, config.init_std, rngs)
        self.up = layers.linear(config.hidden, config.ffn, config.init_std, rngs)
        self.down = layers.linear(config.ffn, config.hidden, config.residual_init_std, rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """[B, S, D] to [B, S, D]."""
        gate_BSF = checkpoint_name(self.gate(x_BSD), "mlp_gate")
        up_BSF = checkpoint_name(self.up(x_BSD), "mlp_up")
        return self.down(jax.nn.silu(gate_BSF) * up_BSF)


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
