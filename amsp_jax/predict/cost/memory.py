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
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import optax

from amsp_jax.engine.block_backward import num_untied, reduction_window
from amsp_jax.engine.collectives import Reduction, reduction_steps
from amsp_jax.engine.plan import MASTER_BYTES, LeafPlan, Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Params
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
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
    return at_peak(arguments, _Moments(distinct, plan, trace, settings, accumulation).all())


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
            full_grads=sum(num_values(leaf) * _first_dtype(leaf, reduction).itemsize for leaf in plans),
            grads=sum(leaf.num_grads_shard for leaf in plans) * GRAD_BYTES,
        )


def _first_dtype(leaf: LeafPlan, reduction: Reduction) -> jnp.dtype:
    """In which a microbatch's gradient waits to be reduced."""
    return reduction.dtype_over(next(iter(reduction_steps(leaf, reduction)), ()))


def num_values(leaf: LeafPlan) -> int:
    """Of a tensor rank, padding included."""
    return math.prod(leaf.shard_shape(()))


def running(values: Iterable[int]) -> list[int]:
    """The sums of the first 0, 1, ... of the values."""
    return list(itertools.accumulate(values, initial=0))


class _Moments:
    """What is alive, beside the arguments, at the moments that may be the peak."""

    def __init__(
        self, distinct: DistinctBlocks, plan: Plan, trace: ModelTrace, settings: StepSettings, accumulation: int
    ) -> None:
        embed, blocks, head = distinct.model.split(plan.leaves)
        wire = plan.compute_dtype, settings.reduction
        kinds = [PartBytes.of(block, leaves, *wire) for block, leaves in zip(trace.blocks, blocks, strict=True)]
        self.embed, self.head = PartBytes.of(trace.embed, embed, *wire), PartBytes.of(trace.head, head, *wire)
        self.backwards = [kinds[kind] for kind in reversed(distinct.order)]
        self.accumulates, self.tied, self.axes = accumulation > 1, distinct.model.tied, plan.axes
        self.has_replicas = bool(self.axes.replica) or plan.parallel.context > 1
        once = bool(self.axes.grad or self.axes.opt or self.axes.replica)
        self.window = reduction_window(blocks, is_last=once and settings.peel_last)
        self.zeros = sum(num_values(leaf) for leaf in jax.tree.leaves(embed)) * GRAD_BYTES
        # See `step._head_of`; a tied table's gradient is complete only with the embedding's.
        self.head_waits = self.tied or any(leaf.param_axes for leaf in jax.tree.leaves(head))
        self.opt_grads = sum(leaf.num_opt_shard * n for leaf, n in leaf_counts(distinct, plan)) * GRAD_BYTES
        reduced = [sum(leaf.num_opt_shard for leaf in jax.tree.leaves(leaves)) for leaves in blocks]
        late = [reduced[kind] for kind in distinct.order][: self.window]
        self.flat_grads = sum(late) * settings.reduction.dtype.itemsize
        # Of the blocks that go backward first, as many make their gradients at once.
        self.num_at_once = len(self.backwards) - num_untied([blocks[kind] for kind in distinct.order], self.window)
        self.waits = self.accumulates and reduction_window(blocks) is None
        stages = [self.embed, self.head, *self.backwards]
        self.copies, self.grads = sum(stage.copy for stage in stages), sum(stage.grads for stage in stages)
        # Of the last `i` blocks, for each `i`.
        self.saved_of = running(stage.trace.saved_bytes for stage in self.backwards)
        self.copies_of = running(stage.copy for stage in self.backwards)
        self.grads_of = running(stage.grads for stage in self.backwards)
        self.pending_of = running(stage.trace.pending_bytes for stage in self.backwards)
        self.saved = self.saved_of[-1]

    def all(self) -> Iterator[Moment]:
        """Each moment."""
        yield AT_HEAD, self._loss()
        if self.waits:
            yield "a microbatch has run and none of its gradients is reduced", self._first()
        num_blocks = len(self.backwards)
        for done in range(num_blocks):
            yield block_moment(num_blocks - done, num_blocks), self._block(done)
        yield "the embedding runs backward", self._embedding()
        yield "gradients are reduced at the end of the step", self._end()

    def _loss(self) -> dict[str, int]:
        """The head, forward and backward: every block's activations, logits and their cotangents."""
        return {
            "params": self.copies,
            "grads": self.grads if self.accumulates else 0,
            "activations": self.saved + self.head.trace.backward_bytes,
            "gathered": self.head.gathered + (self.embed.gathered if self.tied else 0),
        }

    def _first(self) -> dict[str, int]:
        """The end of a microbatch whose gradients are not reduced: their products still wait."""
        return {
            "params": self.copies,
            "activations": round(_WAITING * (self.head.trace.pending_bytes + self.pending_of[-1])),
            "reductions": self.zeros,
        }

    def _block(self, done: int) -> dict[str, int]:
        """The backward pass of the block before the last `done` ones."""
        block = self.backwards[done]
        behind = self._behind(done)
        saved = self.saved - self.saved_of[done + 1]
        return behind | {
            "activations": saved + block.trace.backward_bytes + behind["activations"],
            "gathered": block.gathered,
        }

    def _embedding(self) -> dict[str, int]:
        """The end of the backward pass: zeros to which the embedding's gradient is added."""
        behind = self._behind(len(self.backwards))
        return behind | {"reductions": behind["reductions"] + self.zeros}

    def _behind(self, done: int) -> dict[str, int]:
        """What is alive of the `done` last blocks, and of the parts around the blocks."""
        operands, full = self._waiting(done)
        copies, grads = self.copies, self.grads
        if not self.accumulates:
            # Nothing uses a copy again once its part is done, and gradients come into being one after another.
            copies -= self.head.copy + self.copies_of[done]
            grads = self.grads_of[max(0, done - self.window)] if self.window else 0
        return {"params": copies, "grads": grads, "activations": operands, "reductions": full}

    def _waiting(self, done: int) -> tuple[int, int]:
        """Bytes of operands of parameter gradients, and of gradients that are not reduced, of the `done` last blocks.

        Without reductions nothing presses, and all operands wait; those of a tied table, whose gradient is complete
        only with the embedding's, always do. A block that makes its gradients at once has the latter alone.
        """
        at_once = 0 < done <= self.num_at_once
        if self.window is None or done < 2:
            head = self.head.trace.pending_bytes if self.head_waits else 0
            full = 0 if self.head_waits else self.head.full_grads
            return (head, full + self.backwards[0].full_grads) if at_once else (head + self.pending_of[done], full)
        newest = done if at_once else done - 1
        late = self.backwards[max(0, newest - (self.window - 2)) : newest]
        full = sum(stage.full_grads for stage in late)
        head = self.head.trace.pending_bytes if self.tied else 0
        operands = 0 if at_once else self.backwards[done - 1].trace.pending_bytes
        return operands + head, full + self.head.full_grads

    def _end(self) -> dict[str, int]:
        """The reductions of once a step: all gradients, and the OS shards of accumulated ones.

        Leaves that are all-reduced together are one flat array, alive beside the leaves that are sliced out of it, of
        as many blocks as are late.
        """
        return {
            "grads": self.grads + (self.opt_grads if self.axes.opt and self.accumulates else 0),
            "reductions": self.flat_grads if self.has_replicas else 0,
        }
