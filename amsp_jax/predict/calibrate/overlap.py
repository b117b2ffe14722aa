"""How much slower compute is while a collective runs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp

from amsp_jax.predict.calibrate.collectives import Table, collective, message_arrays, payload_dtype
from amsp_jax.predict.calibrate.compute import Workbench, factor_arrays, multiply, num_bytes_of
from amsp_jax.predict.calibrate.programs import Array, Body, filled, group_mesh, repeated
from amsp_jax.predict.cluster.rates import MatmulPoint
from amsp_jax.strategy import Degree

# Of the gather's time. Products that add more to it had no headway beside it: the scheduler put one after the other,
# which says nothing of how they share a device.
_MAX_ADDED_SHARE = 0.5
_MAX_PAIRS = 8


def overlap_slowdown(bench: Workbench, table: Table, products: Iterable[MatmulPoint], dtype: str) -> float | None:
    """Seconds of products while an all-gather runs, over their seconds alone; at least 1.

    None if nothing fits, and if they did not run at once.

    A gather of Tc seconds runs beside products of T >= 2 Tc, so that the products hide it wherever the scheduler
    starts it. They advance by Tc / s in that time, and the rest comes after: T' = Tc + (T - Tc / s).

    Args:
      bench: its devices.
      table: measured gathers; inside a node if there are any, in the largest group.
      products: measured, of which square ones are taken.
      dtype: of the products.
    """
    for trial in _trials(table, products, dtype, payload_dtype(bench.machine.platform)):
        # The products alone, and as long again beside the gather.
        cost_s = 2 * bench.watch.cost_s(trial.num_pairs * trial.pair_s + trial.gather_s)
        is_small = num_bytes_of(trial.arrays) <= bench.max_bytes
        if is_small and cost_s < bench.until_s - bench.watch.elapsed_s:
            return _slowdown(bench, trial)
    return None


@dataclasses.dataclass(frozen=True)
class _Trial:
    """An all-gather, and square products, there and back, that take at least twice as long."""

    group: Degree
    gather_s: float
    num_pairs: int
    pair_s: float
    arrays: list[Array]


def _trials(table: Table, products: Iterable[MatmulPoint], dtype: str, payload: jnp.dtype) -> Iterator[_Trial]:
    """Large messages first; beside each, few large products before many small ones."""
    gathered = [group for kind, group in table if kind == "all-gather"]
    if not gathered:
        return
    group = max(gathered, key=lambda g: (g.inter == 1, g.total))
    squares = {m: 4.0 * m**3 / rate for m, k, n, rate in products if m == k == n}
    for num_bytes, gather_s in sorted(table["all-gather", group].items(), reverse=True):
        message = message_arrays("all-gather", group, num_bytes, payload)
        # Products far longer than the gather would hide what it costs; so those come last.
        for width, pair_s in sorted(squares.items(), key=lambda item: (item[1] > gather_s, -item[1])):
            num_pairs = math.ceil(2 * gather_s / pair_s)
            if num_pairs <= _MAX_PAIRS:
                factors = factor_arrays((width, width, width), dtype)
                yield _Trial(group, gather_s, num_pairs, pair_s, factors + message)


def slowdown_of(alone_s: float, beside_s: float, gather_s: float) -> float | None:
    """From seconds of products alone, of products and gather, and of the gather alone; None of a serial schedule."""
    added_share = max(beside_s - alone_s, 0.0) / gather_s
    return None if added_share > _MAX_ADDED_SHARE else 1 / (1 - added_share)


def _slowdown(bench: Workbench, trial: _Trial) -> float | None:
    mesh = group_mesh(bench.machine, trial.group)

    def measure(label: str, body: Body, arrays: list[Array], predicted_s: float) -> float:
        make_program = functools.partial(repeated, mesh, body, len(arrays))
        return bench.watch.measure(label, make_program, functools.partial(filled, mesh, arrays), predicted_s)

    alone_s = measure("products alone", _products(trial.num_pairs), trial.arrays[:3], trial.num_pairs * trial.pair_s)
    beside = _products_beside_gather(trial.num_pairs, trial.group)
    beside_s = measure("products beside an all-gather", beside, trial.arrays, alone_s + trial.gather_s)
    return slowdown_of(alone_s, beside_s, trial.gather_s)


def _products(num_pairs: int) -> Body:
    def body(x: jax.Array, there: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
        for _ in range(num_pairs):
            x, there, back = multiply(x, there, back)
        return x, there, back

    return body


def _products_beside_gather(num_pairs: int, group: Degree) -> Body:
    multiply, gather = _products(num_pairs), collective("all-gather", group)

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return *multiply(*arrays[:3]), *gather(*arrays[3:])

    return body
