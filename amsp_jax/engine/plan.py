"""From a strategy, a mesh and abstract parameters to a `Plan`: what of each leaf is sharded where, and why not.

All leaves live on one mesh. Where the strategy has rules, its data axes are cut wherever the strategy of a rule needs a
cut, and each leaf has the roles of its own strategy on them.
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

from amsp_jax.engine.leaves import MASTER_BYTES, LeafAxes, LeafPlan, LeafPlans, path_name, plan_leaf
from amsp_jax.engine.local_rows import local_ranks, shard_rows
from amsp_jax.engine.mesh import DataAxes, data_axes, find_nodes, make_mesh
from amsp_jax.engine.parallel import CONTEXT, ModelParallel
from amsp_jax.engine.trees import tree_map
from amsp_jax.errors import UserError
from amsp_jax.model import Batch, LossOutput, Model, Params, Split
from amsp_jax.strategy import DataRanks, Degrees, Strategy, parse


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
      rules: degrees of the strategy's rules, in their order.
    """

    mesh: Mesh | AbstractMesh
    degrees: Degrees
    leaves: LeafPlans
    compute_dtype: jnp.dtype
    strategy: Strategy
    model: Model
    parallel: ModelParallel = ModelParallel()
    rules: tuple[Degrees, ...] = ()

    @property
    def axes(self) -> DataAxes:
        """Data axes by the roles that they have for leaves that no rule decides."""
        return data_axes(self.degrees, self.rules)

    @property
    def all_axes(self) -> tuple[DataAxes, ...]:
        """Data axes by role, of the strategy and of each rule."""
        return self.axes, *(data_axes(self.degrees, self.rules, i) for i in range(len(self.rules)))

    @property
    def block_degrees(self) -> Degrees:
        """The degrees of the rule, or of the strategy, that decides most values of the first block."""
        _, blocks, last = self.model.split(self.leaves)
        counts: Counter[int | None] = Counter()
        for leaf in jax.tree.leaves(blocks[0] if blocks else last):
            counts[self.strategy.rule_of(leaf.path)] += math.prod(leaf.shape)
        most = counts.most_common(1)[0][0] if counts else None
        return self.degrees if most is None else self.rules[most]

    @property
    def has_work_once_a_step(self) -> bool:
        """Whether some leaves are gathered or reduced once a step, and not with each microbatch alone."""
        return any(axes.grad or axes.opt or axes.replica for axes in self.all_axes)

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
      strategy: or its text. Its `rules` are pairs of a pattern and a strategy, or a dict; the setting is a dict.
      model: only the shapes of its parameters are read.
      devices: all of them; `jax.devices()` if neither they nor `ranks` are given. Nodes are found as `find_nodes` says.
      ranks: the data ranks, of one stage where there are several. Without `devices` the plan is for devices that do
        not exist yet, and its mesh is abstract. With `devices`, these are given node by node.
      devices_per_node: takes this many devices, in their order, for a node.
      parallel: pipeline stages, context and tensor; none by default.
      compute_dtype: of gathered parameters.
      frozen: regular expressions; a parameter whose whole name matches one has no gradient and no optimizer state;
        the bytes of its OS are those of its float32 master.

    Raises:
      UserError: an argument is of a wrong type, the strategy does not fit the ranks, the devices are not as many, the
        model is not made for the parts that it is to be cut into, or a pattern of `frozen` matches no parameter.

    Example:
      >>> plan = make_plan("zero3", model)
      >>> print(make_plan("zero3", model, ranks=DataRanks(per_node=8, num_nodes=128)))
    """
    _check_types(strategy, model)
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


def _check_types(strategy: Any, model: Any) -> None:
    """Raises UserError for a strategy or a model that is none, such as the two in the wrong order."""
    if isinstance(strategy, Model):
        raise UserError(
            f"make_plan: strategy is the model {strategy.name!r}; the order is make_plan(strategy, model), as "
            "make_plan('zero1', model)"
        )
    if not isinstance(model, Model):
        raise UserError(
            f"make_plan(strategy, model): model is of type {type(model).__name__}; give a Model, as "
            "Model.from_nnx, Model.from_loss or build_model('llama-tiny') make it"
        )


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

    def zeros(key: jax.Array) -> Params:
        return jax.tree.map(lambda x: jnp.zeros(x.shape), params)

    model = Model.from_loss(_no_mathematics, zeros, name=_NO_MODEL)
    parallel = parallel or ModelParallel()
    return _compile(strategy, model, params, ranks, devices, compute_dtype, parallel, splits, None)


def is_of_parameters_alone(plan: Plan) -> bool:
    """Whether the plan was made by `plan_parameters`, so that its model computes nothing."""
    return plan.model.name == _NO_MODEL


_NO_MODEL = "parameters without a model"


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
    degrees, rules = _resolve(strategy, ranks, parallel)
    around = {i: LeafAxes.of(degrees, parallel, rules, i) for i in (None, *range(len(rules)))}
    flat_splits = jax.tree.leaves(splits, is_leaf=_is_split_or_none) if splits is not None else None
    flat, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = [
        plan_leaf(path_name(path), tuple(x.shape), around[strategy.rule_of(path_name(path))], split)
        for (path, x), split in zip(flat, flat_splits or [None] * len(flat), strict=True)
    ]
    if blocks is not None and parallel.pipeline > 1:
        numbers = jax.tree.leaves(blocks)
        leaves = [dataclasses.replace(x, block=number) for x, number in zip(leaves, numbers, strict=True)]
    _check_rules(strategy, [leaf.path for leaf in leaves])
    mesh = make_mesh(degrees, devices, parallel, rules)
    if not jnp.issubdtype(jnp.dtype(compute_dtype), jnp.floating):
        raise UserError(
            f"compute_dtype={jnp.dtype(compute_dtype).name}: a model computes in floating point, such as bfloat16"
        )
    planned = jax.tree.unflatten(structure, leaves)
    return Plan(mesh, degrees, planned, jnp.dtype(compute_dtype), strategy, model, parallel, rules)


def _check_parallel(model: Model, parallel: ModelParallel, splits: Params | None) -> None:
    """Raises UserError unless the model is made for the parts that it is to be cut into."""
    inner = {"tensor": parallel.tensor, "context": parallel.context}
    if splits is None and (asked := [f"{name}={size}" for name, size in inner.items() if size > 1]):
        raise UserError(
            f"{' and '.join(asked)}: {model.name} does not say how its parameters are split (Part.splits); "
            "leave it at 1, or declare the splits and use the operators of amsp_jax.engine.tensor"
        )
    if parallel.pipeline > 1 and not model.blocks:
        raise UserError(
            f"pipeline={parallel.pipeline}: {model.name} declares no blocks that stages could share; leave it at 1"
        )
    if parallel.pipeline > max(1, len(model.blocks)):
        raise UserError(
            f"pipeline={parallel.pipeline} is more stages than {model.name} has blocks, {len(model.blocks)}; "
            f"choose at most {len(model.blocks)}"
        )


def _check_rules(strategy: Strategy, names: Sequence[str]) -> None:
    """Raises UserError where a rule decides no leaf."""
    decided = {strategy.rule_of(name) for name in names}
    for i, (pattern, _) in enumerate(strategy.rules):
        if i in decided:
            continue
        if any(re.fullmatch(pattern, name) for name in names):
            raise UserError(
                f"rules: {pattern!r} decides nothing: earlier rules match all of its parameters; move it up"
            )
        raise UserError(
            f"rules: {pattern!r} matches no parameter; a pattern matches the whole name, such as "
            f"{', '.join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))}"
        )


def _resolve(strategy: Strategy, ranks: DataRanks, parallel: ModelParallel) -> tuple[Degrees, tuple[Degrees, ...]]:
    """The degrees of the strategy and of its rules."""
    try:
        return strategy.resolve(ranks), strategy.resolve_rules(ranks)
    except UserError as e:
        if parallel.total == 1:
            raise
        raise UserError(f"{e}. These are the data ranks that {parallel} leaves") from None


def _is_split_or_none(x: Any) -> bool:
    return x is None or isinstance(x, Split)


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
    own = dataclasses.replace(plan.strategy, rules=())
    head = [f"strategy  {own}", f"degrees   {plan.degrees} on {plan.degrees.ranks}"]
    rules = zip(plan.strategy.rules, plan.rules, strict=True)
    head += [f"rule      {pattern}: {degrees}" for (pattern, _), degrees in rules] + [f"mesh      {axes}"]
    head += [f"parallel  {plan.parallel}"] if plan.parallel.total > 1 else []
    head += [f"warning   {w}" for degrees in (plan.degrees, *plan.rules) for w in degrees.warnings]
    has_frozen = any(leaf.frozen for leaf in jax.tree.leaves(plan.leaves))
    frozen = ", of a frozen leaf its float32 master alone" if has_frozen else ""
    foot = [
        f"P: {plan.compute_dtype.name} copy kept for the step, none where P = OS is sharded; G: float32, while "
        f"microbatches accumulate; OS: float32 master and two moments{frozen}",
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
