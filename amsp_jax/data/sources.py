"""What a data text may name: documents of text, or a file of token ids."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from amsp_jax.errors import UserError

STDLIB = "stdlib"
TOKEN_SUFFIXES = (".npy", ".bin")

_CHECK_CHUNK = 1 << 24
_HEAD_BYTES = 1 << 13


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Documents in a fixed order, read again at every call.

    Attributes:
      name: for messages.
      documents: gives the documents that are not empty.
    """

    name: str
    documents: Callable[[], Iterator[str]]

    def summary(self) -> tuple[str, int, int]:
        """`(digest of the content, number of documents, bytes of text)`, in one pass over everything.

        Raises:
          UserError: there is no text.
        """
        digest = hashlib.blake2b(digest_size=16)
        num_documents = num_bytes = 0
        for document in self.documents():
            text = document.encode()
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
            num_documents += 1
            num_bytes += len(text)
        if not num_documents:
            raise UserError(
                f"data {self.name!r} holds no text: 0 documents that are not empty. Point it at UTF-8 text."
            )
        return digest.hexdigest(), num_documents, num_bytes


def open_text(data: str) -> TextSource:
    """Resolves `stdlib`, a folder, a `.jsonl` file or a text file.

    In a folder every visible file that is UTF-8 is a document, and every record of its `.jsonl` files; the
    order is that of the paths. The source's name says how many files were passed over.

    Raises:
      UserError: there is no such thing, or it is not text.
    """
    if data == STDLIB:
        return TextSource(f"{STDLIB} (Python {platform.python_version()})", _stdlib_documents)
    path = existing(data)
    if not path.is_dir():
        if not _is_text(path):
            raise UserError(f"data file {data!r} is not UTF-8 text. Convert it, or give token ids as .npy or .bin.")
        return TextSource(data, lambda: _file_documents(path))
    files = _visible_files(path)
    texts = [file for file in files if _is_text(file)]
    if not texts:
        raise UserError(
            f"data folder {data!r} holds no text: 0 of its {len(files)} files are UTF-8. Hidden files do not count, "
            "and a .npy or .bin file of token ids is named itself."
        )
    passed_over = (
        f" ({len(files) - len(texts)} of {len(files)} files are not UTF-8 text)" if len(files) > len(texts) else ""
    )
    return TextSource(data + passed_over, lambda: (document for file in texts for document in _file_documents(file)))


def existing(data: str) -> Path:
    """The path that `data` names.

    Raises:
      UserError: nothing is there.
    """
    path = Path(data).expanduser()
    try:
        there = path.exists()
    except OSError as error:
        raise UserError(f"data {data!r} cannot be reached: {error.strerror}.") from error
    if not there:
        raise UserError(
            f"data {data!r} does not exist (looked at {path.absolute()}). Give {STDLIB!r}, a folder of text files, a "
            ".jsonl, .npy or .bin file."
        )
    return path


def _stdlib_documents() -> Iterator[str]:
    """The Python sources of the standard library without its tests, which many systems do not install."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            # A source may declare another encoding, and is then passed over.
            with contextlib.suppress(UnicodeDecodeError):
                yield from filter(None, [_read(path).decode()])


def _visible_files(folder: Path) -> list[Path]:
    """All files below `folder` whose path has no hidden part, sorted by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(f for f in files if not any(part.startswith(".") for part in f.relative_to(folder).parts))


def _file_documents(path: Path) -> Iterator[str]:
    """The documents of one file: the records of a `.jsonl`, the one text of any other."""
    if path.suffix == ".jsonl":
        yield from _records(path)
        return
    try:
        text = _read(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"data file {path} begins as UTF-8 text but has byte 0x{error.object[error.start]:02x} at position "
            f"{error.start:,}. Convert it to UTF-8, or take it out."
        ) from error
    if text:
        yield text


def _is_text(path: Path) -> bool:
    """Whether a file looks like UTF-8 by its first kilobytes; a `.jsonl` is read, so that its bad lines are named."""
    if path.suffix == ".jsonl":
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    # Not final: the read may have cut the last character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"data file {path} cannot be read: {error.strerror or error}.")


def _records(path: Path) -> Iterator[str]:
    """The texts of a JSONL file; blank lines and empty texts are passed over.

    Raises:
      UserError: after the last line, if any line was corrupt: how many, and where the first one is.
    """
    num_records = num_corrupt = 0
    first = ""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                num_records += 1
                try:
                    text = _record_text(line)
                except ValueError as error:
                    num_corrupt += 1
                    first = first or f"{path}:{number}: {error}"
                    continue
                if text:
                    yield text
    except OSError as error:
        raise _unreadable(path, error) from error
    if num_corrupt:
        raise UserError(
            f"{first}. {num_corrupt} of {num_records} records are corrupt; every line must be a JSON object with a "
            'string "text", as {"text": "..."}. Correct or remove them.'
        )


def _record_text(line: bytes) -> str:
    """The text of one record; ValueError says what is wrong with it."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError('no string "text"')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError('"text" holds half of a surrogate pair') from None
    return text


def open_tokens(data: str, vocab_size: int) -> np.ndarray:
    """Memory-maps a file of token ids as `[num_rows, length]`, one row if the file has one dimension.

    A `.npy` file has one or two dimensions of any integer type. A `.bin` file is a bare little-endian array:
    uint16 if its name ends in `.uint16.bin`, uint32 if in `.uint32.bin`, else uint16 for vocabularies of up to
    65,536 and uint32 above.

    Raises:
      UserError: the file is missing, empty, of another type or shape, or holds ids outside the vocabulary.
    """
    path = existing(data)
    try:
        tokens = np.load(path, mmap_mode="r") if path.suffix == ".npy" else _open_raw(path, vocab_size)
    except OSError as error:
        raise _unreadable(path, error) from error
    # What numpy raises for a file that is no array, or one of Python objects.
    except (ValueError, EOFError) as error:
        raise UserError(f"token file {data!r} is not a numpy array of integers: {error}") from error
    if tokens.ndim not in (1, 2) or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"token file {data!r} holds {tokens.dtype} of shape {list(tokens.shape)}; it must be integers of one "
            "dimension, or of two: one document a row."
        )
    if not tokens.size:
        raise UserError(f"token file {data!r} is empty: shape {list(tokens.shape)}.")
    _check_ids(data, tokens, vocab_size)
    return tokens if tokens.ndim == 2 else tokens[None]


def _open_raw(path: Path, vocab_size: int) -> np.ndarray:
    small = path.name.endswith(".uint16.bin") or (vocab_size <= 1 << 16 and not path.name.endswith(".uint32.bin"))
    dtype = np.dtype("<u2" if small else "<u4")
    size = path.stat().st_size
    if size % dtype.itemsize or not size:
        raise UserError(
            f"token file {path} has {size:,} bytes, which is no positive multiple of {dtype.itemsize} ({dtype.name}). "
            "Name it .uint16.bin or .uint32.bin after the type it holds."
        )
    tokens = np.memmap(path, dtype, mode="r")
    if small and size % 4 == 0 and not tokens[1 : 1 << 20 : 2].any() and tokens[: 1 << 20 : 2].any():
        raise UserError(
            f"token file {path} was read as uint16 and every second id is 0: it holds uint32. Name it .uint32.bin to "
            "say so."
        )
    return tokens


def _check_ids(data: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Reads the whole file once: an id that is out of range would surface as a wrong loss, or as NaN."""
    step = max(1, _CHECK_CHUNK * len(tokens) // tokens.size)
    for start in range(0, len(tokens), step):
        chunk = tokens[start : start + step]
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            first = np.argwhere(chunk == wrong)[0].tolist()
            raise UserError(
                f"token file {data!r} holds id {wrong} at {[first[0] + start, *first[1:]]}, outside the model's "
                f"vocabulary of {vocab_size} (ids 0 to {vocab_size - 1}). Use a model that fits the file's tokenizer."
            )
