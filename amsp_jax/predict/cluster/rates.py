"""Rates of one device: matrix products by size, attention, memory, and what a running collective costs."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Mapping

from amsp_jax.errors import UserError

MatmulPoint = tuple[int, int, int, float]
"""`(m, k, n, flops_per_s)`: a product of [m, k] and [k, n] is 2 m k n FLOPs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device reaches, measured or assumed; `Cluster.source` and `Cluster.assumptions` say which.

    Attributes:
      matmul: points by the dtype's name, such as `bfloat16`.
      attention_flops_per_s: forward and backward; a causal mask's half counts as no work.
      memory_bytes_per_s: of elementwise passes, bytes read plus bytes written.
      overlap_slowdown: compute time while a collective runs over compute time alone, at least 1.
    """

    matmul: Mapping[str, tuple[MatmulPoint, ...]] = dataclasses.field(hash=False)
    attention_flops_per_s: tuple[float, float]
    memory_bytes_per_s: float
    overlap_slowdown: float

    def __post_init__(self) -> None:
        numbers = [("memory_bytes_per_s", self.memory_bytes_per_s), ("overlap_slowdown", self.overlap_slowdown)]
        numbers += [("attention_flops_per_s", rate) for rate in self.attention_flops_per_s]
        for dtype, points in self.matmul.items():
            if not points:
                raise UserError(f"rates: matmul of {dtype} has no points, but needs one or more. Leave the dtype out.")
            numbers += [(f"matmul of {dtype}", number) for point in points for number in point]
        for name, number in numbers:
            if not (math.isfinite(number) and number > 0):
                raise UserError(f"rates: {name}: {number}, but it is a finite number above 0. Correct it.")
        if self.overlap_slowdown < 1:
            raise UserError(f"rates: overlap_slowdown={self.overlap_slowdown}, but it is at least 1. Correct it.")

    def matmul_flops_per_s(self, dtype: str, m: int, k: int, n: int) -> float:
        """Rate of a product [m, k] x [k, n].

        Linear in the logarithm of (m k n)^(1/3) between the points, that of the nearest point outside them.

        Raises:
          UserError: no points of this dtype.
        """
        if dtype not in self.matmul:
            raise UserError(
                f"rates: no matrix products of {dtype!r} were measured; there are {', '.join(self.matmul) or 'none'}. "
                f"Choose one of them, or calibrate: python -m amsp_jax calibrate --out FILE"
            )
        sizes, rates = self._curves[dtype]
        size = math.log(m * k * n) / 3
        right = bisect.bisect_right(sizes, size)
        if right == 0 or right == len(sizes):
            return rates[max(right - 1, 0)]
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return rates[right - 1] + share * (rates[right] - rates[right - 1])

    @functools.cached_property
    def _curves(self) -> dict[str, tuple[list[float], list[float]]]:
        """By dtype: logarithms of sizes, rising, and the rate at each."""
        return {dtype: _curve(points) for dtype, points in self.matmul.items()}


def _curve(points: tuple[MatmulPoint, ...]) -> tuple[list[float], list[float]]:
    # Shapes of one size, a product and its transposes, count as one point: their seconds are averaged.
    by_size: dict[int, list[float]] = defaultdict(list)
    for m, k, n, flops_per_s in points:
        by_size[m * k * n].append(1 / flops_per_s)
    return (
        [math.log(size) / 3 for size in sorted(by_size)],
        [len(by_size[size]) / sum(by_size[size]) for size in sorted(by_size)],
    )
