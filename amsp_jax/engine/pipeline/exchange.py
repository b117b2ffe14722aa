"""Storage does not know stages: once a step the pieces of all blocks go to the stages that compute them, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from amsp_jax.engine.collectives import Reduction, param_shard, reduce_accumulated
from amsp_jax.engine.parallel import STAGE
from amsp_jax.engine.pipeline.schedule import Assignment
from amsp_jax.engine.plan import LeafPlan
from amsp_jax.model import Params


def exchange(assignment: Assignment, leaves: Sequence[Params], master: Sequence[Params], dtype: Any) -> list[Params]:
    """This stage's P shards, one tree a slot, from the OS shards of all blocks; zeros where the slot is missing.

    Args:
      assignment: of the blocks.
      leaves, master: one tree a block.
      dtype: of the copies.
    """
    slots = []
    for slot in range(assignment.num_slots):
        like = leaves[assignment.blocks(slot)[0]]
        zeros = jax.tree.map(jnp.zeros_like, master[assignment.blocks(slot)[0]])
        pieces = [master[block] if block >= 0 else zeros for block in assignment.owner[:, slot]]
        slots.append(jax.tree.map(lambda leaf, *xs: _own_shard(leaf, dtype, xs), like, *pieces))
    return slots


def _own_shard(leaf: LeafPlan, dtype: Any, pieces: Sequence[jax.Array]) -> jax.Array:
    if leaf.dim is None:
        return lax.dynamic_index_in_dim(jnp.stack(pieces), lax.axis_index(STAGE), keepdims=False)
    # `stage` is the least significant axis of the dimension, so the pieces of all stages make a contiguous shard.
    mine = _all_to_all(jnp.concatenate([x.astype(dtype) for x in pieces], leaf.dim), leaf.dim)
    return param_shard(_within_stage(leaf), mine, dtype)


def exchange_back(
    assignment: Assignment, leaves: Sequence[Params], grads: Sequence[Params], reduction: Reduction
) -> list[Params]:
    """The OS shards of every block's gradient, one tree a block, from the G shards of this stage's slots."""
    blocks: list[Params] = [None] * len(leaves)
    for slot in range(assignment.num_slots):
        like, structure = jax.tree.flatten(leaves[assignment.blocks(slot)[0]])
        pairs = zip(like, jax.tree.leaves(grads[slot]), strict=True)
        pieces = [_shards_of_all(leaf, grad, reduction, len(assignment.owner)) for leaf, grad in pairs]
        for stage, block in enumerate(assignment.owner[:, slot]):
            if block >= 0:
                blocks[block] = jax.tree.unflatten(structure, [shards[stage] for shards in pieces])
    return blocks


def _shards_of_all(leaf: LeafPlan, grad: jax.Array, reduction: Reduction, num_stages: int) -> Sequence[jax.Array]:
    if leaf.dim is None:
        mine = jnp.zeros((num_stages, *grad.shape), grad.dtype).at[lax.axis_index(STAGE)].set(grad)
        return list(reduce_accumulated(leaf, mine, reduction))
    reduced = reduce_accumulated(_within_stage(leaf), grad, reduction)
    return jnp.split(_all_to_all(reduced, leaf.dim), num_stages, leaf.dim)


def _within_stage(leaf: LeafPlan) -> LeafPlan:
    """The plan of a leaf that one stage has for itself."""
    return dataclasses.replace(leaf, opt_axes=tuple(axis for axis in leaf.opt_axes if axis != STAGE))


def _all_to_all(x: jax.Array, dim: int) -> jax.Array:
    return lax.all_to_all(x, STAGE, dim, dim, tiled=True)
