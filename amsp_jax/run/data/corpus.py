"""`open_dataset`: a text that names a corpus becomes a training set, a validation set and a tokenizer."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from amsp_jax.errors import UserError
from amsp_jax.run.data.cache import cached, open_cache
from amsp_jax.run.data.paths import printable, require_corpus
from amsp_jax.run.data.progress import Progress
from amsp_jax.run.data.scans import remembered
from amsp_jax.run.data.sources import OnCorrupt, Summary, TextSource, open_text
from amsp_jax.run.data.token_files import TOKEN_SUFFIXES, TokenFile, check_ids, open_npy, open_tokens, scan
from amsp_jax.run.data.tokenizer import Tokenizer, check_vocab_size, train_tokenizer
from amsp_jax.run.data.windows import Dataset, TokenDataset, Windows, split_places

# Raise it when the same text would be tokenised, split or stored in another way.
_CACHE_FORMAT = 1
_TOKENIZER_TRAINING_BYTES = 4 << 20
_SAMPLE_PIECE_CHARS = 1 << 14
# With fewer, one long document decides how large the validation set is.
_MIN_VALIDATION_DOCUMENTS = 8
_NAMED_IN_DESCRIPTION = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run reads.

    Attributes:
      train: endless, shuffled.
      validation: once, in a fixed order; no rows if the corpus has a single window or the fraction is 0.
      tokenizer: None for a file of token ids.
      description: a few lines for the start of a run.
      fingerprint: digests by name, equal where the same rows are read from the same corpus; JSON values.
      corrupt: the records that were left out, each as `file:line: reason`; the first 10,000 of them.
    """

    train: Dataset
    validation: Dataset
    tokenizer: Tokenizer | None
    description: str
    fingerprint: Mapping[str, str]
    corrupt: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Corpus:
    """A corpus before it is cut into windows: one array, or two if it is split by documents."""

    arrays: Sequence[TokenFile]
    num_documents: tuple[int | None, int | None] = (None, None)
    tokenizer: Tokenizer | None = None
    end_of_document: int | None
    fingerprint: Mapping[str, str]
    corrupt: tuple[str, ...] = ()
    lines: Sequence[str]


def open_dataset(
    data: str,
    *,
    vocab_size: int,
    seq_len: int,
    global_batch: int,
    seed: int,
    cache_dir: Path | None = None,
    validation_fraction: float = 0.02,
    end_of_document: int | None = None,
    on_corrupt: OnCorrupt = "stop",
) -> Datasets:
    """Opens a corpus; text is tokenised at the first start and read from the cache afterwards.

    Args:
      data: `stdlib` (the Python standard library's sources), a folder of text files, a text file, a `.jsonl`
        file with a `"text"` in every line, or token ids in a `.npy` or `.bin` file.
      vocab_size: of the model: the largest the tokenizer may be, and the bound for token ids.
      seq_len: tokens of a row.
      global_batch: rows of a step.
      seed: of the sample order, 0 to 2**32 - 1. The split does not depend on it.
      cache_dir: for tokenizers and tokens; None is the user's cache folder.
      validation_fraction: of the documents, or of the windows where documents are few or unknown.
      end_of_document: the id that ends a document in a file of token ids, if it has one.
      on_corrupt: `stop` makes a corrupt record of text an error, `skip` leaves it out.

    Raises:
      UserError: the corpus is missing, unreadable, empty, corrupt or too small, or a number is out of range.
        `TokenDataset.rows` raises it when the corpus or the cache disappears or changes while it is read.
    """
    _check_numbers(seq_len, global_batch, seed, validation_fraction)
    if Path(data).suffix.lower() in TOKEN_SUFFIXES:
        require_corpus(data)
        _check_end(end_of_document, vocab_size)
        _refuse_skip(data, on_corrupt)
        corpus = _open_token_corpus(data, vocab_size, end_of_document, cache_dir)
    else:
        _refuse_end(data, end_of_document)
        corpus = _open_text_corpus(data, vocab_size, validation_fraction, cache_dir, on_corrupt)
    _check_length(data, corpus.arrays[0], seq_len)
    parts = [
        Windows(tokens=tokens, seq_len=seq_len, end_of_document=corpus.end_of_document) for tokens in corpus.arrays
    ]
    if len(parts) == 1:
        parts = _split_windows(parts[0], validation_fraction)
    train, validation = (
        TokenDataset(windows=windows, global_batch=global_batch, seed=order, num_documents=count)
        for windows, order, count in zip(parts, (seed, None), corpus.num_documents, strict=True)
    )
    lines = [
        *corpus.lines,
        *_repeats(parts[0], global_batch),
        f"train: {train.describe()}",
        f"validation: {validation.describe()}",
    ]
    return Datasets(
        train=train,
        validation=validation,
        tokenizer=corpus.tokenizer,
        description="\n".join(map(printable, lines)),
        fingerprint=corpus.fingerprint,
        corrupt=corpus.corrupt,
    )


def _check_numbers(seq_len: int, global_batch: int, seed: int, validation_fraction: float) -> None:
    if seq_len < 1 or global_batch < 1:
        raise UserError(f"sequences of {seq_len} tokens in batches of {global_batch}: both must be at least 1.")
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed {seed} is out of range: the sample order takes 0 to {(1 << 32) - 1}.")
    if not 0 <= validation_fraction < 1:
        raise UserError(
            f"validation fraction {validation_fraction} is out of range: it must be at least 0 and below 1."
        )


def _check_end(end_of_document: int | None, vocab_size: int) -> None:
    if end_of_document is not None and not 0 <= end_of_document < vocab_size:
        raise UserError(f"end of document {end_of_document} is not in the vocabulary, ids 0 to {vocab_size - 1}.")


def _refuse_skip(data: str, on_corrupt: OnCorrupt) -> None:
    if on_corrupt == "skip":
        raise UserError(
            f"corrupt_records='skip' is for text, but {data!r} holds token ids, of which one outside the vocabulary is "
            "always an error. Leave it out."
        )


def _refuse_end(data: str, end_of_document: int | None) -> None:
    if end_of_document is not None:
        raise UserError(
            f"end of document {end_of_document} is for files of token ids ({', '.join(sorted(TOKEN_SUFFIXES))}), but "
            f"{data!r} is text, whose tokenizer has its own. Leave it out."
        )


def _check_length(data: str, tokens: TokenFile, seq_len: int) -> None:
    num_rows, length = tokens.shape
    if length < 2 or (num_rows == 1 and length <= seq_len):
        raise UserError(
            f"a sequence of {seq_len} tokens is longer than the training corpus {data!r}: a row needs {seq_len + 1} "
            f"tokens and there are {length}. Use shorter sequences or more text."
        )


def _repeats(train: Windows, global_batch: int) -> list[str]:
    if global_batch <= len(train):
        return []
    return [
        f"note: global_batch={global_batch} is more than the {len(train)} training windows of the corpus: a step reads "
        f"each window {global_batch / len(train):.1f} times; use a smaller batch, shorter sequences or more text"
    ]


def _split_windows(everything: Windows, fraction: float) -> list[Windows]:
    validation = split_places(len(everything), fraction)
    chosen = (np.flatnonzero(~validation), np.flatnonzero(validation))
    return [dataclasses.replace(everything, chosen=places) for places in chosen]


def _open_token_corpus(data: str, vocab_size: int, end_of_document: int | None, cache_dir: Path | None) -> _Corpus:
    tokens = open_tokens(data, vocab_size)
    cache, note = open_cache(cache_dir)
    key = _key("ids", tokens.dtype.str, tokens.shape)
    found = remembered(
        cache, key, [tokens.path], lambda: dict(zip(("digest", "low", "high"), scan(tokens), strict=True))
    )
    check_ids(tokens, (found["low"], found["high"]), vocab_size)
    return _Corpus(
        arrays=[tokens],
        end_of_document=end_of_document,
        fingerprint={"token ids": found["digest"]},
        lines=[f"data: {data}, {tokens.size:,} token ids ({tokens.dtype}), split by windows", *_noted(note)],
    )


def _noted(note: str) -> list[str]:
    return [f"note: {note}"] if note else []


def _open_text_corpus(
    data: str, vocab_size: int, validation_fraction: float, cache_dir: Path | None, on_corrupt: OnCorrupt
) -> _Corpus:
    require_corpus(data)
    check_vocab_size(vocab_size)
    source = open_text(data, on_corrupt)
    cache, note = open_cache(cache_dir)
    summary = _summary(source, cache, on_corrupt)
    by_documents = round(validation_fraction * summary.num_documents) >= _MIN_VALIDATION_DOCUMENTS
    is_validation = split_places(summary.num_documents, validation_fraction if by_documents else 0)

    tokenizer = _make_tokenizer(source, summary, is_validation, vocab_size, cache)
    tokens_key = _key(summary.digest, is_validation.sum(), tokenizer.to_json())
    tokens_dir = cached(
        cache, f"tokens-{tokens_key}", lambda folder: _write_tokens(folder, source, summary, tokenizer, is_validation)
    )
    parts = ("train", "validation") if by_documents else ("train",)
    with _from_cache(tokens_dir):
        arrays = [open_npy(tokens_dir / f"{part}.npy") for part in parts]
    num_held_out = int(is_validation.sum())
    num_tokens = sum(array.size for array in arrays)
    return _Corpus(
        arrays=arrays,
        num_documents=(summary.num_documents - num_held_out, num_held_out) if by_documents else (None, None),
        tokenizer=tokenizer,
        end_of_document=tokenizer.end_of_document,
        fingerprint={"text": summary.digest, "tokenizer": _key(tokenizer.to_json())},
        corrupt=summary.corrupt,
        lines=[
            f"data: {source.name}, {summary.num_documents:,} documents, {summary.num_bytes:,} bytes, {num_tokens:,} "
            f"tokens ({summary.num_bytes / num_tokens:.2f} bytes a token), split by "
            f"{'documents' if by_documents else 'windows'}",
            *_corrupt_line(summary),
            f"tokenizer: byte-level BPE of {tokenizer.vocab_size:,} tokens, cached in {cache}",
            *_noted(note),
        ],
    )


def _summary(source: TextSource, cache: Path, on_corrupt: OnCorrupt) -> Summary:
    """Of the pass over the corpus, or of an earlier one over the same files."""
    found = remembered(cache, _key("text", on_corrupt), source.files, lambda: dataclasses.asdict(source.summary()))
    return Summary(**{**found, "corrupt": tuple(found["corrupt"])})


def _corrupt_line(summary: Summary) -> list[str]:
    if not summary.num_corrupt:
        return []
    named = "; ".join(summary.corrupt[:_NAMED_IN_DESCRIPTION])
    more = "; ..." if summary.num_corrupt > _NAMED_IN_DESCRIPTION else ""
    total = summary.num_corrupt + summary.num_documents
    return [f"corrupt: {summary.num_corrupt:,} of {total:,} records are left out: {named}{more}"]


def _make_tokenizer(
    source: TextSource, summary: Summary, is_validation: np.ndarray, vocab_size: int, cache: Path
) -> Tokenizer:
    key = _key(summary.digest, vocab_size, is_validation.sum(), tokenizers.__version__)
    folder = cached(
        cache,
        f"tokenizer-{key}",
        lambda folder: train_tokenizer(_sample(source, summary, is_validation), vocab_size).save(
            folder / "tokenizer.json"
        ),
    )
    with _from_cache(folder):
        return Tokenizer.load(folder / "tokenizer.json")


@contextlib.contextmanager
def _from_cache(folder: Path) -> Iterator[None]:
    """Says of a file that is damaged what to do about it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error} It is of the data cache: delete {folder}, the next start makes it anew.") from error


def _key(*parts: object) -> str:
    text = json.dumps([_CACHE_FORMAT, *map(str, parts)])
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _sample(source: TextSource, summary: Summary, is_validation: np.ndarray) -> Iterator[str]:
    """A few megabytes of training text: every n-th piece of the corpus."""
    every = -(-summary.num_bytes // _TOKENIZER_TRAINING_BYTES)
    piece = itertools.count()
    for document, held_out in zip(source.documents(summary), is_validation, strict=True):
        if held_out:
            continue
        for start in range(0, len(document), _SAMPLE_PIECE_CHARS):
            if next(piece) % every == 0:
                yield document[start : start + _SAMPLE_PIECE_CHARS]


def _write_tokens(
    folder: Path, source: TextSource, summary: Summary, tokenizer: Tokenizer, is_validation: np.ndarray
) -> None:
    """Writes `train.npy` and `validation.npy`: documents one after the other, each with its end of document."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    with _NpyWriter(folder / "train.npy", dtype) as train, _NpyWriter(folder / "validation.npy", dtype) as validation:
        documents = source.documents(summary, Progress("tokenising", summary.num_bytes, "bytes"))
        for number, ids in tokenizer.encode_documents(documents):
            (validation if is_validation[number] else train).append(ids)


class _NpyWriter:
    """Writes a one-dimensional `.npy` file whose length is known at the end; the corpus is never in memory."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file = path.open("wb")
        self._dtype = dtype
        self._num_values = 0
        self._write_header()

    def append(self, values: Sequence[int]) -> None:
        self._file.write(np.asarray(values, self._dtype).tobytes())
        self._num_values += len(values)

    def _write_header(self) -> None:
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._num_values,)}
        # numpy pads the header so that a growing first dimension never changes its size.
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> _NpyWriter:
        return self

    def __exit__(self, *error: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
