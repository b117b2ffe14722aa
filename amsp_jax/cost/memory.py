"""Peak memory of a step on one device, part by part: the largest of a few moments, each a sum of what is alive then.

Arguments are exact. Temporaries follow what XLA's scheduler was seen to keep in compiled programs
(benchmarks/memory.md):
- operands of the products that make parameter gradients wait for them, for as long as no barrier says otherwise;
- where gradients are reduced each microbatch, the barriers of `stack` hold at most `reduction_window` of them: while a
  block runs backward, the one before it still waits as operands, the oldest has been reduced, the others are full.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import optax

from amsp_jax.cost.sketch import Sketch
from amsp_jax.cost.storage import leaf_counts, stored_opt_state
from amsp_jax.cost.trace import ModelTrace
from amsp_jax.model import Params
from amsp_jax.plan import MASTER_BYTES, LeafPlan, Plan
from amsp_jax.stack import reduction_window
from amsp_jax.step import StepSettings

GRAD_BYTES = 4
"""Of a gradient's value, accumulated or on its way to its reduction: float32."""
_COUNTERS_BYTES = 8
"""The seed, and the number of the step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one device at the peak of a step.

    Attributes:
      master, opt_state: the arguments: float32 master shard, and the optimizer's state.
      batch: the arguments: tokens, targets and weights of all microbatches, the seed and the step's number.
      params: P shards kept for the step, where they are not the master.
      grads: float32 accumulators at the G sharding, or gradients that wait for the reductions of once a step.
      activations: what blocks and the head keep for the backward pass, and what runs at the moment of the peak.
      gathered: whole parameters of the part that runs.
      reductions: gradients that wait for their reduction, and the zeros that the embedding's is added to.
    """

    master: int
    opt_state: int
    batch: int
    params: int = 0
    grads: int = 0
    activations: int = 0
    gathered: int = 0
    reductions: int = 0

    @property
    def total(self) -> int:
        """The sum: the peak of buffers, as `memory_analysis` counts them (arguments and temporaries)."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def argument_bytes(self) -> int:
        """What is there before and after the step; exact."""
        return self.master + self.opt_state + self.batch

    @property
    def margin_bytes(self) -> int:
        """What the placement of buffers may need beyond their sum: see `ALLOCATOR_MARGIN`."""
        return round(ALLOCATOR_MARGIN * (self.total - self.argument_bytes))


ALLOCATOR_MARGIN = 0.08
"""Of the temporaries: gaps between buffers in the heap that XLA lays out."""


def argument_bytes(
    sketch: Sketch, plan: Plan, optimizer: optax.GradientTransformation, batch_bytes: int
) -> MemoryEstimate:
    """The step's arguments alone, exact: what `memory_analysis().argument_size_in_bytes` says of the compiled step.

    Args:
      sketch: of the model.
      plan: of the sketch's parameters.
      optimizer: any optax transform.
      batch_bytes: of one device's rows of all microbatches.
    """
    return MemoryEstimate(
        master=sum(leaf.num_opt_shard * count for leaf, count in leaf_counts(sketch, plan)) * MASTER_BYTES,
        opt_state=sum(leaf.num_bytes * leaf.count for leaf in stored_opt_state(sketch, plan, optimizer)),
        batch=batch_bytes + _COUNTERS_BYTES,
    )


def estimate(
    sketch: Sketch,
    plan: Plan,
    trace: ModelTrace,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    accumulation: int,
) -> MemoryEstimate:
    """The peak of a step.

    Args:
      sketch: of the model.
      plan: of the sketch's parameters.
      trace: of the sketch on one microbatch, with the rematerialisation of `settings`.
      optimizer: any optax transform.
      settings: how the step computes.
      accumulation: microbatches of a step.
    """
    arguments = argument_bytes(sketch, plan, optimizer, accumulation * trace.batch_bytes)
    moments = _Moments(sketch, plan, trace, settings, accumulation)
    return max((dataclasses.replace(arguments, **parts) for parts in moments.all()), key=lambda e: e.total)


class _Moments:
    """What is alive, beside the arguments, at the moments that may be the peak."""

    def __init__(
        self, sketch: Sketch, plan: Plan, trace: ModelTrace, settings: StepSettings, accumulation: int
    ) -> None:
        self.plan, self.trace = plan, trace
        self.embed, blocks, self.head = sketch.model.split(plan.leaves)
        self.tied = sketch.model.tied
        self.blocks = [(trace.blocks[kind], blocks[kind]) for kind in sketch.order]
        self.window = reduction_window([block for _, block in self.blocks])
        self.accumulates = accumulation > 1
        axes = plan.axes
        peels = settings.peel and bool(axes.grad or axes.opt or axes.replica)
        # The zeros of the peeled microbatches are one array, alive across the loop, which has its own.
        self.num_zeros = 2 if peels and accumulation > 2 else 1
        counts = leaf_counts(sketch, plan)
        self.params = (
            sum(n * leaf.num_params_shard for leaf, n in counts if leaf.has_copy) * plan.compute_dtype.itemsize
        )
        self.grads = sum(n * leaf.num_grads_shard for leaf, n in counts) * GRAD_BYTES
        self.opt_grads = sum(n * leaf.num_opt_shard for leaf, n in counts) * GRAD_BYTES

    def all(self) -> Iterator[dict[str, int]]:
        """Each moment as the fields of a `MemoryEstimate`."""
        yield self._head()
        yield from self._blocks_backward()
        yield {"grads": self.grads + (self.opt_grads if self.plan.axes.opt and self.accumulates else 0)}

    @property
    def _saved(self) -> int:
        return sum(block.saved_bytes for block, _ in self.blocks)

    def _head(self) -> dict[str, int]:
        """The loss and its gradient: every block's activations, logits and their cotangents."""
        gathered = self._gathered(self.head) + (self._gathered(self.embed) if self.tied else 0)
        return {
            "params": self.params,
            "grads": self.grads if self.accumulates else 0,
            "activations": self._saved + self.trace.head.backward_bytes,
            "gathered": gathered,
            "reductions": self._zeros() if self.accumulates else 0,
        }

    def _blocks_backward(self) -> Iterator[dict[str, int]]:
        """A block's backward pass, the last block first."""
        saved, waiting = self._saved, self.trace.head.pending_bytes
        for done, (block, leaves) in enumerate(reversed(self.blocks)):
            saved -= block.saved_bytes
            full, operands = self._late(done)
            yield {
                "params": self.params if self.accumulates else self.params - self._params_done(done),
                "grads": self.grads if self.accumulates else self._reduced(done),
                "activations": saved + block.backward_bytes + operands + (waiting if not full else 0),
                "gathered": self._gathered(leaves),
                "reductions": full + self._zeros(),
            }

    def _late(self, done: int) -> tuple[int, int]:
        """Bytes of full gradients, and of operands, of the blocks that are done and wait."""
        before = self.blocks[::-1][:done]
        if self.window is None:
            return 0, sum(block.pending_bytes for block, _ in before)
        operands = sum(block.pending_bytes for block, _ in before[-1:])
        full = sum(_full_bytes(leaves) for _, leaves in before[:-1][-(self.window - 2) :])
        return full + (_full_bytes(self.head) if done > 1 else 0), operands

    def _params_done(self, done: int) -> int:
        """P shards of head and blocks that nothing uses any more: no microbatch follows."""
        after = [self.head, *(leaves for _, leaves in self.blocks[::-1][:done])]
        values = sum(leaf.num_params_shard for leaves in after for leaf in _leaves(leaves) if leaf.has_copy)
        return values * self.plan.compute_dtype.itemsize

    def _reduced(self, done: int) -> int:
        """Shards of the gradients of blocks whose reduction is behind them."""
        late = self.window or len(self.blocks)
        before = self.blocks[::-1][: max(0, done - late)]
        return sum(leaf.num_grads_shard for _, block in before for leaf in _leaves(block)) * GRAD_BYTES

    def _gathered(self, leaves: Params) -> int:
        whole = sum(_num_values(leaf) for leaf in _leaves(leaves) if leaf.param_axes)
        return whole * self.plan.compute_dtype.itemsize

    def _zeros(self) -> int:
        return self.num_zeros * _full_bytes(self.embed)


def _full_bytes(leaves: Params) -> int:
    return sum(map(_num_values, _leaves(leaves))) * GRAD_BYTES


def _num_values(leaf: LeafPlan) -> int:
    return math.prod(leaf.shard_shape(()))


def _leaves(leaves: Params) -> list[LeafPlan]:
    return jax.tree.leaves(leaves)
