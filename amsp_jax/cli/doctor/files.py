"""The file systems of the run folder and the cache: writing and free space."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from amsp_jax.cli.doctor.findings import Finding, fail, ok, warn

_GIB = 2**30
_FAIL_FREE_BYTES, _WARN_FREE_BYTES = 100 * 2**20, 10 * _GIB


def nearest_folder(path: Path) -> Path:
    """`path` itself, or the nearest folder above it that exists: nothing is made by looking."""
    absolute = path.expanduser().absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def check_folder(check: str, path: Path) -> Iterator[Finding]:
    """Whether a folder can be written, and its free space where it can.

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
