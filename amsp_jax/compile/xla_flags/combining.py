"""How far XLA may combine collectives: it depends on the strategy, so it goes with one compilation of the step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from amsp_jax.engine.collectives import Reduction
from amsp_jax.model import Model
from amsp_jax.strategy import Degrees


def combine_thresholds(
    model: Model, degrees: Degrees, compute_dtype: Any, reduction: Reduction, tensor: int = 1
) -> dict[str, str]:
    """Compiler options for GPUs: collectives are combined up to one block.

    Then the leaves of a block share one collective, and blocks are not merged: their collectives could not overlap
    the blocks between. XLA counts the bytes of results: a gathered block in the compute dtype; a block reduced over the
    ranks that share its gradient, in the reduction dtype, or over those that share its optimizer states if gradients
    are whole until the end of the step; a block's part of those, which is what replicas all-reduce. Where gradients
    travel between nodes in a dtype of their own, only the ranks of a node share a reduce-scatter, and all-to-alls,
    which XLA does not combine, follow it.

    Args:
      model: whose first block counts, or its head if it has none.
      degrees: the resolved strategy.
      compute_dtype: of gathered parameters.
      reduction: how gradients are summed.
      tensor: ranks that share each matrix.
    """
    _, blocks, head = model.split(model.abstract_params())
    num_params = sum(x.size for x in jax.tree.leaves(blocks[0] if blocks else head)) // tensor
    gather_bytes = num_params * jnp.dtype(compute_dtype).itemsize
    scattered = degrees.grads if degrees.grads.total > 1 else degrees.opt_state
    num_scattered = scattered.intra if reduction.is_narrower_between_nodes else scattered.total
    reduce_bytes = reduction.dtype.itemsize
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": str(gather_bytes),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": str(num_params // num_scattered * reduce_bytes),
        "xla_gpu_all_reduce_combine_threshold_bytes": str(num_params // degrees.opt_state.total * reduce_bytes),
    }
