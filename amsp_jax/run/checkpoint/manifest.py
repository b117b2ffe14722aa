"""The manifest of a checkpoint: size and checksum of every file, in a JSON file beside them.

It is written in parts, one a process, so that nobody reads what another one wrote; the last to finish seals them
into one file. Reading shares the work, too. Plain files only: nothing here knows arrays.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

MANIFEST = "MANIFEST.json"
# zlib releases the GIL; more threads than this wait for the disk.
_NUM_THREADS = 4
_READ_BYTES = 1 << 20


class Entry(NamedTuple):
    """What a file must be: its length and the CRC-32 of its bytes."""

    size_bytes: int
    crc32: int


Entries = Mapping[str, Entry]
"""By the path inside the checkpoint's folder, with slashes."""


def write_part(folder: Path, index: int, own: Path, name: str, also: Sequence[Path] = ()) -> None:
    """Measures the files in `own`, which process `index` wrote, and leaves the result in `folder` for `seal`.

    Args:
      folder: the checkpoint's.
      index: the process.
      own: a folder in it.
      name: the path that `own` will have inside `folder` at the end.
      also: files directly in `folder` that the process wrote, too.
    """
    entries = {f"{name}/{file}": entry for file, entry in _measure(own, _files(own)).items()}
    _write(folder / _part(index), entries | _measure(folder, [file.name for file in also]))


def seal(folder: Path, num_parts: int, but: frozenset[str]) -> None:
    """Joins the parts of all processes, measures every other file except `but`, and writes the manifest.

    A part is opened by its name, not found in a listing, which a network file system may remember from before it
    was there.
    """
    entries: dict[str, Entry] = {}
    parts = [folder / _part(index) for index in range(num_parts)]
    for part in parts:
        entries |= _read(part)
    for part in parts:
        part.unlink()
    entries |= _measure(folder, (name for name in _files(folder) if name not in entries and name not in but))
    _write(folder / MANIFEST, entries)


def damage(folder: Path, full: bool, share: tuple[int, int] = (0, 1)) -> str | None:
    """What is wrong with the files of `folder` by its manifest, one sentence without an end; None if nothing is.

    Args:
      folder: of a checkpoint with a manifest.
      full: reads the files and compares checksums; otherwise their sizes alone.
      share: `(index, count)`: looks at one of `count` shares of about the same size.
    """
    try:
        entries = _read(folder / MANIFEST)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({_reason(error)})"
    index, count = share
    largest_first = sorted(entries, key=lambda name: (-entries[name].size_bytes, name))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        found = pool.map(lambda name: _damage_of(folder, name, entries[name], full), largest_first[index::count])
        wrong = [what for what in found if what]
    others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"{wrong[0]}{others}" if wrong else None


def _damage_of(folder: Path, name: str, entry: Entry, full: bool) -> str | None:
    path = folder / name
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            return f"{name} has {size_bytes} bytes instead of {entry.size_bytes}"
        if full and (crc32 := _crc32(path)) != entry.crc32:
            return f"{name} has other content than was saved (checksum {crc32:08x} instead of {entry.crc32:08x})"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read ({_reason(error)})"
    return None


def _measure(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    return {name: Entry((folder / name).stat().st_size, _crc32(folder / name)) for name in sorted(names)}


def _crc32(path: Path) -> int:
    crc32, buffer = 0, bytearray(_READ_BYTES)
    with open(path, "rb", buffering=0) as file:
        while num_bytes := file.readinto(buffer):
            crc32 = zlib.crc32(memoryview(buffer)[:num_bytes], crc32)
    return crc32


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def _part(index: int) -> str:
    return f"{MANIFEST}.{index}"


def _write(path: Path, entries: Entries) -> None:
    rows = {name: {"bytes": entry.size_bytes, "crc32": f"{entry.crc32:08x}"} for name, entry in entries.items()}
    write_text(path, json.dumps({"files": rows}, indent=1))


def write_text(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns: the checkpoint's last rename must not come earlier."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Entry]:
    rows = json.loads(path.read_text())["files"]
    return {name: Entry(int(row["bytes"]), int(row["crc32"], 16)) for name, row in rows.items()}


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
