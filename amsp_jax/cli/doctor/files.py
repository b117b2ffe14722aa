"""The file systems of the run folder and the cache: space, writing, speed, locks."""

from __future__ import annotations

import errno
import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from amsp_jax.cli.doctor.findings import Finding, Status, fail, ok, warn

_GIB = 2**30
_FAIL_FREE_BYTES, _WARN_FREE_BYTES = 100 * 2**20, 10 * _GIB
_NUM_WRITES, _WRITE_BYTES = 5, 4096
_SLOW_WRITE_S = 0.5


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists: nothing is made by looking."""
    absolute = path.expanduser().absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def check_run_folder(path: Path) -> Iterator[Finding]:
    """Also whether two commands that train into one folder would notice each other."""
    check = "run folder"
    for finding in check_folder(check, path):
        yield finding
        if finding.status == Status.FAIL and finding.check == check:
            return
    yield check_locks(f"{check}: locks", path)


def check_folder(check: str, path: Path) -> Iterator[Finding]:
    """Whether a folder can be written, and how well; the checks that need writing are left out where it cannot.

    Args:
      check: its name in the table, such as `run folder`.
      path: need not exist.
    """
    folder = nearest_folder(path)
    problem = writing_problem(folder)
    if problem:
        yield fail(check, f"{folder}: {problem}", "choose a folder that you may write, on a disk with space")
        return
    yield ok(check, f"{folder} can be written")
    yield check_space(f"{check}: space", folder, os.statvfs(folder))
    yield check_write_time(f"{check}: writing", time_writes(folder))


def writing_problem(folder: Path) -> str | None:
    """What is in the way of a file in this folder; None if nothing is."""
    if not folder.is_dir():
        return "it is a file"
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def check_space(check: str, folder: Path, stat: os.statvfs_result) -> Finding:
    """Free bytes and free file entries of the file system."""
    free = stat.f_frsize * stat.f_bavail
    found = f"{free / _GIB:.3g} GiB free"
    # Some file systems do not count their entries, and say 0 of 0.
    if stat.f_files and not stat.f_favail:
        return fail(check, f"no file entry (inode) of {stat.f_files} is free", "remove files, or choose another disk")
    if free < _FAIL_FREE_BYTES:
        return fail(check, found, "free some space, or choose a folder on another disk")
    if free < _WARN_FREE_BYTES:
        return warn(check, found, "a checkpoint takes 12 bytes a parameter: see that the checkpoints kept will fit")
    return ok(check, found)


def time_writes(folder: Path) -> float:
    """Seconds that 4 KiB take to reach the disk: the median of a few."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_NUM_WRITES):
            begin = time.perf_counter()
            file.write(bytes(_WRITE_BYTES))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def check_write_time(check: str, seconds: float) -> Finding:
    """`time_writes`' answer as a finding."""
    found = f"{_WRITE_BYTES} bytes are on the disk in {1e3 * seconds:.2g} ms"
    if seconds > _SLOW_WRITE_S:
        return warn(check, found, "the disk is slow or busy: saves will take long; choose another if there is one")
    return ok(check, found)


def check_locks(check: str, path: Path, flock: Callable[[IO[bytes], int], None] = fcntl.flock) -> Finding:
    """Whether a second taker of a lock is refused, as two commands that train into one folder must be."""
    with tempfile.NamedTemporaryFile(dir=nearest_folder(path)) as first, open(first.name, "ab") as second:
        try:
            flock(first.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return ok(check, "a second command would be kept out")
            problem = f"no locks here ({error.strerror})"
        else:
            problem = "two can hold the same lock"
    fix = "take care that no two commands use one run folder; or mount it with locks (Lustre: -o flock)"
    return warn(check, problem, fix)
