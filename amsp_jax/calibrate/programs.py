"""What is timed: a function of local arrays that every device runs several times in one program.

Each repetition starts from an element of the result before it. So XLA can neither drop, merge nor reorder
repetitions, and the dependency costs one tiny kernel instead of a pass over the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from amsp_jax.cluster import Cluster
from amsp_jax.strategy import Degree

Body = Callable[..., tuple[jax.Array, ...]]
"""Local arrays to as many of the same shapes and dtypes."""

AXES = ("inter_rest", "inter_group", "intra_rest", "intra_group")


class Machine(Protocol):
    """The devices of a run, as `launch.Layout` has them: node after node."""

    @property
    def platform(self) -> str:
        """One of cpu, cuda and rocm."""

    @property
    def num_nodes(self) -> int:
        """Nodes, real or logical."""

    @property
    def devices_per_node(self) -> int:
        """Devices of each."""

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """All of them."""

    @property
    def memory_bytes(self) -> int:
        """That one device may use."""

    @property
    def process_index(self) -> int:
        """Of this process."""

    def cluster(self) -> Cluster:
        """The same in numbers."""


def group_mesh(machine: Machine, group: Degree) -> Mesh:
    """All devices, the members of a group along the axes `inter_group` and `intra_group`, adjacent as in training."""
    shape = (
        machine.num_nodes // group.inter,
        group.inter,
        machine.devices_per_node // group.intra,
        group.intra,
    )
    return Mesh(np.array(machine.devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def group_axes(group: Degree) -> tuple[str, ...]:
    """The axes of `group_mesh` that a collective of this group runs over."""
    sizes = {"inter_group": group.inter, "intra_group": group.intra}
    return tuple(axis for axis, size in sizes.items() if size > 1)


def repeated(mesh: Mesh, body: Body, num_arrays: int, num_repeats: int) -> Callable[..., tuple[jax.Array, ...]]:
    """A jitted function that applies `body` `num_repeats` times on each device, in place of its donated arguments.

    Args:
      mesh: of all devices.
      body: on local arrays; it must use its last result, see `chained`.
      num_arrays: that it takes and returns.
      num_repeats: in a loop of static length, which XLA runs without asking the host.
    """

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return lax.fori_loop(0, num_repeats, lambda _, carried: body(*carried), arrays)

    spec = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=tuple(range(num_arrays)))


def chained(x: jax.Array, result: jax.Array) -> jax.Array:
    """`x`, in place, with its first element taken from `result`."""
    first = result.reshape(-1)[0].astype(x.dtype)
    return x.at[(0,) * x.ndim].set(first)


def filled(mesh: Mesh, arrays: Sequence[tuple[tuple[int, ...], str]]) -> tuple[jax.Array, ...]:
    """An array of each local shape and dtype on every device, split along dimension 0; values vary within +-1."""
    whole = [((shape[0] * mesh.size, *shape[1:]), dtype) for shape, dtype in arrays]

    def fill() -> tuple[jax.Array, ...]:
        # Products of zeros draw less power, and so run faster, than those of numbers.
        return tuple(
            jnp.sin(lax.broadcasted_iota(jnp.float32, shape, len(shape) - 1) + i).astype(dtype)
            for i, (shape, dtype) in enumerate(whole)
        )

    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.jit(fill, out_shardings=(sharding,) * len(whole))()
