"""Rates of a device at work: matrix products, attention, and passes over memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh

from amsp_jax.predict.calibrate.collectives import size_text
from amsp_jax.predict.calibrate.programs import Array, Body, Machine, chained, filled, group_mesh, repeated, rotation
from amsp_jax.predict.calibrate.stopwatch import Stopwatch
from amsp_jax.predict.cluster.rates import MatmulPoint
from amsp_jax.strategy import Degree

Product = tuple[int, int, int]
"""m, k, n of [m, k] @ [k, n], k <= n; its counterpart [m, n] @ [n, k] is timed with it."""

_SQUARES = tuple((n, n, n) for n in (512, 1024, 2048, 4096, 8192))
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
    products={"bfloat16": (*_SQUARES, *_TALL, (16384, 16384, 16384)), "float32": _SQUARES},
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
        arrays = factor_arrays(shape, dtype)
        if shape == shapes[0] or bench.fits(label, flops / flops_per_s, num_bytes_of(arrays)):
            flops_per_s = flops / bench.measure(label, multiply, arrays, flops / flops_per_s)
            yield *shape, flops_per_s


def factor_arrays(shape: Product, dtype: str) -> list[Array]:
    """The arrays of `multiply`."""
    m, k, n = shape
    return [Array((m, k), dtype), Array((k, n), dtype, rotation), Array((n, k), dtype, rotation)]


def multiply(x: jax.Array, there: jax.Array, back: jax.Array) -> tuple[jax.Array, ...]:
    """The body of a program: [m, k] @ [k, n] @ [n, k], which keeps the norm of x."""
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


def attention_flops_per_s(bench: Workbench, sizes: tuple[AttentionSize, ...]) -> tuple[float, float]:
    """Causal FLOP/s of the forward and the backward pass at the last size that fits, or the first.

    Args:
      bench: where cuDNN's attention exists it is taken, as the models do.
      sizes: small ones first.
    """
    fused = _has_fused_attention(bench.machine)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn" if fused else "xla")
    rates = _FIRST_FLOPS_PER_S, _FIRST_FLOPS_PER_S
    for size in sizes:
        label, predicted_s = f"attention of {size.rows} x {size.seq_len} tokens", size.flops / rates[0]
        arrays = [Array(size.shape, "bfloat16")] * 7
        # Unfused, the scores decide: some four arrays of them in float32.
        scores_bytes = 0 if fused else 4 * 4 * size.rows * size.num_heads * size.seq_len**2
        if size == sizes[0] or bench.fits(label, 4 * predicted_s, num_bytes_of(arrays) + scores_bytes):
            # XLA's form, and the lowering of its gradient, ask for the common dtype of bfloat16 and float32.
            with jax.numpy_dtype_promotion("standard"):
                forward_s = bench.measure(f"{label}, forward", _forward(attend), arrays[:4], predicted_s)
                both_s = bench.measure(f"{label}, forward and backward", _both(attend), arrays, 4 * forward_s)
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


def num_bytes_of(arrays: Sequence[Array]) -> int:
    """Of all of them on one device."""
    return sum(array.num_bytes for array in arrays)
