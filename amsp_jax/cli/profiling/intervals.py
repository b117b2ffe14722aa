"""Arithmetic of time intervals: what is covered, and what is left."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Start and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def minus(interval: Interval, covered: Sequence[Interval]) -> list[Interval]:
    """The parts of an interval outside `covered`, which is disjoint and in order."""
    start, end = interval
    left = []
    for a, b in covered[max(bisect_right(covered, (start, start)) - 1, 0) :]:
        if a >= end:
            break
        if a > start:
            left.append((start, a))
        start = max(start, b)
    return [*left, (start, end)] if start < end else left


def total(intervals: Iterable[Interval]) -> float:
    """The summed length."""
    return sum(end - start for start, end in intervals)
