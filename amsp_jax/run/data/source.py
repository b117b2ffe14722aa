"""Data from Python: rows by step and number, or by number alone, or any iterator of batches.

A corpus that a text names is opened by `corpus`; here is what else `Trainer(data=...)` takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from amsp_jax.errors import UserError, text_of
from amsp_jax.run.data.corpus import Datasets
from amsp_jax.run.data.iterators import IteratorSource
from amsp_jax.run.data.windows import Rows

ARRAYS = {"tokens": np.dtype(np.int32), "targets": np.dtype(np.int32), "weights": np.dtype(np.float32)}
"""The arrays of a batch and their types."""


@runtime_checkable
class Source(Protocol):
    """Rows of batches by number: a pure function, so every process count and every resume sees the same batches.

    Two attributes are used where a source has them. `fingerprint` is a text that is equal where the rows are equal; a
    resumed run refuses another one. `num_rows` is the number of rows of a source that ends, as one for validation does.

    Example:
      class Squares:
          def rows(self, step, rows):
              tokens = (step * 8 + rows[:, None]) ** 2 % 50 + np.zeros((1, 16), np.int32)
              return {"tokens": tokens, "targets": tokens}
    """

    def rows(self, step: int, rows: np.ndarray) -> Mapping[str, Any]:
        """Some rows of a step's batch.

        Args:
          step: counts from 0.
          rows: numbers of rows in the global batch, each at least 0 and below `global_batch`, in rising order.

        Returns:
          Integers `tokens` and `targets` and, unless all are 1, `weights`, each [len(rows), seq_len].
        """
        ...


def from_map(rows: Sequence[Mapping[str, Any]], *, fingerprint: str | None = None) -> MapSource:
    """Makes a `Source` of rows that have numbers, such as a `grain.MapDataset`: row `i` is `rows[i]`.

    Step `s` reads the rows from number `s * global_batch` on. Shuffles, epochs and mixtures are the data set's own,
    and need no state: a resumed run, on any number of processes, reads on at its step.

    Args:
      rows: has `len` and `[number]`; a row is a dict of `tokens`, `targets` and, if need be, `weights`, each [seq_len].
      fingerprint: a text that is equal where the rows are equal; a resumed run refuses another one.

    Example:
      rows = grain.MapDataset.source(documents).map(to_row).seed(0).shuffle().repeat()
      Trainer(model, optimizer, data=amsp_jax.data.from_map(rows))
    """
    if not hasattr(rows, "__getitem__") or not hasattr(rows, "__len__"):
        raise UserError(
            f"from_map({type(rows).__name__}): it has no numbered rows. Give an object with len and [number], or an "
            "iterator of batches to from_iterator."
        )
    return MapSource(rows, fingerprint)


class MapSource:
    """Numbered rows as a source; `rows` counts in batches of one row, `SourceDataset` asks by number."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], fingerprint: str | None) -> None:
        self._rows, self.num_rows, self.fingerprint = rows, len(rows), fingerprint
        self.name = type(rows).__name__

    def rows(self, step: int, rows: np.ndarray) -> Mapping[str, Any]:
        """The rows of these numbers, whatever the step."""
        found = [self._rows[int(number)] for number in rows]
        return {name: np.stack([np.asarray(row[name]) for row in found]) for name in found[0]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceDataset:
    """A source as the training loop reads it: each batch is checked, and rows beyond its end have weight 0.

    Attributes:
      source: what is read.
      name: for messages.
      global_batch, seq_len, vocab_size: what the rows must fit.
    """

    source: Source
    name: str
    global_batch: int
    seq_len: int
    vocab_size: int

    @property
    def num_rows(self) -> int:
        """Rows of the source; `sys.maxsize` for one that does not end."""
        with _named_errors(f"{self.name}, num_rows"):
            num_rows = getattr(self.source, "num_rows", None)
            return sys.maxsize if num_rows is None else int(num_rows)

    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """As `Source.rows`, in int32 and float32, `weights` included.

        Raises:
          UserError: the source gives something else, or raises; what it raised is the cause.
        """
        numbers = np.asarray(rows)
        if isinstance(self.source, IteratorSource) and len(numbers) * jax.process_count() != self.global_batch:
            raise UserError(
                f"{self.name}: the devices of this process hold {len(numbers)} of the {self.global_batch} rows of a "
                f"step, and {jax.process_count()} processes hold some of them together. Give a source with "
                "rows(step, rows) instead of an iterator."
            )
        is_there = numbers < self.num_rows - step * self.global_batch
        wanted = numbers[is_there]
        if isinstance(self.source, MapSource):
            wanted = wanted + step * self.global_batch
        with _named_errors(f"{self.name}, step {step + 1}"):
            given = self.source.rows(step, wanted) if is_there.any() else {}
            found = self._checked(given, step, int(is_there.sum()))
        if is_there.all():
            return found
        # What ends is as often no multiple of the batch: the rows that are missing count nothing.
        padded = {name: np.zeros((len(numbers), self.seq_len), dtype) for name, dtype in ARRAYS.items()}
        for name in ARRAYS:
            padded[name][is_there] = found[name]
        return padded

    def _checked(self, given: Mapping[str, Any], step: int, num_rows: int) -> Rows:
        shape = (num_rows, self.seq_len)
        if not num_rows:
            return {name: np.zeros(shape, dtype) for name, dtype in ARRAYS.items()}
        if not isinstance(given, Mapping) or not {"tokens", "targets"} <= set(given) <= set(ARRAYS):
            what = sorted(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
            raise self._wrong(step, f"it gives {what}; it must give a dict of tokens, targets and, if need be, weights")
        arrays = {name: np.asarray(value) for name, value in given.items()}
        arrays.setdefault("weights", np.ones(shape, np.float32))
        for name, dtype in ARRAYS.items():
            found, kinds = arrays[name], "iu" if dtype.kind == "i" else "fiub"
            if found.shape != shape or found.dtype.kind not in kinds:
                raise self._wrong(
                    step,
                    f"{name} are {found.dtype}{list(found.shape)}; they must be "
                    f"{'integers' if dtype.kind == 'i' else 'numbers'} {list(shape)}, {num_rows} rows of "
                    f"seq_len={self.seq_len}",
                )
        for name in ("tokens", "targets"):
            low, high = int(arrays[name].min()), int(arrays[name].max())
            if low < 0 or high >= self.vocab_size:
                raise self._wrong(
                    step, f"{name} go from {low} to {high}; the model's ids are 0 to {self.vocab_size - 1}"
                )
        return {name: arrays[name].astype(dtype, copy=False) for name, dtype in ARRAYS.items()}

    def _wrong(self, step: int, what: str) -> UserError:
        return UserError(f"{self.name}, step {step + 1}: {what}.")


def open_sources(
    train: Source,
    validation: Source | None,
    *,
    global_batch: int,
    seq_len: int,
    vocab_size: int,
    steps: int,
    eval_batches: int | None = None,
) -> Datasets:
    """Takes sources in place of a corpus.

    Args:
      train: read from step 0 on.
      validation: read from its first row at each validation; None validates nothing.
      global_batch: rows of a step.
      seq_len: tokens of a row.
      vocab_size: ids that the model knows.
      steps: how many steps `train` must last.
      eval_batches: batches of a validation; None: all that `validation` has.

    Raises:
      UserError: one of the two is no source, ends too early, or does not end where it must.
    """
    _require_source("data", train)
    sizes = {"global_batch": global_batch, "seq_len": seq_len, "vocab_size": vocab_size}
    train_set = SourceDataset(source=train, name=f"data={source_name(train)}", **sizes)
    if train_set.num_rows < steps * global_batch:
        raise UserError(
            f"{train_set.name} has num_rows={train_set.num_rows:,}, and steps={steps:,} of global_batch={global_batch} "
            f"need {steps * global_batch:,}. Give fewer steps, or a source that repeats its rows."
        )
    lines = [f"data: {source_name(train)}, from Python"]
    if validation is None:
        validation_set = dataclasses.replace(train_set, source=_Nothing(), name="no validation")
        lines.append("validation: none, no source was given for it")
    else:
        _require_source("validation", validation)
        validation_set = dataclasses.replace(train_set, source=validation, name=f"validation={source_name(validation)}")
        _require_validation(validation_set, eval_batches)
        lines.append(f"validation: {source_name(validation)}, from Python")
    return Datasets(
        train=train_set,
        validation=validation_set,
        tokenizer=None,
        description="\n".join(lines),
        fingerprint=_fingerprint(train),
    )


def _require_source(argument: str, source: Any) -> None:
    if not isinstance(source, Source):
        raise UserError(
            f"{argument}={source!r}: a {type(source).__name__} has no method rows(step, rows). Give a text that names "
            "a corpus, an object that has one, or amsp_jax.data.from_map(...) or from_iterator(...)."
        )


def _require_validation(dataset: SourceDataset, eval_batches: int | None) -> None:
    if isinstance(dataset.source, IteratorSource):
        raise UserError(
            f"{dataset.name}: an iterator can be read once, and each validation reads the same rows. Give an object "
            "with rows(step, rows)."
        )
    if dataset.num_rows == sys.maxsize and eval_batches is None:
        raise UserError(
            f"{dataset.name} has no num_rows, and eval_batches=None validates on all of it. Set eval_batches, or give "
            "the source num_rows."
        )


class _Nothing:
    """A source of no rows."""

    num_rows = 0

    def rows(self, step: int, rows: np.ndarray) -> Mapping[str, Any]:
        raise AssertionError("there are no rows")


def source_name(source: Source) -> str:
    """The name of a source in messages and in the record of a run."""
    if isinstance(source, IteratorSource):
        return f"from_iterator({source.name})"
    return f"from_map({source.name})" if isinstance(source, MapSource) else type(source).__name__


def can_read_again(dataset: Any) -> bool:
    """Whether these are rows from Python, and reading a batch does not lose it for the next reader."""
    return isinstance(dataset, SourceDataset) and not isinstance(dataset.source, IteratorSource)


def _fingerprint(source: Source) -> dict[str, str]:
    with _named_errors(f"data={source_name(source)}, fingerprint"):
        fingerprint = getattr(source, "fingerprint", None)
    return {} if fingerprint is None else {"source": str(fingerprint)}


def state_after(datasets: Datasets, num_steps: int) -> str | None:
    """What a checkpoint of step `num_steps` must keep of the training data in this process; None: nothing."""
    source = getattr(datasets.train, "source", None)
    return source.state_after(num_steps) if isinstance(source, IteratorSource) else None


def resume(datasets: Datasets, num_steps: int, state: str | None) -> list[str]:
    """Lets the training data continue after `num_steps` steps; lines that say how.

    Raises:
      UserError: they cannot.
    """
    source = getattr(datasets.train, "source", None)
    if not isinstance(source, IteratorSource):
        return []
    with _named_errors(f"data={source_name(source)}, continuing after batch {num_steps:,}"):
        return [source.resume(num_steps, state)]


@contextlib.contextmanager
def _named_errors(where: str) -> Iterator[None]:
    """Turns what the code of a source raises into a `UserError` that says where; what it raised is the cause."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: it raised {text_of(error)}") from error
