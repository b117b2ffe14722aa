"""From a strategy, a mesh and abstract parameters to one `LeafPlan` a leaf: what is sharded where, and why not.

Inside a leaf one dimension is split over the axes in the order (param, grad, opt), param most significant,
so that gathering the opt and grad axes leaves one contiguous parameter shard. Dimension 0 is preferred: no
transposes around its collectives. A leaf with no dimension that divides is padded, or replicated where it is
small and padding would cost more than an eighth; the plan says so, nothing is replicated silently.

What a model is cut into beside the strategy adds to a leaf: a dimension split over `tensor`; `stage` as its last opt
axis, whatever part of the model it is; `context`, and `tensor` where it is not split, as replica axes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.local_rows import local_ranks, shard_rows
from amsp_jax.engine.mesh import DataAxes, data_axes, find_nodes, make_mesh, mesh_axes
from amsp_jax.engine.parallel import CONTEXT, STAGE, TENSOR, ModelParallel
from amsp_jax.engine.trees import Tree, tree_map
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model, Params, Split
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
class Bytes:
    """Bytes on one device: P (the compute-dtype copy kept for the step, none where P = OS is sharded), G (the float32
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
      model: the model that the plan is valid for.
      parallel: what one copy of the model is cut into beside it.
    """

    mesh: Mesh | AbstractMesh
    degrees: Degrees
    leaves: LeafPlans
    compute_dtype: jnp.dtype
    strategy: Strategy
    model: Model
    parallel: ModelParallel = ModelParallel()

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
        """Of arrays [microbatches, rows, ...]: rows over every data axis; and the third dimension, the sequence, over
        `context` where it is split."""
        return P(None, self.axes.all or None, CONTEXT) if self.parallel.context > 1 else self.rows_spec

    @property
    def rows_spec(self) -> P:
        """Of arrays [microbatches, rows]: rows over every data axis."""
        return P(None, self.axes.all or None)

    @property
    def batch_sharding(self) -> NamedSharding:
        """`batch_spec` on this mesh."""
        return NamedSharding(self.mesh, self.batch_spec)

    def shard(self, rows: Mapping[str, Any]) -> dict[str, jax.Array]:
        """The global arrays of a batch, at `batch_sharding`, from the rows that this process holds.

        All processes call it together, each with the rows of its own data ranks: as many rows for each rank, one rank
        after another. Where one data rank has devices of several processes (tensor, context, pipeline), each of
        them gives the same rows. A single process gives all rows.

        Args:
          rows: numpy arrays [microbatches, local rows, ...] of 32 bits or less.

        Returns:
          Arrays [microbatches, rows of all data ranks, ...].

        Raises:
          UserError: the local rows do not divide by this process's data ranks, a value is wider than 32 bits, or
            names, dtypes and shapes are not the same in all processes.
        """
        return shard_rows(rows, self.batch_sharding, self._rows_sharding, self.degrees.ranks.total)

    def local_rows(self, num_rows: int) -> np.ndarray:
        """The numbers of the rows that this process gives to `shard`, of the `num_rows` of a global microbatch."""
        num_ranks = self.degrees.ranks.total
        if num_rows % num_ranks:
            raise UserError(f"num_rows={num_rows} does not divide by the {num_ranks} data ranks")
        numbers = np.arange(num_rows).reshape(num_ranks, -1)
        return numbers[local_ranks(self._rows_sharding, num_ranks)].reshape(-1)

    @property
    def _rows_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, self.rows_spec)

    @property
    def replicated(self) -> NamedSharding:
        """For scalars."""
        return NamedSharding(self.mesh, P())

    def bytes_per_device(self) -> Bytes:
        """By the strategy's arithmetic, padding included; of the stage with the most blocks."""
        return self._sum_bytes(jax.tree.leaves(self.leaves))

    def _sum_bytes(self, leaves: Sequence[LeafPlan]) -> Bytes:
        trained = [leaf for leaf in leaves if not leaf.frozen]
        master, moment = (sum(leaf.num_opt_shard for leaf in some) for some in (leaves, trained))
        copied = [leaf for leaf in leaves if leaf.has_copy(self.compute_dtype)]
        copies = self._of_a_stage([(leaf, leaf.num_params_shard) for leaf in copied])
        grads = self._of_a_stage([(leaf, leaf.num_grads_shard) for leaf in trained])
        return Bytes(
            params=copies * self.compute_dtype.itemsize,
            grads=grads * 4,
            master=master * MASTER_BYTES,
            moments=moment * 2 * 4,
        )

    def _of_a_stage(self, values: Sequence[tuple[LeafPlan, int]]) -> int:
        """The sum of values that leaves take on a stage: of equal blocks as many as the fullest stage has."""
        blocks = sum(value for leaf, value in values if leaf.block >= 0)
        num_blocks = 1 + max((leaf.block for leaf in jax.tree.leaves(self.leaves)), default=-1)
        num_local = -(-num_blocks // self.parallel.pipeline)
        return sum(value for leaf, value in values if leaf.block < 0) + blocks * num_local // max(1, num_blocks)

    def __str__(self) -> str:
        return _table(self)


def make_plan(
    strategy: Strategy | str,
    model: Model,
    *,
    devices: Sequence[jax.Device] | None = None,
    ranks: DataRanks | None = None,
    devices_per_node: int | None = None,
    parallel: ModelParallel | None = None,
    compute_dtype: Any = jnp.bfloat16,
    frozen: str | Sequence[str] = (),
) -> Plan:
    """Compiles a strategy for a model on devices.

    Args:
      strategy: or its text.
      model: only the shapes of its parameters are read.
      devices: all of them; `jax.devices()` if neither they nor `ranks` are given. Nodes are found as `find_nodes` says.
      ranks: the data ranks, of one stage where there are several. Without `devices` the plan is for devices that do
        not exist yet, and its mesh is abstract. With `devices`, these are given node by node.
      devices_per_node: takes this many devices, in their order, for a node.
      parallel: pipeline stages, context and tensor; none by default.
      compute_dtype: of gathered parameters.
      frozen: regular expressions; a parameter whose whole name matches one has no gradient and no optimizer state.

    Raises:
      UserError: the strategy does not fit the ranks, the devices are not as many, the model is not made for the parts
        that it is to be cut into, or a pattern of `frozen` matches no parameter.

    Example:
      >>> plan = make_plan("zero3", model)
      >>> print(make_plan("zero3", model, ranks=DataRanks(per_node=8, num_nodes=128)))
    """
    parallel, splits = parallel or ModelParallel(), model.splits()
    _check_parallel(model, parallel, splits)
    if ranks is not None and devices_per_node is not None:
        raise UserError(f"devices_per_node={devices_per_node} and ranks={ranks}: the ranks say both; leave one out")
    if ranks is None:
        devices, num_nodes = find_nodes(jax.devices() if devices is None else devices, devices_per_node)
        ranks = parallel.data_ranks(num_nodes, len(devices) // num_nodes, max(1, len(model.blocks)))
    params, blocks = model.abstract_params(), model.block_numbers()
    plan = _compile(strategy, model, params, ranks, devices, compute_dtype, parallel, splits, blocks)
    return dataclasses.replace(plan, leaves=_freeze(plan.leaves, (frozen,) if isinstance(frozen, str) else frozen))


def _freeze(leaves: LeafPlans, patterns: Sequence[str]) -> LeafPlans:
    names = [leaf.path for leaf in jax.tree.leaves(leaves)]
    for pattern in patterns:
        try:
            found = any(re.fullmatch(pattern, name) for name in names)
        except re.error as e:
            raise UserError(f"frozen={pattern!r} is no regular expression: {e}") from None
        if not found:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise UserError(
                f"frozen={pattern!r} matches no parameter; a pattern matches the whole name, such as {', '.join(near)}"
            )

    def one(leaf: LeafPlan) -> LeafPlan:
        is_frozen = any(re.fullmatch(pattern, leaf.path) for pattern in patterns)
        note = "; ".join(filter(None, (leaf.note, "frozen")))
        return dataclasses.replace(leaf, frozen=True, note=note) if is_frozen else leaf

    result = tree_map(one, leaves)
    if patterns and all(leaf.frozen for leaf in jax.tree.leaves(result)):
        raise UserError(f"frozen={list(patterns)!r} matches every parameter, and nothing is left to train")
    return result


def plan_parameters(
    strategy: Strategy | str,
    params: Params,
    ranks: DataRanks,
    devices: Sequence[jax.Device] | None = None,
    compute_dtype: Any = jnp.bfloat16,
    *,
    parallel: ModelParallel | None = None,
    splits: Params | None = None,
) -> Plan:
    """Compiles a strategy for a tree of abstract parameters that belongs to no model; see `make_plan`.

    Args:
      strategy, ranks, devices, compute_dtype, parallel: as of `make_plan`, the devices node by node.
      params: only shapes are read.
      splits: a `Split` or None in place of each parameter; None: no parameter is split.

    Returns:
      A plan of sizes and shardings; a step cannot be made of it.
    """
    model = Model.from_loss(_no_mathematics, lambda key: jax.tree.map(lambda x: jnp.zeros(x.shape), params))
    parallel = parallel or ModelParallel()
    return _compile(strategy, model, params, ranks, devices, compute_dtype, parallel, splits, None)


def _no_mathematics(params: Params, batch: Batch, rng: jax.Array) -> LossOutput:
    raise AssertionError("the plan is of parameters alone: plan_parameters")


def _compile(
    strategy: Strategy | str,
    model: Model,
    params: Params,
    ranks: DataRanks,
    devices: Sequence[jax.Device] | None,
    compute_dtype: Any,
    parallel: ModelParallel,
    splits: Params | None,
    blocks: Params | None,
) -> Plan:
    strategy = parse(strategy)
    degrees = _resolve(strategy, ranks, parallel)
    around = _Around.of(degrees, parallel)
    flat_splits = jax.tree.leaves(splits, is_leaf=_is_split_or_none) if splits is not None else None
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = [
        _plan_leaf(path_name(path), tuple(x.shape), around, split)
        for (path, x), split in zip(flat, flat_splits or [None] * len(flat), strict=True)
    ]
    if blocks is not None and parallel.pipeline > 1:
        numbers = jax.tree.leaves(blocks)
        leaves = [dataclasses.replace(x, block=number) for x, number in zip(leaves, numbers, strict=True)]
    mesh = make_mesh(degrees, devices, parallel)
    if not jnp.issubdtype(jnp.dtype(compute_dtype), jnp.floating):
        raise UserError(
            f"compute_dtype={jnp.dtype(compute_dtype).name}: a model computes in a dtype of floating point, as bfloat16"
        )
    planned = jax.tree.unflatten(structure, leaves)
    return Plan(mesh, degrees, planned, jnp.dtype(compute_dtype), strategy, model, parallel)


def _check_parallel(model: Model, parallel: ModelParallel, splits: Params | None) -> None:
    """Raises UserError unless the model is made for the parts that it is to be cut into."""
    inner = {"TENSOR": parallel.tensor, "CONTEXT": parallel.context}
    if splits is None and (asked := [f"{name}={size}" for name, size in inner.items() if size > 1]):
        raise UserError(
            f"{' and '.join(asked)}: {model.name} does not say how its parameters are split (Part.splits); "
            "leave it at 1, or declare the splits and use the operators of amsp_jax.engine.tensor"
        )
    if parallel.pipeline > 1 and not model.blocks:
        raise UserError(
            f"PIPELINE={parallel.pipeline}: {model.name} declares no blocks that stages could share; leave it at 1"
        )
    if parallel.pipeline > max(1, len(model.blocks)):
        raise UserError(
            f"PIPELINE={parallel.pipeline} is more stages than {model.name} has blocks, {len(model.blocks)}; "
            f"choose at most {len(model.blocks)}"
        )


def _resolve(strategy: Strategy, ranks: DataRanks, parallel: ModelParallel) -> Degrees:
    try:
        return strategy.resolve(ranks)
    except UserError as e:
        if parallel.total == 1:
            raise
        raise UserError(f"{e}. These are the data ranks that {parallel} leaves") from None


def _is_split_or_none(x: Any) -> bool:
    return x is None or isinstance(x, Split)


@dataclasses.dataclass(frozen=True)
class _Around:
    """What all leaves have in common: axes by role, with stage, context and tensor among them; and sizes."""

    data: DataAxes
    opt: tuple[str, ...]
    replica: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    shards: int
    tensor: int

    @classmethod
    def of(cls, degrees: Degrees, parallel: ModelParallel) -> _Around:
        data = data_axes(degrees)
        stage = (STAGE,) if parallel.pipeline > 1 else ()
        context = (CONTEXT,) if parallel.context > 1 else ()
        sizes = tuple(mesh_axes(degrees, parallel).items())
        shards = degrees.opt_state.total * parallel.pipeline
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


def _plan_leaf(path: str, shape: tuple[int, ...], around: _Around, split: Split | None) -> LeafPlan:
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
            f"TENSOR={num_ranks} is more than the {most} {split.name} of {path} (dimension {split.dim}, {length} "
            f"long); choose TENSOR={most} or fewer"
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
        part = plan._sum_bytes(members[key])
        sums = (f"{part.params:,}", f"{part.grads:,}", f"{part.master + part.moments:,}")
        rows.append((name, str(count), "x".join(map(str, shape)), *map(spec_text, specs), *sums))
        if note:
            notes.append(f"  {name}: {note}")
    total = plan.bytes_per_device()
    sums = (f"{total.params:,}", f"{total.grads:,}", f"{total.master + total.moments:,}")
    rows.append(("total", str(sum(groups.values())), "", "", "", "", *sums))
    axes = ", ".join(f"{name} {size}" for name, size in plan.mesh.shape.items())
    head = [f"strategy  {plan.strategy}", f"degrees   {plan.degrees} on {plan.degrees.ranks}", f"mesh      {axes}"]
    head += [f"parallel  {plan.parallel}"] if plan.parallel.total > 1 else []
    head += [f"warning   {w}" for w in plan.degrees.warnings]
    foot = [
        f"P: {plan.compute_dtype.name} copy kept for the step, none where P = OS is sharded; G: float32, while "
        "microbatches accumulate; OS: float32 master and two moments",
        f"sum: {total.total:,} bytes on each device ({total.total / 2**30:.2f} GiB), before activations",
    ]
    return "\n".join(head + _align(rows) + notes + foot)


def spec_text(spec: P) -> str:
    """`0:inter_opt+intra_param 1:tensor`: the sharded dimensions and their axes; `replica` if none."""
    parts = [(dim, (axes,) if isinstance(axes, str) else axes) for dim, axes in enumerate(spec) if axes]
    return " ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in parts) or "replica"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = {1, *range(len(rows[0]) - 3, len(rows[0]))}
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
