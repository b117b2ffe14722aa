"""From the rows that each process holds to the global arrays of a batch, on any number of hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from amsp_jax.errors import UserError

SEQUENCES = ("tokens", "targets", "weights")
"""The arrays of a batch that are sequences in every model for text."""


def local_ranks(sharding: NamedSharding, num_ranks: int) -> list[int]:
    """The data ranks of which this process has devices, in ascending order.

    Args:
      sharding: of arrays [microbatches, rows].
      num_ranks: data ranks of the plan.

    Raises:
      UserError: the plan is of no devices, or of none of this process.
    """
    if not isinstance(sharding.mesh, Mesh):
        raise UserError("the plan is for devices that do not exist (ranks= without devices=): it has no place for rows")
    places = sharding.addressable_devices_indices_map((1, num_ranks)).values()
    ranks = sorted({place[1].start or 0 for place in places if place is not None})
    if not ranks:
        raise UserError(
            f"process {jax.process_index()} has no device of the plan and can give it no rows; plan for the devices of "
            "all processes"
        )
    return ranks


def shard_rows(
    rows: Mapping[str, Any], batch: NamedSharding, by_row: NamedSharding, num_ranks: int
) -> dict[str, jax.Array]:
    """Global arrays [microbatches, rows, ...] of this process's arrays [microbatches, local rows, ...].

    Args:
      rows: of this process, in the order of its data ranks.
      batch: sharding of arrays of three dimensions and more.
      by_row: sharding of arrays of two dimensions.
      num_ranks: data ranks of the plan.

    Raises:
      UserError: shapes, dtypes or counts that make no batch, or that differ between processes.
    """
    check_is_batch(rows)
    ranks = local_ranks(by_row, num_ranks)
    arrays = {name: _array(name, x) for name, x in rows.items()}
    num_microbatches, num_local = batch_counts({name: x.shape for name, x in arrays.items()})
    if num_local % len(ranks):
        mine = f"the {len(ranks)} data ranks" if jax.process_count() == 1 else _owner(len(ranks))
        raise UserError(
            f"a batch has {num_local} rows in a microbatch, which do not divide by {mine}; give "
            f"{max(1, num_local // len(ranks)) * len(ranks)} or another multiple"
        )
    per_rank = num_local // len(ranks)
    _agree(arrays, per_rank, batch)

    def place(name: str, x: np.ndarray) -> jax.Array:
        sharding = by_row if x.ndim == 2 else batch
        _check_sequence(name, x, sharding)

        def piece(index: Any) -> np.ndarray:
            first = ranks.index((index[1].start or 0) // per_rank) * per_rank
            return x[(index[0], slice(first, first + per_rank), *index[2:])]

        shape = (num_microbatches, per_rank * num_ranks, *x.shape[2:])
        return jax.make_array_from_callback(shape, sharding, piece)

    return {name: place(name, x) for name, x in arrays.items()}


def _owner(num_ranks: int) -> str:
    return f"the {num_ranks} data ranks of process {jax.process_index()}"


def _array(name: str, x: Any) -> np.ndarray:
    array = np.asarray(x)
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise UserError(f"batch['{name}'] is of dtype {array.dtype}; rows are numbers")
    if array.dtype.itemsize > 4:
        small = {"i": "int32", "u": "uint32", "f": "float32"}[array.dtype.kind]
        raise UserError(
            f"batch['{name}'] is {array.dtype}, but devices hold 32 bits a value; give it as .astype(np.{small})"
        )
    return array


def check_is_batch(batch: Any) -> None:
    """Raises UserError unless a batch is a dict, or another mapping, of arrays by name."""
    if not isinstance(batch, Mapping):
        kind = "an array" if isinstance(batch, jax.Array | np.ndarray) else f"of type {type(batch).__name__}"
        raise UserError(
            f"a batch is {kind}; it is a dict of arrays [microbatches, rows, ...] by name, as "
            "{'tokens': ..., 'targets': ...}"
        )


def batch_counts(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """The numbers of microbatches and rows of a batch, by the shapes of its arrays.

    Raises:
      UserError: an array has neither, or not as many as another one; or sequences have no dimension of microbatches.
    """
    counts = {shape[:2] for shape in shapes.values()}
    shape = next(iter(counts), ())
    if len(counts) != 1 or len(shape) != 2 or 0 in shape:
        raise UserError(
            f"a batch of {listed(shapes)}: its arrays are [microbatches, rows, ...], with equal numbers of both"
        )
    sequences = {name: each for name, each in shapes.items() if name in SEQUENCES}
    # Beside an array of three dimensions, `targets` and `weights` of two are a value for each row.
    has_none = all(len(each) == 2 for each in shapes.values())
    if (sequences and has_none) or len(sequences.get("tokens", (0, 0, 0))) < 3:
        name = "tokens" if "tokens" in sequences else next(iter(sequences))
        raise UserError(
            f"a batch of {listed(shapes)}: its sequences are [microbatches, rows, seq], three dimensions; as one "
            f"microbatch {name} is {(1, *sequences[name])}, which batch['{name}'][None] makes"
        )
    return shape[0], shape[1]


def listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The arrays of a batch, for a message."""
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "no arrays"


def _check_sequence(name: str, x: np.ndarray, sharding: NamedSharding) -> None:
    spec = sharding.spec
    num_parts = sharding.mesh.shape[spec[2]] if len(spec) > 2 and spec[2] else 1
    if x.ndim > 2 and x.shape[2] % num_parts:
        raise UserError(
            f"batch['{name}'] has sequences of {x.shape[2]}, which do not divide by context={num_parts}; choose a "
            f"multiple of {num_parts}"
        )


_agreed: set[str] = set()
"""Batches that all processes were found to give alike."""


def _agree(arrays: Mapping[str, np.ndarray], per_rank: int, sharding: NamedSharding) -> None:
    """Raises UserError where another process gives other names, shapes or dtypes; asked once for each kind of batch.

    Otherwise the processes would compile different steps, which wait for one another for ever.
    """
    processes = {device.process_index for device in sharding.mesh.devices.flat}
    if len(processes) == 1 or len(processes) < jax.process_count():
        return
    kinds = sorted(f"{name}:{x.dtype}:{x.shape[0]}:{x.shape[2:]}" for name, x in arrays.items())
    said = " ".join((str(per_rank), *kinds))
    if said in _agreed:
        return
    digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:4], "little") >> 1
    num_microbatches = next(iter(arrays.values())).shape[0]
    mine = np.array([per_rank, num_microbatches, len(arrays), digest], np.int32)
    everyone = np.asarray(multihost_utils.process_allgather(mine))
    for process, other in enumerate(everyone):
        if not np.array_equal(other, everyone[0]):
            counts = [f"{m} microbatches of {r} rows a data rank, {n} arrays" for r, m, n, _ in (everyone[0], other)]
            raise UserError(
                f"process 0 gives a batch of {counts[0]}, process {process} one of {counts[1]}; names, dtypes and "
                "shapes must be the same in all processes"
            )
    _agreed.add(said)
