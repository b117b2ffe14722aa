"""What only several processes can find out: whether they share files, and whether their clocks agree."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from amsp_jax.cli.doctor.exchange import Exchange
from amsp_jax.cli.doctor.files import nearest_folder
from amsp_jax.cli.doctor.findings import Finding, fail, ok, ranges, warn

# A network file system may keep a folder's old listing for this long.
_VISIBLE_WITHIN_S = 15.0
_WAIT_S = 20.0
# The processes leave the barrier some hundredths of a second apart, on a loaded machine more.
_MAX_SKEW_S = 2.0


def check_shared_between(exchange: Exchange, run_dir: Path) -> Iterator[Finding]:
    """Files and clocks, in every process at once; each says what it sees, process 0 judges the clocks.

    Raises:
      TimeoutError: another process did not come.
    """
    if exchange.index == 0:
        yield from _show_a_file(exchange, nearest_folder(run_dir))
    else:
        place = exchange.hear("file", 0, _WAIT_S)
        yield check_shared(Path(place["path"]), place["token"], _VISIBLE_WITHIN_S)
        exchange.wait_for_all("looked", _VISIBLE_WITHIN_S + _WAIT_S)
    exchange.wait_for_all("clocks", _WAIT_S)
    exchange.tell("clock", time.time())
    if exchange.index == 0:
        yield check_clocks(exchange.hear_all("clock", _WAIT_S))


def _show_a_file(exchange: Exchange, folder: Path) -> Iterator[Finding]:
    """Keeps a locked file in the folder until all the others have looked."""
    token = os.urandom(8).hex()
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".doctor-") as file:
        file.write(token)
        file.flush()
        os.fsync(file.fileno())
        fcntl.flock(file, fcntl.LOCK_EX)
        exchange.tell("file", {"path": file.name, "token": token})
        exchange.wait_for_all("looked", _VISIBLE_WITHIN_S + _WAIT_S)
    yield ok("shared run folder", f"a file of process 0 in {folder} is seen by every process")


def check_shared(path: Path, token: str, timeout_s: float) -> Finding:
    """Whether this process sees process 0's file, its content and its lock."""
    check, deadline = "shared run folder", time.monotonic() + timeout_s
    while not path.exists() and time.monotonic() < deadline:
        # Opening a folder makes NFS ask its server again.
        if path.parent.is_dir():
            os.listdir(path.parent)
        time.sleep(0.2)
    if not path.exists():
        fix = "put the run folder on a file system that all nodes share, and name it with --run-dir"
        return fail(check, f"does not see process 0's file in {path.parent} within {timeout_s:g} s", fix)
    with path.open() as file:
        if file.read() != token:
            return fail(
                check, f"sees process 0's file in {path.parent} with another content", "mount it with caching off"
            )
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return ok(check, "sees process 0's file and its lock")
    return warn(
        check, "sees process 0's file, but not its lock", "take care that no two commands train into one run folder"
    )


def check_clocks(times: Mapping[int, float]) -> Finding:
    """Times of day in all processes at one moment, in seconds."""
    base = times[0]
    skews = {process: seconds - base for process, seconds in times.items()}
    worst = max(skews, key=lambda process: abs(skews[process]))
    late = [process for process, skew in skews.items() if abs(skew) > _MAX_SKEW_S]
    if late:
        found = f"processes {ranges(late)} differ from process 0's by up to {skews[worst]:+.3g} s"
        return warn("clocks", found, "start chrony or ntpd on those nodes: logs and file times will be misleading")
    return ok("clocks", f"{len(times)} within {max(abs(skew) for skew in skews.values()):.2g} s")
