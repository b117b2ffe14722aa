"""What a person's path leads to, or why it leads nowhere."""

from __future__ import annotations

import os
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
        raise UserError(f"data {_shortened(data)} cannot be reached: {error.strerror}.") from error
    # No such user as in `~user`; a NUL.
    except (RuntimeError, ValueError) as error:
        raise UserError(f"data {_shortened(data)} cannot be a path: {error}.") from error
    if not there:
        raise UserError(
            f"data {_shortened(data)} does not exist (looked at {path.absolute()}). Give {STDLIB!r}, a folder of text "
            "files, a .jsonl, .npy or .bin file."
        )
    if not path.is_file() and not path.is_dir():
        raise UserError(f"data {_shortened(data)} is neither a file nor a folder. Write what it gives into a file.")
    return path


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
