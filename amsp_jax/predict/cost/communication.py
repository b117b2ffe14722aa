"""The collectives of one step, read off the plan that the step executes: kind, axes, shape, bytes and how often.

`collectives` lists them leaf by leaf, as they are written into the program; a test holds them equal to the compiled
one's. `messages` puts the leaves of a part together, as XLA's combiner does up to a block's bytes: what is timed.
It combines no all-to-alls.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum

import jax
import jax.numpy as jnp

from amsp_jax.engine.collectives import Axes, Reduction, reduction_steps, scatter_steps
from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.mesh import level
from amsp_jax.engine.parallel import CONTEXT, STAGE, TENSOR
from amsp_jax.model import Model, Params
from amsp_jax.strategy import Degree


class Phase(StrEnum):
    """When in a step a collective runs."""

    START = "start"
    """Once, before a part's first use: the P shard of the step, over the grad and opt axes."""
    FORWARD = "forward"
    """Each microbatch or group of them, before the part's forward pass: the whole parameters, over the param axes."""
    BACKWARD = "backward"
    """Likewise, before a block's backward pass: the same again."""
    REDUCE = "reduce"
    """Likewise, after the part's backward pass: gradients over the param and grad axes."""
    END = "end"
    """Once, after the last backward pass: accumulated gradients over the opt and replica axes."""
    TENSOR = "tensor"
    """Inside each half of a block: the sequence over the tensor axis (`model_axes`)."""
    CONTEXT = "context"
    """Inside attention: keys and values around the context axis."""
    SEND = "send"
    """Each tick of a pipeline: what flows between stages."""


ONCE = (Phase.START, Phase.END)
EXCHANGE = "all-to-all"
"""A kind of which the network has no measurements: see `model_axes.seconds`."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of one leaf, or of several that travel together.

    Attributes:
      kind: `all-gather`, `reduce-scatter`, `all-reduce` or `all-to-all`.
      axes: mesh axes it runs over.
      group: their sizes inside a node and between nodes.
      shape: of one device's result; empty for a message of several leaves.
      num_bytes: of the whole message: a gather's result, a reduction's or an exchange's input.
      phase: when it runs.
    """

    kind: str
    axes: tuple[str, ...]
    group: Degree
    shape: tuple[int, ...]
    num_bytes: int
    phase: Phase


@dataclasses.dataclass(frozen=True)
class WireDtypes:
    """What travels: parameters in the compute dtype, gradients as the reduction says."""

    gather: jnp.dtype
    reduction: Reduction


ONE = Degree(1, 1)


def collectives(leaf: LeafPlan, wire: WireDtypes, regathers: bool, stages: Degree = ONE) -> list[Collective]:
    """One leaf's collectives: those of once a step, and those of one microbatch.

    Args:
      leaf: its plan.
      wire: dtypes on the wire.
      regathers: whether the backward pass gathers again: in blocks, not in embedding and head.
      stages: how many stages lie in a node, times how many nodes they span.
    """
    p, g, o = leaf.param_axes, leaf.grad_axes, leaf.opt_axes
    gather, reduction = wire.gather.itemsize, wire.reduction
    wanted = [("all-gather", g + o, p, gather, Phase.START), ("all-gather", p, (), gather, Phase.FORWARD)]
    if regathers:
        wanted.append(("all-gather", p, (), gather, Phase.BACKWARD))
    if leaf.frozen:
        return [_collective(leaf, *one, stages) for one in wanted if one[1]]
    before: Axes = ()
    steps = [(axes, Phase.REDUCE) for axes in reduction_steps(leaf, reduction)]
    steps += [(axes, Phase.END) for axes in scatter_steps(o, reduction)]
    for axes, phase in steps:
        kind = EXCHANGE if reduction.exchanges(axes) else "reduce-scatter"
        wanted.append((kind, axes, before, reduction.dtype_over(axes).itemsize, phase))
        before += axes
    wanted.append(("all-reduce", leaf.replica_axes, before, reduction.dtype.itemsize, Phase.END))
    return [_collective(leaf, *one, stages) for one in wanted if one[1]]


def _collective(
    leaf: LeafPlan,
    kind: str,
    axes: Axes,
    outside: Axes,
    item_bytes: int,
    phase: Phase,
    stages: Degree,
) -> Collective:
    """Over `axes`, of the part that is left when the leaf is split over `outside`."""
    whole = leaf.shard_shape(outside)
    result = leaf.shard_shape(outside + axes) if kind == "reduce-scatter" else whole
    group = group_of(axes, dict(leaf.axis_size), stages)
    return Collective(kind, axes, group, result, math.prod(whole) * item_bytes, phase)


def group_of(axes: Sequence[str], sizes: dict[str, int], stages: Degree = ONE) -> Degree:
    """How many ranks of a node, times how many nodes, a collective over `axes` brings together.

    Context and tensor lie inside a node; stages where `stages` says.
    """
    by_level = {"intra": 1, "inter": 1}
    for axis in axes:
        if axis == STAGE:
            by_level["intra"] *= stages.intra
            by_level["inter"] *= stages.inter
        else:
            by_level["intra" if axis in (CONTEXT, TENSOR) else level(axis)] *= sizes[axis]
    return Degree(**by_level)


@dataclasses.dataclass(frozen=True)
class PartPlan:
    """A part's leaves, whether its backward pass gathers them again, and where stages lie."""

    leaves: tuple[LeafPlan, ...]
    regathers: bool
    stages: Degree = ONE


@dataclasses.dataclass(frozen=True)
class PartPlans:
    """A model's parts in order: `parts[kind]` for each `kind` of `order`, so that equal blocks are looked at once."""

    parts: tuple[PartPlan, ...]
    order: tuple[int, ...]

    def __iter__(self) -> Iterator[PartPlan]:
        return (self.parts[kind] for kind in self.order)


def part_plans(model: Model, leaves: Params, block_order: Sequence[int], stages: Degree = ONE) -> PartPlans:
    """Embedding, blocks and head of a plan's leaves.

    Blocks are given to their stages in an exchange of their own (`model_axes.exchanges`), and are here as a stage has
    them then: spread over no stages.

    Args:
      model: whose `split` knows the tree; each distinct block once.
      leaves: `Plan.leaves` for it.
      block_order: for each block of the real model, which of them.
      stages: how many lie in a node, times how many nodes they span.
    """
    embed, blocks, head = model.split(leaves)
    blocks = jax.tree.map(on_its_stage, blocks)
    # A model without blocks is one rematerialised head.
    ends = _part(embed, False, stages), _part(head, not model.blocks, stages)
    parts = (ends[0], *(_part(block, True, stages) for block in blocks), ends[1])
    return PartPlans(parts, (0, *(1 + kind for kind in block_order), len(parts) - 1))


def on_its_stage(leaf: LeafPlan) -> LeafPlan:
    """The plan of a leaf that one stage has for itself."""
    if STAGE not in leaf.opt_axes:
        return leaf
    return dataclasses.replace(leaf, opt_axes=tuple(axis for axis in leaf.opt_axes if axis != STAGE))


def _part(leaves: Params, regathers: bool, stages: Degree) -> PartPlan:
    return PartPlan(tuple(jax.tree.leaves(leaves)), regathers, stages)


def step_collectives(parts: PartPlans, wire: WireDtypes, rounds: int) -> dict[Collective, int]:
    """Every collective of a step, leaf by leaf, with how often it runs.

    Sums of loss, weight and gradient norm, a few scalars, are not in it.

    Args:
      parts: of the model.
      wire: dtypes on the wire.
      rounds: microbatches of the step, or groups of them.
    """
    counts: dict[Collective, int] = defaultdict(int)
    for kind, part in enumerate(parts.parts):
        uses = parts.order.count(kind)
        for leaf in part.leaves:
            for collective in collectives(leaf, wire, part.regathers, part.stages):
                counts[collective] += uses * (1 if collective.phase in ONCE else rounds)
    return dict(counts)


def messages(part: PartPlan, wire: WireDtypes) -> list[Collective]:
    """A part's collectives with its leaves combined: one for each phase, kind and set of axes, in order.

    An all-to-all goes alone.
    """
    joined: dict[tuple[Phase, str, Axes, int], Collective] = {}
    for number, leaf in enumerate(part.leaves):
        for one in collectives(leaf, wire, part.regathers, part.stages):
            key = one.phase, one.kind, one.axes, number if one.kind == EXCHANGE else 0
            num_bytes = one.num_bytes + (joined[key].num_bytes if key in joined else 0)
            joined[key] = dataclasses.replace(one, shape=(), num_bytes=num_bytes)
    return list(joined.values())
