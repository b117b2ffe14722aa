"""The files that benchmarks write, one JSON object a line, and their tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One line of a file: what was asked, and what was measured or the error."""


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
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = not path.exists() or path.read_text().endswith("\n")
    with path.open("a") as file:
        file.write(("" if whole else "\n") + json.dumps(row) + "\n")


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    rule = ["---"] * len(heads)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *lines))


def milliseconds(seconds: float) -> str:
    """As a cell of a table."""
    return f"{seconds * 1e3:.1f}"


def step_times(row: Row) -> str:
    """Median (fastest, slowest) in milliseconds, or why there is none."""
    if "step_s" not in row:
        return str(row["error"])
    return f"{milliseconds(row['step_s'])} ({milliseconds(row['min_s'])}, {milliseconds(row['max_s'])})"


def gibibytes(num_bytes: float) -> str:
    """As a cell of a table."""
    return f"{num_bytes / 2**30:.2f}"
