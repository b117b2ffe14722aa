"""Peak memory of a step that goes breadth-first through groups of microbatches (`breadth.py`).

A part is a loop over the group, so what it needs to compute is there for one microbatch, and nothing waits to be
computed; what blocks keep, and what flows between parts, is there for each microbatch of the group. Gradients are
summed as whole float32 arrays, and the program's barriers say how many of them wait for their reduction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import optax

from amsp_jax.engine.plan import LeafPlan, Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Params
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.memory import (
    AT_HEAD,
    GRAD_BYTES,
    MemoryEstimate,
    Moment,
    PartBytes,
    argument_bytes,
    at_peak,
    block_moment,
    num_values,
    running,
)
from amsp_jax.predict.cost.trace import ModelTrace, PartTrace


def estimate(
    distinct: DistinctBlocks,
    plan: Plan,
    trace: ModelTrace,
    optimizer: optax.GradientTransformation,
    settings: StepSettings,
    rounds: int,
) -> MemoryEstimate:
    """The peak of a step of `rounds` groups of microbatches; arguments as of `memory.estimate`."""
    batch_bytes = rounds * settings.microbatch_group * trace.batch_bytes
    arguments = argument_bytes(distinct, plan, optimizer, batch_bytes)
    return at_peak(arguments, _Moments(distinct, plan, trace, settings, rounds).all())


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part's bytes.

    Attributes:
      own: those of `PartBytes`.
      whole: its unreduced float32 gradients.
      reduced: its float32 gradients at the OS sharding.
      cast: its P shards in the compute dtype, where they are cast to be gathered.
    """

    own: PartBytes
    whole: int
    reduced: int
    cast: int

    @classmethod
    def of(cls, trace: PartTrace, leaves: Params, plan: Plan, settings: StepSettings) -> _Part:
        """Of a part's planned leaves."""
        plans: list[LeafPlan] = jax.tree.leaves(leaves)
        dtype = plan.compute_dtype
        uncopied = [leaf for leaf in plans if leaf.param_axes and not leaf.has_copy(dtype)]
        return cls(
            own=PartBytes.of(trace, leaves, dtype, settings.reduction),
            whole=sum(map(num_values, plans)) * GRAD_BYTES,
            reduced=sum(leaf.num_opt_shard for leaf in plans) * GRAD_BYTES,
            cast=sum(leaf.num_params_shard for leaf in uncopied) * dtype.itemsize,
        )


class _Moments:
    """What is alive in a group, beside the arguments, at the moments that may be the peak."""

    def __init__(
        self, distinct: DistinctBlocks, plan: Plan, trace: ModelTrace, settings: StepSettings, rounds: int
    ) -> None:
        embed, blocks, head = distinct.model.split(plan.leaves)
        kinds = [_Part.of(one, leaves, plan, settings) for one, leaves in zip(trace.blocks, blocks, strict=True)]
        self.embed, self.head = (
            _Part.of(one, leaves, plan, settings) for one, leaves in ((trace.embed, embed), (trace.head, head))
        )
        self.group, self.rounds, self.tied = settings.microbatch_group, rounds, distinct.model.tied
        self.parts = [self.head, *(kinds[kind] for kind in reversed(distinct.order)), self.embed]
        self.saved = running(self.group * part.own.trace.saved_bytes for part in self.parts[1:-1])
        self.flows = self.group * trace.embed.output_bytes
        self.copies = running(part.own.copy for part in self.parts)
        self.grads = running(part.own.grads for part in self.parts)
        self.reduced = running(part.reduced for part in self.parts)

    def all(self) -> Iterator[Moment]:
        """Each moment: parts backward, in the last group and in those before."""
        num_blocks = len(self.parts) - 2
        blocks = [block_moment(num_blocks - done, num_blocks) for done in range(num_blocks)]
        for is_last in (True, False)[: self.rounds]:
            for place, when in enumerate([AT_HEAD, *blocks, "the embedding runs backward"]):
                yield when, self._part(place, is_last)

    def _part(self, place: int, is_last: bool) -> dict[str, int]:
        """A part runs backward after `place` others, the one behind it is being reduced, and the next is gathered."""
        part, is_block = self.parts[place], 0 < place < len(self.parts) - 1
        ahead = self.parts[place : place + 2] if is_block else [part]
        gathered = sum(one.own.gathered + one.cast for one in ahead if one is not self.embed)
        whole = part.whole + (self._late(self.parts[place - 1], is_last) if place > 1 else 0)
        if self.tied and place < len(self.parts) - 1:
            whole += self.embed.whole
            gathered += self.embed.own.gathered if place == 0 else 0
        return {
            "params": self.copies[-1] - (self.copies[place] if self.rounds == 1 else 0),
            "grads": self._grads(place, is_last),
            "activations": self._saved(place) + part.own.trace.backward_bytes + (2 if is_block else 1) * self.flows,
            "gathered": gathered,
            "reductions": whole,
        }

    def _late(self, part: _Part, is_last: bool) -> int:
        """Whole gradients of a part that wait for their reduction; what nothing reduces is a sum of the step."""
        return part.whole if is_last or part.own.grads < part.whole else 0

    def _saved(self, place: int) -> int:
        """What is kept by blocks that have not run backward when the part at `place` does, its own included."""
        return self.saved[-1] - self.saved[max(0, min(place - 1, len(self.saved) - 1))]

    def _grads(self, place: int, is_last: bool) -> int:
        """Gradients of parts that are reduced, and sums of the groups before."""
        if is_last:
            before = self.grads[-1] - self.grads[place] if self.rounds > 1 else 0
            return before + self.reduced[place]
        before = self.grads[-1] if self.rounds > 2 else 0
        return before + self.grads[place]
