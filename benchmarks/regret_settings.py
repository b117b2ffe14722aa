"""What `regret.py` measures, in which order, and the file it goes to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rows import Row

from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.strategy import DataRanks, Degrees, all_degrees, parse

SETTINGS = StepSettings()
"""Of every step: gradients are summed in float32, blocks keep the results of their matrix products."""

NUM_BEST, NUM_REPEATED = 6, 2
NAMED = ("zero1", "zero3", "mics", "hpz")
"""What others call their strategies: the choice is compared with them in every case of the first size."""

PROBE_BYTES = 2**26
"""Of a gather over all devices after each setting: how fast the network was then."""

Picks = Mapping[str, str]
"""By size and microbatches, as in `wide 4`: the strategy that the planner chooses."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One thing to measure.

    Attributes:
      size: a key of `SIZES`.
      accumulation: microbatches of a step.
      strategy: in canonical form.
      repeat: 0, and 1 when it is measured again.
    """

    size: str
    accumulation: int
    strategy: str
    repeat: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Setting:
        """The setting of a row."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    def degrees(self, ranks: DataRanks) -> Degrees:
        """Its strategy, resolved."""
        return parse(self.strategy).resolve(ranks)


def schedule(rows: Sequence[Row], ranks: DataRanks, sizes: Sequence[str], picks: Picks) -> Iterator[Setting]:
    """Every setting in order, measured or not; what comes late depends on the times of what comes early.

    All strategies of the first size at 1 and 4 microbatches; the fastest two of each and the planner's choice again,
    which gives the noise; the fastest six of both, the planner's choice and those that have a name at 2 and 8; the
    former, without names, at 1 and 4 of each other size.
    """
    first, *others = sizes
    for accumulation in (1, 4):
        yield from (Setting(first, accumulation, str(d)) for d in sorted(all_degrees(ranks), key=_filled_first))
    best = fastest(rows, first, (1, 4))[:NUM_BEST]
    for n in (1, 4):
        pick = picks.get(f"{first} {n}")
        again = dict.fromkeys([*fastest(rows, first, (n,))[:NUM_REPEATED], *([pick] if best and pick else [])])
        yield from (Setting(first, n, strategy, repeat=1) for strategy in again)
    named = [str(parse(name).resolve(ranks)) for name in NAMED if best]
    cases = [(first, 8, named), (first, 2, named), *((size, n, []) for size in others for n in (4, 1))]
    for size, n, more in cases:
        pick = picks.get(f"{size} {n}")
        yield from (Setting(size, n, s) for s in dict.fromkeys([*best, *([pick] if pick else []), *more]))


def _filled_first(degrees: Degrees) -> bool:
    return bool(degrees.warnings)


def fastest(rows: Sequence[Row], size: str, accumulations: Sequence[int]) -> list[str]:
    """Strategies by the product of their step times at these numbers of microbatches; those that lack one are left
    out."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        if row["size"] == size and row["accumulation"] in accumulations and not row["repeat"] and "step_s" in row:
            logs.setdefault(row["strategy"], []).append(math.log(row["step_s"]))
    every = [strategy for strategy, found in logs.items() if len(found) == len(accumulations)]
    return sorted(every, key=lambda strategy: sum(logs[strategy]))


def next_setting(rows: Sequence[Row], ranks: DataRanks, sizes: Sequence[str], picks: Picks) -> Setting | None:
    """The first of the schedule that has no row."""
    done = {Setting.of(row) for row in rows}
    return next((setting for setting in schedule(rows, ranks, sizes, picks) if setting not in done), None)


def read_picks(folder: Path) -> Picks:
    """Of `picks.json`; none if it is not there."""
    path = folder / "picks.json"
    return json.loads(path.read_text()) if path.exists() else {}
