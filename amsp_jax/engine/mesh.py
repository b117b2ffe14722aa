"""From degrees to a device mesh: the data ranks factored into nested axes, per network level.

On each level the sizes are s_p, s_g/s_p, s_os/s_g, s_dp/s_os for the roles param, grad, opt, replica.
Outer to inner the mesh is (between nodes: replica, opt, grad, param), then (inside a node: the same), so
parameter shards lie on adjacent devices (AMSP, IV-B). Around them lie pipeline stages, and inside them context and
tensor. Axes of size 1 are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from amsp_jax.engine.parallel import STAGE, ModelParallel
from amsp_jax.errors import UserError
from amsp_jax.strategy import Degrees

LEVELS = ("inter", "intra")
ROLES = ("replica", "opt", "grad", "param")


@dataclasses.dataclass(frozen=True)
class DataAxes:
    """The mesh axes of each role, only those larger than 1, between nodes before inside a node."""

    param: tuple[str, ...]
    grad: tuple[str, ...]
    opt: tuple[str, ...]
    replica: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Every data axis, the most significant of a sharded dimension first."""
        return self.param + self.grad + self.opt + self.replica


def level(axis: str) -> str:
    """`inter` or `intra`: the network level of a data axis."""
    return axis.partition("_")[0]


def axis_sizes(degrees: Degrees, rules: Sequence[Degrees] = ()) -> dict[str, int]:
    """All data axes, outer to inner, with their sizes, those of size 1 included.

    Rules cut an axis wherever one of them needs a cut: `intra_opt` becomes `intra_opt1` and `intra_opt2`, outer first.

    Raises:
      UserError: the degrees of strategy and rules do not nest.
    """
    sizes = {}
    for lvl, data in (("inter", degrees.ranks.num_nodes), ("intra", degrees.ranks.per_node)):
        p, g, o = _level_degrees(degrees, lvl)
        cuts = _cuts(lvl, [degrees, *rules])
        for role, low, high in zip(ROLES, (o, g, p, 1), (data, o, g, p), strict=True):
            inside = [cut for cut in cuts if low < cut < high]
            if not inside:
                sizes[f"{lvl}_{role}"] = high // low
                continue
            bounds = [high, *reversed(inside), low]
            for i, (outer, inner) in enumerate(itertools.pairwise(bounds), start=1):
                sizes[f"{lvl}_{role}{i}"] = outer // inner
    return sizes


def _level_degrees(degrees: Degrees, lvl: str) -> tuple[int, int, int]:
    p, g, o = (getattr(degree, lvl) for degree in (degrees.params, degrees.grads, degrees.opt_state))
    return p, g, o


def _cuts(lvl: str, every: Sequence[Degrees]) -> list[int]:
    """The different degrees on a level, ascending, each dividing the next."""
    cuts = sorted({degree for degrees in every for degree in _level_degrees(degrees, lvl)})
    for small, large in itertools.pairwise(cuts):
        if large % small:
            owner = {n: str(d) for d in reversed(every) for n in _level_degrees(d, lvl)}
            where = "inside a node" if lvl == "intra" else "between nodes"
            raise UserError(
                f"rules: {where} the degree {small} of '{owner[small]}' and {large} of '{owner[large]}' do not nest: "
                f"strategies of one mesh need degrees of which each divides the next; replace {small} or {large}"
            )
    return cuts


def data_axes(degrees: Degrees, rules: Sequence[Degrees] = (), rule: int | None = None) -> DataAxes:
    """The axes by role, as the strategy uses them, or as the rule of a number does, on the mesh of all of them."""
    own = degrees if rule is None else rules[rule]
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for lvl in LEVELS:
        p, g, o = _level_degrees(own, lvl)
        sizes = [(axis, size) for axis, size in axis_sizes(degrees, rules).items() if level(axis) == lvl]
        shards = math.prod(size for _, size in sizes)
        for axis, size in sizes:
            role = "param" if shards <= p else "grad" if shards <= g else "opt" if shards <= o else "replica"
            if size > 1:
                found[role].append(axis)
            shards //= size
    return DataAxes(**{role: tuple(axes) for role, axes in found.items()})


def mesh_axes(degrees: Degrees, parallel: ModelParallel, rules: Sequence[Degrees] = ()) -> dict[str, int]:
    """Every axis of the mesh with its size, outer to inner: stage, the data axes, context, tensor."""
    around = parallel.axis_sizes()
    sizes = {STAGE: around.pop(STAGE), **axis_sizes(degrees, rules), **around}
    return {axis: size for axis, size in sizes.items() if size > 1}


def find_nodes(
    devices: Sequence[jax.Device], devices_per_node: int | None = None
) -> tuple[tuple[jax.Device, ...], int]:
    """The devices node by node, and the number of nodes.

    Without `devices_per_node` a node is a machine: devices say which of them share one (`slice_index`). Where they do
    not, the devices of each process are a node.

    Raises:
      UserError: the nodes have not equally many devices.
    """
    if not devices:
        raise UserError("devices=[]: a plan needs at least one device")
    if devices_per_node is not None:
        if devices_per_node < 1 or len(devices) % devices_per_node:
            raise UserError(
                f"devices_per_node={devices_per_node} does not divide the {len(devices)} devices; it must be one of "
                f"{', '.join(str(n) for n in range(1, len(devices) + 1) if len(devices) % n == 0)}"
            )
        return tuple(devices), len(devices) // devices_per_node
    sizes = Counter(map(_node, devices))
    if len(set(sizes.values())) > 1:
        raise UserError(
            f"the {len(sizes)} nodes have {', '.join(map(str, sizes.values()))} devices; give equally many of each, or "
            "say devices_per_node"
        )
    return tuple(sorted(devices, key=_node)), len(sizes)


def _node(device: jax.Device) -> int:
    found = getattr(device, "slice_index", None)
    return device.process_index if found is None else int(found)


def make_mesh(
    degrees: Degrees,
    devices: Sequence[jax.Device] | None = None,
    parallel: ModelParallel | None = None,
    rules: Sequence[Degrees] = (),
) -> Mesh | AbstractMesh:
    """The mesh of a resolved strategy.

    Args:
      degrees: resolved on the data ranks of a stage.
      devices: node by node, each node's devices in their local order; None for a mesh of no devices,
        to plan for machines that are not there.
      parallel: stages, context and tensor; none by default.
      rules: degrees of the strategy's rules.

    Raises:
      UserError: the number of devices is not that of all ranks.
    """
    parallel = parallel or ModelParallel()
    sizes = mesh_axes(degrees, parallel, rules) or {"intra_replica": 1}
    names, shape = tuple(sizes), tuple(sizes.values())
    types = (AxisType.Auto,) * len(names)
    if devices is None:
        return AbstractMesh(shape, names, axis_types=types)
    if len(devices) != math.prod(shape):
        each = "" if parallel.total == 1 else f" of {parallel.total} devices each ({parallel})"
        raise UserError(
            f"{degrees.ranks} are {degrees.ranks.total} data ranks{each}, but {len(devices)} devices are given; "
            "they must be as many"
        )
    return Mesh(np.array(devices).reshape(shape), names, axis_types=types)
