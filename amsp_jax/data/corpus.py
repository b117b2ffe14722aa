"""`open_dataset`: a text that names a corpus becomes a training set, a validation set and a tokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers

from amsp_jax.data.cache import cached, open_cache
from amsp_jax.data.sources import TOKEN_SUFFIXES, TextSource, open_text, open_tokens
from amsp_jax.data.tokenizer import Tokenizer, check_vocab_size, train_tokenizer
from amsp_jax.data.windows import TokenDataset, Windows, split_places
from amsp_jax.errors import UserError

# Raise it when the same text would be tokenised, split or stored in another way.
_CACHE_FORMAT = 1
_TOKENIZER_TRAINING_BYTES = 4 << 20
_SAMPLE_PIECE_CHARS = 1 << 14
# With fewer, one long document decides how large the validation set is.
_MIN_VALIDATION_DOCUMENTS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets:
    """What a run reads.

    Attributes:
      train: endless, shuffled.
      validation: once, in a fixed order; no rows if the corpus has a single window or the fraction is 0.
      tokenizer: None for a file of token ids.
      description: a few lines for the start of a run.
    """

    train: TokenDataset
    validation: TokenDataset
    tokenizer: Tokenizer | None
    description: str


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
) -> Datasets:
    """Opens a corpus; text is tokenised at the first start and memory-mapped from the cache afterwards.

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

    Raises:
      UserError: the corpus is missing, unreadable, empty, corrupt or too small, or a number is out of range.
    """
    _check_numbers(seq_len, global_batch, seed, validation_fraction)
    is_tokens = Path(data).suffix in TOKEN_SUFFIXES
    _check_end(data, is_tokens, end_of_document, vocab_size)
    if is_tokens:
        arrays = [open_tokens(data, vocab_size)]
        counts: tuple[int | None, int | None] = (None, None)
        tokenizer, lines = None, [f"data: {data}, {arrays[0].size:,} token ids ({arrays[0].dtype}), split by windows"]
    else:
        tokenizer, arrays, counts, lines = _open_text_corpus(data, vocab_size, validation_fraction, cache_dir)
        end_of_document = tokenizer.end_of_document
    _check_length(data, arrays[0], seq_len)
    parts = [Windows(tokens=tokens, seq_len=seq_len, end_of_document=end_of_document) for tokens in arrays]
    if len(parts) == 1:
        parts = _split_windows(parts[0], validation_fraction)
    train, validation = (
        TokenDataset(windows=windows, global_batch=global_batch, seed=order, num_documents=count)
        for windows, order, count in zip(parts, (seed, None), counts, strict=True)
    )
    lines += [f"train: {train.describe()}", f"validation: {validation.describe()}"]
    return Datasets(train=train, validation=validation, tokenizer=tokenizer, description="\n".join(lines))


def _check_numbers(seq_len: int, global_batch: int, seed: int, validation_fraction: float) -> None:
    if seq_len < 1 or global_batch < 1:
        raise UserError(f"sequences of {seq_len} tokens in batches of {global_batch}: both must be at least 1.")
    if not 0 <= seed < 1 << 32:
        raise UserError(f"seed {seed} is out of range: the sample order takes 0 to {(1 << 32) - 1}.")
    if not 0 <= validation_fraction < 1:
        raise UserError(
            f"validation fraction {validation_fraction} is out of range: it must be at least 0 and below 1."
        )


def _check_end(data: str, is_tokens: bool, end_of_document: int | None, vocab_size: int) -> None:
    if end_of_document is None:
        return
    if not is_tokens:
        raise UserError(
            f"end of document {end_of_document} is for files of token ids ({', '.join(sorted(TOKEN_SUFFIXES))}), but "
            f"{data!r} is text, whose tokenizer has its own. Leave it out."
        )
    if not 0 <= end_of_document < vocab_size:
        raise UserError(f"end of document {end_of_document} is not in the vocabulary, ids 0 to {vocab_size - 1}.")


def _check_length(data: str, tokens: np.ndarray, seq_len: int) -> None:
    num_rows, length = tokens.shape
    if length < 2 or (num_rows == 1 and length <= seq_len):
        raise UserError(
            f"a sequence of {seq_len} tokens is longer than the training corpus {data!r}: a row needs {seq_len + 1} "
            f"tokens and there are {length}. Use shorter sequences or more text."
        )


def _split_windows(everything: Windows, fraction: float) -> list[Windows]:
    validation = split_places(len(everything), fraction)
    chosen = (np.flatnonzero(~validation), np.flatnonzero(validation))
    return [dataclasses.replace(everything, chosen=places) for places in chosen]


def _open_text_corpus(
    data: str, vocab_size: int, validation_fraction: float, cache_dir: Path | None
) -> tuple[Tokenizer, list[np.ndarray], tuple[int | None, int | None], list[str]]:
    """`(tokenizer, arrays [1, length], documents of train and validation, lines)`; one array if documents are few."""
    check_vocab_size(vocab_size)
    source = open_text(data)
    digest, num_documents, num_bytes = source.summary()
    by_documents = round(validation_fraction * num_documents) >= _MIN_VALIDATION_DOCUMENTS
    is_validation = split_places(num_documents, validation_fraction if by_documents else 0)
    cache, note = open_cache(cache_dir)

    tokenizer_key = _key(digest, vocab_size, is_validation.sum(), tokenizers.__version__)
    tokenizer_dir = cached(
        cache,
        f"tokenizer-{tokenizer_key}",
        lambda folder: train_tokenizer(_sample(source, is_validation, num_bytes), vocab_size).save(
            folder / "tokenizer.json"
        ),
    )
    tokenizer = Tokenizer.load(tokenizer_dir / "tokenizer.json")
    tokens_dir = cached(
        cache,
        f"tokens-{_key(digest, is_validation.sum(), tokenizer.to_json())}",
        lambda folder: _write_tokens(folder, source, tokenizer, is_validation),
    )
    parts = ("train", "validation") if by_documents else ("train",)
    arrays = [np.load(tokens_dir / f"{part}.npy", mmap_mode="r")[None] for part in parts]
    num_held_out = int(is_validation.sum())
    counts = (num_documents - num_held_out, num_held_out) if by_documents else (None, None)
    num_tokens = sum(array.size for array in arrays)
    lines = [
        f"data: {source.name}, {num_documents:,} documents, {num_bytes:,} bytes, {num_tokens:,} tokens "
        f"({num_bytes / num_tokens:.2f} bytes a token), split by {'documents' if by_documents else 'windows'}",
        f"tokenizer: byte-level BPE of {tokenizer.vocab_size:,} tokens, cached in {cache}",
        *([f"note: {note}"] if note else []),
    ]
    return tokenizer, arrays, counts, lines


def _key(*parts: object) -> str:
    text = json.dumps([_CACHE_FORMAT, *map(str, parts)])
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _sample(source: TextSource, is_validation: np.ndarray, num_bytes: int) -> Iterator[str]:
    """A few megabytes of training text: every n-th piece of the corpus."""
    every = -(-num_bytes // _TOKENIZER_TRAINING_BYTES)
    piece = itertools.count()
    for document, held_out in zip(source.documents(), is_validation, strict=True):
        if held_out:
            continue
        for start in range(0, len(document), _SAMPLE_PIECE_CHARS):
            if next(piece) % every == 0:
                yield document[start : start + _SAMPLE_PIECE_CHARS]


def _write_tokens(folder: Path, source: TextSource, tokenizer: Tokenizer, is_validation: np.ndarray) -> None:
    """Writes `train.npy` and `validation.npy`: documents one after the other, each with its end of document."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    with _NpyWriter(folder / "train.npy", dtype) as train, _NpyWriter(folder / "validation.npy", dtype) as validation:
        for number, ids in tokenizer.encode_documents(source.documents()):
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
