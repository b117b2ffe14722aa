"""Storage does not know stages: once a step the pieces of all blocks go to the stages that compute them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from amsp_jax.engine.collectives import Reduction, param_shard, reduce_accumulated
from amsp_jax.engine.leaves import LeafPlan, LeafPlans
from amsp_jax.engine.parallel import STAGE
from amsp_jax.engine.pipeline.schedule import Assignment
from amsp_jax.engine.trees import GradShard, Master, OptGrad, ParamShard, Tree, tree_map


def slot_leaves(assignment: Assignment, leaves: Sequence[LeafPlans], slot: int) -> LeafPlans:
    """The plans of a slot. Its leaf is frozen if it is frozen in the block of every stage: stages run one program."""
    first, *others = (leaves[block] for block in assignment.blocks(slot))

    def one(leaf: LeafPlan, *same: LeafPlan) -> LeafPlan:
        return dataclasses.replace(leaf, frozen=all(each.frozen for each in (leaf, *same)))

    result: LeafPlans = jax.tree.map(one, first, *others)
    return result


def exchange(
    assignment: Assignment, leaves: Sequence[LeafPlans], master: Sequence[Tree[Master]], dtype: jnp.dtype
) -> list[Tree[ParamShard]]:
    """This stage's P shards, one tree a slot, from the OS shards of all blocks; zeros where the slot is missing.

    Args:
      assignment: of the blocks.
      leaves, master: one tree a block.
      dtype: of the copies.
    """
    slots = []
    for slot in range(assignment.num_slots):
        zeros = jax.tree.map(jnp.zeros_like, master[assignment.blocks(slot)[0]])
        pieces = [master[block] if block >= 0 else zeros for block in assignment.owner[:, slot]]
        # One all-to-all a slot and leaf: each stage sends every other stage its piece of that stage's block.
        plans = slot_leaves(assignment, leaves, slot)
        shards: Tree[ParamShard] = jax.tree.map(lambda leaf, *xs: _own_shard(leaf, dtype, xs), plans, *pieces)
        slots.append(shards)
    return slots


def _own_shard(leaf: LeafPlan, dtype: jnp.dtype, pieces: Sequence[Master]) -> ParamShard:
    if leaf.dim is None:
        return ParamShard(lax.dynamic_index_in_dim(jnp.stack(pieces), lax.axis_index(STAGE), keepdims=False))
    # `stage` is the least significant axis of the dimension, so the pieces of all stages make a contiguous shard.
    mine = _all_to_all(jnp.concatenate([x.astype(dtype) for x in pieces], leaf.dim), leaf.dim)
    return param_shard(_within_stage(leaf), Master(mine), dtype)


def exchange_back(
    assignment: Assignment,
    leaves: Sequence[LeafPlans],
    grads: Sequence[Tree[GradShard | None]],
    reduction: Reduction,
) -> list[Tree[OptGrad | None]]:
    """The OS shards of every block's gradient, one tree a block, from the G shards of this stage's slots."""
    blocks: list[Tree[OptGrad | None]] = [Tree()] * len(leaves)
    num_stages = len(assignment.owner)

    def one(leaf: LeafPlan, grad: GradShard | None) -> Sequence[OptGrad] | None:
        return None if grad is None else _shards_of_all(leaf, grad, reduction, num_stages)

    for slot in range(assignment.num_slots):
        pieces = tree_map(one, slot_leaves(assignment, leaves, slot), grads[slot])
        for stage, block in enumerate(assignment.owner[:, slot]):
            if block >= 0:
                blocks[block] = _of_stage(leaves[block], pieces, stage)
    return blocks


def _of_stage(leaves: LeafPlans, pieces: Tree[Sequence[OptGrad] | None], stage: int) -> Tree[OptGrad | None]:
    """The gradient of one block of a slot; a leaf that is frozen in this block alone has none."""

    def one(leaf: LeafPlan, shards: Sequence[OptGrad] | None) -> OptGrad | None:
        return None if shards is None or leaf.frozen else shards[stage]

    return tree_map(one, leaves, pieces)


def _shards_of_all(leaf: LeafPlan, grad: GradShard, reduction: Reduction, num_stages: int) -> Sequence[OptGrad]:
    if leaf.dim is None:
        # Replicated leaves have no pieces to exchange; the all-reduce over `stage` adds up one entry a stage.
        mine = jnp.zeros((num_stages, *grad.shape), grad.dtype).at[lax.axis_index(STAGE)].set(grad)
        return [OptGrad(piece) for piece in reduce_accumulated(leaf, GradShard(mine), reduction)]
    reduced = reduce_accumulated(_within_stage(leaf), grad, reduction)
    return [OptGrad(piece) for piece in jnp.split(_all_to_all(reduced, leaf.dim), num_stages, leaf.dim)]


def _within_stage(leaf: LeafPlan) -> LeafPlan:
    """The plan of a leaf that one stage has for itself."""
    return dataclasses.replace(leaf, opt_axes=tuple(axis for axis in leaf.opt_axes if axis != STAGE))


def _all_to_all(x: jax.Array, dim: int) -> jax.Array:
    return lax.all_to_all(x, STAGE, dim, dim, tiled=True)
