"""Numbers and tables as text: what the planner's reports share."""

from __future__ import annotations

from collections.abc import Sequence

from amsp_jax.strategy import Degrees

WIDTH = 120
"""Of sentences."""

_GIB = 2**30


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Columns of one width; those of `left` begin at it, the others end there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]


def gib(num_bytes: float) -> str:
    """GiB without the unit."""
    return f"{num_bytes / _GIB:.2f}"


def seconds(number: float) -> str:
    """In s, ms or us."""
    if number >= 1:
        return f"{number:.3f} s" if number < 10 else f"{number:.2f} s"
    return f"{number * 1e3:.1f} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"


def signed(number: float) -> str:
    """Seconds with a sign."""
    return f"{'+' if number >= 0 else '-'}{seconds(abs(number))}"


def percent(fraction: float) -> str:
    """`61.5`, without the sign of percent."""
    return f"{100 * fraction:.1f}"


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`, `2 microbatches`, `2 copies`."""
    plurals = {"y": f"{noun[:-1]}ies", "h": f"{noun}es"}
    return f"{number} {noun if number == 1 else plurals.get(noun[-1], f'{noun}s')}"


def short(degrees: Degrees) -> str:
    """`P 1x1, G 8x8, OS 8x32`: where there is no room for the canonical text."""
    return f"P {degrees.params}, G {degrees.grads}, OS {degrees.opt_state}"
