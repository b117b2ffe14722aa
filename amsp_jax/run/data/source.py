"""Data from Python: rows by number, or any iterator of batches.

A corpus that a text names is opened by `corpus`; here is what else `Trainer(data=...)` takes.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import numpy as np

from amsp_jax.errors import UserError
from amsp_jax.run.data.corpus import Datasets
from amsp_jax.run.data.iterator_state import decode, encode
from amsp_jax.run.data.windows import Rows

ARRAYS = {"tokens": np.dtype(np.int32), "targets": np.dtype(np.int32), "weights": np.dtype(np.float32)}
"""The arrays of a batch and their types."""

# The step that is computed, the two that are prefetched, and a few whose numbers are still on their way.
_NUM_KEPT = 8
_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


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


def from_iterator(
    batches: Iterable[Mapping[str, Any]],
    *,
    fingerprint: str | None = None,
    on_resume: Literal["refuse", "skip"] = "refuse",
) -> IteratorSource:
    """Makes a `Source` of an iterator in each process, whose batches hold the rows of this process.

    A batch has `global_batch / jax.process_count()` rows. Which of the global batch's rows a process gives makes no
    difference to the loss, which is a mean over all of them.

    An iterator that has `get_state` and `set_state`, as grain's have, or an iterable that has `state_dict` and
    `load_state_dict`, as torchdata's loaders have, continues where it was when the checkpoint was saved: each
    checkpoint holds one state for each process. A state is made of JSON values, tuples, bytes and numpy arrays.

    Args:
      batches: an iterator, or an iterable that is iterated over once.
      fingerprint: a text that is equal where the batches are equal; a resumed run refuses another one.
      on_resume: what a resumed run does with an iterator without state. `refuse` is an error. `skip` reads and drops
        the batches that were trained on, which is right where the iterator gives the same batches at every start.
    """
    return IteratorSource(batches, fingerprint, on_resume)


class IteratorSource:
    """An iterator as a source: the steps are read in order, each once."""

    def __init__(
        self, batches: Iterable[Mapping[str, Any]], fingerprint: str | None, on_resume: Literal["refuse", "skip"]
    ) -> None:
        if not isinstance(batches, Iterable):
            raise UserError(
                f"from_iterator({batches!r}): a {type(batches).__name__} is no iterator. Give an iterator of batches, "
                "each a dict of arrays."
            )
        if on_resume not in ("refuse", "skip"):
            raise UserError(f"on_resume={on_resume!r}: it is 'refuse' or 'skip'")
        self.fingerprint, self._on_resume = fingerprint, on_resume
        self.name = type(batches).__name__
        # A loader with state of its own begins anew with each iter(): that comes after its state was set.
        is_loader = not isinstance(batches, Iterator) and _state_methods(batches) is not None
        self._batches = batches if is_loader else iter(batches)
        self._iterator: Iterator[Mapping[str, Any]] | None = None
        self._next_step = 0
        self._kept: dict[int, Mapping[str, Any]] = {}
        # By the number of steps that were read: the prefetcher is ahead of the step that a checkpoint is of.
        self._states: dict[int, str] = {}
        self._methods = _state_methods(self._batches)

    @property
    def has_state(self) -> bool:
        """Whether a checkpoint can hold where the iterator is."""
        return self._methods is not None

    def rows(self, step: int, rows: np.ndarray) -> Mapping[str, Any]:
        """The batch of `step` in this process. The few newest steps can be read again."""
        if step in self._kept:
            return self._kept[step]
        assert step == self._next_step, f"step {step} was asked for, the iterator is at {self._next_step}"
        batch = self._read(step)
        self._kept[step] = batch
        self._next_step += 1
        if self._methods:
            self._states[self._next_step] = encode(getattr(self._batches, self._methods[0])(), self.name)
        for memory in (self._kept, self._states):
            for old in sorted(memory)[:-_NUM_KEPT]:
                del memory[old]
        return batch

    def state_after(self, num_steps: int) -> str | None:
        """Where the iterator was when it had given `num_steps` batches, of the few newest; None without state."""
        return self._states[num_steps] if self._methods else None

    def resume(self, num_steps: int, state: str | None) -> str:
        """Continues after `num_steps` batches; a line that says how.

        Raises:
          UserError: it cannot.
        """
        if self._methods and state is not None:
            getattr(self._batches, self._methods[1])(decode(state))
            self._next_step = num_steps
            return f"data: {self.name} continues after batch {num_steps:,}, from the state in the checkpoint"
        if self._on_resume == "refuse":
            why = "the checkpoint holds no state of an iterator" if self._methods else "it has no get_state, set_state"
            raise UserError(
                f"data=from_iterator({self.name}) cannot continue after batch {num_steps:,}: {why}. Give an iterator "
                "that has both from the first start on, or on_resume='skip' to read and drop the batches that were "
                "trained on."
            )
        for step in range(num_steps):
            self._read(step)
        self._next_step = num_steps
        return f"data: {self.name} has no state: {num_steps:,} batches that were trained on were read and dropped"

    def _read(self, step: int) -> Mapping[str, Any]:
        if self._iterator is None:
            self._iterator = iter(self._batches)
        try:
            # An iterator may give one buffer again and again.
            return copy.deepcopy(next(self._iterator))
        except StopIteration:
            raise UserError(
                f"data=from_iterator({self.name}) ended after {step:,} batches, and step {step + 1:,} needs one more. "
                "Give an iterator that repeats, or fewer steps."
            ) from None


def _state_methods(batches: object) -> tuple[str, str] | None:
    for pair in _STATE_METHODS:
        if all(callable(getattr(batches, method, None)) for method in pair):
            return pair
    return None


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
        num_rows = getattr(self.source, "num_rows", None)
        return sys.maxsize if num_rows is None else int(num_rows)

    def rows(self, step: int, rows: np.ndarray) -> Rows:
        """As `Source.rows`, in int32 and float32, `weights` included.

        Raises:
          UserError: the source gives something else.
        """
        numbers = np.asarray(rows)
        if isinstance(self.source, IteratorSource) and len(numbers) * jax.process_count() != self.global_batch:
            raise UserError(
                f"{self.name}: the devices of this process hold {len(numbers)} of the {self.global_batch} rows of a "
                f"step, and {jax.process_count()} processes hold some of them together. Give a source with "
                "rows(step, rows) instead of an iterator."
            )
        is_there = numbers < self.num_rows - step * self.global_batch
        given = self.source.rows(step, numbers[is_there]) if is_there.any() else {}
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
            f"need {steps * global_batch:,}. Give fewer steps, or a source that repeats its rows and has no num_rows."
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
            "a corpus, an object that has one, or amsp_jax.data.from_iterator(...)."
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
    return f"from_iterator({source.name})" if isinstance(source, IteratorSource) else type(source).__name__


def _fingerprint(source: Source) -> dict[str, str]:
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
    return [source.resume(num_steps, state)] if isinstance(source, IteratorSource) else []
