"""Seconds of a collective: from measured points, else from what is measured beside it, else from the links."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from amsp_jax.errors import UserError
from amsp_jax.strategy import Degree


class CollectiveKind(StrEnum):
    """What is measured and asked for; a plain string of the same letters does as well."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    BROADCAST = "broadcast"


Points = tuple[tuple[int, float], ...]
"""`(bytes of the whole message, seconds)`, by rising bytes."""

# Which kind stands in for one that was not measured, best first: a gather and a reduce-scatter move the same bytes.
_GATHER, _SCATTER, _REDUCE, _BROADCAST = CollectiveKind
_SIBLINGS = {
    _GATHER: (_SCATTER, _REDUCE, _BROADCAST),
    _SCATTER: (_GATHER, _REDUCE, _BROADCAST),
    _REDUCE: (_SCATTER, _GATHER, _BROADCAST),
    _BROADCAST: (_GATHER, _SCATTER, _REDUCE),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, as one device sees it while all devices send.

    Attributes:
      bytes_per_s: that a device sends, and receives at the same time; its share, where devices of a node share NICs.
      latency_s: of one step of a ring.
      slowdown: `((num_devices, factor), ...)` by rising size: a group of up to `num_devices` gets the bandwidth divided
        by `factor`, a larger one than the last by the last factor. Devices inside the node are counted inside a node,
        all of the group's between nodes.
    """

    bytes_per_s: float
    latency_s: float
    slowdown: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        _require("link: bytes_per_s", self.bytes_per_s)
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise UserError(f"link: latency_s={self.latency_s}, but it is a finite number of at least 0. Correct it.")
        for _, factor in self.slowdown:
            _require("link: a factor of slowdown", factor)
        _require_rising("link: the sizes of slowdown", (size for size, _ in self.slowdown))

    def effective_bytes_per_s(self, num_devices: int) -> float:
        """Bandwidth of a device in a group of `num_devices`."""
        if not self.slowdown:
            return self.bytes_per_s
        fits = (factor for size, factor in self.slowdown if num_devices <= size)
        return self.bytes_per_s / next(fits, self.slowdown[-1][1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """How long collectives take, with all groups of a shape active at once.

    Attributes:
      measured: points by kind and group shape `intra x inter`. A message's bytes are those of the whole: a gather's
        result, a reduction's input.
      intra: the links inside a node; None where nodes have one device.
      inter: the links between nodes; None where nothing is known of them.
    """

    measured: Mapping[tuple[str, Degree], Points] = dataclasses.field(default_factory=dict, hash=False)
    intra: Link | None = None
    inter: Link | None = None

    def __post_init__(self) -> None:
        for (kind, group), points in self.measured.items():
            where = f"network: {_known_kind(kind)} {group}"
            if group.total < 2 or not points:
                raise UserError(
                    f"{where}: {len(points)} points, but a group has 2 devices or more and one point or more."
                )
            _require_rising(f"{where}: bytes", (num_bytes for num_bytes, _ in points))
            for _, seconds in points:
                _require(f"{where}: seconds", seconds)

    def is_measured(self, kind: str, group: Degree) -> bool:
        """Whether `seconds` reads this kind and group off points, rather than off neighbours or links."""
        return (kind, group) in self.measured

    def seconds(self, kind: str, num_bytes: float, group: Degree) -> float:
        """Time of one collective over `num_bytes`, the whole message, in groups of shape `intra x inter`.

        Never shorter for more bytes. A group of one takes none. The first of these that there is:

        1. points of this kind and group, log-log between them; below the smallest its time (the latency), above the
           largest its bandwidth;
        2. points of another kind for this group, by the ratio of the bytes that the two kinds move;
        3. points of this kind for a smaller and a larger group, both inside a node or both over nodes with as many
           devices in each: the seconds log-log in the size of the group;
        4. the links, see `link_seconds`.

        Raises:
          UserError: an unknown kind, or a link is needed and not known.
        """
        kind = _known_kind(kind)
        if group.total == 1:
            return 0.0
        curves = self._curves
        if curve := curves.get((kind, group)):
            return curve.seconds(num_bytes)
        if sibling := self._sibling(kind, group):
            ratio = _traffic(kind, group.total) / _traffic(sibling, group.total)
            return curves[sibling, group].seconds(num_bytes) * ratio
        if around := self._bracket(kind, group):
            return _between(group, [(other, curves[kind, other].seconds(num_bytes)) for other in around])
        return self.link_seconds(kind, num_bytes, group)

    def basis(self, kind: str, group: Degree) -> str:
        """Which of the four `seconds` takes, for a table: `measured`, `as all-reduce`, `from 8x2, 8x8` or `links`."""
        kind = _known_kind(kind)
        if self.is_measured(kind, group):
            return "measured"
        if sibling := self._sibling(kind, group):
            return f"as {sibling}"
        if around := self._bracket(kind, group):
            return f"from {around[0]}, {around[1]}"
        return "links"

    def link_seconds(self, kind: str, num_bytes: float, group: Degree) -> float:
        """The same from the two links alone, for a group `a x b`.

        Rings inside the node and between nodes run at once, so the slower level sets the time. Each device moves
        `bytes x (n - 1) / n` (an all-reduce twice that, a broadcast all bytes). Between nodes the `a` devices that a
        group has in a node share that, each over its own part of the NICs:

            max(moved / intra.bytes_per_s [a > 1], moved / (a inter.bytes_per_s) [b > 1])
              + steps ((a - 1) intra.latency_s + (b - 1) inter.latency_s)        steps: 2 for all-reduce, else 1
        """
        kind = _known_kind(kind)
        moved = num_bytes * _traffic(kind, group.total)
        steps = 2 if kind == CollectiveKind.ALL_REDUCE else 1
        transfer = latency = 0.0
        if group.intra > 1:
            link = self._link("intra", group)
            transfer = moved / link.effective_bytes_per_s(group.intra)
            latency += steps * (group.intra - 1) * link.latency_s
        if group.inter > 1:
            link = self._link("inter", group)
            transfer = max(transfer, moved / (group.intra * link.effective_bytes_per_s(group.total)))
            latency += steps * (group.inter - 1) * link.latency_s
        return transfer + latency

    @functools.cached_property
    def _curves(self) -> dict[tuple[str, Degree], _Curve]:
        return {key: _Curve.of(points) for key, points in self.measured.items()}

    def _sibling(self, kind: CollectiveKind, group: Degree) -> CollectiveKind | None:
        return next((sibling for sibling in _SIBLINGS[kind] if (sibling, group) in self.measured), None)

    def _bracket(self, kind: CollectiveKind, group: Degree) -> tuple[Degree, Degree] | None:
        """The nearest smaller and larger measured groups that differ from `group` on its outer level only."""
        alike = [other for name, other in self.measured if name == kind and _structure(other) == _structure(group)]
        smaller = [other for other in alike if other.total < group.total]
        larger = [other for other in alike if other.total > group.total]
        if not smaller or not larger:
            return None
        return max(smaller, key=lambda other: other.total), min(larger, key=lambda other: other.total)

    def _link(self, level: str, group: Degree) -> Link:
        link: Link | None = getattr(self, level)
        if link is None:
            where = "inside a node" if level == "intra" else "between nodes"
            raise UserError(
                f"network: a group of {group} needs the links {where}, but {level} is not known. Calibrate on machines "
                f"that have them: python -m amsp_jax calibrate --out FILE"
            )
        return link


@dataclasses.dataclass(frozen=True)
class _Curve:
    """Seconds over bytes, by rising bytes; the seconds rise, too."""

    num_bytes: tuple[int, ...]
    times_s: tuple[float, ...]

    @classmethod
    def of(cls, points: Points) -> _Curve:
        # Noise makes a measurement longer, not shorter: a larger message's time bounds a smaller one's from above.
        bounded = itertools.accumulate((seconds for _, seconds in reversed(points)), min)
        return cls(tuple(num_bytes for num_bytes, _ in points), tuple(bounded)[::-1])

    def seconds(self, num_bytes: float) -> float:
        if num_bytes <= self.num_bytes[0]:
            return self.times_s[0]
        if num_bytes >= self.num_bytes[-1]:
            return self.times_s[-1] * num_bytes / self.num_bytes[-1]
        right = bisect.bisect_right(self.num_bytes, num_bytes)
        ends = slice(right - 1, right + 1)
        return _log_log(num_bytes, self.num_bytes[ends], self.times_s[ends])


def _log_log(x: float, xs: tuple[float, ...], ys: tuple[float, ...]) -> float:
    """On the straight line through two points, all in logarithms."""
    share = math.log(x / xs[0]) / math.log(xs[1] / xs[0])
    return ys[0] * (ys[1] / ys[0]) ** share


def _between(group: Degree, ends: list[tuple[Degree, float]]) -> float:
    return _log_log(group.total, tuple(end.total for end, _ in ends), tuple(seconds for _, seconds in ends))


def _structure(group: Degree) -> int | None:
    """What two groups must have in common to be compared by size: devices in each node, or being inside one."""
    return group.intra if group.inter > 1 else None


def _traffic(kind: str, num_devices: int) -> float:
    """Bytes that each device sends on a ring, over the bytes of the message."""
    if kind == CollectiveKind.BROADCAST:
        return 1.0
    return (2 if kind == CollectiveKind.ALL_REDUCE else 1) * (num_devices - 1) / num_devices


def _known_kind(kind: str) -> CollectiveKind:
    try:
        return CollectiveKind(kind)
    except ValueError:
        raise UserError(f"network: {kind!r} is no collective; write one of {', '.join(CollectiveKind)}") from None


def _require(what: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UserError(f"{what}={value}, but it is a finite number above 0. Correct it.")


def _require_rising(what: str, sizes: Iterable[int]) -> None:
    before = 0
    for size in sizes:
        if size <= before:
            raise UserError(f"{what}: {size} after {before}, but they start at 1 and rise. Sort them.")
        before = size
