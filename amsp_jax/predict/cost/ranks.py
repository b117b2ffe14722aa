"""What one tensor and context rank has of a part's work and memory, from the trace of the whole part.

Products and activations are equal pieces, but for padding and for what every rank computes alike. So a part is traced
once, whole, and no trace is made for each number of ranks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax

from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.model import Model, Params
from amsp_jax.predict.cost.trace import ModelTrace, PartTrace

HALVES = 2
"""Of a block, each between a `tensor.enter` and a `tensor.leave`."""


@dataclasses.dataclass(frozen=True)
class Share:
    """A rank's share of a part's work, 1 on one device.

    Attributes:
      products: of products with weights: their columns or rows, padding included, and the rank's tokens.
      attention: of fused attention.
      scores, scores_size: of attention as plain products, and of the size of each of them.
      others: of the bytes that all other kernels move.
    """

    products: float = 1.0
    attention: float = 1.0
    scores: float = 1.0
    scores_size: float = 1.0
    others: float = 1.0


WHOLE = Share()


def shares(model: Model, leaves: Params, parallel: ModelParallel) -> tuple[Share, ...]:
    """Of the embedding, each block and the head.

    The ring computes c + 1 of the 2 c blocks of a causal matrix of c x c that a rank would without skipping: its own,
    whole, and half of each other's. Fused attention is traced as the half that a mask leaves.

        products, blocks: values of matrices on a rank / values of the matrices, / c
        attention: (c + 1)/c / (t c)     scores: (c + 1)/(2 c) / (t c), whole where c = 1     others: 1 / (t c)

    The embedding of a vocabulary split over ranks writes every token's row on each rank, so its share is 1/c.

    Args:
      model: the distinct's.
      leaves: `Plan.leaves` for it.
      parallel: the ranks.
    """
    embed, blocks, head = model.split(leaves)
    ranks, c = parallel.tensor * parallel.context, parallel.context
    if ranks == 1:
        return (WHOLE,) * (2 + len(blocks))
    causal = {
        "attention": (c + 1) / c / ranks if c > 1 else 1 / ranks,
        "scores": (c + 1) / (2 * c) / ranks if c > 1 else 1 / ranks,
        "scores_size": 1 / c**2,
    }
    matrices = [_split_share(_matrices(block)) / c for block in blocks]
    vocabulary = [leaf for leaf in _matrices((embed if model.tied else [], head)) if leaf.split_dim is not None]
    return (
        Share(products=1 / c, others=1 / c),
        *(Share(products=share, others=1 / ranks, **causal) for share in matrices),
        Share(products=_split_share(vocabulary) / c, others=1 / ranks, **causal),
    )


def _matrices(leaves: Params) -> list[LeafPlan]:
    return [leaf for leaf in jax.tree.leaves(leaves) if len(leaf.shape) > 1]


def _split_share(leaves: Sequence[LeafPlan]) -> float:
    """Values on one tensor rank over true values; 1 of nothing."""
    whole = sum(math.prod(leaf.shape) for leaf in leaves)
    return sum(math.prod(leaf.rank_shape) for leaf in leaves) / whole if whole else 1.0


def rank_trace(trace: ModelTrace, parallel: ModelParallel, remat: Remat) -> ModelTrace:
    """The same trace with one rank's bytes: 1/(t c) of each, and the sequences that it has whole inside a half.

    Work is left as it is; `shares` says what of it is a rank's. Each half of a block has its whole sequence, before the
    first product and after the last, alive in the backward pass; what waits for a parameter's gradient is whole, too.
    With nothing rematerialised the sequence before the first product is kept, whole. Sums of parameters' gradients are
    1/t.
    """
    if parallel.tensor * parallel.context == 1:
        return trace
    return dataclasses.replace(
        trace,
        embed=_rank_part(trace.embed, parallel, num_halves=1),
        blocks=tuple(_rank_part(block, parallel, HALVES, keeps=remat is Remat.NONE) for block in trace.blocks),
        head=_rank_part(trace.head, parallel, num_halves=1, flows=trace.embed.output_bytes),
        batch_bytes=trace.batch_bytes // parallel.context,
    )


def _rank_part(
    part: PartTrace, parallel: ModelParallel, num_halves: int, flows: int | None = None, keeps: bool = False
) -> PartTrace:
    """Of a part of some halves, which gather `flows` bytes, the part's output if None, and may keep them."""
    ranks = parallel.tensor * parallel.context
    whole = num_halves * (part.output_bytes if flows is None else flows)
    more = whole // parallel.context - whole // ranks
    # Of parameters a context rank has as many as one device.
    backward, pending = (size - size // parallel.context for size in part.params_bytes)
    return dataclasses.replace(
        part,
        saved_bytes=-(-part.saved_bytes // ranks) + (more if keeps else 0),
        backward_bytes=-(-part.backward_bytes // ranks) + more + backward // parallel.tensor,
        pending_bytes=-(-part.pending_bytes // ranks) + more + pending // parallel.tensor,
        output_bytes=-(-part.output_bytes // ranks),
        attended_bytes=-(-part.attended_bytes // ranks),
    )
