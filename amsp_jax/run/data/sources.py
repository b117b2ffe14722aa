"""What a data text may name as text: documents in order, and what is done with those that are corrupt."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import json
import platform
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from amsp_jax.errors import UserError
from amsp_jax.run.data.paths import STDLIB, existing, printable, unreadable, visible_files
from amsp_jax.run.data.progress import Progress

OnCorrupt = Literal["stop", "skip"]
"""Whether a corrupt record or text ends the start, or is left out and counted."""

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
_HEAD_BYTES = 1 << 13
_ARRAY_OF_RECORDS = re.compile(rb'\s*\[\s*\{[^}]*"text"\s*:')
# Of a corpus that is corrupt all over, no more are named.
_MAX_NAMED = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What one pass over a corpus found.

    Attributes:
      digest: of the documents.
      num_documents, num_bytes: of text.
      num_corrupt: records that were left out.
      corrupt: the first of them, each as `file:line: reason`.
    """

    digest: str
    num_documents: int
    num_bytes: int
    num_corrupt: int
    corrupt: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class TextSource:
    """Documents in a fixed order, read again at every call.

    Attributes:
      name: for messages.
      files: all that is read.
      read: gives the documents that are not empty; what it leaves out it tells its argument.
    """

    name: str
    files: Sequence[Path]
    read: Callable[[Callable[[str], None]], Iterator[str]]

    def summary(self) -> Summary:
        """One pass over everything.

        Raises:
          UserError: there is no text, or it is corrupt.
        """
        digest = _Digest()
        corrupt: list[str] = []
        num_corrupt = num_bytes = 0

        def left_out(what: str) -> None:
            nonlocal num_corrupt
            num_corrupt += 1
            if num_corrupt <= _MAX_NAMED:
                corrupt.append(printable(what))

        progress = Progress("reading text", _total_bytes(self.files), "bytes")
        for document in self.read(left_out):
            added = digest.add(document)
            num_bytes += added
            progress.add(added)
        if not digest.num_documents:
            besides = f"; {num_corrupt} are corrupt, the first is {corrupt[0]}" if corrupt else ""
            raise UserError(
                f"data {self.name!r} holds no text: 0 documents that are not empty{besides}. Point it at UTF-8 text."
            )
        return Summary(
            digest=digest.hex(),
            num_documents=digest.num_documents,
            num_bytes=num_bytes,
            num_corrupt=num_corrupt,
            corrupt=tuple(corrupt),
        )

    def documents(self, summary: Summary, progress: Progress | None = None) -> Iterator[str]:
        """The documents that the summary is of, counted in bytes by `progress`.

        Raises:
          UserError: they are others by now.
        """
        digest = _Digest()
        for document in self.read(lambda _: None):
            if digest.num_documents == summary.num_documents:
                raise self._changed()
            num_bytes = digest.add(document)
            if progress:
                progress.add(num_bytes)
            yield document
        if digest.hex() != summary.digest:
            raise self._changed()

    def _changed(self) -> UserError:
        return UserError(f"data {self.name!r} was changed while it was read. Start again when nothing writes to it.")


def _total_bytes(files: Sequence[Path]) -> int:
    """Bytes of all files; one that is gone is named when it is read."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.stat().st_size
    return total


class _Digest:
    def __init__(self) -> None:
        self._inner = hashlib.blake2b(digest_size=16)
        self.num_documents = 0

    def add(self, document: str) -> int:
        """Returns the document's number of bytes."""
        text = document.encode()
        self._inner.update(len(text).to_bytes(8, "little"))
        self._inner.update(text)
        self.num_documents += 1
        return len(text)

    def hex(self) -> str:
        return self._inner.hexdigest()


def open_text(data: str, on_corrupt: OnCorrupt = "stop") -> TextSource:
    """Resolves `stdlib`, a folder, a `.jsonl` file or a text file.

    In a folder every visible file that is UTF-8 is a document, and every record of its JSON lines, which are told by
    their names or their first line. Links are followed, and nothing is read twice; the order is that of the paths. The
    source's name says how many files were passed over.

    Args:
      data: one of these.
      on_corrupt: what is done with records that are no JSON object with a text, and with texts that turn out not
        to be UTF-8.

    Raises:
      UserError: there is no such thing, or it is not text.
    """
    if data == STDLIB:
        return TextSource(f"{STDLIB} (Python {platform.python_version()})", _stdlib_files(), _stdlib_documents)
    path = existing(data)
    if not path.is_dir():
        if not _is_text(path):
            raise UserError(f"data file {data!r} is not UTF-8 text. Convert it, or give token ids as .npy or .bin.")
        return TextSource(data, [path], _reader([path], on_corrupt))
    files, num_links = visible_files(path)
    texts = [file for file in files if _is_text(file)]
    if not texts:
        raise UserError(
            f"data folder {data!r} holds no text: 0 of its {len(files)} files are UTF-8. Hidden files do not count, "
            "and a .npy or .bin file of token ids is named itself."
        )
    notes = [f"{len(files) - len(texts)} of {len(files)} files are not UTF-8 text"] if len(files) > len(texts) else []
    notes += [f"{num_links} links to what is read already are left out"] if num_links else []
    return TextSource(data + (f" ({'; '.join(notes)})" if notes else ""), texts, _reader(texts, on_corrupt))


def _stdlib_files() -> list[Path]:
    """The Python sources of the standard library without its tests, which many systems do not install."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return [path for path in sorted(root.rglob("*.py")) if left_out.isdisjoint(path.relative_to(root).parts)]


def _stdlib_documents(left_out: Callable[[str], None]) -> Iterator[str]:
    for path in _stdlib_files():
        # A source may declare another encoding, and is then passed over.
        with contextlib.suppress(UnicodeDecodeError):
            yield from filter(None, [_read(path).decode()])


def _reader(files: Sequence[Path], on_corrupt: OnCorrupt) -> Callable[[Callable[[str], None]], Iterator[str]]:
    def read(left_out: Callable[[str], None]) -> Iterator[str]:
        for path in files:
            yield from _documents_of(path)(path, left_out if on_corrupt == "skip" else None)

    return read


def _whole_text(path: Path, left_out: Callable[[str], None] | None) -> Iterator[str]:
    """A file as one document; one that is not UTF-8 is an error where `left_out` is None."""
    try:
        text = _read(path).decode()
    except UnicodeDecodeError as error:
        what = f"has byte 0x{error.object[error.start]:02x} at position {error.start:,}"
        if left_out is None:
            raise UserError(
                f"data file {path} begins as UTF-8 text but {what}. Convert it to UTF-8, take it out, or leave such "
                "files out by corrupt_records='skip'."
            ) from error
        left_out(f"{path}: not UTF-8: {what}")
        return
    if text:
        yield text


def _is_text(path: Path) -> bool:
    """Whether a file looks like UTF-8 by its first kilobytes; a `.jsonl` is read, so that its bad lines are named."""
    if path.suffix.lower() in JSON_LINES_SUFFIXES:
        return True
    head = _head(path)
    # Not final: the read may have cut the last character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(head, final=len(head) < _HEAD_BYTES)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def _documents_of(path: Path) -> Callable[[Path, Callable[[str], None] | None], Iterator[str]]:
    """How a file is read: record by record by its name, or since its content begins as records do; else whole."""
    suffix = path.suffix.lower()
    if suffix in JSON_LINES_SUFFIXES:
        return _records
    if suffix == ".json" and _ARRAY_OF_RECORDS.match(_head(path)):
        return _array_records
    first = next((line for line in _lines(path) if line.strip()), b"")
    # Cheap for what is no JSON: a line of other text is not parsed.
    if not first.lstrip().startswith(b"{"):
        return _whole_text
    try:
        _record_text(first)
    except ValueError:
        return _whole_text
    return _records


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def _records(path: Path, left_out: Callable[[str], None] | None) -> Iterator[str]:
    """The texts of a JSONL file; blank lines and empty texts are passed over.

    Raises:
      UserError: where `left_out` is None, after the last line, if any line was corrupt: how many, and where the
        first one is.
    """
    numbered = enumerate(_lines(path), start=1)
    yield from _texts(((f"{path}:{number}", line) for number, line in numbered if line.strip()), left_out)


def _array_records(path: Path, left_out: Callable[[str], None] | None) -> Iterator[str]:
    """The texts of a file that is one JSON array of records, as `_records`; the file is read into memory."""
    try:
        array = json.loads(_read(path))
    except (ValueError, RecursionError):
        array = [None]
    records = (json.dumps(record).encode() for record in array)
    yield from _texts(((f"{path}, record {i}", record) for i, record in enumerate(records, start=1)), left_out)


def _texts(records: Iterable[tuple[str, bytes]], left_out: Callable[[str], None] | None) -> Iterator[str]:
    num_records = num_corrupt = 0
    first = ""
    for place, record in records:
        num_records += 1
        try:
            text = _record_text(record)
        except ValueError as error:
            num_corrupt += 1
            what = f"{place}: {error}"
            first = first or what
            if left_out is not None:
                left_out(what)
            continue
        if text:
            yield text
    if num_corrupt and left_out is None:
        raise UserError(
            f"{first}. {num_corrupt} of {num_records} records are corrupt; every line must be a JSON object with a "
            'string "text", as {"text": "..."}. Correct or remove them, or leave them out by corrupt_records=\'skip\'.'
        )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            yield from file
    except OSError as error:
        raise unreadable(path, error) from error


def _record_text(line: bytes) -> str:
    """The text of one record; ValueError says what is wrong with it."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON (a number or a nesting beyond what Python reads)") from None
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError('no string "text"')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError('"text" holds half of a surrogate pair') from None
    return text
