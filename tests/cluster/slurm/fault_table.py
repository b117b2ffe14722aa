"""The table of faults in docs/reliability.md, from what the tests measured."""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Sequence
from pathlib import Path

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_SILENT = "nothing, as its writer is lost; SLURM requeues the job itself"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """What followed on one fault.

    Attributes:
      name: of the fault.
      said: the lines of the log that tell of it.
      end_s: until the job had ended; None where it never trained.
      continue_s: until it dispatched its next training step; None where it must not go on.
      steps_lost: that were trained again.
    """

    name: str
    said: Sequence[str]
    end_s: float
    continue_s: float | None = None
    steps_lost: int | None = None


def write_table(file: Path, faults: Sequence[Fault], command: str) -> None:
    """Puts the table between its marks in `file`."""
    text = file.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    file.write_text(f"{before}{BEGIN}\n{_table(faults, command)}{END}{after}")


def _table(faults: Sequence[Fault], command: str) -> str:
    rows = [
        f"| {fault.name} | {'<br>'.join(f'`{line}`' for line in fault.said) or _SILENT} | {fault.end_s:.0f} "
        f"| {_or_none(fault.continue_s, '.0f')} | {_or_none(fault.steps_lost, 'd')} |"
        for fault in faults
    ]
    head = "| fault | what the log says | s to the end | s to the next step | steps lost |"
    load = os.getloadavg()[1]
    where = f"{os.cpu_count()} CPU cores ({platform.machine()}), load {load:.1f} over the last 5 minutes"
    return "\n".join([f"Measured by `{command}` on {where}:", "", head, "| --- " * 5 + "|", *rows, ""])


def _or_none(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
