"""How findings are printed: as a table, or as JSON."""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Sequence
from typing import TextIO

from amsp_jax.cli.doctor.findings import Finding, Status, count, summary
from amsp_jax.runtime.launch.processes import Processes


@dataclasses.dataclass(frozen=True)
class Table:
    """Where findings are printed, and how."""

    stdout: TextIO
    as_json: bool

    def print(self, findings: Sequence[Finding], title: str | None = None) -> int:
        """Prints them and returns the exit code."""
        counts = count(findings)
        is_good = not counts[Status.FAIL]
        if self.as_json:
            values = {"ok": is_good, "counts": counts, "findings": [dataclasses.asdict(f) for f in findings]}
            text = json.dumps(values, indent=2)
        else:
            text = "\n".join([*([title] if title else []), *map(str, findings), summary(findings)])
        print(text, file=self.stdout, flush=True)
        return 0 if is_good else 1


def title_of(processes: Processes) -> str | None:
    """The title of a table that is one process's own: processes that did not meet print one each."""
    return f"process {processes.index} on {socket.gethostname()}:" if processes.count > 1 else None
