"""The scan over the ticks of a `Schedule`: one program for all stages, for use inside `shard_map`.

Each half of a tick is one `switch` on the table's entry of this stage. What a half sends travels while the other half
computes. A tree of one stage is a list: the embedding, one item a slot of its blocks, the head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from amsp_jax.engine.block_backward import run_blocks
from amsp_jax.engine.collectives import Reduction, param_shard, reduce_accumulated
from amsp_jax.engine.leaves import LeafPlan, LeafPlans
from amsp_jax.engine.parallel import STAGE
from amsp_jax.engine.parts import Gather, PartState, Uses, grad_shape, split
from amsp_jax.engine.pipeline.exchange import exchange, exchange_back, slot_leaves
from amsp_jax.engine.pipeline.schedule import Assignment, Kind, PipelineSchedule, assign_blocks, forward_alone
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.trees import GradShard, Master, OptGrad, Param, ParamShard, Sink, Tree, tree_map
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model, Part

KeysOf = Callable[[jax.Array], jax.Array]
"""From row numbers [rows] to one PRNG key a row."""
Sinks = Mapping[int, Tree[Sink | None]]
"""By the number of a part on this stage; a part that is not there gets no gradient."""
Data = tuple[Batch, jax.Array]
"""Arrays [microbatches, rows, ...] and row numbers [microbatches, rows]; or those of one microbatch."""


class _Now(NamedTuple):
    """What this stage does in one tick: which branch of each half, on which microbatch, and the places of inputs."""

    forward: jax.Array
    forward_microbatch: jax.Array
    backward: jax.Array
    backward_microbatch: jax.Array
    write: jax.Array
    read: jax.Array


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A model on pipeline stages; made by `make_pipeline`. Its methods are for use inside `shard_map`.

    Attributes:
      model: the model.
      leaves: of the whole tree of parameters, a `LeafPlan` each.
      schedule: the order of work.
      gather: how parameters are gathered at use.
      remat: what a stage keeps when it computes a microbatch again for its backward pass.
      assignment: which stage has which blocks.
    """

    model: Model
    leaves: LeafPlans
    schedule: PipelineSchedule
    gather: Gather
    remat: Remat
    assignment: Assignment

    def param_shards(self, params: Tree[Master], dtype: jnp.dtype) -> list[Tree[ParamShard]]:
        """The P shards of this stage, from the OS shards of the whole tree."""

        def one(leaf: LeafPlan, master: Master) -> ParamShard:
            return param_shard(leaf, master, dtype)

        first_l, *blocks_l, last_l = split(self.model, self.leaves)
        first, *blocks, last = split(self.model, params)
        slots = exchange(self.assignment, blocks_l, blocks, dtype)
        return [tree_map(one, first_l, first), *slots, tree_map(one, last_l, last)]

    def grads(
        self, shards: Sequence[Tree[ParamShard]], data: Data, keys_of: KeysOf
    ) -> tuple[LossOutput, list[Tree[GradShard | None]]]:
        """Sums of the head, zeros but on the last stage, and this stage's accumulated float32 G shards."""
        return _Ticks(self, shards, data, keys_of).train()

    def reduce(self, grads: Sequence[Tree[GradShard | None]], reduction: Reduction) -> Tree[OptGrad | None]:
        """The OS shards of the whole tree's gradients, once a step, from the accumulated G shards of this stage."""

        def one(leaf: LeafPlan, grad: GradShard | None) -> OptGrad | None:
            return None if grad is None else reduce_accumulated(leaf, grad, reduction)

        def nothing(leaf: LeafPlan) -> OptGrad | None:
            return None if leaf.frozen else OptGrad(jnp.zeros(grad_shape(leaf, True), jnp.float32))

        first_l, *blocks_l, last_l = split(self.model, self.leaves)
        first, *slots, last = grads
        blocks = exchange_back(self.assignment, blocks_l, slots, reduction)
        # A leaf that several parts use has a gradient in each of them.
        parts = [tree_map(one, first_l, first), *blocks, tree_map(one, last_l, last)]
        return Uses(self.model, self.leaves).total(parts, nothing)

    def forward(self, shards: Sequence[Tree[ParamShard]], data: Data, keys_of: KeysOf) -> Any:
        """What the head gives for each microbatch, [microbatches, ...], on every stage; for evaluation and logits.

        Takes any number of microbatches.
        """
        return _Ticks(self, shards, data, keys_of).evaluate()

    def stage_leaves(self) -> list[LeafPlans]:
        """The `LeafPlan`s of one stage: of the embedding, each slot of its blocks, and the head."""
        first, *blocks, last = split(self.model, self.leaves)
        slots = range(self.assignment.num_slots)
        return [first, *(slot_leaves(self.assignment, blocks, slot) for slot in slots), last]


def make_pipeline(
    model: Model, leaves: LeafPlans, schedule: PipelineSchedule, gather: Gather, remat: Remat
) -> Pipeline:
    """The model on the stages of a schedule.

    A stage computes its part once more for the backward pass, from its input. `remat` is about that computation, in
    which FULL keeps everything but gathered parameters: a block is never computed three times.

    Args:
      model: the model.
      leaves: a `LeafPlan` in place of each parameter, whose dimension is split over `stage` last.
      schedule: of at least two stages.
      gather: how parameters are gathered.
      remat: what a block keeps.

    Raises:
      UserError: there are too few blocks, or blocks in the same place of two stages differ.
    """
    assert schedule.num_stages > 1
    assignment = assign_blocks(len(model.blocks), schedule.num_stages, schedule.virtual_stages)
    for slot in range(assignment.num_slots):
        first, *others = assignment.blocks(slot)
        for other in others:
            if model.blocks[other] != model.blocks[first]:
                raise UserError(
                    f"pipeline={schedule.num_stages}: blocks {first} and {other} of {model.name} differ, and "
                    "are in the same place of two stages, which run one program; give them one Part, or use pipeline=1"
                )
    _check_alike(split(model, leaves)[1:-1], assignment)
    remat = Remat.NONE if remat is Remat.FULL else remat
    return Pipeline(model, leaves, schedule, gather, remat, assignment)


def _check_alike(blocks: Sequence[LeafPlans], assignment: Assignment) -> None:
    """Raises UserError unless blocks in one place of several stages are stored alike; any of them may be frozen."""
    for slot in range(assignment.num_slots):
        first, *others = (jax.tree.leaves(blocks[number]) for number in assignment.blocks(slot))
        for a, b in ((a, b) for other in others for a, b in zip(first, other, strict=True)):
            if a.kind != dataclasses.replace(b.kind, frozen=a.frozen):
                raise UserError(
                    f"{a.path} and {b.path} are sharded differently, and are in the same place of two pipeline stages, "
                    "which run one program; give both the same rule, or use pipeline=1"
                )


class _Ticks:
    """The program of one call: the parameters, the data, and the scan over ticks."""

    def __init__(self, pipeline: Pipeline, shards: Sequence[Tree[ParamShard]], data: Data, keys_of: KeysOf) -> None:
        self.pipeline, self.shards, self.data, self.keys_of = pipeline, shards, data, keys_of
        self.model, self.assignment = pipeline.model, pipeline.assignment
        self.leaves = pipeline.stage_leaves()
        self.stage = lax.axis_index(STAGE)
        self.x = self._shape_between_stages()

    def train(self) -> tuple[LossOutput, list[Tree[GradShard | None]]]:
        schedule = self.pipeline.schedule
        assert len(self.data[1]) == schedule.num_microbatches
        # The last virtual stage goes forward inside its backward half.
        forwards, forward = schedule.forward.without(Kind.LAST).works()
        backwards, backward = schedule.backward.works()
        ahead = [self._forward_branch(kind, chunk) for kind, chunk in forwards]
        back = [self._backward_branch(kind, chunk) for kind, chunk in backwards]

        def tick(carry: Any, now: _Now) -> tuple[Any, None]:
            x, dx, kept, grads, sums = carry
            dy = self._send(dx, -1)
            kept = _write(kept, now.write, x)
            y = lax.switch(now.forward, ahead, x, self._microbatch(now.forward_microbatch))
            # The halves do not need each other, but in this order dx travels during the first and y during the second.
            y, dy = lax.optimization_barrier((y, dy))
            x = self._send(y, 1)
            item = self._microbatch(now.backward_microbatch)
            grads, sums, dx = lax.switch(now.backward, back, grads, sums, _read(kept, now.read), dy, item)
            # XLA would move a send at the end of a loop's body to its start, where nothing hides it.
            x, dx = lax.optimization_barrier((x, dx))
            return (x, dx, kept, grads, sums), None

        slots = schedule.slots
        table = (forward, schedule.forward.microbatch, backward, schedule.backward.microbatch, slots.write, slots.read)
        kept = jax.tree.map(lambda s: jnp.zeros((schedule.num_slots, *s.shape), s.dtype), self.x)
        grads = [self._zero_grads(part) for part in range(len(self.leaves))]
        start = (_zeros(self.x), _zeros(self.x), kept, grads, _zeros(self._head_shape()))
        (*_, grads, sums), _ = lax.scan(tick, start, _Now(*map(self._column, table)))
        return sums, grads

    def evaluate(self) -> Any:
        num_microbatches = len(self.data[1])
        schedule = self.pipeline.schedule
        half = forward_alone(schedule.num_stages, schedule.virtual_stages, num_microbatches)
        works, index = half.works()
        shape = self._head_shape()
        branches = [self._evaluation_branch(kind, chunk, shape) for kind, chunk in works]

        def tick(carry: Any, now: tuple[jax.Array, ...]) -> tuple[Any, None]:
            x, results = carry
            branch, microbatch, place = now
            y, result = lax.switch(branch, branches, x, self._microbatch(microbatch))
            return (self._send(y, 1), _write(results, place, result)), None

        place = np.where(half.kind == Kind.LAST, half.microbatch, -1)
        results = jax.tree.map(lambda s: jnp.zeros((num_microbatches, *s.shape), s.dtype), shape)
        table = tuple(map(self._column, (index, half.microbatch, place)))
        (_, results), _ = lax.scan(tick, (_zeros(self.x), results), table)
        return lax.psum(results, STAGE)

    # A branch for each kind of work: one `switch` costs a GPU one wait for its predicate, nested conditions several.
    def _forward_branch(self, kind: Kind, chunk: int) -> Callable[..., Any]:
        def forward(x: Any, item: Data) -> Any:
            return x if kind is Kind.IDLE else self._run(kind, chunk, {}, x, item)

        return forward

    def _evaluation_branch(self, kind: Kind, chunk: int, shape: Any) -> Callable[..., Any]:
        def forward(x: Any, item: Data) -> Any:
            if kind is Kind.IDLE:
                return x, _zeros(shape)
            result = self._run(kind, chunk, {}, x, item)
            return (x, result) if kind is Kind.LAST else (result, _zeros(shape))

        return forward

    def _backward_branch(self, kind: Kind, chunk: int) -> Callable[..., Any]:
        def backward(grads: list[Any], sums: LossOutput, x: Any, dy: Any, item: Data) -> Any:
            if kind is Kind.IDLE:
                return grads, sums, x
            # Only the parts that this work runs: the others' gradients pass through untouched.
            sinks = {part: self._zero_grads(part) for part in self._parts_of(kind, chunk)}

            def run(sinks: Sinks, x: Any) -> Any:
                result = self._run(kind, chunk, sinks, x, item)
                return (result[0][0], result) if kind is Kind.LAST else (result, None)

            result, vjp, added = jax.vjp(run, sinks, x, has_aux=True)
            more, dx = vjp(jnp.ones_like(result) if kind is Kind.LAST else dy)
            sums = _add(sums, added) if kind is Kind.LAST else sums
            return [_add(g, more[part]) if part in more else g for part, g in enumerate(grads)], sums, dx

        return backward

    def _run(self, kind: Kind, chunk: int, sinks: Sinks, x: Any, item: Data) -> Any:
        """One virtual stage on one microbatch: what the next one gets, or what the head gives."""
        batch, rows = item
        keys = self.keys_of(rows)
        if kind is Kind.FIRST:
            x = self.model.embed.apply(self._gathered(0, sinks), batch, keys)
        x = self._blocks(chunk, sinks, x, batch, keys)
        if kind is not Kind.LAST:
            return x
        embed = self._gathered(0, sinks) if self.model.tied else None
        return self.model.head.apply(self._gathered(len(self.leaves) - 1, sinks), embed, x, batch, keys)

    def _blocks(self, chunk: int, sinks: Sinks, x: Any, batch: Batch, keys: jax.Array) -> Any:
        slots = self.assignment.chunk_slots[chunk]
        # Keys by the number of the block in the model, so dropout does not depend on the stages.
        numbers = jnp.asarray(self.assignment.owner + 1)[self.stage]
        block_keys = [jax.vmap(jax.random.fold_in, (0, None))(keys, numbers[slot]) for slot in slots]
        states = [self._state(1 + slot, sinks) for slot in slots]
        blocks = [self._block(slot) for slot in slots]
        pipeline = self.pipeline
        return run_blocks(blocks, states, pipeline.gather, pipeline.remat, x, batch, block_keys)

    def _block(self, slot: int) -> Part:
        part = self.model.blocks[self.assignment.blocks(slot)[0]]
        if self.assignment.is_everywhere(slot):
            return part
        # Stages run one program, and a shorter stage has the identity in place of the block that it lacks.
        has_block = self.assignment.owner[:, slot] >= 0

        def apply(params: Any, x: Any, batch: Batch, key: jax.Array) -> Any:
            is_here = jnp.asarray(has_block)[lax.axis_index(STAGE)]
            return lax.cond(is_here, part.apply, lambda params, x, batch, key: x, params, x, batch, key)

        return dataclasses.replace(part, apply=apply)

    def _state(self, part: int, sinks: Sinks) -> PartState:
        leaves = self.leaves[part]
        own = sinks[part] if part in sinks else tree_map(lambda leaf: None, leaves)
        return PartState.of(leaves, self.shards[part], own)

    def _gathered(self, part: int, sinks: Sinks) -> Tree[Param]:
        return self.pipeline.gather(self._state(part, sinks))

    def _parts_of(self, kind: Kind, chunk: int) -> list[int]:
        """The parts whose parameters this work differentiates."""
        slots = [1 + slot for slot in self.assignment.chunk_slots[chunk]]
        if kind is Kind.FIRST:
            return [0, *slots]
        if kind is Kind.LAST:
            return [*([0] if self.model.tied else []), *slots, len(self.leaves) - 1]
        return slots

    def _zero_grads(self, part: int) -> Any:
        """Zeros of the shape of a part's G shards, for sinks and for their sum; None for frozen leaves."""

        def one(leaf: LeafPlan) -> jax.Array | None:
            return None if leaf.frozen else jnp.zeros(grad_shape(leaf, False), jnp.float32)

        return tree_map(one, self.leaves[part])

    def _microbatch(self, number: Any) -> Data:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False), self.data)

    def _column(self, table: np.ndarray) -> jax.Array:
        """[ticks]: this stage's column of a table [ticks, stages]."""
        return lax.dynamic_index_in_dim(jnp.asarray(table, jnp.int32), self.stage, axis=1, keepdims=False)

    def _send(self, x: Any, direction: int) -> Any:
        """To the next stage, or to the one before; from one end to the other only between chunks."""
        num_stages = self.pipeline.schedule.num_stages
        pairs = [(stage, (stage + direction) % num_stages) for stage in range(num_stages)]
        # The last stage's output goes nowhere if there is no next chunk on the first stage.
        if self.pipeline.schedule.virtual_stages == 1:
            pairs = [(source, target) for source, target in pairs if target - source == direction]
        return lax.ppermute(x, STAGE, pairs)

    def _shape_between_stages(self) -> Any:
        batch, rows = self._microbatch(0)
        x = jax.eval_shape(lambda: self.model.embed.apply(self._gathered(0, {}), batch, self.keys_of(rows)))
        leaves = jax.tree.leaves(x)
        if not leaves or not all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
            found = ", ".join(str(leaf.dtype) for leaf in leaves) or "nothing"
            raise UserError(
                f"the embedding of {self.model.name} gives {found}; with pipeline={self.pipeline.schedule.num_stages} "
                "it must give floating-point arrays, which are sent from stage to stage; let blocks read the rest from "
                "`batch`, or use pipeline=1"
            )
        return x

    def _head_shape(self) -> Any:
        last = len(self.assignment.chunk_slots) - 1
        return jax.eval_shape(lambda: self._run(Kind.LAST, last, {}, _zeros(self.x), self._microbatch(0)))


def _zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _write(kept: Any, slot: jax.Array, x: Any) -> Any:
    """Puts `x` at `slot`, or leaves `kept` as it is where that is -1."""

    def write(kept: jax.Array, x: jax.Array) -> jax.Array:
        place = jnp.maximum(slot, 0)
        before = lax.dynamic_index_in_dim(kept, place, keepdims=False)
        return lax.dynamic_update_index_in_dim(kept, jnp.where(slot >= 0, x, before), place, 0)

    return jax.tree.map(write, kept, x)


def _read(kept: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, jnp.maximum(slot, 0), keepdims=False), kept)
