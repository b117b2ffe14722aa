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

from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Params
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks, trained
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
    return at_peak(arguments, _moments(_step(distinct, plan, trace, settings, rounds)))


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
            whole=sum(map(num_values, trained(plans))) * GRAD_BYTES,
            reduced=sum(leaf.num_opt_shard for leaf in trained(plans)) * GRAD_BYTES,
            cast=sum(leaf.num_params_shard for leaf in uncopied) * dtype.itemsize,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Step:
    """What a step of groups holds, beside its arguments, at any of its moments.

    Attributes:
      parts: the parts in the order in which they run backward: head, blocks, embedding.
      saved: sums over the blocks that run backward first, of what they keep for all microbatches of a group.
      copies, grads, reduced: sums over the parts that run backward first: P shards, float32 gradients at the G and at
        the OS sharding.
      flows: bytes that flow between two parts, of all microbatches of a group.
      rounds: groups of the step.
      tied: whether the head uses the embedding's table.
    """

    parts: tuple[_Part, ...]
    saved: list[int]
    copies: list[int]
    grads: list[int]
    reduced: list[int]
    flows: int
    rounds: int
    tied: bool


def _step(distinct: DistinctBlocks, plan: Plan, trace: ModelTrace, settings: StepSettings, rounds: int) -> _Step:
    embed, blocks, head = distinct.model.split(plan.leaves)
    kinds = [_Part.of(one, leaves, plan, settings) for one, leaves in zip(trace.blocks, blocks, strict=True)]
    ends = [_Part.of(one, leaves, plan, settings) for one, leaves in ((trace.head, head), (trace.embed, embed))]
    parts = ends[0], *(kinds[kind] for kind in reversed(distinct.order)), ends[1]
    return _Step(
        parts=parts,
        saved=running(settings.microbatch_group * part.own.trace.saved_bytes for part in parts[1:-1]),
        copies=running(part.own.copy for part in parts),
        grads=running(part.own.grads for part in parts),
        reduced=running(part.reduced for part in parts),
        flows=settings.microbatch_group * trace.embed.output_bytes,
        rounds=rounds,
        tied=distinct.model.tied,
    )


def _moments(step: _Step) -> Iterator[Moment]:
    """Every moment that may be the peak: each part runs backward, in the last group and in a group before it."""
    num_blocks = len(step.parts) - 2
    blocks = [block_moment(num_blocks - done, num_blocks) for done in range(num_blocks)]
    for is_last in (True, False)[: step.rounds]:
        for place, when in enumerate([AT_HEAD, *blocks, "the embedding runs backward"]):
            yield when, _part_runs_backward(step, place, is_last)


def _part_runs_backward(step: _Step, place: int, is_last: bool) -> dict[str, int]:
    """A part runs backward after `place` others, the part behind it is being reduced, and the next is gathered."""
    part, last = step.parts[place], len(step.parts) - 1
    is_block, embed = 0 < place < last, step.parts[-1]
    ahead = step.parts[place : place + 2] if is_block else [part]
    gathered = sum(one.own.gathered + one.cast for one in ahead if one is not embed)
    whole = part.whole + (_unreduced(step.parts[place - 1], is_last) if place > 1 else 0)
    if step.tied and place < last:
        whole += embed.whole
        gathered += embed.own.gathered if place == 0 else 0
    return {
        "params": step.copies[-1] - (step.copies[place] if step.rounds == 1 else 0),
        "grads": _reduced_grads(step, place, is_last),
        "activations": _kept(step, place) + part.own.trace.backward_bytes + (2 if is_block else 1) * step.flows,
        "gathered": gathered,
        "reductions": whole,
    }


def _unreduced(part: _Part, is_last: bool) -> int:
    """Whole gradients of a part that wait for their reduction; a gradient that nothing reduces is a sum of the step."""
    return part.whole if is_last or part.own.grads < part.whole else 0


def _kept(step: _Step, place: int) -> int:
    """What the blocks keep that have not run backward when the part at `place` does, its own included."""
    return step.saved[-1] - step.saved[max(0, min(place - 1, len(step.saved) - 1))]


def _reduced_grads(step: _Step, place: int, is_last: bool) -> int:
    """Reduced gradients of the parts before `place`, and the sums of the groups before."""
    if is_last:
        before = step.grads[-1] - step.grads[place] if step.rounds > 1 else 0
        return before + step.reduced[place]
    before = step.grads[-1] if step.rounds > 2 else 0
    return before + step.grads[place]
