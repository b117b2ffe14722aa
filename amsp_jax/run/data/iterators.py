"""Iterators of batches as sources, whose state goes into each checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from amsp_jax.errors import UserError
from amsp_jax.run.data.iterator_state import decode, encode

# The step that is computed, the two that are prefetched, and a few whose numbers are still on their way.
_NUM_KEPT = 8
_STATE_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


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
