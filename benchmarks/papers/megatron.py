"""Megatron-LM: activations, parameters, FLOPs and pipeline bubbles of a GPT (arXiv 2205.05198 and 2104.04473).

a heads, b sequences a microbatch, h hidden, L layers, s tokens, t tensor-parallel ranks, p stages, v vocabulary, B
sequences a step. Values have 2 bytes, dropout masks 1. The layer is GPT's: a feed-forward of 4 h with GELU, biases,
two layer norms. This engine reads the same off whatever model it is given and off its rematerialisation policies
(`cost.trace`), whose names mean other sets of tensors than the recomputation here.
"""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum

from amsp_jax.errors import UserError


class Recompute(StrEnum):
    """What a layer computes again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    """Scores, softmax, its dropout and the product with the values."""
    FULL = "full"
    """Everything from the layer's input."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpt:
    """Sizes of a model: L, h, a, v and s."""

    num_layers: int
    hidden: int
    num_heads: int
    vocab_size: int
    seq_len: int


def layer_activation_bytes(
    gpt: Gpt,
    microbatch: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = Recompute.NONE,
    flash_attention: bool = False,
    dropout: bool = True,
) -> float:
    """Bytes that a layer keeps for its backward pass on one device (2205.05198, Table 2).

        none             sbh (34 + 5as/h)                   full          2 sbh
        t                sbh (10 + 24/t + 5as/(ht))         t, selective  sbh (10 + 24/t)
        t and sequence   sbh (34/t + 5as/(ht))              both          sbh 34/t

    The paper splits the 2 sbh of full recomputation over t in neither case.

    Args:
      gpt: sizes.
      microbatch: b.
      tensor: t.
      sequence_parallel: norms and dropouts are split over t along the sequence, too.
      recompute: selective drops the term with a, which does not depend on h.
      flash_attention: never stores that term; its row statistics (4 abs bytes) are not counted.
      dropout: without it 34 becomes 32 and 10 becomes 8 (two masks), 5 becomes 2 (a mask, and the softmax's output is
        no longer kept twice).
    """
    tokens_hidden = gpt.seq_len * microbatch * gpt.hidden
    if recompute is Recompute.FULL:
        return 2 * tokens_hidden
    replicated = (10 if dropout else 8) * tokens_hidden
    kept = 24 * tokens_hidden / tensor + (replicated / tensor if sequence_parallel else replicated)
    if recompute is Recompute.SELECTIVE or flash_attention:
        return kept
    scores = gpt.num_heads * gpt.seq_len**2 * microbatch
    return kept + (5 if dropout else 2) * scores / tensor


def first_stage_activation_bytes(
    layer_bytes: float, num_layers: int, num_stages: int = 1, num_chunks: int = 1
) -> float:
    """Activations of the first stage, which holds most (2205.05198).

    1F1B with p microbatches or more: p microbatches of L/p layers, L layers' worth whatever p. Interleaved with v > 1
    chunks of layers a stage: L (1 + (p - 1)/(p v)).
    """
    factor = 1 + (num_stages - 1) / (num_stages * num_chunks) if num_chunks > 1 else 1
    return num_layers * layer_bytes * factor


def padded_vocab_size(vocab_size: int, tensor: int = 1) -> int:
    """v as Megatron stores it: the next multiple of 128 t, so that each rank's part of the logits is of a good width.

    >>> padded_vocab_size(50257, tensor=4)
    50688
    """
    return math.ceil(vocab_size / (128 * tensor)) * 128 * tensor


def num_params(gpt: Gpt) -> int:
    """12 L h^2 + 13 L h + v h + s h + 2 h: head tied to the table, learned positions."""
    return gpt.num_layers * (12 * gpt.hidden**2 + 13 * gpt.hidden) + (gpt.vocab_size + gpt.seq_len + 2) * gpt.hidden


def rank_params(gpt: Gpt, *, tensor: int, num_stages: int, stage: int) -> int:
    """Parameters on one (tensor, stage) rank.

    A layer has 12 h^2/t + 7 h/t + 6 h: matrices and their split biases, norms and biases that every rank holds. The
    first and the last stage have v h/t + s h more (the last a copy of the tied table), the last 2 h of the final norm.

    Raises:
      UserError: layers do not divide by stages, sizes not by t, or there is no such stage.
    """
    _check_split(gpt, tensor, num_stages, stage)
    layer = (12 * gpt.hidden**2 + 7 * gpt.hidden) // tensor + 6 * gpt.hidden
    params = gpt.num_layers // num_stages * layer
    if stage in (0, num_stages - 1):
        params += gpt.vocab_size * gpt.hidden // tensor + gpt.seq_len * gpt.hidden
    if stage == num_stages - 1:
        params += 2 * gpt.hidden
    return params


def _check_split(gpt: Gpt, tensor: int, num_stages: int, stage: int) -> None:
    for what, size, parts in (
        ("num_layers", gpt.num_layers, num_stages),
        ("hidden", gpt.hidden, tensor),
        ("vocab_size", gpt.vocab_size, tensor),
    ):
        if size % parts:
            raise UserError(f"{what}={size} does not divide by {parts}; take another degree, or pad {what}")
    if not 0 <= stage < num_stages:
        raise UserError(f"stage={stage}, but {num_stages} stages are numbered from 0 to {num_stages - 1}")


def model_flops(gpt: Gpt, global_batch: int) -> int:
    """FLOPs of a step without recomputation (2205.05198, Appendix A): 72 B L s h^2 (1 + s/6h + v/12hL).

    A layer's forward pass has 24 B s h^2 + 4 B s^2 h, the logits 2 B s h v; the backward pass twice that. The whole
    attention matrix counts; the engine's own count takes the half that a causal mask leaves.
    """
    return 3 * (gpt.num_layers * _layer_forward_flops(gpt, global_batch) + _logits_flops(gpt, global_batch))


def hardware_flops(gpt: Gpt, global_batch: int) -> int:
    """The same with full recomputation of the layers (2104.04473): 24 c B s L h^2 (1 + s/6h + v/16Lh), c = 4."""
    return 4 * gpt.num_layers * _layer_forward_flops(gpt, global_batch) + 3 * _logits_flops(gpt, global_batch)


def _layer_forward_flops(gpt: Gpt, global_batch: int) -> int:
    return global_batch * (24 * gpt.seq_len * gpt.hidden**2 + 4 * gpt.seq_len**2 * gpt.hidden)


def _logits_flops(gpt: Gpt, global_batch: int) -> int:
    return 2 * global_batch * gpt.seq_len * gpt.hidden * gpt.vocab_size


def utilization(flops: float, step_s: float, num_devices: int, peak_flops: float) -> float:
    """Share of the peak, 0 to 1: MFU of `model_flops`, HFU of `hardware_flops`."""
    return flops / (step_s * num_devices * peak_flops)


def bubble_of_ideal(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> float:
    """Idle time over that without a bubble (2104.04473): (p - 1)/m for GPipe and 1F1B, (p - 1)/(v m) interleaved."""
    return (num_stages - 1) / (num_chunks * num_microbatches)


def bubble_of_total(num_stages: int, num_microbatches: int) -> float:
    """Idle time over the whole time, GPipe and 1F1B: (p - 1)/(m + p - 1)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def tensor_layer_elements(gpt: Gpt, microbatch: int, tensor: int) -> float:
    """Elements that a device sends for one layer and microbatch over t, forward and backward, no recomputation.

    With sequence parallelism 4 all-gathers and 4 reduce-scatters of sbh, without it 4 all-reduces, which send as much:
    8 sbh (t - 1)/t.
    """
    return 8 * gpt.seq_len * microbatch * gpt.hidden * (tensor - 1) / tensor
