"""Seconds of the collectives of training, by kind, group and message size, all groups of a shape active at once."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from amsp_jax.predict.calibrate.programs import Array, Body, Machine, chained, filled, group_axes, group_mesh, repeated
from amsp_jax.predict.calibrate.stopwatch import Stopwatch
from amsp_jax.strategy import Degree

KINDS = ("all-gather", "reduce-scatter", "all-reduce")
_COARSE = tuple(2**18 * 16**i for i in range(4))
_BETWEEN = tuple(2**20 * 16**i for i in range(3))
SIZES = tuple(sorted(_COARSE + _BETWEEN))
"""Message bytes: 256 KiB to 1 GiB in steps of 4."""

# Of a device's memory, for the buffers of one collective.
_MEMORY_SHARE = 0.25
# For the very first message alone: afterwards smaller ones and other groups predict.
_FIRST_GUESS_S = 1e-4
# Of two measurements on a quiet network, the slower over the faster.
_SCATTER = 1.1

Table = dict[tuple[str, Degree], dict[int, float]]
"""Seconds by message bytes, for each kind and group."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One kind of collective in groups of one shape, and the sizes to measure, ascending."""

    kind: str
    group: Degree
    sizes: tuple[int, ...]


def measure_collectives(
    machine: Machine, watch: Stopwatch, until_s: float, sizes: Iterable[int] = SIZES
) -> tuple[Table, list[str]]:
    """The table, and notes on what is missing in it.

    The four coarse sizes come first in every group, then the sizes between them, then groups that span nodes and
    leave devices of a node out; at last what looks disturbed is measured again.

    Args:
      machine: the devices.
      watch: whose elapsed seconds count.
      until_s: when to stop, on that clock. Each series has an equal share of what is left of its pass.
      sizes: message bytes.
    """
    table: Table = {}
    missing: dict[tuple[str, str], list[Series]] = {}
    for series_of_pass in _passes(machine, set(sizes)):
        for i, series in enumerate(series_of_pass):
            share_s = (until_s - watch.elapsed_s) / (len(series_of_pass) - i)
            for reason, left_out in _measure_series(machine, watch, series, share_s, table).items():
                missing.setdefault((reason, ", ".join(map(size_text, left_out))), []).append(series)
    _measure_again(machine, watch, until_s, table)
    return table, [f"{reason}: {what} in {_names(every)}" for (reason, what), every in missing.items()]


def groups(num_nodes: int, devices_per_node: int) -> tuple[list[Degree], list[Degree]]:
    """The groups that strategies use most, large ones first, and the other nested ones."""
    intra, inter = _divisors(devices_per_node), _divisors(num_nodes)
    inside = [Degree(a, 1) for a in intra if a > 1]
    full = [Degree(devices_per_node, b) for b in inter if b > 1]
    across = [Degree(1, b) for b in inter if b > 1 and devices_per_node > 1]
    every = [Degree(a, b) for a in intra for b in inter if a * b > 1]
    first = inside + full + across
    return first, [group for group in every if group not in first]


def collective(kind: str, group: Degree) -> Body:
    """The body of a program: the arrays of `message_arrays` to the same, with the collective done once more."""
    axes = group_axes(group)

    def all_reduce(x: jax.Array) -> tuple[jax.Array]:
        # In place: with an array for the result XLA would copy the whole message first.
        return (lax.psum(x, axes),)

    def all_gather(x: jax.Array, result: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = chained(x, result)
        return x, lax.all_gather(x, axes, tiled=True)

    def reduce_scatter(x: jax.Array, result: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = chained(x, result)
        return x, lax.psum_scatter(x, axes, tiled=True)

    bodies: dict[str, Body] = {
        "all-gather": all_gather,
        "reduce-scatter": reduce_scatter,
        "all-reduce": all_reduce,
    }
    return bodies[kind]


def message_arrays(kind: str, group: Degree, num_bytes: int, dtype: jnp.dtype) -> list[Array]:
    """A device's input and result, one array for both if it is an all-reduce.

    The whole message has `num_bytes`, rounded up so that its shards are equal.
    """
    shard = -(-num_bytes // (group.total * dtype.itemsize))
    shapes = {
        "all-gather": ((shard,), (shard * group.total,)),
        "reduce-scatter": ((shard * group.total,), (shard,)),
        "all-reduce": ((shard * group.total,),),
    }[kind]
    return [Array(shape, dtype) for shape in shapes]


def payload_dtype(platform: str) -> jnp.dtype:
    """Bfloat16, as in training; float32 on the CPU, whose collectives convert bfloat16."""
    return jnp.dtype(jnp.float32 if platform == "cpu" else jnp.bfloat16)


def _passes(machine: Machine, sizes: set[int]) -> Iterator[list[Series]]:
    first, others = groups(machine.num_nodes, machine.devices_per_node)
    coarse, between = (tuple(s for s in sorted(sizes) if (s in _COARSE) == is_coarse) for is_coarse in (True, False))
    for chosen, pass_sizes in ((first, coarse), (first, between), (others, coarse)):
        if pass_sizes:
            yield [Series(kind, group, pass_sizes) for group, kind in itertools.product(chosen, KINDS)]


def _names(every: list[Series]) -> str:
    """The groups of which every kind is there, and the others one by one."""
    kinds_of = {s.group: [other.kind for other in every if other.group == s.group] for s in every}
    return ", ".join(
        f"{group}" if len(kinds) == len(KINDS) else f"{group} ({', '.join(kinds)})" for group, kinds in kinds_of.items()
    )


def _measure_series(
    machine: Machine, watch: Stopwatch, series: Series, share_s: float, table: Table
) -> dict[str, tuple[int, ...]]:
    """Adds to the table what fits into `share_s`; returns what did not, by the reason."""
    mesh = group_mesh(machine, series.group)
    dtype = payload_dtype(machine.platform)
    begin_s = watch.elapsed_s
    for i, num_bytes in enumerate(series.sizes):
        arrays = message_arrays(series.kind, series.group, num_bytes, dtype)
        if sum(array.num_bytes for array in arrays) > _MEMORY_SHARE * machine.memory_bytes:
            return {f"too large to measure in {size_text(machine.memory_bytes)} of memory": series.sizes[i:]}
        known = table.get((series.kind, series.group), {})
        predicted_s = _predict(known, num_bytes) if known else _typical(table, num_bytes)
        left_s = share_s - (watch.elapsed_s - begin_s)
        # Every group gets its latency, so that no link stays unknown.
        is_first = not known and series.kind == KINDS[0]
        if watch.cost_s(predicted_s) > left_s and not is_first:
            return {f"not measured within {watch.budget_s:g} s": series.sizes[i:]}
        seconds = _measure(watch, mesh, series, arrays, predicted_s)
        table.setdefault((series.kind, series.group), {})[max(array.num_bytes for array in arrays)] = seconds
    return {}


def _measure_again(machine: Machine, watch: Stopwatch, until_s: float, table: Table) -> None:
    """What was disturbed, by a network that others use, once more: the faster time counts."""
    for (kind, group), known in table.items():
        for num_bytes in disturbed_sizes(known):
            if watch.elapsed_s + watch.cost_s(known[num_bytes]) > until_s:
                return
            again_s = message_seconds(machine, watch, Series(kind, group, (num_bytes,)), known[num_bytes])
            known[num_bytes] = min(known[num_bytes], again_s)


def disturbed_sizes(known: Mapping[int, float]) -> list[int]:
    """Of seconds by message bytes, sizes that took longer a byte than a smaller one, by more than the usual scatter."""
    found, least = [], math.inf
    for num_bytes, seconds in sorted(known.items()):
        if seconds / num_bytes > _SCATTER * least:
            found.append(num_bytes)
        least = min(least, seconds / num_bytes)
    return found


def message_seconds(machine: Machine, watch: Stopwatch, series: Series, predicted_s: float) -> float:
    """Of the first size of a series, in all groups of its shape at once; all processes call it at once.

    Args:
      machine: the devices.
      watch: whose elapsed seconds count.
      series: what is measured.
      predicted_s: about how long it takes, as it decides how often it is repeated.
    """
    arrays = message_arrays(series.kind, series.group, series.sizes[0], payload_dtype(machine.platform))
    return _measure(watch, group_mesh(machine, series.group), series, arrays, predicted_s)


def _measure(watch: Stopwatch, mesh: Mesh, series: Series, arrays: list[Array], predicted_s: float) -> float:
    body = collective(series.kind, series.group)
    return watch.measure(
        f"{series.kind} {series.group} {size_text(max(array.num_bytes for array in arrays))}",
        lambda num_repeats: repeated(mesh, body, len(arrays), num_repeats),
        lambda: filled(mesh, arrays),
        predicted_s,
    )


def _predict(known: dict[int, float], num_bytes: int) -> float:
    """From the sizes around it, a line; beyond them, in proportion to the nearest, which is never too little."""
    below = max((size for size in known if size <= num_bytes), default=None)
    above = min((size for size in known if size >= num_bytes), default=None)
    if below is None or above is None:
        nearest = min(known) if below is None else below
        return known[nearest] * max(num_bytes / nearest, 1.0)
    share = (num_bytes - below) / max(above - below, 1)
    return known[below] + share * (known[above] - known[below])


def _typical(table: Table, num_bytes: int) -> float:
    """The slowest of the smallest messages measured so far: where there is no better guess."""
    return max((_predict(known, num_bytes) for known in table.values()), default=_FIRST_GUESS_S)


def _divisors(number: int) -> list[int]:
    """Large ones first."""
    return [d for d in range(number, 0, -1) if number % d == 0]


def size_text(num_bytes: int) -> str:
    """`256 KiB`, `1 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} B"
