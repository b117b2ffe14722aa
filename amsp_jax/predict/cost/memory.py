"""Peak memory of a step on one device, part by part: the largest of a few moments, each a sum of what is alive then.

Arguments are exact. Temporaries follow what XLA's scheduler was seen to keep in compiled programs
(benchmarks/memory.md):
- operands of the products that make parameter gradients wait for them, for as long as no barrier says otherwise;
- where gradients are reduced, in each microbatch or once a step inside the last, the barriers of `stack` hold at most
  `reduction_window` of them: while a block runs backward, the one before it still waits as operands, or as a gradient
  where that is made at once (`stack.num_untied`), the oldest has been reduced, the others are full. In the microbatches
  before the last, operands were not seen to wait for longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import optax

from amsp_jax.engine.block_backward import num_untied, reduction_window
from amsp_jax.engine.collectives import Reduction, reduction_steps
from amsp_jax.engine.leaves import MASTER_BYTES, LeafPlan
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Params
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks, trained
from amsp_jax.predict.cost.storage import leaf_counts, stored_opt_state
from amsp_jax.predict.cost.trace import ModelTrace, PartTrace

GRAD_BYTES = 4
"""Of an accumulated gradient's value, float32."""
_WAITING = 0.77
"""Of the operands of parameter gradients, those seen to wait: all but those of the down projection."""
AT_HEAD = "the head runs"
Moment = tuple[str, dict[str, int]]
"""What it is called, and the fields of a `MemoryEstimate` that are bytes of temporaries."""
_COUNTER_BYTES = 8
"""The number of the step, and the seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one device at the peak of a step.

    Attributes:
      master, opt_state: the arguments: float32 master shard, and the optimizer's state.
      batch: the arguments: tokens, targets and weights of all microbatches, and the step's number.
      params: P shards kept for the step, where they are not the master.
      grads: float32 accumulators at the G sharding, or gradients that wait for the reductions of once a step.
      activations: what blocks and the head keep for the backward pass, and what runs at the moment of the peak.
      gathered: whole parameters of the part that runs.
      reductions: gradients that wait for their reduction, and the zeros that the embedding's is added to.
      peak_at: when the peak is, as `the head runs`; not told of a pipeline.
    """

    master: int
    opt_state: int
    batch: int
    params: int = 0
    grads: int = 0
    activations: int = 0
    gathered: int = 0
    reductions: int = 0
    peak_at: str = ""

    @property
    def total(self) -> int:
        """The sum: the peak of buffers, as `memory_analysis` counts them (arguments and temporaries)."""
        temporary = self.params + self.grads + self.activations + self.gathered + self.reductions
        return self.argument_bytes + temporary

    @property
    def argument_bytes(self) -> int:
        """What is there before and after the step; exact."""
        return self.master + self.opt_state + self.batch

    @property
    def margin_bytes(self) -> int:
        """What the placement of buffers may need beyond their sum: see `ALLOCATOR_MARGIN`."""
        return round(ALLOCATOR_MARGIN * (self.total - self.argument_bytes))


ALLOCATOR_MARGIN = 0.12
"""Of the temporaries: gaps in the heap that XLA lays out, and what a schedule keeps beyond the terms here. The largest
shortfall was 11 % in the table of benchmarks/memory.md, on which this was calibrated."""


def argument_bytes(
    distinct: DistinctBlocks, plan: Plan, optimizer: optax.GradientTransformation, batch_bytes: int
) -> MemoryEstimate:
    """The step's arguments alone, exact: what `memory_analysis().argument_size_in_bytes` says of the compiled step.

    Args:
      distinct: the model with each distinct block once.
      plan: of the parameters of `distinct`.
      optimizer: any optax transform.
      batch_bytes: of one device's rows of all microbatches.
    """
    return MemoryEstimate(
        master=sum(leaf.num_opt_shard * count for leaf, count in leaf_counts(distinct, plan)) * MASTER_BYTES,
        opt_state=sum(leaf.num_bytes * leaf.count for leaf in stored_opt_state(distinct, plan, optimizer)),
        batch=batch_bytes + _COUNTER_BYTES,
    )


def estimate(
    distinct: DistinctBlocks,
    plan: Plan,
    trace: ModelTrace,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    accumulation: int,
) -> MemoryEstimate:
    """The peak of a step.

    Args:
      distinct: the model with each distinct block once.
      plan: of the parameters of `distinct`.
      trace: of `distinct` on one microbatch, with the rematerialisation of `settings`.
      optimizer: any optax transform.
      settings: how the step computes.
      accumulation: microbatches of a step.
    """
    arguments = argument_bytes(distinct, plan, optimizer, accumulation * trace.batch_bytes)
    return at_peak(arguments, _moments(_step(distinct, plan, trace, settings, accumulation)))


def at_peak(arguments: MemoryEstimate, moments: Iterable[Moment]) -> MemoryEstimate:
    """The arguments and the largest of the moments; the first of several."""
    when, num_bytes = max(moments, key=lambda moment: sum(moment[1].values()))
    return dataclasses.replace(arguments, peak_at=when, **num_bytes)


def block_moment(number: int, num_blocks: int) -> str:
    """What the moment is called at which a block runs backward; they count from 1."""
    return f"block {number} of {num_blocks} runs backward"


@dataclasses.dataclass(frozen=True)
class PartBytes:
    """A part of the model and its bytes.

    Attributes:
      trace: of the part.
      copy: its P shards kept for the step.
      gathered: its whole parameters, if it gathers them.
      full_grads: its unreduced gradients, in the dtype on the wire of their first reduction.
      grads: its float32 gradients at the G sharding.
    """

    trace: PartTrace
    copy: int
    gathered: int
    full_grads: int
    grads: int

    @classmethod
    def of(cls, trace: PartTrace, leaves: Params, dtype: jnp.dtype, reduction: Reduction) -> PartBytes:
        """Of a part's planned leaves; the dtype of gathered parameters, and how gradients are summed."""
        plans: list[LeafPlan] = jax.tree.leaves(leaves)
        return cls(
            trace=trace,
            copy=sum(leaf.num_params_shard for leaf in plans if leaf.has_copy(dtype)) * dtype.itemsize,
            gathered=sum(num_values(leaf) for leaf in plans if leaf.param_axes) * dtype.itemsize,
            full_grads=sum(num_values(leaf) * _first_dtype(leaf, reduction).itemsize for leaf in trained(plans)),
            grads=sum(leaf.num_grads_shard for leaf in trained(plans)) * GRAD_BYTES,
        )


def _first_dtype(leaf: LeafPlan, reduction: Reduction) -> jnp.dtype:
    """In which a microbatch's gradient waits to be reduced."""
    return reduction.dtype_over(next(iter(reduction_steps(leaf, reduction)), ()))


def num_opt_grads(distinct: DistinctBlocks, plan: Plan) -> int:
    """Values of all gradients at the OS sharding; frozen leaves have none."""
    return sum(leaf.num_opt_shard * count for leaf, count in leaf_counts(distinct, plan) if not leaf.frozen)


def num_values(leaf: LeafPlan) -> int:
    """Of a tensor rank, padding included."""
    return math.prod(leaf.shard_shape(()))


def running(values: Iterable[int]) -> list[int]:
    """The sums of the first 0, 1, ... of the values."""
    return list(itertools.accumulate(values, initial=0))


def part_bytes(
    distinct: DistinctBlocks, plan: Plan, trace: ModelTrace, settings: StepSettings
) -> tuple[PartBytes, list[PartBytes], PartBytes]:
    """Bytes of the embedding, of each distinct block, and of the head."""
    embed, blocks, head = distinct.model.split(plan.leaves)
    wire = plan.compute_dtype, settings.reduction
    kinds = [PartBytes.of(block, leaves, *wire) for block, leaves in zip(trace.blocks, blocks, strict=True)]
    return PartBytes.of(trace.embed, embed, *wire), kinds, PartBytes.of(trace.head, head, *wire)


@dataclasses.dataclass(frozen=True)
class _LastBlocks:
    """Sums over the blocks that run backward first: entry `n` of each field is the sum over the last `n` blocks."""

    saved: list[int]
    copies: list[int]
    grads: list[int]
    pending: list[int]

    @classmethod
    def of(cls, backwards: Sequence[PartBytes]) -> _LastBlocks:
        """The sums over blocks in the order in which they run backward."""
        return cls(
            saved=running(block.trace.saved_bytes for block in backwards),
            copies=running(block.copy for block in backwards),
            grads=running(block.grads for block in backwards),
            pending=running(block.trace.pending_bytes for block in backwards),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reductions:
    """How the step reduces gradients, and how long gradients wait.

    Attributes:
      window: blocks whose gradients may wait for their reduction; None where nothing is reduced block by block.
      num_at_once: leading blocks of the backward pass that make their gradients at once and keep no operands.
      head_waits: whether the head's gradient waits as operands (see `train_step`).
      none_in_first: whether the first of several microbatches reduces no gradient.
      opt_grads: bytes of all float32 gradients at the OS sharding.
      flat_grads: bytes of one flat array of the leaves that are all-reduced together.
      shards_opt: whether optimizer states are sharded further than gradients.
    """

    window: int | None
    num_at_once: int
    head_waits: bool
    none_in_first: bool
    opt_grads: int
    flat_grads: int
    shards_opt: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """What a step holds, beside its arguments, at any of its moments.

    Attributes:
      embed, head: the parts around the blocks.
      backwards: the blocks in the order in which they run backward.
      last: sums over the last blocks.
      copies, grads: bytes of all parts' P shards and float32 gradients.
      zeros: bytes of the zeros to which the embedding's gradient is added.
      accumulates: whether a step has several microbatches.
      tied: whether the head uses the embedding's table.
      reductions: how gradients are reduced.
    """

    embed: PartBytes
    head: PartBytes
    backwards: tuple[PartBytes, ...]
    last: _LastBlocks
    copies: int
    grads: int
    zeros: int
    accumulates: bool
    tied: bool
    reductions: _Reductions


def _step(distinct: DistinctBlocks, plan: Plan, trace: ModelTrace, settings: StepSettings, accumulation: int) -> _Step:
    embed, kinds, head = part_bytes(distinct, plan, trace, settings)
    backwards = tuple(kinds[kind] for kind in reversed(distinct.order))
    stages = [embed, head, *backwards]
    leaves, _, _ = distinct.model.split(plan.leaves)
    return _Step(
        embed=embed,
        head=head,
        backwards=backwards,
        last=_LastBlocks.of(backwards),
        copies=sum(stage.copy for stage in stages),
        grads=sum(stage.grads for stage in stages),
        zeros=sum(num_values(leaf) for leaf in trained(leaves)) * GRAD_BYTES,
        accumulates=accumulation > 1,
        tied=distinct.model.tied,
        reductions=_reductions(distinct, plan, settings, accumulation),
    )


def _reductions(distinct: DistinctBlocks, plan: Plan, settings: StepSettings, accumulation: int) -> _Reductions:
    _, blocks, head = distinct.model.split(plan.leaves)
    once = plan.has_work_once_a_step
    window = reduction_window(blocks, is_last=once and settings.peel_last)
    reduced = [sum(leaf.num_opt_shard for leaf in trained(leaves)) for leaves in blocks]
    late = [reduced[kind] for kind in distinct.order][:window]
    has_replicas = any(axes.replica for axes in plan.all_axes) or plan.parallel.context > 1
    return _Reductions(
        window=window,
        # Of the blocks that go backward first, as many make their gradients at once.
        num_at_once=len(distinct.order) - num_untied([blocks[kind] for kind in distinct.order], window),
        # A tied table's gradient is complete only with the embedding's.
        head_waits=distinct.model.tied or any(leaf.param_axes for leaf in jax.tree.leaves(head)),
        none_in_first=accumulation > 1 and reduction_window(blocks) is None,
        opt_grads=num_opt_grads(distinct, plan) * GRAD_BYTES,
        flat_grads=sum(late) * settings.reduction.dtype.itemsize if has_replicas else 0,
        shards_opt=any(axes.opt for axes in plan.all_axes),
    )


def _moments(step: _Step) -> Iterator[Moment]:
    """Every moment that may be the peak."""
    yield AT_HEAD, _head_runs(step)
    if step.reductions.none_in_first:
        yield "a microbatch has run and none of its gradients is reduced", _first_microbatch_ends(step)
    num_blocks = len(step.backwards)
    for done in range(num_blocks):
        yield block_moment(num_blocks - done, num_blocks), _block_runs_backward(step, done)
    yield "the embedding runs backward", _embedding_runs_backward(step)
    yield "gradients are reduced at the end of the step", _step_ends(step)


def _head_runs(step: _Step) -> dict[str, int]:
    """The head, forward and backward: every block's activations, logits and the logits' cotangents."""
    return {
        "params": step.copies,
        "grads": step.grads if step.accumulates else 0,
        "activations": step.last.saved[-1] + step.head.trace.backward_bytes,
        "gathered": step.head.gathered + (step.embed.gathered if step.tied else 0),
    }


def _first_microbatch_ends(step: _Step) -> dict[str, int]:
    """The end of a microbatch whose gradients are not reduced: the products that make gradients still wait."""
    return {
        "params": step.copies,
        "activations": round(_WAITING * (step.head.trace.pending_bytes + step.last.pending[-1])),
        "reductions": step.zeros,
    }


def _block_runs_backward(step: _Step, done: int) -> dict[str, int]:
    """The backward pass of the block before the last `done` blocks."""
    block = step.backwards[done]
    behind = _after_backward(step, done)
    saved = step.last.saved[-1] - step.last.saved[done + 1]
    return behind | {
        "activations": saved + block.trace.backward_bytes + behind["activations"],
        "gathered": block.gathered,
    }


def _embedding_runs_backward(step: _Step) -> dict[str, int]:
    """The end of the backward pass, with the zeros to which the embedding's gradient is added."""
    behind = _after_backward(step, len(step.backwards))
    return behind | {"reductions": behind["reductions"] + step.zeros}


def _after_backward(step: _Step, done: int) -> dict[str, int]:
    """What the last `done` blocks, and the parts around the blocks, hold after they have run backward."""
    operands, unreduced = _waiting(step, done)
    copies, grads, window = step.copies, step.grads, step.reductions.window
    if not step.accumulates:
        # Nothing uses a copy again once its part is done, and gradients come into being one after another.
        copies -= step.head.copy + step.last.copies[done]
        grads = step.last.grads[max(0, done - window)] if window else 0
    return {"params": copies, "grads": grads, "activations": operands, "reductions": unreduced}


def _waiting(step: _Step, done: int) -> tuple[int, int]:
    """Bytes of operands of parameter gradients, and of unreduced gradients, of the last `done` blocks and the head.

    Without reductions all operands wait. The operands of a tied table always wait, because its gradient is complete
    only with the embedding's. A block that makes its gradients at once has no operands that wait.
    """
    reductions, head = step.reductions, step.head
    at_once = 0 < done <= reductions.num_at_once
    if reductions.window is None or done < 2:
        head_operands = head.trace.pending_bytes if reductions.head_waits else 0
        head_grads = 0 if reductions.head_waits else head.full_grads
        if at_once:
            return head_operands, head_grads + step.backwards[0].full_grads
        return head_operands + step.last.pending[done], head_grads
    newest = done if at_once else done - 1
    late = step.backwards[max(0, newest - (reductions.window - 2)) : newest]
    operands = 0 if at_once else step.backwards[done - 1].trace.pending_bytes
    if step.tied:
        operands += head.trace.pending_bytes
    return operands, sum(block.full_grads for block in late) + head.full_grads


def _step_ends(step: _Step) -> dict[str, int]:
    """The reductions of once a step: all gradients, and the OS shards of accumulated gradients.

    Leaves that are all-reduced together are one flat array, which is alive beside the leaves that are sliced out of
    it. It holds as many blocks as may be late.
    """
    reductions = step.reductions
    return {
        "grads": step.grads + (reductions.opt_grads if reductions.shards_opt and step.accumulates else 0),
        "reductions": reductions.flat_grads,
    }
