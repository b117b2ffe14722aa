"""What is timed: a function of local arrays that every device runs several times in one program.

Each repetition starts from the result before it, or from one element of it where its shape is another. So XLA can
neither drop, merge nor reorder repetitions, and the dependency costs one tiny kernel at most.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jax.typing import DTypeLike

from amsp_jax.predict.cluster import Cluster
from amsp_jax.strategy import Degree

Body = Callable[..., tuple[jax.Array, ...]]
"""Local arrays to as many of the same shapes and dtypes."""

AXES = ("inter_rest", "inter_group", "intra_rest", "intra_group")


class Machine(Protocol):
    """The devices of a run, as `launch.DeviceLayout` has them: node after node."""

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
      body: on local arrays; what it computes must depend on what it computed before, see `chained`.
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


def waves(shape: tuple[int, ...]) -> jax.Array:
    """Values within +-1 of varied bits: products of zeros draw less power, and so run faster, than those of numbers."""
    angles = [0.37 * (d + 1) * lax.broadcasted_iota(jnp.float32, shape, d) for d in range(len(shape))]
    return jnp.sin(functools.reduce(jnp.add, angles))


def rotation(shape: tuple[int, ...]) -> jax.Array:
    """Rows or columns of an orthogonal matrix, that of the cosine transform DCT-IV: a product with it keeps norms.

    A product with [k, n], k <= n, and then with [n, k] is the identity, so that a chain of them neither vanishes nor
    overflows.
    """
    row, column = (lax.broadcasted_iota(jnp.float32, shape, d) for d in range(2))
    size = max(shape)
    return math.sqrt(2 / size) * jnp.cos(math.pi / size * (row + 0.5) * (column + 0.5))


class Array(NamedTuple):
    """A local array: its shape, its dtype, and what it holds."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    fill: Callable[[tuple[int, ...]], jax.Array] = waves

    @property
    def num_bytes(self) -> int:
        """Of one device."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def filled(mesh: Mesh, arrays: Sequence[Array]) -> tuple[jax.Array, ...]:
    """The arrays on every device, the same on each; as one they are split along dimension 0."""

    def fill() -> tuple[jax.Array, ...]:
        return tuple(array.fill(array.shape).astype(array.dtype) for array in arrays)

    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(fill, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
