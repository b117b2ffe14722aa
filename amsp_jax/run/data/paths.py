"""What a person's path leads to, or why it leads nowhere."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from amsp_jax.errors import UserError

STDLIB = "stdlib"


def existing(data: str) -> Path:
    """The file or folder that `data` names.

    Raises:
      UserError: nothing is there, or something that has no end, such as a pipe.
    """
    try:
        path = Path(data).expanduser()
        there = path.exists()
    except OSError as error:
        raise UserError(f"data={_shortened(data)} cannot be reached: {error.strerror}.") from error
    # No such user as in `~user`; a NUL.
    except (RuntimeError, ValueError) as error:
        raise UserError(f"data={_shortened(data)} cannot be a path: {error}.") from error
    if not there:
        raise UserError(
            f"data={_shortened(data)}: no such file or folder (looked at {path.absolute()}). Give {STDLIB!r}, a folder "
            "of text files, a .jsonl, .npy or .bin file."
        )
    if not path.is_file() and not path.is_dir():
        raise UserError(f"data={_shortened(data)} is neither a file nor a folder. Write what it gives into a file.")
    return path


def require_corpus(data: str) -> None:
    """Raises UserError where `data` names no corpus; nothing is read."""
    if data != STDLIB:
        existing(data)


def visible_files(folder: Path) -> tuple[list[Path], int]:
    """All files below `folder` whose path has no hidden part, sorted by path, and how many links were left out.

    Links are followed. A file or folder that two paths lead to is listed once, at the first of them.

    Raises:
      UserError: a folder cannot be read, or a link leads nowhere.
    """
    seen: set[tuple[int, int] | str] = set()
    files: list[Path] = []
    num_left_out = 0
    waiting = [folder]
    while waiting:
        path = waiting.pop()
        try:
            status = path.stat()
            is_folder = stat.S_ISDIR(status.st_mode)
            found = sorted(path.iterdir(), reverse=True) if is_folder else []
        except OSError as error:
            if path.is_symlink() and isinstance(error, FileNotFoundError):
                raise UserError(
                    f"data file {path} is a link to {os.readlink(path)}, which does not exist. Bring that back, or "
                    "remove the link."
                ) from error
            raise unreadable(path, error) from error
        # Some network file systems number no files.
        key = (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)
        if key in seen:
            num_left_out += 1
        elif is_folder or stat.S_ISREG(status.st_mode):
            seen.add(key)
            files += [] if is_folder else [path]
            # The last in is the first out: the order is that of the paths.
            waiting += [inner for inner in found if not inner.name.startswith(".")]
    return sorted(files), num_left_out


def unreadable(path: Path, error: OSError) -> UserError:
    """What to raise for a data file that the system does not let us read."""
    return UserError(f"data file {path} cannot be read: {error.strerror or error}.")


def stamps(files: Sequence[Path]) -> list[tuple[str, int, int, int, int]]:
    """Path, inode, size, times of content and of status of each file: another content has another stamp.

    No copy and no restored backup brings the time of status along, so it is told from the original.

    Raises:
      UserError: one of them is gone.
    """
    found = []
    for path in files:
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from error
        times = (status.st_mtime_ns, status.st_ctime_ns)
        found.append((str(path.absolute()), status.st_ino, status.st_size, *times))
    return found


def printable(text: str) -> str:
    """The text with escapes for what a terminal or a file in UTF-8 would not take, such as a name of odd bytes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _shortened(data: str) -> str:
    return repr(data if len(data) <= 200 else data[:197] + "...")
