"""From a strategy, a mesh and abstract parameters to one `LeafPlan` a leaf: what is sharded where, and why not.

Inside a leaf one dimension is split over the axes in the order (param, grad, opt), param most significant,
so that gathering the opt and grad axes leaves one contiguous parameter shard. Dimension 0 is preferred: no
transposes around its collectives. A leaf with no dimension that divides is padded, or replicated where it is
small and padding would cost more than an eighth; the plan says so, nothing is replicated silently.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from amsp_jax.errors import UserError
from amsp_jax.mesh import DataAxes, axis_sizes, data_axes, make_mesh
from amsp_jax.model import Batch, Params
from amsp_jax.strategy import DataRanks, Degrees, Strategy, parse

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
      replica_axes: data axes that hold equal copies; gradients are summed over them once a step.
      axis_size: sizes of those axes.
      note: why it is not sharded as asked, or empty.
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

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """The shape of the stored global array, padding included."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.padded, *self.shape[self.dim + 1 :])

    @property
    def is_padded(self) -> bool:
        """Whether the stored array is longer than the leaf."""
        return self.storage_shape != self.shape

    @property
    def has_copy(self) -> bool:
        """Whether a compute-dtype copy of the P shard is kept for the step: not where P = OS, cast at each use."""
        return bool(self.grad_axes or self.opt_axes)

    def _spec(self, axes: tuple[str, ...]) -> P:
        if self.dim is None or not axes:
            return P()
        return P(*[None] * self.dim, axes if len(axes) > 1 else axes[0])

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
        """The shape of one device's part when `dim` is split over `axes`."""
        if self.dim is None:
            return self.shape
        sizes = dict(self.axis_size)
        shards = math.prod(sizes[a] for a in axes)
        shape = self.storage_shape
        return (*shape[: self.dim], shape[self.dim] // shards, *shape[self.dim + 1 :])

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


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes on one device: P (the compute-dtype copy kept for the step, none where P = OS), G (the float32
    accumulator of more than one microbatch), the float32 master and two float32 moments."""

    params: int
    grads: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """All four."""
        return self.params + self.grads + self.master + self.moments


@dataclasses.dataclass(frozen=True)
class Plan:
    """A strategy compiled for a model and a mesh.

    Attributes:
      mesh: of devices, or abstract.
      degrees: the resolved strategy.
      leaves: a `LeafPlan` in place of each parameter.
      compute_dtype: of gathered parameters.
      strategy: as it was asked for.
    """

    mesh: Mesh | AbstractMesh
    degrees: Degrees
    leaves: Params
    compute_dtype: jnp.dtype
    strategy: Strategy

    @property
    def axes(self) -> DataAxes:
        """Data axes by role."""
        return data_axes(self.degrees)

    def _shardings(self, attribute: str) -> Params:
        return jax.tree.map(lambda leaf: NamedSharding(self.mesh, getattr(leaf, attribute)), self.leaves)

    @property
    def param_shardings(self) -> Params:
        """`NamedSharding` of each leaf's P."""
        return self._shardings("params_spec")

    @property
    def grad_shardings(self) -> Params:
        """`NamedSharding` of each leaf's G."""
        return self._shardings("grads_spec")

    @property
    def opt_shardings(self) -> Params:
        """`NamedSharding` of each leaf's master copy and moments."""
        return self._shardings("opt_spec")

    @property
    def batch_spec(self) -> P:
        """Of arrays [microbatches, rows, ...]: rows over every data axis."""
        return P(None, self.axes.all or None)

    @property
    def batch_sharding(self) -> NamedSharding:
        """`batch_spec` on this mesh."""
        return NamedSharding(self.mesh, self.batch_spec)

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """Puts arrays [microbatches, rows, ...] on the devices at `batch_sharding`; one process only.

        Raises:
          UserError: the rows do not divide by the data ranks.
        """
        ranks = self.degrees.ranks.total
        for name, x in batch.items():
            if x.ndim < 2 or x.shape[1] % ranks:
                raise UserError(
                    f"batch['{name}'] has shape {x.shape}; a batch is [microbatches, rows, ...] and its rows divide by "
                    f"the {ranks} data ranks"
                )
        return jax.device_put(dict(batch), self.batch_sharding)

    @property
    def replicated(self) -> NamedSharding:
        """For scalars."""
        return NamedSharding(self.mesh, P())

    def bytes_per_device(self) -> Bytes:
        """By the strategy's arithmetic, padding included."""
        return _sum_bytes(jax.tree.leaves(self.leaves), self.compute_dtype)

    def __str__(self) -> str:
        return _table(self)


def make_plan(
    strategy: Strategy | str,
    params: Params,
    ranks: DataRanks,
    devices: Sequence[jax.Device] | None = None,
    compute_dtype: Any = jnp.bfloat16,
) -> Plan:
    """Compiles a strategy for a model on data ranks.

    Args:
      strategy: or its text.
      params: abstract parameters (`Model.abstract_params()`): only shapes are read.
      ranks: the data ranks.
      devices: node by node; None plans for devices that are not there.
      compute_dtype: of gathered parameters.

    Raises:
      UserError: the strategy does not fit the ranks, or the devices are not as many.
    """
    strategy = parse(strategy)
    degrees = strategy.resolve(ranks)
    axes = data_axes(degrees)
    sizes = tuple((axis, size) for axis, size in axis_sizes(degrees).items() if size > 1)
    leaves = jax.tree_util.tree_map_with_path(
        lambda path, x: _plan_leaf(path_name(path), tuple(x.shape), axes, sizes, degrees.opt_state.total), params
    )
    return Plan(make_mesh(degrees, devices), degrees, leaves, jnp.dtype(compute_dtype), strategy)


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


def _plan_leaf(
    path: str, shape: tuple[int, ...], axes: DataAxes, sizes: tuple[tuple[str, int], ...], shards: int
) -> LeafPlan:
    dim, padded, note = _choose_dim(shape, shards)
    if dim is None:
        return LeafPlan(path, shape, None, 0, (), (), (), axes.all, sizes, note)
    return LeafPlan(path, shape, dim, padded, axes.param, axes.grad, axes.opt, axes.replica, sizes, note)


def _choose_dim(shape: tuple[int, ...], shards: int) -> tuple[int | None, int, str]:
    """(dimension to shard or None, its stored length, what to tell the user)."""
    if math.prod(shape) == 0 or not shape:
        kind = "a scalar" if not shape else "it has no values"
        return None, 0, f"replicated: {kind}" if shards > 1 else ""
    for dim, size in enumerate(shape):
        if size % shards == 0:
            return dim, size, ""
    waste = [-size % shards / size for size in shape]
    dim = waste.index(min(waste))
    padded = shape[dim] + -shape[dim] % shards
    if waste[dim] <= 1 / 8 or math.prod(shape) >= LARGE_LEAF:
        return dim, padded, f"dimension {dim} padded {shape[dim]} -> {padded} to divide by {shards}"
    return None, 0, f"replicated: small, and no dimension of {shape} divides by {shards}"


def _sum_bytes(leaves: Sequence[LeafPlan], compute_dtype: jnp.dtype) -> Bytes:
    opt = sum(leaf.num_opt_shard for leaf in leaves)
    return Bytes(
        params=sum(leaf.num_params_shard * compute_dtype.itemsize for leaf in leaves if leaf.has_copy),
        grads=sum(leaf.num_grads_shard * 4 for leaf in leaves),
        master=opt * MASTER_BYTES,
        moments=opt * 2 * 4,
    )


def _table(plan: Plan) -> str:
    """Leaves of equal name (block numbers aside), shape and specs on one line, then the sums."""
    groups: Counter[tuple[Any, ...]] = Counter()
    members: dict[tuple[Any, ...], list[LeafPlan]] = {}
    for leaf in jax.tree.leaves(plan.leaves):
        name = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", leaf.path)
        key = (name, leaf.shape, leaf.params_spec, leaf.grads_spec, leaf.opt_spec, leaf.note)
        groups[key] += 1
        members.setdefault(key, []).append(leaf)
    rows: list[tuple[str, ...]] = [("leaf", "count", "shape", "P", "G", "OS", "bytes/device P", "G", "OS")]
    notes = []
    for key, count in groups.items():
        name, shape, *specs, note = key
        part = _sum_bytes(members[key], plan.compute_dtype)
        sums = (f"{part.params:,}", f"{part.grads:,}", f"{part.master + part.moments:,}")
        rows.append((name, str(count), "x".join(map(str, shape)), *map(spec_text, specs), *sums))
        if note:
            notes.append(f"  {name}: {note}")
    total = plan.bytes_per_device()
    sums = (f"{total.params:,}", f"{total.grads:,}", f"{total.master + total.moments:,}")
    rows.append(("total", str(sum(groups.values())), "", "", "", "", *sums))
    axes = ", ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    head = [f"strategy  {plan.strategy}", f"degrees   {plan.degrees} on {plan.degrees.ranks}", f"mesh      {axes}"]
    head += [f"warning   {w}" for w in plan.degrees.warnings]
    foot = [
        f"P: {plan.compute_dtype.name} copy kept for the step, none where P = OS; G: float32, while microbatches "
        "accumulate; OS: float32 master and two moments",
        f"sum: {total.total:,} bytes on each device ({total.total / 2**30:.2f} GiB), before activations",
    ]
    return "\n".join(head + _align(rows) + notes + foot)


def spec_text(spec: P) -> str:
    """`0:inter_opt+intra_param`: the sharded dimension and its axes; `replica` if none."""
    for dim, axes in enumerate(spec):
        if axes:
            return f"{dim}:" + "+".join((axes,) if isinstance(axes, str) else axes)
    return "replica"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {1, *range(len(rows[0]) - 3, len(rows[0]))}
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
