"""Whether replicas are still bit for bit the same: checksums of what each device holds, compared across devices.

Replicas are computed from equal bits by the same program, so a difference is a fault: of memory, of a device, or a
program that is not deterministic.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.leaves import path_name
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.state import TrainState, abstract_state


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Replicas of one shard of a leaf that are not alike.

    Attributes:
      path: the leaf, `params.blocks.0.attention.query`.
      devices: those that differ from most replicas; all of them where none are in the majority.
      num_replicas: of the shard.
    """

    path: str
    devices: tuple[jax.Device, ...]
    num_replicas: int

    def __str__(self) -> str:
        if len(self.devices) == self.num_replicas:
            return f"{self.path}: the replicas on {_places(self.devices)} differ, and no majority is alike"
        verb = "differs" if len(self.devices) == 1 else "differ"
        return f"{self.path}: {_places(self.devices)} {verb} from the rest of {self.num_replicas} replicas"


def _places(devices: Sequence[jax.Device]) -> str:
    by_process: dict[int, list[int]] = defaultdict(list)
    for device in devices:
        by_process[device.process_index].append(device.id)
    return ", ".join(
        f"{'device' if len(ids) == 1 else 'devices'} {', '.join(map(str, ids))} of process {process}"
        for process, ids in sorted(by_process.items())
    )


@dataclasses.dataclass(frozen=True)
class _Replicated:
    """A leaf of which several devices hold the same shard.

    Attributes:
      index: among the leaves of the state.
      path: its name.
      dims: dimensions of the mesh over which it is replicated.
    """

    index: int
    path: str
    dims: tuple[int, ...]


def make_replica_check(plan: Plan, optimizer: optax.GradientTransformation) -> Callable[[TrainState], list[Divergence]]:
    """`(state) -> what differs`, empty if nothing does; all processes call it together and get the same answer.

    It reads the replicated part of the state once, gathers 4 bytes per leaf and device, and waits for the answer. It
    compiles at its first call. GPUs sum the words as they are read; XLA's CPU backend writes the mixed ones down first,
    so there it needs as much memory again as the replicated part has.
    """
    abstract = abstract_state(plan, optimizer)
    leaves = list(_replicated(abstract, plan))
    specs = [leaf.sharding.spec for leaf in jax.tree.leaves(abstract)]
    axes = tuple(plan.mesh.axis_names)

    # 4 bytes a leaf from each device, so every process compares all replicas and comes to the same answer.
    def gathered(*arrays: jax.Array) -> jax.Array:
        return lax.all_gather(jnp.stack([checksum(x) for x in arrays]), axes)

    compiled = jax.jit(
        jax.shard_map(
            gathered,
            mesh=plan.mesh,
            in_specs=tuple(specs[leaf.index] for leaf in leaves),
            out_specs=P(),
            check_vma=False,
        )
    )

    def check(state: TrainState) -> list[Divergence]:
        if not leaves:
            return []
        arrays = jax.tree.leaves(state)
        sums = jax.device_get(compiled(*(arrays[leaf.index] for leaf in leaves)))
        return [found for leaf, column in zip(leaves, sums.T, strict=True) for found in _compare(plan, leaf, column)]

    return check


def _replicated(abstract: TrainState, plan: Plan) -> Iterator[_Replicated]:
    for index, (path, x) in enumerate(jax.tree_util.tree_flatten_with_path(abstract)[0]):
        dims = tuple(i for i, axis in enumerate(plan.mesh.axis_names) if axis not in _axes(x.sharding.spec))
        if math.prod(plan.mesh.axis_sizes[i] for i in dims) > 1:
            yield _Replicated(index, path_name(path), dims)


def _axes(spec: P) -> set[str]:
    """The mesh axes that a spec names."""
    return {axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)}


def checksum(x: jax.Array) -> jax.Array:
    """uint32 of an array's bits and their places.

    One changed value always changes it, as each is mixed by a bijection; any other change goes unseen by a chance of
    2^-32. Without the mixing, a plain sum weighted by place would miss two values that swap and differ in sign alone.
    """
    words = _words(x)
    return jnp.sum(_mixed(words ^ (lax.iota(jnp.uint32, words.size) * jnp.uint32(0x9E3779B9))), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits as a vector of uint32, values of fewer bits one to a word."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    # Of 8 bytes: a new last dimension of two words.
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).reshape(-1)


def _mixed(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every bit of the input moves half of the output's."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _compare(plan: Plan, leaf: _Replicated, sums: np.ndarray) -> Iterator[Divergence]:
    """The shards of a leaf whose checksums, [devices] in the order of the mesh, are not all equal."""
    assert isinstance(plan.mesh, jax.sharding.Mesh)
    shape, last = plan.mesh.devices.shape, range(-len(leaf.dims), 0)
    num_replicas = math.prod(shape[dim] for dim in leaf.dims)
    # Axes that hold equal copies last: a row is one shard, its columns are the replicas.
    by_shard = np.moveaxis(sums.reshape(shape), leaf.dims, last).reshape(-1, num_replicas)
    devices = np.moveaxis(plan.mesh.devices, leaf.dims, last).reshape(-1, num_replicas)
    for shard in np.flatnonzero((by_shard != by_shard[:, :1]).any(axis=1)):
        (usual, count), *_ = Counter(by_shard[shard].tolist()).most_common(1)
        # Without a majority nobody can say which replica is right.
        is_odd = by_shard[shard] != usual if 2 * count > num_replicas else np.full(num_replicas, True)
        yield Divergence(leaf.path, tuple(devices[shard][is_odd]), num_replicas)
