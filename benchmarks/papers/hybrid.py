"""Sharding with the node in mind: ZeRO++ (arXiv 2306.10209), MiCS (arXiv 2205.00119) and hybrid FSDP of PyTorch.

M is what one copy of the model's 16-bit weights takes, in elements or in bytes: a volume has the unit of its argument.
Quantised gathers and reductions are the papers'; this engine sends the dtypes of its settings.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossNodeVolume:
    """What leaves the nodes in a step of one microbatch under ZeRO-3, in M's unit."""

    forward_gather: float
    backward_gather: float
    grad_reduce: float

    @property
    def total(self) -> float:
        """The three together."""
        return self.forward_gather + self.backward_gather + self.grad_reduce


def cross_node_volume(
    model_size: float,
    *,
    quantized_weights: bool = False,
    secondary_shard: bool = False,
    quantized_grads: bool = False,
) -> CrossNodeVolume:
    """ZeRO++: 3M without any of the three, 0.75M with all.

    Args:
      model_size: M, in 16-bit elements or in bytes.
      quantized_weights: qwZ, gathers in int8: half of M each.
      secondary_shard: hpZ, the backward pass gathers inside the node: 0.
      quantized_grads: qgZ, reduction in int4: a quarter of M.
    """
    gather = model_size / 2 if quantized_weights else model_size
    return CrossNodeVolume(
        forward_gather=gather,
        backward_gather=0.0 if secondary_shard else gather,
        grad_reduce=model_size / 4 if quantized_grads else model_size,
    )


def secondary_shard_bytes(num_params: float, group_size: int) -> float:
    """hpZ: memory of the second copy of the 16-bit parameters over `group_size` devices, 2 Psi / g, on each of them.

    In this engine that copy is P of a strategy such as `hpz(8)`, and there is no other 16-bit copy beside it.
    """
    return 2 * num_params / group_size


def cross_node_gather_volume(model_size: float, num_microbatches: int, *, secondary_shard: bool) -> float:
    """What gathers bring across nodes in a step of s microbatches, in M's unit, unquantised.

    ZeRO-3 gathers forward and backward in each microbatch, 2 s M. The secondary shard lives from its first use to the
    optimizer step, so the weights cross once, M.
    """
    return model_size if secondary_shard else 2 * num_microbatches * model_size


def inter_node_gather_volume(model_size: float, group_size: int, devices_per_node: int, *, hierarchical: bool) -> float:
    """MiCS: what all-gathers of M in a group of p devices move between nodes of k, in M's unit.

    A flat gather moves (p - 1) M / p. A hierarchical one gathers between nodes first, each device only among those of
    its place in the node, then inside: (p - k) M / p.
    """
    foreign = group_size - (devices_per_node if hierarchical else 1)
    return foreign * model_size / group_size


def hybrid_all_reduce_volume(model_size: float, group_size: int, num_ranks: int) -> float:
    """Hybrid FSDP: what a device sends to all-reduce its shard over the replicas, on a ring, in M's unit.

    Each of W/G replicas holds M/G on a device: 2 (M/G) (W/G - 1)/(W/G) = 2 M (W - G) / (G W), for groups of G among W
    ranks.
    """
    return 2 * model_size * (num_ranks - group_size) / (group_size * num_ranks)
