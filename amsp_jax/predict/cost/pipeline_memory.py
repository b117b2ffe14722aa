"""Peak memory of a step of a pipeline on one device: one program for all stages, so the largest of what any needs.

Arguments are exact. Of the temporaries the stage inputs in flight are, by the schedule's table; the rest follows
`memory`: within a virtual stage's backward half nothing presses, so operands of parameter gradients wait to its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import optax

from amsp_jax.engine.pipeline.schedule import Kind, PipelineSchedule
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks, trained
from amsp_jax.predict.cost.memory import (
    GRAD_BYTES,
    MemoryEstimate,
    PartBytes,
    argument_bytes,
    at_peak,
    num_opt_grads,
    part_bytes,
)
from amsp_jax.predict.cost.pipeline_timeline import Chunks, num_slots
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
    moments = _moments(_step(distinct, plan, trace, settings, schedule))
    return at_peak(arguments, (("", num_bytes) for num_bytes in moments))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """What a pipeline's step holds, beside its arguments, at any of its moments.

    Attributes:
      embed, head: the parts around the blocks.
      kinds: each distinct block.
      chunks: which blocks each virtual stage has.
      copies, grads: bytes of P shards and of float32 gradients of the stage with the most blocks.
      in_flight: bytes of stage inputs that wait, and of arrays that are sent and received.
      opt_grads: bytes of all gradients at the OS sharding.
      exchanged: bytes of one slot's gradients, which are handed from stage to stage.
      tied: whether the head uses the embedding's table.
    """

    embed: PartBytes
    head: PartBytes
    kinds: tuple[PartBytes, ...]
    chunks: Chunks
    copies: int
    grads: int
    in_flight: int
    opt_grads: int
    exchanged: int
    tied: bool


def _step(
    distinct: DistinctBlocks,
    plan: Plan,
    trace: ModelTrace,
    settings: StepSettings,
    schedule: PipelineSchedule,
) -> _Step:
    embed, kinds, head = part_bytes(distinct, plan, trace, settings)
    chunks = Chunks.of(distinct.order, schedule.num_stages, schedule.virtual_stages)
    stage = [embed, head, *(kinds[kind] for kind in chunks.fullest)]
    leaves, _, head_leaves = distinct.model.split(plan.leaves)
    opt_values = num_opt_grads(distinct, plan)
    ends = sum(leaf.num_opt_shard for leaf in trained((leaves, head_leaves)))
    return _Step(
        embed=embed,
        head=head,
        kinds=tuple(kinds),
        chunks=chunks,
        copies=sum(part.copy for part in stage),
        grads=sum(part.grads for part in stage),
        in_flight=(num_slots(schedule) + _HOPS) * trace.blocks[0].output_bytes,
        opt_grads=opt_values * GRAD_BYTES,
        # The gradients of a slot, of which each stage gets its pieces, are there before and after the exchange.
        exchanged=(opt_values - ends) // len(distinct.order) * schedule.num_stages * GRAD_BYTES,
        tied=distinct.model.tied,
    )


def _moments(step: _Step) -> Iterator[dict[str, int]]:
    """Every moment that may be the peak, as fields of a `MemoryEstimate`."""
    for kind, blocks in step.chunks.virtual:
        yield from _stage_runs_backward(step, kind, [step.kinds[block] for block in blocks])
    yield {"grads": step.grads + step.opt_grads, "reductions": 2 * step.exchanged}


def _stage_runs_backward(step: _Step, kind: Kind, blocks: Sequence[PartBytes]) -> Iterator[dict[str, int]]:
    """The second pass over a virtual stage, its backward pass, and its gradients before they are added up."""
    ends: list[PartBytes] = []
    if kind is Kind.FIRST:
        ends = [step.embed]
    elif kind is Kind.LAST:
        ends = [step.head, *([step.embed] if step.tied else [])]
    saved = sum(block.trace.saved_bytes for block in blocks)
    grads = sum(part.grads for part in (*blocks, *ends))
    gathered = sum(part.gathered for part in ends)
    if kind is Kind.LAST:
        yield _moment(step, saved + step.head.trace.backward_bytes, gathered, 0)
    waiting = step.head.trace.pending_bytes if kind is Kind.LAST else 0
    for block in reversed(blocks):
        saved -= block.trace.saved_bytes
        yield _moment(step, saved + block.trace.backward_bytes + waiting, gathered + block.gathered, grads)
        waiting += block.trace.pending_bytes
    if kind is Kind.FIRST:
        yield _moment(step, step.embed.trace.backward_bytes + waiting, gathered, grads)


def _moment(step: _Step, activations: int, gathered: int, reductions: int) -> dict[str, int]:
    return {
        "params": step.copies,
        "grads": step.grads,
        "activations": step.in_flight + activations,
        "gathered": gathered,
        "reductions": reductions,
    }
