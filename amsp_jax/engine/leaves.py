"""How one leaf is stored and communicated: `LeafPlan`, and the choice of the dimensions that are split.

Inside a leaf one dimension is split over the axes in the order (param, grad, opt), param most significant,
so that gathering the opt and grad axes leaves one contiguous parameter shard. Dimension 0 is preferred: no
transposes around its collectives. A leaf with no dimension that divides is padded, or replicated where it is
small and padding would cost more than an eighth; the plan says so, nothing is replicated silently.

What a model is cut into beside the strategy adds to a leaf: a dimension split over `tensor`; `stage` as its last opt
axis, whatever part of the model it is; `context`, and `tensor` where it is not split, as replica axes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.mesh import DataAxes, data_axes, mesh_axes
from amsp_jax.engine.parallel import CONTEXT, STAGE, TENSOR, ModelParallel
from amsp_jax.engine.trees import Tree
from amsp_jax.errors import UserError
from amsp_jax.model import Split
from amsp_jax.strategy import Degrees

MASTER_BYTES = 4
"""The master copy of a parameter, float32."""

LARGE_LEAF = 2**20
"""A leaf of this many values is padded whatever that costs, a smaller one at most by an eighth."""


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """How one leaf is stored and communicated.

    Attributes:
      path: its name, `blocks.0.attention.query`.
      shape: its true shape.
      dim: the sharded dimension; None if the leaf is replicated.
      padded: the stored length of that dimension, a multiple of its shards.
      param_axes, grad_axes, opt_axes: mesh axes that `dim` is split over, for P; added for G; added for OS.
      replica_axes: axes that hold equal copies; gradients are summed over them once a step.
      axis_size: sizes of all axes of the mesh.
      note: why it is not sharded as asked, or empty.
      split_dim: the dimension that is split over `tensor`, outside of `dim`'s axes if it is the same; or None.
      split_padded: its stored length.
      block: the number of its block among those that pipeline stages share; -1 if it is of none.
      frozen: it has no gradient and no optimizer state; its master never changes.
    """

    path: str
    shape: tuple[int, ...]
    dim: int | None
    padded: int
    param_axes: tuple[str, ...]
    grad_axes: tuple[str, ...]
    opt_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    axis_size: tuple[tuple[str, int], ...]
    note: str = ""
    split_dim: int | None = None
    split_padded: int = 0
    block: int = -1
    frozen: bool = False

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of the stored global array, padding included."""
        return _with(_with(self.shape, self.dim, self.padded), self.split_dim, self.split_padded)

    @property
    def rank_shape(self) -> tuple[int, ...]:
        """The shape that the model sees: true but for the split dimension, a tensor rank's piece of the padded one."""
        return _with(self.shape, self.split_dim, self.split_padded // dict(self.axis_size).get(TENSOR, 1))

    @property
    def rank_storage_shape(self) -> tuple[int, ...]:
        """`rank_shape` with the padding of `dim`."""
        return self.rank_shape if self.dim == self.split_dim else _with(self.rank_shape, self.dim, self.padded)

    @property
    def is_padded(self) -> bool:
        """Whether the stored array is longer than the leaf."""
        return self.storage_shape != self.shape

    @property
    def kind(self) -> LeafPlan:
        """The leaf without its name and place: those of one kind are stored and communicated alike."""
        return dataclasses.replace(self, path="", note="", block=-1)

    def has_copy(self, dtype: Any) -> bool:
        """Whether a copy of the P shard in a compute dtype is kept for the step.

        Not where P = OS: a shard of the master is cast at each use, which is less work than its gather. A master that
        is whole on each device is cast once.
        """
        return bool(self.grad_axes or self.opt_axes) or not (self.param_axes or jnp.dtype(dtype) == jnp.float32)

    def _spec(self, axes: tuple[str, ...]) -> P:
        over: dict[int, tuple[str, ...]] = {} if self.split_dim is None else {self.split_dim: (TENSOR,)}
        if self.dim is not None and axes:
            over[self.dim] = over.get(self.dim, ()) + axes
        entries = [over.get(dim, ()) for dim in range(max(over, default=-1) + 1)]
        return P(*[axes if len(axes) > 1 else axes[0] if axes else None for axes in entries])

    @property
    def params_spec(self) -> P:
        """P: over the param axes."""
        return self._spec(self.param_axes)

    @property
    def grads_spec(self) -> P:
        """G: over the param and grad axes."""
        return self._spec(self.param_axes + self.grad_axes)

    @property
    def opt_spec(self) -> P:
        """OS, the master copy included: over the param, grad and opt axes."""
        return self._spec(self.param_axes + self.grad_axes + self.opt_axes)

    def shard_shape(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The shape of one device's part when `dim` is split over `axes`, the tensor axis apart."""
        shape = self.rank_storage_shape
        if self.dim is None:
            return shape
        sizes = dict(self.axis_size)
        return _with(shape, self.dim, shape[self.dim] // math.prod(sizes[a] for a in axes))

    @property
    def num_params_shard(self) -> int:
        """Values of P a device holds."""
        return math.prod(self.shard_shape(self.param_axes))

    @property
    def num_grads_shard(self) -> int:
        """Values of G a device holds."""
        return math.prod(self.shard_shape(self.param_axes + self.grad_axes))

    @property
    def num_opt_shard(self) -> int:
        """Values of the master, or of one moment, a device holds."""
        return math.prod(self.shard_shape(self.param_axes + self.grad_axes + self.opt_axes))


def _with(shape: tuple[int, ...], dim: int | None, length: int) -> tuple[int, ...]:
    """`shape` with another length of `dim`."""
    return shape if dim is None else (*shape[:dim], length, *shape[dim + 1 :])


LeafPlans = Tree[LeafPlan]
"""A plan in place of each parameter."""


@dataclasses.dataclass(frozen=True)
class LeafAxes:
    """Axes by role, with stage, context and tensor among them, and sizes: equal for all leaves of one strategy."""

    data: DataAxes
    opt: tuple[str, ...]
    replica: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    shards: int
    tensor: int

    @classmethod
    def of(
        cls, degrees: Degrees, parallel: ModelParallel, rules: Sequence[Degrees] = (), rule: int | None = None
    ) -> LeafAxes:
        """The axes of leaves that a rule decides; of the strategy's own if `rule` is None."""
        data = data_axes(degrees, rules, rule)
        stage = (STAGE,) if parallel.pipeline > 1 else ()
        context = (CONTEXT,) if parallel.context > 1 else ()
        sizes = tuple(mesh_axes(degrees, parallel, rules).items())
        shards = (degrees if rule is None else rules[rule]).opt_state.total * parallel.pipeline
        return cls(data, data.opt + stage, data.replica + context, sizes, shards, parallel.tensor)


def path_name(path: Sequence[Any]) -> str:
    """`blocks.0.attention.query` of a pytree path."""
    return ".".join(key_name(k) for k in path)


def key_name(key: Any) -> str:
    """The text of one key of a pytree path."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def crop(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Storage form to true shape: the padding at the end of a dimension is sliced off."""
    return x[tuple(slice(0, n) for n in shape)] if x.shape != tuple(shape) else x


def pad(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """True shape to storage form: zeros at the end of a dimension."""
    if x.shape == tuple(shape):
        return x
    return jnp.pad(x, [(0, stored - true) for true, stored in zip(x.shape, shape, strict=True)])


def plan_leaf(path: str, shape: tuple[int, ...], around: LeafAxes, split: Split | None) -> LeafPlan:
    """The plan of a leaf of this name and true shape."""
    split_dim, split_padded, split_note = _choose_split(path, shape, around.tensor, split)
    replica = around.replica if split_dim is not None or around.tensor == 1 else (*around.replica, TENSOR)
    seen = _with(shape, split_dim, split_padded // around.tensor)
    dim, padded, note = _choose_dim(seen, around.shards, split_dim)
    notes = "; ".join(filter(None, (split_note, note)))
    if dim is None:
        everywhere = around.data.param + around.data.grad + around.opt + replica
        return LeafPlan(path, shape, None, 0, (), (), (), everywhere, around.sizes, notes, split_dim, split_padded)
    padded = split_padded if dim == split_dim else padded
    axes = around.data.param, around.data.grad, around.opt, replica
    return LeafPlan(path, shape, dim, padded, *axes, around.sizes, notes, split_dim, split_padded)


def _choose_split(
    path: str, shape: tuple[int, ...], num_ranks: int, split: Split | None
) -> tuple[int | None, int, str]:
    """(dimension split over tensor ranks or None, its stored length, what to tell the user)."""
    if num_ranks == 1 or split is None:
        return None, 0, ""
    length = shape[split.dim]
    padded = split.padded(length, num_ranks)
    if padded is None and not split.replicate:
        most = max(split.units)
        raise UserError(
            f"tensor={num_ranks} is more than the {most} {split.name} of {path} (dimension {split.dim}, {length} "
            f"long); choose tensor={most} or fewer"
        )
    if padded is None:
        return None, 0, f"whole on each of {num_ranks} tensor ranks: it has {max(split.units)} {split.name}"
    if padded == length:
        return split.dim, padded, ""
    num = split.num_units(num_ranks) or 1
    name = f"{num} {split.name}"
    return split.dim, padded, f"dimension {split.dim}, {name}, padded {length} -> {padded} for {num_ranks} tensor ranks"


def _choose_dim(shape: tuple[int, ...], shards: int, split_dim: int | None) -> tuple[int | None, int, str]:
    """(dimension to shard or None, its stored length, what to tell the user), of a leaf as a tensor rank sees it.

    The split dimension is never padded here: the padding would lie between the ranks' pieces.
    """
    if math.prod(shape) == 0 or not shape:
        kind = "a scalar" if not shape else "it has no values"
        return None, 0, f"replicated: {kind}" if shards > 1 else ""
    for dim, size in enumerate(shape):
        if size % shards == 0:
            return dim, size, ""
    waste = [math.inf if dim == split_dim else -size % shards / size for dim, size in enumerate(shape)]
    dim = waste.index(min(waste))
    padded = shape[dim] + -shape[dim] % shards
    if waste[dim] <= 1 / 8 or (math.prod(shape) >= LARGE_LEAF and waste[dim] < math.inf):
        return dim, padded, f"dimension {dim} padded {shape[dim]} -> {padded} to divide by {shards}"
    return None, 0, f"replicated: small, and no dimension of {shape} divides by {shards}"
