"""GPT: LayerNorm, learned positions, GELU, biases, embeddings tied to the head.

Radford et al. (GPT-2) and Brown et al., arXiv 2005.14165. Shape suffixes as in `models.layers`.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.engine import context, tensor
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, Model, ModelNumbers, Split
from amsp_jax.models import layers
from amsp_jax.models.attention import causal_attention
from amsp_jax.models.config import TransformerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """A GPT's sizes.

    Attributes:
      max_seq_len: rows of the table of positions; no longer sequence can be trained or generated.
    """

    max_seq_len: int
    tied: bool = True

    def numbers(self) -> ModelNumbers:
        """Parameters and FLOPs by arithmetic."""
        matrices = 4 * self.hidden**2 + 2 * self.hidden * self.ffn
        biases_and_norms = 4 * self.hidden + self.ffn + self.hidden + 4 * self.hidden
        table = self.vocab_size * self.hidden
        outside = table * (1 if self.tied else 2) + self.max_seq_len * self.hidden + 2 * self.hidden
        return ModelNumbers(
            num_params=self.num_layers * (matrices + biases_and_norms) + outside,
            num_matmul_params=self.num_layers * matrices + table,
            num_layers=self.num_layers,
            attention_width=self.hidden,
        )


class Embedding(nnx.Module):
    """Token embedding plus learned position."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        hidden, std = config.hidden, config.init_std
        self.table = layers.normal_table(config.vocab_size, hidden, std, rngs, layers.vocabulary(config, dim=0))
        self.positions = layers.normal_table(config.max_seq_len, hidden, std, rngs, split=None)
        self.vocab_size = config.vocab_size

    def __call__(self, batch: Batch, rng: jax.Array) -> jax.Array:
        """The tokens' rows and those of their positions, added up: [B, S, D], with t tensor ranks [B, S / t, D].

        Raises:
          UserError: the sequence is longer than the table of positions.
        """
        del rng
        positions, seq_len = self.positions[...], batch["tokens"].shape[1] * context.size()
        if seq_len > positions.shape[0]:
            raise UserError(
                f"a sequence of {seq_len} tokens is longer than the model's max_seq_len {positions.shape[0]}; "
                f"set seq_len={positions.shape[0]} or less, or raise max_seq_len in model_overrides."
            )
        own_SD = tensor.local_sequence(context.local_sequence(positions[:seq_len], dim=0), dim=0)
        return layers.embed(self.table[...], batch["tokens"], self.vocab_size) + own_SD


class Attention(nnx.Module):
    """Causal multi-head attention."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        width, std, residual_std = config.hidden, config.init_std, config.residual_init_std
        by_columns, by_rows = (Split(dim, (config.num_heads,), name="heads") for dim in (1, 0))
        self.q = layers.linear(width, width, std, rngs, split=by_columns, bias=True)
        self.k = layers.linear(width, width, std, rngs, split=by_columns, bias=True)
        self.v = layers.linear(width, width, std, rngs, split=by_columns, bias=True)
        self.o = layers.linear(width, width, residual_std, rngs, split=by_rows, bias=True)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The whole sequence in, this rank's piece of it out."""
        q_BSNH, k_BSNH, v_BSNH = (
            layers.split_heads(checkpoint_name(project(x_BSD), "qkv"), self.config.head_dim)
            for project in (self.q, self.k, self.v)
        )
        heads_BSD = causal_attention(q_BSNH, k_BSNH, v_BSNH, self.config.attention)
        return layers.sum_rows(self.o, heads_BSD)


class MLP(nnx.Module):
    """down(gelu(up(x))), with the tanh form of GELU as in GPT-2."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        by_columns, by_rows = (Split(dim, (config.ffn,), name="MLP columns") for dim in (1, 0))
        self.up = layers.linear(config.hidden, config.ffn, config.init_std, rngs, split=by_columns, bias=True)
        self.down = layers.linear(config.ffn, config.hidden, config.residual_init_std, rngs, split=by_rows, bias=True)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The whole sequence in, this rank's piece of it out."""
        up_BSF = checkpoint_name(self.up(x_BSD), "mlp_up")
        return layers.sum_rows(self.down, jax.nn.gelu(up_BSF, approximate=True))


def gpt(config: GPTConfig, name: str = "gpt") -> Model:
    """The model of `config`; the numbers of a batch are those of one device."""

    def norm() -> layers.LayerNorm:
        return layers.LayerNorm(config.hidden, config.norm_eps)

    def block(rngs: nnx.Rngs) -> layers.Block:
        return layers.Block(norm(), Attention(config, rngs), norm(), MLP(config, rngs))

    return layers.transformer(
        name,
        config,
        embedding=lambda rngs: Embedding(config, rngs),
        block=block,
        head=lambda rngs: layers.Head(norm(), config, rngs),
        numbers=config.numbers(),
    )
