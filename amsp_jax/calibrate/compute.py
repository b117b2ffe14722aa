"""Rates of a device at work: matrix products, attention, passes over memory, and products beside a collective."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from amsp_jax.calibrate.collectives import Table, collective, message_arrays, payload_dtype, size_text
from amsp_jax.calibrate.programs import Array, Body, Machine, chained, filled, group_mesh, repeated, rotation
from amsp_jax.calibrate.stopwatch import Stopwatch
from amsp_jax.cluster.rates import MatmulPoint
from amsp_jax.strategy import Degree

Product = tuple[int, int, int]
"""m, k, n of [m, k] @ [k, n], k <= n; its counterpart [m, n] @ [n, k] is timed with it."""

_SQUARES = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192, 16384))
# Tokens by hidden to hidden, and to the ffn, as in models of 1 to 70 billion parameters.
_TALL = tuple(
    shape
    for tokens, hidden, ffn in ((4096, 2048, 5632), (4096, 4096, 11008), (8192, 8192, 28672))
    for shape in ((tokens, hidden, hidden), (tokens, hidden, ffn))
)
# Before anything ran: slow enough for a laptop's core. A run that turns out too short is repeated.
_FIRST_FLOPS_PER_S, _FIRST_BYTES_PER_S = 1e10, 1e10
# Of a device's memory, for the arrays of one measurement.
_MEMORY_SHARE = 0.25
# Products that make no headway at all beside a collective would have an infinite slowdown.
_MAX_SLOWDOWN = 10.0
_MAX_PAIRS = 8


@dataclasses.dataclass(frozen=True)
class AttentionSize:
    """Causal attention of `rows` sequences."""

    rows: int
    seq_len: int
    num_heads: int
    head_dim: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of queries, keys, values and results: [rows, seq, heads, head]."""
        return self.rows, self.seq_len, self.num_heads, self.head_dim

    @property
    def flops(self) -> float:
        """Of the forward pass: two products, of which the mask leaves half. The backward pass has twice as many."""
        return 2.0 * self.rows * self.num_heads * self.seq_len**2 * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class Menu:
    """What is measured of one device; of each, the first whatever it takes, and then what fits.

    Attributes:
      products: by dtype, small ones first.
      pass_bytes: of the array that an elementwise pass runs over; the last should be larger than any cache.
      attention: small ones first.
    """

    products: Mapping[str, tuple[Product, ...]]
    pass_bytes: tuple[int, ...]
    attention: tuple[AttentionSize, ...]


GPU_MENU = Menu(
    products={"bfloat16": _SQUARES + _TALL, "float32": _SQUARES[:-1]},
    pass_bytes=(2**25, 2**29),
    attention=(AttentionSize(1, 512, 8, 128), AttentionSize(1, 4096, 32, 128)),
)
CPU_MENU = Menu(
    products={"float32": _SQUARES[:3], "bfloat16": _SQUARES[:1]},
    pass_bytes=(2**22, 2**25),
    attention=(AttentionSize(1, 256, 4, 64), AttentionSize(1, 1024, 4, 64)),
)


@dataclasses.dataclass
class Workbench:
    """Where compute is measured: on all devices at once, as in training.

    Attributes:
      machine: the devices.
      watch: whose elapsed seconds count.
      until_s: when to stop, on that clock.
      notes: what was left out, and why.
    """

    machine: Machine
    watch: Stopwatch
    until_s: float
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def max_bytes(self) -> float:
        """Of the arrays of one measurement."""
        return _MEMORY_SHARE * self.machine.memory_bytes

    @functools.cached_property
    def mesh(self) -> Mesh:
        """Of all devices, in groups of one."""
        return group_mesh(self.machine, Degree(1, 1))

    def measure(self, label: str, body: Body, arrays: Sequence[Array], predicted_s: float) -> float:
        """Seconds of `body` on local arrays of these shapes and dtypes."""
        return self.watch.measure(
            label,
            lambda num_repeats: repeated(self.mesh, body, len(arrays), num_repeats),
            lambda: filled(self.mesh, arrays),
            predicted_s,
        )

    def fits(self, label: str, predicted_s: float, num_bytes: float) -> bool:
        """Whether time and memory are left for it; a note says where not."""
        if num_bytes > self.max_bytes:
            self.notes.append(f"too large to measure in {size_text(self.machine.memory_bytes)} of memory: {label}")
        elif self.watch.cost_s(predicted_s) > self.until_s - self.watch.elapsed_s:
            self.notes.append(f"not measured within {self.watch.budget_s:g} s: {label}")
        else:
            return True
        return False


def matmul_rates(bench: Workbench, products: Mapping[str, tuple[Product, ...]]) -> dict[str, tuple[MatmulPoint, ...]]:
    """FLOP/s of matrix products by dtype: of the first, whatever it takes, and of all others that fit."""
    return {dtype: tuple(_rates_of(bench, dtype, shapes)) for dtype, shapes in products.items()}


def _rates_of(bench: Workbench, dtype: str, shapes: tuple[Product, ...]) -> Iterator[MatmulPoint]:
    flops_per_s = _FIRST_FLOPS_PER_S
    for shape in shapes:
        label, flops = f"{dtype} product {' x '.join(map(str, shape))}", 4.0 * math.prod(shape)
        arrays = _factors(shape, dtype)
        if shape == shapes[0] or bench.fits(label, flops / flops_per_s, _num_bytes(arrays)):
            flops_per_s = flops / bench.measure(label, _multiply, arrays, flops / flops_per_s)
            yield *shape, flops_per_s


def _factors(shape: Product, dtype: str) -> list[Array]:
    m, k, n = shape
    return [Array((m, k), dtype), Array((k, n), dtype, rotation), Array((n, k), dtype, rotation)]


def _multiply(x: jax.Array, there: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
    return x @ there @ back, there, back


def memory_bytes_per_s(bench: Workbench, sizes: tuple[int, ...]) -> float:
    """Bytes read and written a second by an elementwise pass over the largest array that fits, or the first."""
    rate = _FIRST_BYTES_PER_S
    for num_bytes in sizes:
        label, predicted_s = f"memory pass over {size_text(num_bytes)}", 2 * num_bytes / rate
        if num_bytes == sizes[0] or bench.fits(label, predicted_s, num_bytes):
            rate = 2 * num_bytes / bench.measure(label, _scale, [Array((num_bytes // 4,), "float32")], predicted_s)
    return rate


def _scale(x: jax.Array) -> tuple[jax.Array, ...]:
    return (x * 0.999 + 0.001,)


def attention_flops_per_s(
    bench: Workbench, flops_per_s: float, sizes: tuple[AttentionSize, ...]
) -> tuple[float, float]:
    """Causal FLOP/s of the forward and the backward pass at the last size that fits, or the first.

    Args:
      bench: where cuDNN's attention exists it is taken, as the models do.
      flops_per_s: of matrix products, to predict from.
      sizes: small ones first.
    """
    fused = _has_fused_attention(bench.machine)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if fused else "xla")
    rates = flops_per_s, flops_per_s
    for size in sizes:
        label, predicted_s = f"attention of {size.rows} x {size.seq_len} tokens", 4 * size.flops / flops_per_s
        arrays = [Array(size.shape, "bfloat16")] * 7
        # Unfused, the scores decide: some four arrays of them in float32.
        scores_bytes = 0 if fused else 4 * 4 * size.rows * size.num_heads * size.seq_len**2
        if size == sizes[0] or bench.fits(label, 3 * predicted_s, _num_bytes(arrays) + scores_bytes):
            # XLA's form, and the lowering of its gradient, ask for the common dtype of bfloat16 and float32.
            with jax.numpy_dtype_promotion("standard"):
                forward_s = bench.measure(f"{label}, forward", _forward(attend), arrays[:4], predicted_s)
                both_s = bench.measure(f"{label}, forward and backward", _both(attend), arrays, 3 * forward_s)
            rates = size.flops / forward_s, 2 * size.flops / max(both_s - forward_s, forward_s)
    return rates


def _has_fused_attention(machine: Machine) -> bool:
    """Whether cuDNN's is there: NVIDIA, compute capability 8.0 or later."""
    major = str(getattr(machine.devices[0], "compute_capability", "")).partition(".")[0]
    return machine.platform == "cuda" and major.isdigit() and int(major) >= 8


def _forward(attend: Callable[..., jax.Array]) -> Body:
    def body(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
        q = chained(q, out)
        return q, k, v, attend(q, k, v)

    return body


def _both(attend: Callable[..., jax.Array]) -> Body:
    def body(q: jax.Array, k: jax.Array, v: jax.Array, grad: jax.Array, *grads: jax.Array) -> tuple[jax.Array, ...]:
        q = chained(q, grads[0])
        _, backward = jax.vjp(attend, q, k, v)
        return q, k, v, grad, *backward(grad)

    return body


def overlap_slowdown(bench: Workbench, table: Table, products: Iterable[MatmulPoint], dtype: str) -> float | None:
    """Seconds of products while an all-gather runs, over their seconds alone; at least 1, None if nothing fits.

    A gather of Tc seconds runs beside products of T >= 2 Tc, so that the products hide it wherever the scheduler
    starts it. They advance by Tc / s in that time, and the rest comes after: T' = Tc + (T - Tc / s).

    Args:
      bench: its devices.
      table: measured gathers; inside a node if there are any, in the largest group.
      products: measured, of which square ones are taken.
      dtype: of the products.
    """
    for trial in _trials(table, products, dtype, payload_dtype(bench.machine.platform)):
        left_s = bench.until_s - bench.watch.elapsed_s
        if (
            bench.watch.cost_s(2.5 * trial.num_pairs * trial.pair_s) < left_s
            and _num_bytes(trial.arrays) <= bench.max_bytes
        ):
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
                factors = _factors((width, width, width), dtype)
                yield _Trial(group, gather_s, num_pairs, pair_s, factors + message)


def _slowdown(bench: Workbench, trial: _Trial) -> float:
    mesh = group_mesh(bench.machine, trial.group)

    def measure(label: str, body: Body, arrays: list[Array], predicted_s: float) -> float:
        make_program = functools.partial(repeated, mesh, body, len(arrays))
        return bench.watch.measure(label, make_program, functools.partial(filled, mesh, arrays), predicted_s)

    alone_s = measure("products alone", _products(trial.num_pairs), trial.arrays[:3], trial.num_pairs * trial.pair_s)
    beside = _products_beside_gather(trial.num_pairs, trial.group)
    beside_s = measure("products beside an all-gather", beside, trial.arrays, alone_s + trial.gather_s)
    added_s = max(beside_s - alone_s, 0.0)
    return 1 / max(1 - added_s / trial.gather_s, 1 / _MAX_SLOWDOWN)


def _products(num_pairs: int) -> Body:
    def body(x: jax.Array, there: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
        for _ in range(num_pairs):
            x, there, back = _multiply(x, there, back)
        return x, there, back

    return body


def _products_beside_gather(num_pairs: int, group: Degree) -> Body:
    multiply, gather = _products(num_pairs), collective("all-gather", group)

    def body(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return *multiply(*arrays[:3]), *gather(*arrays[3:])

    return body


def _num_bytes(arrays: Sequence[Array]) -> int:
    return sum(array.num_bytes for array in arrays)
