"""The model on one microbatch, inside `shard_map`: each part's parameters are gathered where the part runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from amsp_jax.engine.barriers import tie_cotangents
from amsp_jax.engine.block_backward import run_blocks
from amsp_jax.engine.collectives import param_shard
from amsp_jax.engine.context import check_sequence, zigzag
from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.local_rows import SEQUENCES, batch_counts, check_is_batch, listed
from amsp_jax.engine.parallel import CONTEXT
from amsp_jax.engine.parts import Gather, PartState
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.rematerialization import Remat, policy
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.trees import Master, Param, ParamShard, Sink, Tree, tree_map
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model


@flax.struct.dataclass
class LossSums:
    """Sums over the global batch.

    Attributes:
      loss: sum of the losses.
      weight: sum of the weights.
      aux: the model's `aux`, each leaf summed.
    """

    loss: jax.Array
    weight: jax.Array
    aux: Any

    @classmethod
    def of(cls, output: LossOutput) -> LossSums:
        """The sums that the model's head returns."""
        (loss, weight), aux = output
        return cls(loss=loss, weight=weight, aux=aux)


def summing_in_float32(model: Model) -> Model:
    """Returns the model with sums of losses and weights in float32, as they are added up over microbatches and ranks:
    a bfloat16 sum stands still at 256 tokens that are added one by one."""

    def apply(*args: Any) -> LossOutput:
        output = _applied(model, *args)
        try:
            (total, weight), aux = output
        except (TypeError, ValueError):
            raise _not_sums(output) from None
        if jnp.shape(total) or jnp.shape(weight):
            raise _not_sums(output)
        return (jnp.asarray(total, jnp.float32), jnp.asarray(weight, jnp.float32)), aux

    return dataclasses.replace(model, head=dataclasses.replace(model.head, apply=apply))


def _applied(model: Model, *args: Any) -> Any:
    """What the head returns; a head that uses an embedding which it is not given gets more than Python's message."""
    try:
        return model.head.apply(*args)
    except (TypeError, AttributeError) as error:
        if model.tied or "NoneType" not in str(error):
            raise
        raise UserError(
            f"the head of {model.name} uses its embedding's parameters, but gets None ({error}); say tied=True, with "
            "which the head gets them"
        ) from error


def _not_sums(output: Any) -> UserError:
    return UserError(
        f"the model's loss returned arrays of shapes {jax.tree.map(jnp.shape, output)}; it must return ((loss_sum, "
        "weight_sum), aux): two scalars summed over all rows and tokens (not means), and a dict of extra sums, {} if "
        "there are none"
    )


def prepared(plan: Plan, batch: Batch) -> tuple[Batch, jax.Array]:
    """Checks a batch and puts its sequences in the order in which `context` ranks share them.

    Args:
      plan: of the model.
      batch: arrays [microbatches, rows, ...].

    Returns:
      The batch, and [microbatches, rows] int32: the number of each row in the global batch.

    Raises:
      UserError: the arrays are not of equal numbers of microbatches and rows, the rows do not divide by the data ranks,
        or a sequence does not divide by the context and tensor ranks.
    """
    check_is_batch(batch)
    shapes = {name: jnp.shape(x) for name, x in batch.items()}
    num_microbatches, num_rows = batch_counts(shapes)
    # Here and not in the model: from inside `shard_map` jax would report shapes of one device.
    num_ranks, num_context, num_tensor = plan.degrees.ranks.total, plan.parallel.context, plan.parallel.tensor
    if num_rows % num_ranks:
        raise UserError(f"a batch of {listed(shapes)}: its {num_rows} rows must divide by the {num_ranks} data ranks")
    if num_context > 1 and (short := [name for name, each in shapes.items() if len(each) < 3]):
        raise UserError(f"context={num_context} divides sequences, and batch['{short[0]}'] has no third dimension")
    for name, each in shapes.items():
        # `context` cuts the third dimension of every array; what `tensor` cuts is the model's sequence.
        if len(each) > 2 and (num_context > 1 or name in SEQUENCES):
            check_sequence(each[2], num_context, num_tensor)
    rows = jnp.arange(num_microbatches * num_rows, dtype=jnp.int32).reshape(num_microbatches, num_rows)
    if num_context == 1:
        return batch, rows
    return {name: x[:, :, zigzag(x.shape[2], num_context)] for name, x in batch.items()}, rows


def row_keys(seed: Any, step: Any, rows: jax.Array) -> jax.Array:
    """One PRNG key per row of the global batch: a function of (seed, step, row), so the same on every mesh."""
    # No key depends on a device or a microbatch, so dropout is the same however rows are dealt.
    key = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def block_keys(keys: jax.Array, number: int) -> jax.Array:
    """One PRNG key per row for a block; blocks count from 1."""
    return jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)


def global_sums(plan: Plan, sums: LossSums) -> LossSums:
    """Sums over the data ranks and the parts of a sequence; tensor ranks and stages have equal sums."""
    axes = plan.axes.all + ((CONTEXT,) if plan.parallel.context > 1 else ())
    return jax.tree.map(lambda x: lax.psum(x, axes), sums) if axes else sums


def param_shards(plan: Plan, masters: Tree[Master]) -> Tree[ParamShard]:
    """The P shards of a step, from the master's OS shards."""

    def one(leaf: LeafPlan, master: Master) -> ParamShard:
        return param_shard(leaf, master, plan.compute_dtype)

    return tree_map(one, plan.leaves, masters)


def gather_of(plan: Plan, settings: StepSettings, is_last: bool = False) -> Gather:
    """How a step gathers parameters."""
    return Gather(plan.compute_dtype, settings.reduction, is_last)


def apply_model(
    model: Model, gather: Gather, remat: Remat, states: Sequence[PartState], batch: Batch, keys: jax.Array
) -> Any:
    """Applies the model to one microbatch; differentiable in the sinks of `states`.

    Args:
      model: the model.
      gather: how parameters are gathered.
      remat: what blocks keep.
      states: of the embedding, each block and the head.
      batch: arrays [rows, ...].
      keys: [rows].

    Returns:
      What the head gives.
    """
    first, *blocks, last = states
    embed = gather(first)
    x = model.embed.apply(embed, batch, keys)
    keys_of_blocks = [block_keys(keys, number) for number in range(1, len(blocks) + 1)]
    x = run_blocks(model.blocks, blocks, gather, remat, x, batch, keys_of_blocks)
    head = _head_of(model, gather, remat, last)
    return head(last.sinks, (last.shards, last.totals), embed if model.tied else None, x, batch, keys)


def _head_of(model: Model, gather: Gather, remat: Remat, last: PartState) -> Callable[..., Any]:
    # The blocks' second gathers, where there are any, are not to wait for the gradient of the head's matrix.
    has_gathers = any(leaf.param_axes for leaf in jax.tree.leaves(last.leaves))

    def head(
        sinks: Tree[Sink | None], shards: Any, embed: Tree[Param] | None, x: Any, batch: Batch, keys: jax.Array
    ) -> Any:
        params = gather(PartState(last.leaves, shards[0], sinks, shards[1]))
        if not has_gathers:
            # Otherwise XLA puts the matrix's gradient off and keeps the logits' cotangents for it.
            x, params = tie_cotangents(x, params)
        return model.head.apply(params, embed, x, batch, keys)

    if model.blocks:
        return head
    # The whole model: it must not keep its gathered parameters, and the names of projections mean nothing in it.
    return jax.checkpoint(head, policy=policy(Remat.FULL if remat is Remat.FULL else Remat.NONE), prevent_cse=False)
