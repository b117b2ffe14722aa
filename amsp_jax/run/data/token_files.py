"""Files of token ids: what they hold, checked, and reads that cannot crash.

A file that is mapped into memory kills the interpreter by SIGBUS when it is truncated or its disk goes away. Here
every window is a read of its own, in 2 us like a mapped one, and what goes wrong is an error that names the file.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from amsp_jax.errors import UserError
from amsp_jax.run.data.bin_files import HEAD_BYTES, check_content, named_dtype
from amsp_jax.run.data.paths import existing, unreadable
from amsp_jax.run.data.progress import Progress

TOKEN_SUFFIXES = (".npy", ".bin")

_CHUNK_IDS = 1 << 22
_LOOK_EVERY_S = 1.0


class TokenFile:
    """Token ids `[num_rows, length]` in a file that stays open; `file[row, start:stop]` reads some of a row.

    Once a second a read looks whether the path still leads to the same file, unchanged: a run whose data is gone
    could not go on after its next start, and half a run on other data is no run.
    """

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, int], offset_bytes: int):
        """Opens `path`, whose ids begin after `offset_bytes`.

        Raises:
          UserError: it cannot be opened, or is shorter than that.
        """
        self.path, self.dtype, self.shape = path.absolute(), dtype, shape
        self._offset_bytes = offset_bytes
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise unreadable(path, error) from error
        weakref.finalize(self, os.close, self._descriptor)
        self._stamp = _stamp(os.fstat(self._descriptor))
        self._next_look_s = time.monotonic() + _LOOK_EVERY_S
        wanted_bytes, num_bytes = offset_bytes + self.size * dtype.itemsize, self._stamp[1]
        if num_bytes < wanted_bytes:
            raise UserError(f"data file {path} was cut off: it has {num_bytes:,} of {wanted_bytes:,} bytes.")

    @property
    def size(self) -> int:
        """Number of ids."""
        return math.prod(self.shape)

    def __getitem__(self, index: tuple[Any, slice]) -> np.ndarray:
        row, span = index
        start, stop, _ = span.indices(self.shape[1])
        return self.read(int(row) * self.shape[1] + start, stop - start)

    def read(self, start: int, num_ids: int) -> np.ndarray:
        """`num_ids` ids from number `start` on, over the ends of rows.

        Raises:
          UserError: the file is gone, was cut off or replaced, or cannot be read.
        """
        parts, position = [], self._offset_bytes + start * self.dtype.itemsize
        missing_bytes = num_ids * self.dtype.itemsize
        try:
            while missing_bytes and (part := os.pread(self._descriptor, missing_bytes, position)):
                parts.append(part)
                position, missing_bytes = position + len(part), missing_bytes - len(part)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if missing_bytes or time.monotonic() >= self._next_look_s:
            self._require_unchanged()
        if missing_bytes:
            raise UserError(f"data file {self.path} ends at byte {position:,}, {missing_bytes:,} too early.")
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)

    def _require_unchanged(self) -> None:
        try:
            stamp = _stamp(os.stat(self.path))
        except OSError as error:
            raise UserError(
                f"data file {self.path} is gone while the run reads it: {error.strerror}. Put it back and start again."
            ) from error
        if stamp != self._stamp:
            raise UserError(
                f"data file {self.path} was changed or replaced while the run reads it: {self._stamp[1]:,} bytes at "
                f"the start, {stamp[1]:,} now. Put it back as it was and start again."
            )
        self._next_look_s = time.monotonic() + _LOOK_EVERY_S


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def open_tokens(data: str, vocab_size: int) -> TokenFile:
    """Opens a file of token ids as `[num_rows, length]`, one row if the file has one dimension.

    A `.npy` file has one or two dimensions of any integer type. A `.bin` file is a bare little-endian array of the
    type that its name says, such as `ids.int64.bin`, else of uint16 for vocabularies of up to 65,536 and uint32 above.

    Raises:
      UserError: the file is missing, empty, or of another type or shape.
    """
    path = existing(data)
    return open_npy(path) if path.suffix.lower() == ".npy" else _open_raw(path, vocab_size)


def open_npy(path: Path) -> TokenFile:
    """Opens a `.npy` file of one or two dimensions; never one of Python objects, whose loading would run code.

    Raises:
      UserError: it is no such file.
    """
    try:
        # Reads the header alone. Nothing is read through the map.
        mapped = np.lib.format.open_memmap(path, mode="r")
    except OSError as error:
        raise unreadable(path, error) from error
    # A header is a Python literal, and a broken one raises as many types as Python has.
    except Exception as error:
        raise UserError(f"token file {str(path)!r} is not a numpy array of integers: {_short(error)}") from error
    dtype, shape = mapped.dtype, mapped.shape
    if mapped.ndim not in (1, 2) or not np.issubdtype(dtype, np.integer):
        raise UserError(
            f"token file {str(path)!r} holds {_short(dtype)} of shape {_short(list(shape))}; it must be integers of "
            "one dimension, or of two: one document a row."
        )
    if not mapped.size:
        raise UserError(f"token file {str(path)!r} is empty: shape {list(shape)}.")
    if not mapped.flags.c_contiguous:
        raise UserError(f"token file {str(path)!r} is stored by columns; save np.ascontiguousarray of it.")
    return TokenFile(path, dtype, (1, *shape)[-2:], mapped.offset)


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else text[:97] + "..."


def _open_raw(path: Path, vocab_size: int) -> TokenFile:
    dtype, num_bytes = named_dtype(path, vocab_size), path.stat().st_size
    if not num_bytes:
        raise UserError(f"token file {path} is empty: 0 bytes.")
    check_content(path, _head(path), num_bytes, dtype, vocab_size)
    return TokenFile(path, dtype, (1, num_bytes // dtype.itemsize), 0)


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def scan(tokens: TokenFile) -> tuple[str, int, int]:
    """`(digest of the ids, place of the smallest, place of the largest)`, in one pass over the file."""
    digest = hashlib.blake2b(repr((tokens.dtype.str, tokens.shape)).encode(), digest_size=16)
    low, high = (math.inf, 0), (-math.inf, 0)
    progress = Progress("reading token ids", tokens.size, "ids")
    for start in range(0, tokens.size, _CHUNK_IDS):
        ids = tokens.read(start, min(_CHUNK_IDS, tokens.size - start))
        digest.update(ids.data)
        progress.add(len(ids))
        first, last = int(ids.argmin()), int(ids.argmax())
        low = min(low, (int(ids[first]), start + first))
        high = max(high, (int(ids[last]), start + last), key=lambda found: found[0])
    return digest.hexdigest(), low[1], high[1]


def check_ids(tokens: TokenFile, places: tuple[int, int], vocab_size: int) -> None:
    """Checks the smallest and the largest id: one out of range would surface as a wrong loss, or as NaN.

    Raises:
      UserError: one is outside the vocabulary.
    """
    for place in places:
        found = int(tokens.read(place, 1)[0])
        if not 0 <= found < vocab_size:
            where = [int(i) for i in np.unravel_index(place, tokens.shape)]
            raise UserError(
                f"token file {str(tokens.path)!r} holds id {found} at {where if tokens.shape[0] > 1 else where[1:]}, "
                f"outside the model's vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}). Use a model that fits "
                "the file's tokenizer."
            )
