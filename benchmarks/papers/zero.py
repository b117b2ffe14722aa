"""ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (arXiv 1910.02054).

Psi is the number of parameters, Nd of data-parallel ranks, Nm of model-parallel ones. Parameters and gradients have 2
bytes each, optimizer states K = 12: an fp32 copy of the parameter, momentum and variance.

This engine keeps the same 12 bytes, but adds gradients up in float32, so they are 4 bytes a value while more than one
microbatch accumulates; with one there is no accumulator. Where P = OS is sharded (P_os+g+p) it keeps no 16-bit
copy: the fp32 shard is cast at each use. DeepSpeed's own estimator counts 18 Psi / Nd for the last two terms of ZeRO-2:
yet another convention, which these functions do not follow.
"""

from __future__ import annotations

from enum import IntEnum

OPT_STATE_BYTES = 12
"""K: bytes of optimizer states for each parameter under Adam in mixed precision."""


class Stage(IntEnum):
    """What is partitioned over the data-parallel ranks; each stage includes the one before."""

    DP = 0
    """Nothing."""
    OS = 1
    """Optimizer states: P_os, ZeRO-1."""
    OS_G = 2
    """And gradients: P_os+g, ZeRO-2."""
    OS_G_P = 3
    """And parameters: P_os+g+p, ZeRO-3."""


def bytes_per_param(stage: Stage, num_ranks: int, opt_state_bytes: float = OPT_STATE_BYTES) -> float:
    """Bytes of model states on one device, over the number of parameters (Section 5, Figure 1).

    DP 2 + 2 + K; P_os 2 + 2 + K/Nd; P_os+g 2 + (2 + K)/Nd; P_os+g+p (2 + 2 + K)/Nd.
    """
    params = 2 / num_ranks if stage >= Stage.OS_G_P else 2
    grads = 2 / num_ranks if stage >= Stage.OS_G else 2
    opt_state = opt_state_bytes / num_ranks if stage >= Stage.OS else opt_state_bytes
    return params + grads + opt_state


def state_bytes(num_params: float, stage: Stage, num_ranks: int, model_parallel: int = 1) -> float:
    """Bytes of model states on one device: `bytes_per_param` x Psi / Nm (Table 1 with Nm = 1)."""
    return bytes_per_param(stage, num_ranks) * num_params / model_parallel


def largest_model(memory_bytes: float, stage: Stage, num_ranks: int, model_parallel: int = 1) -> float:
    """Parameters whose model states alone fill a device's memory (Table 2): Nm x memory / bytes a parameter."""
    return model_parallel * memory_bytes / bytes_per_param(stage, num_ranks)


def volume(num_params: float, stage: Stage, num_ranks: int | None = None) -> float:
    """Elements that a device sends in a step of one microbatch (Section 7).

    Up to P_os+g a reduce-scatter and an all-gather, 2 Psi; with P_os+g+p one more all-gather, 3 Psi.

    This engine under ZeRO-1 and ZeRO-2 sends as many elements; those of gradients are float32 on the wire unless
    `reduce_dtype` says otherwise.

    Args:
      num_params: Psi.
      stage: what is partitioned.
      num_ranks: Nd for the exact count, which is (Nd - 1)/Nd of the paper's; None for the paper's, large Nd.
    """
    passes = 3 if stage >= Stage.OS_G_P else 2
    share = 1.0 if num_ranks is None else (num_ranks - 1) / num_ranks
    return passes * num_params * share


def activation_elements(hidden: int, microbatch: int, seq_len: int, num_layers: int) -> int:
    """Activations of a GPT-2-like model, without checkpointing: 12 x hidden x batch x seq x layers.

    A rule of thumb: `megatron.layer_activation_bytes` counts the same layer tensor by tensor.
    """
    return 12 * hidden * microbatch * seq_len * num_layers


def model_parallel_volume(hidden: int, microbatch: int, seq_len: int, partitioned_checkpoints: bool = False) -> int:
    """Elements that a device sends for one block over the model-parallel group, large Nm (Section 8).

    Two all-reduces forward, two for the recomputation, two backward, each 2 x batch x seq x hidden. Checkpoints
    partitioned over that group (P_a) cost one all-gather of batch x seq x hidden more: 1/12.
    """
    return (13 if partitioned_checkpoints else 12) * hidden * microbatch * seq_len
