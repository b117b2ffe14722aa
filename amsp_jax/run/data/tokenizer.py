"""Byte-level BPE, trained on the corpus itself.

The 256 bytes are always in the vocabulary, so every text has a spelling and comes back unchanged. At
the smallest vocabulary, 257, there is no room for a merge and the tokenizer is plain bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from amsp_jax.errors import UserError

MIN_VOCAB_SIZE = 257
"""256 bytes and the end of a document."""

_END_OF_DOCUMENT = "<|endoftext|>"
# Long texts go through the encoder in pieces: an Encoding costs a hundred times its text in memory,
# and the pieces of a batch are encoded on all cores.
_PIECE_CHARS = 1 << 18
_BATCH_CHARS = 1 << 22


class Tokenizer:
    """Text to token ids and back; `decode(encode(text)) == text` for every text that UTF-8 can write."""

    def __init__(self, inner: tokenizers.Tokenizer):
        end = inner.token_to_id(_END_OF_DOCUMENT)
        if end is None:
            raise ValueError(f"the tokenizer has no token {_END_OF_DOCUMENT}")
        # A text that spells out the end-of-document token is text and ends no document.
        inner.encode_special_tokens = True
        self._inner = inner
        self.end_of_document: int = end

    @property
    def vocab_size(self) -> int:
        """Number of ids in use: at most what was asked for, less where the text has no more merges to give."""
        return int(self._inner.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end of document."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, documents: Iterable[str]) -> Iterator[tuple[int, list[int]]]:
        """`(number of the document, ids)` in order: a long document comes in several parts, the last one ends it.

        Memory holds one document and a few megabytes of encodings.
        """
        for batch in _batches(_pieces(documents)):
            encodings = self._inner.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                yield piece.document, encoding.ids + ([self.end_of_document] if piece.ends else [])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without ends of documents and ids beyond the vocabulary; broken UTF-8 becomes U+FFFD."""
        return str(self._inner.decode([int(i) for i in ids]))

    def save(self, path: str | Path) -> None:
        """Writes the tokenizer as one JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """The whole tokenizer as JSON: equal tokenizers give equal text."""
        return str(self._inner.to_str())

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads what `save` wrote.

        Raises:
          UserError: the file is missing or holds no tokenizer of this program.
        """
        try:
            return cls(tokenizers.Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise UserError(f"tokenizer {path} cannot be read: {error.strerror}.") from error
        # The library raises bare `Exception`s for what it cannot parse.
        except Exception as error:
            raise UserError(f"{path} is not a tokenizer written by a run: {error}.") from error


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE; the same texts and size give the same tokenizer on every machine.

    Raises:
      UserError: `vocab_size` is below 257.
    """
    check_vocab_size(vocab_size)
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return Tokenizer(inner)


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError where bytes and the end of a document do not fit into the vocabulary."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small for text: the 256 bytes and the end of a document need "
            f"{MIN_VOCAB_SIZE}. Use a model with at least that many, or a pre-tokenised file."
        )


class _Piece(NamedTuple):
    document: int
    text: str
    ends: bool


def _pieces(documents: Iterable[str]) -> Iterator[_Piece]:
    """Cuts long documents after line ends, where there are any, so that few words are cut."""
    for number, text in enumerate(documents):
        start = 0
        while len(text) - start > _PIECE_CHARS:
            line_end = text.rfind("\n", start, start + _PIECE_CHARS)
            end = line_end + 1 if line_end >= 0 else start + _PIECE_CHARS
            yield _Piece(number, text[start:end], ends=False)
            start = end
        yield _Piece(number, text[start:], ends=True)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces in lists of a few megabytes of text."""
    batch: list[_Piece] = []
    chars = 0
    for piece in pieces:
        batch.append(piece)
        chars += len(piece.text)
        if chars >= _BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch
