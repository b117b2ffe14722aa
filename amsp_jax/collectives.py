"""The collectives of one leaf, for use inside `shard_map`. Those over no axes vanish.

A gradient reaches `gather` backwards and leaves it as the cotangent of `sink`, a float32 array of the shape of
the leaf's gradient shard: so it is summed in `reduce_dtype`, kept in float32 and never rounded again, whatever
the compute dtype.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from amsp_jax.mesh import level
from amsp_jax.plan import LeafPlan, crop, pad

GATHERED = "gathered"
"""The `checkpoint_name` of gathered parameters: no rematerialisation policy may save them."""


def param_shard(leaf: LeafPlan, master: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The P shard of a step from the master's OS shard: cast, all-gather over the grad and opt axes.

    Where no copy is kept the master itself is the P shard, and the cast happens at each use.
    """
    if not leaf.has_copy(dtype):
        return master
    return _all_gather(master.astype(dtype), leaf.grad_axes + leaf.opt_axes, leaf.dim)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather(leaf: LeafPlan, dtype: jnp.dtype, reduce_dtype: jnp.dtype, shard: jax.Array, sink: jax.Array) -> jax.Array:
    """The leaf as the model sees it (`rank_shape`), in the compute dtype: its P shard, gathered over the param axes.

    Backward, the gradient is reduce-scattered over the param and grad axes and given to `sink`.

    Args:
      leaf: its plan.
      dtype: of the result.
      reduce_dtype: of the reduction.
      shard: the P shard.
      sink: float32 zeros of the G shard's shape; never read.
    """
    del reduce_dtype, sink
    return _gathered(leaf, dtype, shard)


def _gathered(leaf: LeafPlan, dtype: jnp.dtype, shard: jax.Array) -> jax.Array:
    whole = _all_gather(shard.astype(dtype), leaf.param_axes, leaf.dim)
    return checkpoint_name(crop(whole, leaf.rank_shape), GATHERED)


def _gather_fwd(leaf: LeafPlan, dtype: Any, reduce_dtype: Any, shard: jax.Array, sink: jax.Array) -> Any:
    del reduce_dtype, sink
    return _gathered(leaf, dtype, shard), None


def _gather_bwd(leaf: LeafPlan, dtype: Any, reduce_dtype: Any, residual: None, grad: jax.Array) -> Any:
    del dtype, residual
    return None, _reduce(leaf, grad, reduce_dtype)


gather.defvjp(_gather_fwd, _gather_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def gather_last(
    leaf: LeafPlan, dtype: jnp.dtype, reduce_dtype: jnp.dtype, shard: jax.Array, total: Any, sink: jax.Array
) -> jax.Array:
    """`gather` in the last microbatch of a step: backward, what is reduced once a step is reduced here.

    Args:
      leaf, dtype, reduce_dtype, shard: as in `gather`.
      total: the float32 G shard of the microbatches before, or None; the gradient is added to it.
      sink: float32 zeros of the OS shard's shape, to which `reduce_accumulated` of that sum is given; never read.
    """
    del reduce_dtype, total, sink
    return _gathered(leaf, dtype, shard)


def _gather_last_fwd(leaf: LeafPlan, dtype: Any, reduce_dtype: Any, shard: Any, total: Any, sink: Any) -> Any:
    del reduce_dtype, sink
    return _gathered(leaf, dtype, shard), total


def _gather_last_bwd(leaf: LeafPlan, dtype: Any, reduce_dtype: Any, total: Any, grad: jax.Array) -> Any:
    del dtype
    grad = _reduce(leaf, grad, reduce_dtype)
    if total is not None:
        grad = total + grad
    return None, None, reduce_accumulated(leaf, grad, reduce_dtype)


gather_last.defvjp(_gather_last_fwd, _gather_last_bwd)


def _reduce(leaf: LeafPlan, grad: jax.Array, reduce_dtype: jnp.dtype) -> jax.Array:
    """The float32 G shard of one microbatch's whole gradient."""
    grad = pad(grad, leaf.rank_storage_shape)
    for axes in reduction_steps(leaf):
        grad = _reduce_scatter(grad, axes, leaf.dim, reduce_dtype)
    return grad.astype(jnp.float32)


def reduction_steps(leaf: LeafPlan) -> list[tuple[str, ...]]:
    """The axes of each reduction of a microbatch: param and grad together on one network level, else param first."""
    both = leaf.param_axes + leaf.grad_axes
    if len({level(axis) for axis in both}) <= 1:
        return [both]
    return [leaf.param_axes, leaf.grad_axes]


def reduce_accumulated(leaf: LeafPlan, grad: jax.Array, reduce_dtype: jnp.dtype) -> jax.Array:
    """The OS shard of the summed gradient from the accumulated G shard, once a step.

    Reduce-scatter over the opt axes, all-reduce over the replica axes. Float32 in and out.
    """
    grad = _reduce_scatter(grad, leaf.opt_axes, leaf.dim, reduce_dtype).astype(jnp.float32)
    if leaf.replica_axes:
        grad = lax.psum(grad.astype(reduce_dtype), leaf.replica_axes).astype(jnp.float32)
    return grad


def _all_gather(x: jax.Array, axes: tuple[str, ...], dim: int | None) -> jax.Array:
    return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def _reduce_scatter(x: jax.Array, axes: tuple[str, ...], dim: int | None, dtype: jnp.dtype) -> jax.Array:
    return lax.psum_scatter(x.astype(dtype), axes, scatter_dimension=dim, tiled=True) if axes else x
