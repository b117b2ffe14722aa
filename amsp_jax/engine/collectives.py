"""The collectives of one leaf, for use inside `shard_map`. A collective over no axes vanishes.

A gradient reaches `gather` backwards and leaves it as the cotangent of `sink`, a float32 array of the shape of the
leaf's gradient shard. So the gradient is summed in the dtype of the `Reduction`, kept in float32 and never rounded
again, whatever the compute dtype. Differentiating a bfloat16 all-gather would reduce, and return, bfloat16.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.engine.leaves import LeafPlan, crop, pad
from amsp_jax.engine.mesh import level
from amsp_jax.engine.trees import Grad, GradShard, Master, OptGrad, Param, ParamShard, Sink
from amsp_jax.errors import UserError

Axes = tuple[str, ...]
"""Names of mesh axes."""

GATHERED = "gathered"
"""The `checkpoint_name` of gathered parameters: no rematerialisation policy may save them."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How gradients are summed over ranks.

    A reduce-scatter rounds each partial sum to the dtype on the wire, as often as there are ranks. So a narrower dtype
    between nodes takes another form: ranks exchange the pieces of their gradients in it, and each adds up its own in
    `dtype`. What a node contributes is rounded once, and where it is one rank's gradient of the narrower dtype not at
    all. Inside a node, and over replica axes everywhere, gradients travel in `dtype`.

    Attributes:
      dtype: of the sums.
      inter_node_dtype: on the wire between nodes, where gradients are sharded over nodes.

    Raises:
      UserError: a dtype that is not of floating point, or an `inter_node_dtype` that differs and is not narrower.
    """

    dtype: jnp.dtype
    inter_node_dtype: jnp.dtype

    def __post_init__(self) -> None:
        for name, dtype in (("reduce_dtype", self.dtype), ("inter_node_dtype", self.inter_node_dtype)):
            if not jnp.issubdtype(dtype, jnp.floating):
                raise UserError(f"{name}={dtype.name}: gradients need a floating-point dtype, such as bfloat16")
        if self.inter_node_dtype != self.dtype and not self.is_narrower_between_nodes:
            raise UserError(
                f"inter_node_dtype={self.inter_node_dtype.name} is not narrower than reduce_dtype={self.dtype.name}, "
                f"in which gradients are summed; leave it out, or set reduce_dtype={self.inter_node_dtype.name}"
            )

    @classmethod
    def of(cls, reduce_dtype: Any, inter_node_dtype: Any = None) -> Reduction:
        """Builds a Reduction; `inter_node_dtype=None` means the same as `reduce_dtype`."""
        dtype = jnp.dtype(reduce_dtype)
        return cls(dtype, dtype if inter_node_dtype is None else jnp.dtype(inter_node_dtype))

    @property
    def is_narrower_between_nodes(self) -> bool:
        """Whether reductions between nodes take a form of their own."""
        return self.inter_node_dtype.itemsize < self.dtype.itemsize

    # A reduce-scatter in the narrower dtype would round every partial sum: its error grows with the nodes.
    def exchanges(self, axes: Axes) -> bool:
        """Whether a reduce-scatter over `axes`, one of `scatter_steps`, is an exchange of pieces."""
        return self.is_narrower_between_nodes and bool(axes) and all(level(axis) == "inter" for axis in axes)

    def dtype_over(self, axes: Axes) -> jnp.dtype:
        """The dtype on the wire of a reduce-scatter over `axes`, one of `scatter_steps`."""
        return self.inter_node_dtype if self.exchanges(axes) else self.dtype


def param_shard(leaf: LeafPlan, master: Master, dtype: jnp.dtype) -> ParamShard:
    """Makes the P shard of a step from the master's OS shard: cast, all-gather over the grad and opt axes.

    Where no copy is kept the master itself is the P shard, and the cast happens at each use.
    """
    if not leaf.has_copy(dtype):
        return ParamShard(master)
    # Cast first: half the bytes on the wire.
    return ParamShard(_all_gather(master.astype(dtype), leaf.grad_axes + leaf.opt_axes, leaf.dim))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather(leaf: LeafPlan, dtype: jnp.dtype, reduction: Reduction, shard: ParamShard, sink: Sink) -> Param:
    """Returns the leaf as the model sees it (`rank_shape`), in the compute dtype, gathered over the param axes.

    Backward, the gradient is reduce-scattered over the param and grad axes and given to `sink`.

    Args:
      leaf: its plan.
      dtype: of the result.
      reduction: how the gradient is summed.
      shard: the P shard.
      sink: float32 zeros of the G shard's shape; never read.
    """
    del reduction, sink
    return gathered(leaf, dtype, shard)


def gathered(leaf: LeafPlan, dtype: jnp.dtype, shard: ParamShard) -> Param:
    """Does what `gather` does, for a leaf that gets no gradient here."""
    whole = _all_gather(shard.astype(dtype), leaf.param_axes, leaf.dim)
    # The name lets rematerialisation policies refuse to keep whole parameters.
    return Param(checkpoint_name(crop(whole, leaf.rank_shape), GATHERED))


def _gather_fwd(leaf: LeafPlan, dtype: Any, reduction: Any, shard: ParamShard, sink: Sink) -> Any:
    del reduction, sink
    return gathered(leaf, dtype, shard), None


def _gather_bwd(leaf: LeafPlan, dtype: Any, reduction: Any, residual: None, grad: Grad) -> Any:
    # None: the shard gets no cotangent, its gradient leaves through the sink.
    del dtype, residual
    return None, reduce(leaf, grad, reduction)


gather.defvjp(_gather_fwd, _gather_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_last(
    leaf: LeafPlan, dtype: jnp.dtype, reduction: Reduction, shard: ParamShard, total: GradShard | None, sink: Sink
) -> Param:
    """Does what `gather` does, in the last microbatch of a step: backward, the reductions of once a step are made, too.

    So they run beside the backward pass of the last microbatch.

    Args:
      leaf, dtype, reduction, shard: as in `gather`.
      total: the float32 G shard of the microbatches before, or None; the gradient is added to it. A leaf that the
        model uses twice has it in one use only.
      sink: float32 zeros of the OS shard's shape, to which `reduce_accumulated` of that sum is given; never read.
    """
    del reduction, total, sink
    return gathered(leaf, dtype, shard)


def _gather_last_fwd(leaf: LeafPlan, dtype: Any, reduction: Any, shard: Any, total: Any, sink: Any) -> Any:
    del reduction, sink
    return gathered(leaf, dtype, shard), total


def _gather_last_bwd(leaf: LeafPlan, dtype: Any, reduction: Any, total: Any, grad: Grad) -> Any:
    del dtype
    return None, None, reduce_last(leaf, reduction, total, grad)


gather_last.defvjp(_gather_last_fwd, _gather_last_bwd)


def reduce_last(leaf: LeafPlan, reduction: Reduction, total: GradShard | None, grad: Grad) -> OptGrad:
    """The OS shard of the sum of `total`, the G shard of the microbatches before or None, and a whole gradient."""
    shard = reduce(leaf, grad, reduction)
    # Added before the reduction over the opt axes: one reduction a step, not one a microbatch.
    return reduce_accumulated(leaf, shard if total is None else GradShard(total + shard), reduction)


@jax.custom_vjp
def use(whole: Param, sink: Sink) -> Param:
    """Returns `whole`, for one of several microbatches; its gradient becomes that of `sink`, in float32."""
    del sink
    return whole


def _use_fwd(whole: jax.Array, sink: jax.Array) -> Any:
    del sink
    return whole, None


def _use_bwd(residual: None, grad: jax.Array) -> Any:
    del residual
    return None, grad.astype(jnp.float32)


use.defvjp(_use_fwd, _use_bwd)


def reduce(leaf: LeafPlan, grad: Grad, reduction: Reduction) -> GradShard:
    """The float32 G shard of a whole gradient."""
    x = pad(grad, leaf.rank_storage_shape)
    for axes in _scattered_axes(leaf, reduction):
        x = _reduce_scatter(leaf, x, axes, reduction)
    return GradShard(x.astype(jnp.float32))


# The cost model counts these collectives, and a test holds them equal to the compiled program's.
def reduction_steps(leaf: LeafPlan, reduction: Reduction) -> list[Axes]:
    """The axes of each collective that reduces the gradient of a microbatch."""
    return [step for axes in _scattered_axes(leaf, reduction) for step in scatter_steps(axes, reduction)]


def _scattered_axes(leaf: LeafPlan, reduction: Reduction) -> list[Axes]:
    """Groups the param and grad axes: one reduce-scatter on one network level or with a step for each level, else two.

    One collective has half the launches; over two levels at once it would run at the speed of the slower one.
    """
    both = leaf.param_axes + leaf.grad_axes
    # Where gradients are narrower between nodes, `scatter_steps` has a collective for each level anyway.
    if reduction.is_narrower_between_nodes or len({level(axis) for axis in both}) <= 1:
        return [both]
    return [leaf.param_axes, leaf.grad_axes]


def scatter_steps(axes: Axes, reduction: Reduction) -> list[Axes]:
    """The axes of each collective of a reduce-scatter; none without axes.

    Where gradients are narrower between nodes, the axes between nodes come last: a rank then sends its part of the sum
    of its node.
    """
    outer = tuple(axis for axis in axes if reduction.exchanges((axis,)))
    inner = tuple(axis for axis in axes if axis not in outer)
    return [step for step in (inner, outer) if step]


def reduce_accumulated(leaf: LeafPlan, grad: GradShard, reduction: Reduction) -> OptGrad:
    """The OS shard of the summed gradient from the accumulated G shard, once a step.

    Reduce-scatter over the opt axes, all-reduce over the replica axes. The all-reduce is in the reduction's dtype
    between nodes, too. Float32 in and out.
    """
    x = _reduce_scatter(leaf, grad, leaf.opt_axes, reduction).astype(jnp.float32)
    if leaf.replica_axes:
        x = lax.psum(x.astype(reduction.dtype), leaf.replica_axes).astype(jnp.float32)
    return OptGrad(x)


def _all_gather(x: jax.Array, axes: Axes, dim: int | None) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _reduce_scatter(leaf: LeafPlan, x: jax.Array, axes: Axes, reduction: Reduction) -> jax.Array:
    """Sums over the ranks of `axes`; each rank has its piece of `leaf.dim`, the first axis most significant."""
    steps = scatter_steps(axes, reduction)
    if len(steps) > 1:
        # The steps scatter in an order of their own; a rank must still end with the piece that storage gives it.
        x = _in_order(leaf, x, axes, sum(steps, ()))
    for step in steps:
        if reduction.exchanges(step):
            x = _exchange_and_add(leaf, x, step, reduction)
        else:
            x = lax.psum_scatter(x.astype(reduction.dtype), step, scatter_dimension=leaf.dim, tiled=True)
    return x


def _exchange_and_add(leaf: LeafPlan, x: jax.Array, axes: Axes, reduction: Reduction) -> jax.Array:
    """Reduce-scatters with pieces that travel in `inter_node_dtype`; each rank adds up its own piece in `dtype`."""
    assert leaf.dim is not None
    pieces = _split(leaf, x.astype(reduction.inter_node_dtype), axes)
    arrived = lax.all_to_all(pieces, axes, leaf.dim, leaf.dim, tiled=True)
    # Widened before it is added up, so only what a node contributes has been rounded.
    return jnp.sum(arrived.astype(reduction.dtype), axis=leaf.dim)


def _split(leaf: LeafPlan, x: jax.Array, axes: Axes) -> jax.Array:
    """Splits `leaf.dim` into two dimensions: the pieces of the ranks of `axes`, and the values of one piece."""
    assert leaf.dim is not None
    sizes = dict(leaf.axis_size)
    num_pieces = math.prod(sizes[axis] for axis in axes)
    length = x.shape[leaf.dim] // num_pieces
    return x.reshape(*x.shape[: leaf.dim], num_pieces, length, *x.shape[leaf.dim + 1 :])


def _in_order(leaf: LeafPlan, x: jax.Array, before: Axes, after: Axes) -> jax.Array:
    """Reorders the pieces of `leaf.dim` from the order of one list of axes to that of another."""
    assert leaf.dim is not None
    sizes, dim = dict(leaf.axis_size), leaf.dim
    split = x.reshape(*x.shape[:dim], *(sizes[axis] for axis in before), -1, *x.shape[dim + 1 :])
    # A copy, which XLA fuses with the cast that follows.
    order = [dim + before.index(axis) for axis in after]
    return split.transpose(*range(dim), *order, *range(dim + len(before), split.ndim)).reshape(x.shape)
