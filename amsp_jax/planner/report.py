"""A ranking and an estimate as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from amsp_jax.cost.communication import Phase
from amsp_jax.cost.memory import MemoryEstimate
from amsp_jax.cost.timeline import Event
from amsp_jax.planner.scorer import MEASURED, MessageCost
from amsp_jax.planner.types import Candidate, Estimate, Ranking

TERMS = {
    Phase.START: "P shards",
    Phase.FORWARD: "gather",
    Phase.BACKWARD: "gather again",
    Phase.REDUCE: "reduce",
    Phase.END: "reduce at end",
}
"""What the phases of communication are called."""

_GIB = 2**30
_BAR = 40


def ranking_table(ranking: Ranking, top: int) -> str:
    """The best `top` candidates, one line each: memory in GiB, times in milliseconds."""
    searched = _searched(ranking)
    heads = ["", "strategy", *searched, "states", "activations", "peak", *TERMS.values(), "exposed", "step"]
    rows = [[*heads, "tokens/s/device", "MFU"]]
    for number, estimate in enumerate(ranking.ranked[:top], 1):
        rows.append([str(number), str(estimate.candidate.degrees), *_searched_values(estimate, searched)])
        rows[-1] += _row(estimate)
    units = ["", "", *["" for _ in searched], *["GiB"] * 3, *["ms"] * (len(TERMS) + 2), "", "%"]
    return "\n".join(_aligned([rows[0], units, *rows[1:]], left=(1,)))


def _row(estimate: Estimate) -> list[str]:
    memory = estimate.memory
    times = [estimate.terms_s[phase] for phase in TERMS]
    states = memory.argument_bytes + memory.params + memory.grads
    return [
        _gib(states),
        _gib(memory.activations),
        _gib(memory.total),
        *(f"{seconds * 1e3:.1f}" for seconds in (*times, estimate.timeline.exposed_s, estimate.step_s)),
        f"{estimate.tokens_per_s_per_device:,.0f}",
        "-" if estimate.mfu is None else f"{estimate.mfu:.1%}"[:-1],
    ]


def _searched(ranking: Ranking) -> list[str]:
    """Which of microbatch and rematerialisation differ between candidates."""
    points = [e.candidate for e in ranking.ranked] + [r.candidate for r in ranking.rejected]
    names = ("microbatch", "remat")
    return [name for name in names if len({getattr(point, name) for point in points}) > 1]


def _searched_values(estimate: Estimate, names: Iterable[str]) -> list[str]:
    return [str(getattr(estimate.candidate, name)) for name in names]


def rejected_lines(ranking: Ranking) -> str:
    """How many candidates are not ranked, by reason."""
    lines = [f"{count:5d} rejected: {reason}" for reason, count in ranking.num_rejected.most_common()]
    return "\n".join([f"{len(ranking.ranked):5d} ranked", *lines])


def why(ranking: Ranking) -> str:
    """Why the winner won: what it has over the next that differs, and over well-known strategies."""
    best = ranking.best
    by_name = {"step_time": "predicted step time", "paper": "sum of communication terms (AMSP's objective)"}
    lines = [f"smallest {by_name[ranking.objective]} of {len(ranking.ranked)} that fit: {_seconds(best.objective_s)}"]
    if len(ranking.ranked) > 1:
        second = ranking.ranked[1]
        slower = second.objective_s / best.objective_s - 1 if best.objective_s else 0.0
        lines.append(f"the next, {second.candidate.degrees}, takes {slower:.1%} more: {_difference(best, second)}")
    return "; ".join(lines)


def _difference(best: Estimate, other: Estimate) -> str:
    gaps = {TERMS[phase]: other.terms_s[phase] - best.terms_s[phase] for phase in TERMS}
    gaps["exposed"] = other.timeline.exposed_s - best.timeline.exposed_s
    name = max(gaps, key=lambda key: abs(gaps[key]))
    return f"largest difference, {name} {_signed(gaps[name])}"


def gin_lines(estimate: Estimate, searched: Sequence[str] = ()) -> str:
    """The candidate as lines of a gin file."""
    candidate = estimate.candidate
    lines = [f"STRATEGY = '{candidate.degrees}'"]
    if "microbatch" in searched:
        lines.append(f"MICROBATCH = {candidate.microbatch}")
    if "remat" in searched:
        lines.append(f"REMAT = '{candidate.remat}'")
    return "\n".join(lines)


def as_json(ranking: Ranking) -> dict[str, Any]:
    """One JSON object: `best` first, then `ranked` and `rejected`."""
    return {
        "best": str(ranking.best.candidate.degrees),
        "objective": str(ranking.objective),
        "memory_limit_bytes": ranking.memory_bytes,
        "ranked": [estimate_json(estimate) for estimate in ranking.ranked],
        "rejected": [
            {**_point(r.candidate), "reason": str(r.reason), "missing_bytes": r.missing_bytes} for r in ranking.rejected
        ],
    }


def _point(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": str(candidate.degrees), "microbatch": candidate.microbatch, "remat": str(candidate.remat),
    }  # fmt: skip


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """One estimate, bytes of one device and seconds of a step."""
    return {
        **_point(estimate.candidate),
        "accumulation": estimate.accumulation,
        "memory_bytes": {**_memory_parts(estimate.memory), "peak": estimate.memory.total},
        "communication_s": {TERMS[phase]: seconds for phase, seconds in estimate.terms_s.items()},
        "exposed_s": estimate.timeline.exposed_s,
        "compute_s": estimate.timeline.compute_s,
        "step_s": estimate.step_s,
        "objective_s": estimate.objective_s,
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "unmeasured": list(estimate.unmeasured),
    }


def _memory_parts(memory: MemoryEstimate) -> dict[str, int]:
    return {field.name: getattr(memory, field.name) for field in dataclasses.fields(memory)}


def explanation(estimate: Estimate, messages: Sequence[MessageCost], memory_bytes: int) -> str:
    """One strategy in full: memory bars, a block's two streams, every collective."""
    return "\n\n".join(
        [
            f"{estimate.candidate.degrees}, microbatch {estimate.candidate.microbatch}, remat "
            f"{estimate.candidate.remat}, {estimate.accumulation} microbatches a step",
            _memory_bars(estimate.memory, memory_bytes),
            _block_timeline(estimate),
            _message_table(messages),
            f"step {_seconds(estimate.step_s)}: compute {_seconds(estimate.timeline.compute_s)}, collectives "
            f"{_seconds(estimate.timeline.communication_s)}, of which the step waits for "
            f"{_seconds(estimate.timeline.exposed_s)}",
        ]
    )


def _memory_bars(memory: MemoryEstimate, limit: int) -> str:
    parts = {**{name.replace("_bytes", ""): n for name, n in _memory_parts(memory).items()}, "peak": memory.total}
    rows = [["memory of a device", "GiB", ""]]
    for name, num_bytes in {**parts, "limit": limit}.items():
        filled = round(_BAR * num_bytes / max(limit, memory.total))
        rows.append([name.replace("_", " "), _gib(num_bytes), "#" * filled])
    return "\n".join(_aligned(rows, left=(0, 2)))


def _block_timeline(estimate: Estimate) -> str:
    """The two streams while a block in the middle is computed, forward and backward, in the first microbatch."""
    forwards = [e for e in estimate.timeline.events if e.name.startswith("forward")]
    middle = forwards[0].name.split()[1] if len(forwards) < 3 else None
    indices = sorted({int(e.name.split()[1]) for e in forwards})
    middle = middle or str(indices[len(indices) // 2])
    lanes = [_lanes(estimate.timeline.events, f"{way} {middle}") for way in ("forward", "backward")]
    return "\n\n".join([f"part {middle} of {indices[-1]}: what runs while it is computed", *lanes])


def _lanes(events: Sequence[Event], name: str) -> str:
    block = next(e for e in events if e.stream == "compute" and e.name == name)
    width = 60
    scale = width / (block.end_s - block.start_s)
    rows = [["", f"{name}, {_seconds(block.end_s - block.start_s)}", "", ""]]
    for event in sorted(events, key=lambda e: (e.stream, e.start_s)):
        start, end = max(event.start_s, block.start_s), min(event.end_s, block.end_s)
        if end <= start:
            continue
        left, size = round((start - block.start_s) * scale), max(1, round((end - start) * scale))
        bar = (" " * left + ("=" if event.stream == "compute" else "~") * size)[:width]
        rows.append([event.stream, bar.ljust(width), event.name, _seconds(event.end_s - event.start_s)])
    return "\n".join(_aligned(rows, left=(0, 1, 2)))


def _message_table(messages: Sequence[MessageCost]) -> str:
    rows = [["part", "when", "collective", "over", "group", "MiB", "times", "ms each", "GB/s", ""]]
    for cost in messages:
        message = cost.message
        rows.append(
            [
                cost.part,
                TERMS[message.phase],
                message.kind,
                "+".join(message.axes),
                str(message.group),
                f"{message.num_bytes / 2**20:.1f}",
                str(cost.count),
                f"{cost.seconds * 1e3:.3f}",
                f"{message.num_bytes / cost.seconds / 1e9:.1f}",
                "" if cost.basis == MEASURED else f"not measured: {cost.basis}",
            ]
        )
    return "\n".join(_aligned(rows, left=(0, 1, 2, 3, 4, 9)))


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Columns of one width; those of `left` begin at it, the others end there."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return [line(row) for row in rows]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.1f} ms"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{_seconds(abs(seconds))}"
