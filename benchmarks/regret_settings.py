"""What `regret.py` measures, in which order, and the file it goes to."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from amsp_jax.model import Model
from amsp_jax.optimizer import make_optimizer
from amsp_jax.stack import Remat
from amsp_jax.strategy import DataRanks, Degrees, all_degrees, parse
from models.registry import build_model

COMPUTE_DTYPE, REDUCE_DTYPE, REMAT = jnp.bfloat16, jnp.float32, Remat.PROJECTIONS
"""Of every setting."""

NUM_BEST, NUM_REPEATED = 6, 2

Picks = Mapping[str, str]
"""By size and microbatches, as in `wide 4`: the strategy that the planner chooses."""

Row = dict[str, Any]
"""One line of a file: a `Setting`, its `Size`, and what was measured or the error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """A model and one device's share of a microbatch.

    Attributes:
      model, overrides: a name of `models.registry`, and what differs from it.
      seq_len: tokens of a sequence.
      microbatch: sequences a device computes at once.
    """

    model: str
    overrides: Mapping[str, Any]
    seq_len: int
    microbatch: int


SIZES = {
    "wide": Size(model="llama-7b", overrides={"num_layers": 4}, seq_len=4096, microbatch=2),
    "narrow": Size(model="llama-1b", overrides={"num_layers": 8}, seq_len=4096, microbatch=4),
    "tiny": Size(model="llama-tiny", overrides={"num_layers": 2}, seq_len=64, microbatch=1),
}


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

    All strategies of the first size at 1 and 4 microbatches; the fastest two of them again, which gives the noise; the
    fastest six, and the planner's choice, at 2 and 8, and at 1 and 4 of each other size.
    """
    first, *others = sizes
    for accumulation in (1, 4):
        yield from (Setting(first, accumulation, str(d)) for d in sorted(all_degrees(ranks), key=_filled_first))
    best = fastest(rows, first)[:NUM_BEST]
    yield from (Setting(first, n, strategy, repeat=1) for n in (1, 4) for strategy in best[:NUM_REPEATED])
    for size, accumulations in ((first, (2, 8)), *((size, (1, 4)) for size in others)):
        for n in accumulations:
            pick = picks.get(f"{size} {n}")
            yield from (Setting(size, n, s) for s in dict.fromkeys([*best, *([pick] if pick else [])]))


def _filled_first(degrees: Degrees) -> bool:
    return bool(degrees.warnings)


def fastest(rows: Sequence[Row], size: str) -> list[str]:
    """Strategies by the product of their step times at 1 and 4 microbatches."""
    logs: dict[str, list[float]] = {}
    for row in rows:
        if row["size"] == size and row["accumulation"] in (1, 4) and not row["repeat"] and "step_s" in row:
            logs.setdefault(row["strategy"], []).append(math.log(row["step_s"]))
    return sorted((strategy for strategy, both in logs.items() if len(both) == 2), key=lambda s: sum(logs[s]))


def next_setting(rows: Sequence[Row], ranks: DataRanks, sizes: Sequence[str], picks: Picks) -> Setting | None:
    """The first of the schedule that has no row."""
    done = {Setting.of(row) for row in rows}
    return next((setting for setting in schedule(rows, ranks, sizes, picks) if setting not in done), None)


def read_picks(folder: Path) -> Picks:
    """Of `picks.json`; none if it is not there."""
    path = folder / "picks.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if it is not there. A last line that was cut off counts as not measured."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def append_row(path: Path, row: Row) -> None:
    """Adds a line, after one that was cut off, too."""
    whole = not path.exists() or path.read_text().endswith("\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def build(size: Size, attention: str) -> Model:
    """The model, with the attention that it runs with."""
    return build_model(size.model, size.overrides, attention=attention)


def optimizer() -> Any:
    """Of every setting."""
    return make_optimizer("adamw", 3e-4, weight_decay=0.1, clip_norm=1.0)
