"""One line a check: what was found, and what to do; the findings of many processes as one list.

A check is a function that returns findings. It runs under a time limit in a thread of its own, so that a file system
or a network that hangs is a finding, too.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from amsp_jax.errors import UserError

_THREAD = "doctor: "


class Status(enum.StrEnum):
    """How good a finding is; only `FAIL` stands in the way of training."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
      check: what was looked at.
      status: the verdict.
      found: what was there, in words and numbers.
      fix: the next step; empty where there is none to take, or `found` names it.
      alike: it must be the same in every process.
    """

    check: str
    status: Status
    found: str
    fix: str = ""
    alike: bool = False

    def __str__(self) -> str:
        step = f" -> {self.fix}" if self.fix else ""
        return f"{self.status:<4}  {self.check:<22}  {self.found}{step}"


@dataclasses.dataclass(frozen=True)
class Report:
    """The findings of one process."""

    process: int
    host: str
    findings: tuple[Finding, ...]


def ok(check: str, found: str, *, alike: bool = False) -> Finding:
    """A finding that needs no step."""
    return Finding(check, Status.OK, found, alike=alike)


def warn(check: str, found: str, fix: str = "") -> Finding:
    """A finding that may cost time or safety."""
    return Finding(check, Status.WARN, found, fix)


def fail(check: str, found: str, fix: str = "") -> Finding:
    """A finding that stands in the way of training."""
    return Finding(check, Status.FAIL, found, fix)


class Examined(NamedTuple):
    """What a check found, and whether it came to its end."""

    findings: list[Finding]
    finished: bool


def examine(check: str, look: Callable[[], Iterable[Finding]], *, limit_s: float, if_stuck: str) -> Examined:
    """What `look` finds; never an exception, and never later than `limit_s`.

    Args:
      check: the name of what fails where `look` raises or does not return.
      look: runs in a thread, which is left behind where it hangs.
      limit_s: seconds until it counts as hanging.
      if_stuck: the next step for a person whose machine makes it hang, or jax fail.
    """
    found: list[Finding] = []
    finished = threading.Event()

    def run() -> None:
        try:
            found.extend(look())
            finished.set()
        except UserError as error:
            found.append(fail(check, one_line(error)))
        except Exception as error:  # whatever is broken here is what the doctor was called for
            # The type is compared by name, as the doctor runs without jax, too.
            if isinstance(error, TimeoutError) or type(error).__name__ == "JaxRuntimeError":
                found.append(fail(check, one_line(error), if_stuck))
                return
            problem = f"{type(error).__name__}: {one_line(error)}"
            found.append(fail(check, problem, "this check could not finish; see whether its message says why"))

    thread = threading.Thread(target=run, daemon=True, name=f"{_THREAD}{check}")
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        return Examined([*found, fail(check, f"no answer within {limit_s:g} s", if_stuck)], finished=False)
    return Examined(found, finished.is_set())


def is_stuck() -> bool:
    """Whether a check still hangs: then the process cannot end in order."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())


def one_line(error: BaseException) -> str:
    """The message of an exception without its line breaks, and without what XLA adds for its developers."""
    return " ".join(str(error).split()).split(" [executable_name=")[0].split(" === Source Location")[0]


def merge(reports: Sequence[Report]) -> list[Finding]:
    """One list of all processes' findings, in the order of the checks; who differs is named.

    Args:
      reports: at least one, those of the processes that were heard.
    """
    by_check: dict[str, list[tuple[Report, Finding]]] = {}
    for report in reports:
        for finding in report.findings:
            by_check.setdefault(finding.check, []).append((report, finding))
    return [line for entries in by_check.values() for line in _merged(entries, len(reports))]


def _merged(entries: Sequence[tuple[Report, Finding]], num_reports: int) -> list[Finding]:
    bad = [(report, finding) for report, finding in entries if finding.status != Status.OK]
    if bad:
        return _grouped(bad, num_reports)
    first = entries[0][1]
    texts: dict[str, list[Report]] = {}
    for report, finding in entries:
        texts.setdefault(finding.found, []).append(report)
    if first.alike and len(texts) > 1:
        found = "; ".join(f"{who(reports)}: {text}" for text, reports in texts.items())
        return [fail(first.check, found, "use the same in every process")]
    return list(dict.fromkeys(finding for report, finding in entries if report is entries[0][0]))


def _grouped(entries: Sequence[tuple[Report, Finding]], num_reports: int) -> list[Finding]:
    """A line for each kind of trouble. Numbers may differ within a kind, then the first process's are shown."""
    kinds: dict[tuple[Status, str], list[tuple[Report, Finding]]] = {}
    for report, finding in entries:
        key = finding.fix or finding.found
        kinds.setdefault((finding.status, key), []).append((report, finding))
    lines = []
    for kind in kinds.values():
        first = kind[0][1]
        reports = list(dict.fromkeys(report for report, _ in kind))
        everyone_alike = len(reports) == num_reports and len({finding.found for _, finding in kind}) == 1
        found = first.found if num_reports == 1 or everyone_alike else f"{who(reports)}: {first.found}"
        lines.append(dataclasses.replace(first, found=found))
    return lines


def who(reports: Sequence[Report]) -> str:
    """`process 3 on node2`, or `processes 0-2, 5 on node1, node2`."""
    hosts = list(dict.fromkeys(report.host for report in reports))
    more = f" and {len(hosts) - 4} more hosts" if len(hosts) > 4 else ""
    name = "process" if len(reports) == 1 else "processes"
    return f"{name} {ranges([report.process for report in reports])} on {', '.join(hosts[:4])}{more}"


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5` of 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][-1:] = [number] if len(runs[-1]) > 1 else [runs[-1][0], number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the table."""
    counts = count(findings)
    text = ", ".join(f"{number} {status}" for status, number in counts.items())
    return f"{len(findings)} findings: {text}" + (". Fix what FAILs first." if counts[Status.FAIL] else "")


def count(findings: Sequence[Finding]) -> Mapping[Status, int]:
    """How many findings there are of each status."""
    return {status: sum(finding.status == status for finding in findings) for status in Status}
