"""Peak memory of a step of a pipeline on one device: one program for all stages, so the largest of what any needs.

Arguments are exact. Of the temporaries the stage inputs in flight are, by the schedule's table; the rest follows
`memory`: within a virtual stage's backward half nothing presses, so operands of parameter gradients wait to its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import optax

from amsp_jax.engine.pipeline.schedule import Kind, PipelineSchedule
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.memory import GRAD_BYTES, MemoryEstimate, PartBytes, argument_bytes, at_peak
from amsp_jax.predict.cost.pipeline_timeline import Chunks, num_slots
from amsp_jax.predict.cost.storage import leaf_counts
from amsp_jax.predict.cost.trace import ModelTrace

_HOPS = 4
"""Arrays between stages that are alive in a tick beside those kept: received and to be sent, forward and backward."""


def estimate(
    distinct: DistinctBlocks,
    plan: Plan,
    trace: ModelTrace,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    schedule: PipelineSchedule,
) -> MemoryEstimate:
    """The peak of a step.

    Args:
      distinct: the model with each distinct block once.
      plan: of the parameters of `distinct`, with stages.
      trace: of one tensor and context rank on one microbatch, with what the second pass over a stage keeps.
      optimizer: any optax transform.
      settings: how the step computes.
      schedule: of the pipeline.
    """
    arguments = argument_bytes(distinct, plan, optimizer, schedule.num_microbatches * trace.batch_bytes)
    moments = _Moments(distinct, plan, trace, settings, schedule)
    return at_peak(arguments, (("", num_bytes) for num_bytes in moments.all()))


class _Moments:
    """What is alive, beside the arguments, at the moments that may be the peak."""

    def __init__(
        self,
        distinct: DistinctBlocks,
        plan: Plan,
        trace: ModelTrace,
        settings: StepSettings,
        schedule: PipelineSchedule,
    ) -> None:
        embed, blocks, head = distinct.model.split(plan.leaves)
        wire = plan.compute_dtype, settings.reduction
        kinds = [PartBytes.of(block, leaves, *wire) for block, leaves in zip(trace.blocks, blocks, strict=True)]
        self.embed, self.head = PartBytes.of(trace.embed, embed, *wire), PartBytes.of(trace.head, head, *wire)
        self.tied = distinct.model.tied
        self.kinds = kinds
        self.chunks = Chunks.of(distinct.order, schedule.num_stages, schedule.virtual_stages)
        stage = [self.embed, self.head, *(kinds[kind] for kind in self.chunks.fullest)]
        self.copies, self.grads = sum(part.copy for part in stage), sum(part.grads for part in stage)
        self.in_flight = (num_slots(schedule) + _HOPS) * trace.blocks[0].output_bytes
        self.opt_grads = sum(leaf.num_opt_shard * n for leaf, n in leaf_counts(distinct, plan)) * GRAD_BYTES
        ends = sum(leaf.num_opt_shard for leaf in jax.tree.leaves((embed, head)))
        # The gradients of a slot, of which each stage gets its pieces, are there before and after the exchange.
        num_exchanged = (self.opt_grads // GRAD_BYTES - ends) // len(distinct.order) * schedule.num_stages
        self.exchanged = num_exchanged * GRAD_BYTES

    def all(self) -> Iterator[dict[str, int]]:
        """Each moment as the fields of a `MemoryEstimate`."""
        for kind, blocks in self.chunks.virtual:
            yield from self._backward_half(kind, [self.kinds[block] for block in blocks])
        yield {"grads": self.grads + self.opt_grads, "reductions": 2 * self.exchanged}

    def _backward_half(self, kind: Kind, blocks: Sequence[PartBytes]) -> Iterator[dict[str, int]]:
        """The second pass over a virtual stage, its backward pass, and its gradients before they are added up."""
        ends = {Kind.FIRST: [self.embed], Kind.LAST: [self.head, *([self.embed] if self.tied else [])]}.get(kind, [])
        saved = sum(block.trace.saved_bytes for block in blocks)
        grads = sum(part.grads for part in (*blocks, *ends))
        gathered = sum(part.gathered for part in ends)
        if kind is Kind.LAST:
            yield self._moment(saved + self.head.trace.backward_bytes, gathered, 0)
        waiting = self.head.trace.pending_bytes if kind is Kind.LAST else 0
        for block in reversed(blocks):
            saved -= block.trace.saved_bytes
            yield self._moment(saved + block.trace.backward_bytes + waiting, gathered + block.gathered, grads)
            waiting += block.trace.pending_bytes
        if kind is Kind.FIRST:
            yield self._moment(self.embed.trace.backward_bytes + waiting, gathered, grads)

    def _moment(self, activations: int, gathered: int, reductions: int) -> dict[str, int]:
        return {
            "params": self.copies,
            "grads": self.grads,
            "activations": self.in_flight + activations,
            "gathered": gathered,
            "reductions": reductions,
        }
