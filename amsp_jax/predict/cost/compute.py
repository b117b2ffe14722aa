"""Seconds of computation, from what a trace counts and what a device was measured to reach; exact FLOPs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import optax

from amsp_jax.engine.leaves import MASTER_BYTES, LeafPlan
from amsp_jax.engine.plan import Plan
from amsp_jax.predict.cluster import Rates
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks, trained
from amsp_jax.predict.cost.memory import GRAD_BYTES, num_values
from amsp_jax.predict.cost.ranks import WHOLE, Share
from amsp_jax.predict.cost.storage import leaf_counts, stored_opt_state
from amsp_jax.predict.cost.trace import Matmul, ModelTrace, PartTrace, Work

# What a loop over a group moves, as seen in LLaMA compiled for H100, and traced on one H200 (jax 0.11.2).
_STACKED = 2 + 1.5
"""Bytes for each that is kept: read and written into a stack, which is zeroed before; half of the stacks by a copy."""
_TAKEN = 1
"""Likewise where it is read back: half of it, what kernels and products take, is copied out, all else read in place."""
_ZEROED = 1.5
"""Bytes for each of a sum's zeros."""


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of one microbatch on one device: `model` without recomputation (MFU), `hardware` with it (HFU)."""

    model: int
    hardware: int


def flops(distinct: DistinctBlocks, trace: ModelTrace) -> Flops:
    """Of the whole model.

    Every product costs twice its forward FLOPs in the backward pass, once for each operand.
    """
    parts = _all_parts(distinct, trace)
    forward = sum(part.forward.flops for part in parts)
    return Flops(3 * forward, forward + sum(part.backward.flops for part in parts))


def _all_parts(distinct: DistinctBlocks, trace: ModelTrace) -> list[PartTrace]:
    return [trace.embed, *(trace.blocks[kind] for kind in distinct.order), trace.head]


def seconds(work: Work, rates: Rates, dtype: str, share: Share = WHOLE) -> float:
    """Of a part's kernels one after another, with nothing beside them.

    Args:
      work: of its forward or backward pass.
      rates: of the device.
      dtype: name of the compute dtype, as in `Rates.matmul`.
      share: what of the work a rank has; its products are smaller, and as slow as the rates say of their sizes.
    """
    matmuls = sum(_product_seconds(matmul, rates, dtype, share) for matmul in work.matmuls)
    others = share.others * work.memory_bytes / rates.memory_bytes_per_s
    return matmuls + _kernel_seconds(work, rates, share) + others


def attention_seconds(work: Work, rates: Rates, dtype: str, share: Share = WHOLE) -> float:
    """Of attention alone, fused or as products; arguments as of `seconds`."""
    scores = sum(_product_seconds(matmul, rates, dtype, share) for matmul in work.matmuls if matmul.batch > 1)
    return _kernel_seconds(work, rates, share) + scores


def _kernel_seconds(work: Work, rates: Rates, share: Share) -> float:
    pairs = zip(work.attention_flops, rates.attention_flops_per_s, strict=True)
    return sum(share.attention * count / rate for count, rate in pairs)


def _product_seconds(matmul: Matmul, rates: Rates, dtype: str, share: Share) -> float:
    """Products with weights have no batch; those of scores do, and a rank has fewer of them as well as smaller ones."""
    flops, size = (share.scores, share.scores_size) if matmul.batch > 1 else (share.products, share.products)
    # A rate depends on no more of a product than its size.
    rate = rates.matmul_flops_per_s(dtype, matmul.m, matmul.k, max(1, round(matmul.n * size)))
    return flops * matmul.flops / rate


def optimizer_seconds(
    distinct: DistinctBlocks, plan: Plan, optimizer: optax.GradientTransformation, rates: Rates
) -> float:
    """Of the update: memory passes alone, over the norm's gradient and everything the update reads and writes."""
    return update_bytes(distinct, plan, optimizer) / rates.memory_bytes_per_s


def update_bytes(distinct: DistinctBlocks, plan: Plan, optimizer: optax.GradientTransformation) -> int:
    """Bytes one device reads and writes to update its OS shard and to make its P shard of it.

    The float32 gradient is read for the norm and for the update; master and state are read and written; where P is
    kept as a copy, the master is read once more and its shard written, before the gather.
    """
    total = sum(2 * leaf.num_bytes * leaf.count for leaf in stored_opt_state(distinct, plan, optimizer))
    for leaf, count in leaf_counts(distinct, plan):
        if not leaf.frozen:
            total += (2 * GRAD_BYTES + 2 * MASTER_BYTES) * leaf.num_opt_shard * count
        if leaf.has_copy(plan.compute_dtype):
            total += (MASTER_BYTES + plan.compute_dtype.itemsize) * leaf.num_opt_shard * count
    return total


def accumulation_seconds(leaves: Sequence[LeafPlan], rates: Rates) -> float:
    """Of adding one microbatch's gradients of these leaves to the float32 accumulators: two reads and a write of G."""
    return 3 * 4 * sum(leaf.num_grads_shard for leaf in trained(leaves)) / rates.memory_bytes_per_s


def loop_bytes(kept_bytes: int, input_bytes: int, leaves: Sequence[LeafPlan], group: int) -> tuple[float, float]:
    """Bytes that a part's loops over a group, forward and backward, move beside their kernels.

    Args:
      kept_bytes: of one microbatch, what is written into stacks.
      input_bytes: likewise, what is read out of those of the part before.
      leaves: of the part.
      group: microbatches.
    """
    values = sum(map(num_values, trained(leaves)))
    ahead = group * (_STACKED * kept_bytes + 2 * input_bytes)
    # Of a gradient: the sum is read and written, and a result in two bytes is read, also where the product adds it
    # itself: a group took 357.0 ms on an H200 and depth-first 342.1, and so the planner says 353.9 and 340.8.
    back = group * (_TAKEN * kept_bytes + values * (2 * GRAD_BYTES + 2)) + _ZEROED * values * GRAD_BYTES
    return ahead, back
