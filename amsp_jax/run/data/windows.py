"""Packing: token arrays cut into windows, and the order in which training reads them.

A row of `length` tokens becomes ceil((length - 1) / seq_len) windows of seq_len + 1 tokens at a stride of
seq_len, so that every token but the first of its row is a target exactly once. The last window is padded.
The weight is 0 where there is no target and where the token ends a document: what follows an end of
document belongs to another text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

from amsp_jax.run.data.token_files import TokenFile

Rows = dict[str, np.ndarray]
"""`tokens`, `targets` int32 and `weights` float32, each [num_rows, seq_len] (or [seq_len], for one window)."""


class Dataset(Protocol):
    """Rows of batches, as the training loop reads them."""

    @property
    def global_batch(self) -> int:
        """Rows of a step."""

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""

    @property
    def num_rows(self) -> int:
        """Rows that are not padding; `sys.maxsize` where they do not end."""

    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """`tokens`, `targets` and `weights` of some rows of a step, each [len(rows), seq_len]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Windows:
    """A random-access source of windows, in the order of the corpus.

    Attributes:
      tokens: [num_rows, length] of any integer type.
      seq_len: tokens of a window.
      end_of_document: the id that ends a document; None if the tokens have none.
      chosen: which windows of `tokens` this source has; None is all of them.
    """

    tokens: np.ndarray | TokenFile
    seq_len: int
    end_of_document: int | None = None
    chosen: np.ndarray | None = None

    @property
    def windows_per_row(self) -> int:
        """Windows of one row of `tokens`, a padded one included."""
        return -(-(self.tokens.shape[1] - 1) // self.seq_len)

    def __len__(self) -> int:
        return self.tokens.shape[0] * self.windows_per_row if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: int) -> Rows:
        """The window as one row of a batch."""
        row, offset = self._locate(index if self.chosen is None else self.chosen[index])
        span = np.asarray(self.tokens[row, offset : offset + self.seq_len + 1], np.int32)
        window = self.padding()
        num_targets = len(span) - 1
        window["tokens"][:num_targets] = span[:-1]
        window["targets"][:num_targets] = span[1:]
        window["weights"][:num_targets] = 1 if self.end_of_document is None else span[:-1] != self.end_of_document
        return window

    def padding(self) -> Rows:
        """A row without a target: every weight is 0."""
        return {
            "tokens": np.zeros(self.seq_len, np.int32),
            "targets": np.zeros(self.seq_len, np.int32),
            "weights": np.zeros(self.seq_len, np.float32),
        }

    def num_targets(self) -> int:
        """Tokens that are predicted when every window is read once."""
        if self.chosen is None:
            return self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        _, offsets = self._locate(self.chosen)
        return int(np.minimum(self.seq_len, self.tokens.shape[1] - 1 - offsets).sum())

    def _locate(self, window: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row and offset of windows of `tokens`."""
        row, in_row = np.divmod(window, self.windows_per_row)
        return row, in_row * self.seq_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenDataset:
    """Rows of batches as a pure function of (seed, step, row).

    Row `row` of step `step` is the window at place `step * global_batch + row` of the order. Nothing else
    enters: not the number of processes, the rows asked for together or earlier calls.

    Attributes:
      windows: what is read.
      global_batch: rows of a step.
      seed: shuffles every epoch of training anew; None reads the windows once, in a fixed order.
      num_documents: documents in this part of the corpus; None where the split does not follow documents.
    """

    windows: Windows
    global_batch: int
    seed: int | None
    num_documents: int | None = None

    @functools.cached_property
    def _order(self) -> grain.MapDataset:
        source = grain.MapDataset.source(self.windows)
        if self.seed is None:
            # Shuffled once, so that the first steps of a validation are a sample of all of it.
            return source.shuffle(seed=0)
        # grain adds the epoch to the seed of a shuffle; a seed derived by grain keeps the second epoch of seed 0
        # from being the first of seed 1.
        return source.seed(self.seed).shuffle().repeat()

    @property
    def seq_len(self) -> int:
        """Tokens of a row."""
        return self.windows.seq_len

    @property
    def num_windows(self) -> int:
        """Windows of an epoch."""
        return len(self.windows)

    @property
    def num_rows(self) -> int:
        """Rows that are not padding: endless (`sys.maxsize`) in training, the number of windows in validation."""
        return len(self._order)

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted in an epoch, those after an end of document included."""
        return self.windows.num_targets()

    def rows(self, step: int, rows: Sequence[int] | np.ndarray) -> Rows:
        """Some rows of a step's batch.

        Args:
          step: counts from 0.
          rows: row numbers in the global batch, each in `range(global_batch)`.

        Returns:
          `tokens`, `targets` and `weights`, each [len(rows), seq_len], in the order asked for. Rows beyond the
          end of a validation set have weight 0 everywhere.

        Raises:
          IndexError: a row number is outside the global batch.
        """
        numbers = [int(row) for row in rows]
        if any(not 0 <= row < self.global_batch for row in numbers) or step < 0:
            raise IndexError(f"step {step}, rows {numbers}: steps count from 0 and rows go to {self.global_batch - 1}")
        places = [step * self.global_batch + row for row in numbers]
        windows = [self._order[place] if place < self.num_rows else self.windows.padding() for place in places]
        empty = np.zeros((0, self.windows.seq_len))
        padding = self.windows.padding()
        return {
            name: np.stack([window[name] for window in windows]) if windows else empty.astype(padding[name].dtype)
            for name in padding
        }

    def describe(self) -> str:
        """One line for the start of a run: documents, tokens, windows, steps an epoch."""
        documents = "" if self.num_documents is None else f"{self.num_documents:,} documents, "
        steps = -(-self.num_windows // self.global_batch)
        return (
            f"{documents}{self.num_tokens:,} tokens, {self.num_windows:,} windows of {self.windows.seq_len}, "
            f"{steps:,} step{'s' * (steps != 1)} of {self.global_batch} an epoch"
        )


def split_places(num_places: int, fraction: float) -> np.ndarray:
    """Which places go to validation: `fraction` of them, at least one, never all; bool [num_places].

    A pseudo-random choice by place that depends on nothing but the two arguments.
    """
    num_validation = min(max(1, round(fraction * num_places)), num_places - 1) if fraction else 0
    validation = np.zeros(num_places, bool)
    shuffled = grain.MapDataset.range(num_places).shuffle(seed=0)
    validation[[shuffled[i] for i in range(num_validation)]] = True
    return validation
