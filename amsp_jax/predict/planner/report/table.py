"""A ranking as a table, and what was rejected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.planner.report.text import aligned, gib, percent, short
from amsp_jax.predict.planner.types import Candidate, Estimate, Ranking, Reason
from amsp_jax.strategy import Degrees

TERMS = {
    Phase.START: "P shards",
    Phase.FORWARD: "gather",
    Phase.BACKWARD: "gather again",
    Phase.REDUCE: "reduce",
    Phase.END: "reduce at end",
    Phase.TENSOR: "tensor",
    Phase.CONTEXT: "context",
    Phase.SEND: "stage sends",
}
"""What the phases of communication are called."""

_WIDTH = 170


@dataclasses.dataclass(frozen=True)
class _Column:
    """A number of an estimate; left out where it is nothing for all of them."""

    head: str
    text: Callable[[Estimate], str]

    def cells(self, estimates: Sequence[Estimate]) -> list[str]:
        return [self.head, *map(self.text, estimates)]

    def is_empty(self, estimates: Sequence[Estimate]) -> bool:
        return all(self.text(estimate) in ("0.00", "0.0", "-") for estimate in estimates)


_MEMORY = (
    _Column("states", lambda e: gib(e.memory.master + e.memory.opt_state)),
    _Column("P", lambda e: gib(e.memory.params)),
    _Column("G", lambda e: gib(e.memory.grads)),
    _Column("activ.", lambda e: gib(e.memory.activations)),
    _Column("flight", lambda e: gib(e.memory.gathered + e.memory.reductions)),
    _Column("peak", lambda e: gib(e.memory.total)),
)
_RATES = (
    _Column("tokens/s", lambda e: f"{e.tokens_per_s_per_device:,.0f}"),
    _Column("MFU, %", lambda e: "-" if e.mfu is None else percent(e.mfu)),
)
_SHORT_TERMS = dict(
    zip(TERMS, ("shards", "gather", "again", "reduce", "at end", "tensor", "ring", "sends"), strict=True)
)


def _groups(shown: Sequence[Estimate]) -> dict[str, tuple[_Column, ...]]:
    """Groups of columns under one heading; times in seconds where a step takes ten."""
    in_seconds = max(estimate.step_s for estimate in shown) >= 10
    unit = "s" if in_seconds else "ms"

    def column(head: str, time_s: Callable[[Estimate], float]) -> _Column:
        return _Column(head, lambda e: f"{time_s(e):.2f}" if in_seconds else f"{1e3 * time_s(e):.1f}")

    def term(phase: Phase) -> Callable[[Estimate], float]:
        return lambda e: e.terms_s[phase]

    return {
        "memory of a device, GiB": _MEMORY,
        f"collectives of a step, {unit}": tuple(column(head, term(phase)) for phase, head in _SHORT_TERMS.items()),
        f"step, {unit}": (
            column("exposed", lambda e: e.timeline.exposed_s),
            column("bubble", lambda e: e.timeline.bubble_s),
            column("whole", lambda e: e.step_s),
        ),
        "each device": _RATES,
    }


def ranking_table(ranking: Ranking, top: int) -> str:
    """The best `top` candidates, one line each, under two lines of headings; columns that say nothing are left out.

    Memory at the peak: master parameters with optimizer states, P shards, gradients, activations, and what is gathered
    or waits for its reduction. Seconds of collectives, whether hidden behind compute or not; of the step, those in
    which compute waits for them.
    """
    shown = ranking.ranked[:top]
    blocks = [_block(title, columns, shown) for title, columns in _groups(shown).items()]
    for name in (str, short):
        lines = _beside([_names(ranking, shown, name), *filter(None, blocks)])
        if max(map(len, lines)) <= _WIDTH:
            break
    return "\n".join(lines)


def _names(ranking: Ranking, shown: Sequence[Estimate], name: Callable[[Degrees], str]) -> list[str]:
    fields = searched(ranking)
    rows = [["", "strategy", *map(heading, fields)]]
    for number, estimate in enumerate(shown, 1):
        point = estimate.candidate
        rows.append([str(number), name(point.degrees), *(field_text(point, field) for field in fields)])
    return ["", *aligned(rows, left=(1,))]


def _block(title: str, columns: Sequence[_Column], shown: Sequence[Estimate]) -> list[str]:
    """The lines of a group; none where all of its columns are empty."""
    kept = [column.cells(shown) for column in columns if not column.is_empty(shown)]
    if not kept:
        return []
    lines = aligned(list(zip(*kept, strict=True)), left=())
    width = max(len(title), *map(len, lines))
    return [f"{title} ".ljust(width, "-") if len(title) < width else title, *(line.rjust(width) for line in lines)]


def _beside(blocks: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, block)) for block in blocks]
    return [
        "  ".join(line.ljust(width) for line, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*blocks, strict=True)
    ]


def searched(ranking: Ranking) -> list[str]:
    """Which fields differ between candidates, the strategy aside."""
    points = [e.candidate for e in ranking.ranked] + [r.candidate for r in ranking.rejected]
    return [name for name in _FIELDS if len({field_text(point, name) for point in points}) > 1]


_CUT = ("tensor", "pipeline", "context")
_FIELDS = (*_CUT, "virtual_stages", "microbatch", "microbatch_group", "remat")


def heading(field: str) -> str:
    """The heading of a column for a field that `searched` names."""
    return {"microbatch": "micro", "microbatch_group": "group", "virtual_stages": "virtual"}.get(field, field)


def field_text(candidate: Candidate, name: str) -> str:
    """The value of one of the fields that `searched` names."""
    return str(getattr(candidate.parallel if name in _CUT else candidate, name))


def rejected_lines(ranking: Ranking) -> str:
    """How many candidates are not ranked, by reason; of those too large, by how much the nearest misses."""
    lines = [f"{len(ranking.ranked):5d} ranked"]
    for reason, count in ranking.num_rejected.most_common():
        nearest = ""
        if reason is Reason.MEMORY:
            missing = min((r.missing_bytes for r in ranking.rejected if r.reason is reason), default=0)
            nearest = f", the nearest {gib(missing)} GiB more than {gib(ranking.memory_bytes)}" if missing else ""
        lines.append(f"{count:5d} rejected: {reason}{nearest}")
    if ranking.not_scored:
        scored = len(ranking.ranked) + len(ranking.rejected)
        lines.append(
            f"{scored:5d} of all were predicted in full; bounds said enough of the others, and the first are exact"
        )
    return "\n".join(lines)


def gin_lines(estimate: Estimate) -> list[str]:
    """The candidate as lines of a gin file."""
    candidate = estimate.candidate
    lines = [
        f"STRATEGY = '{candidate.degrees}'",
        f"MICROBATCH = {candidate.microbatch}",
        f"REMAT = '{candidate.remat}'",
    ]
    if candidate.microbatch_group > 1:
        lines.insert(2, f"MICROBATCH_GROUP = {candidate.microbatch_group}")
    if candidate.parallel.total == 1:
        return lines
    lines += [f"{name.upper()} = {field_text(candidate, name)}" for name in _CUT]
    if candidate.parallel.pipeline > 1:
        lines += [
            f"PIPELINE_SCHEDULE = '{candidate.pipeline_schedule}'",
            f"VIRTUAL_STAGES = {candidate.virtual_stages}",
        ]
    return lines
