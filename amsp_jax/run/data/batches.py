"""Batches on devices, and ahead of time."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from amsp_jax.run.data.windows import Dataset

T = TypeVar("T")

_AHEAD = 2


def global_batch(
    dataset: Dataset,
    step: int,
    *,
    num_microbatches: int,
    rows_per_microbatch: int,
    sharding: jax.sharding.Sharding,
) -> dict[str, jax.Array]:
    """The batch of a step as global arrays [num_microbatches, rows_per_microbatch, seq_len].

    Row `row` of microbatch `m` is row `m * rows_per_microbatch + row` of the global batch. Each process reads
    only the rows of its own devices, in one call.

    Args:
      dataset: training or validation rows.
      step: counts from 0.
      num_microbatches: microbatches of the step.
      rows_per_microbatch: rows of a microbatch, over all devices.
      sharding: of the three dimensions.

    Raises:
      ValueError: the two numbers do not make up the dataset's global batch.
    """
    if num_microbatches * rows_per_microbatch != dataset.global_batch:
        raise ValueError(
            f"{num_microbatches} microbatches of {rows_per_microbatch} rows are not the global batch of "
            f"{dataset.global_batch} rows that the sample order counts in"
        )
    shape = (num_microbatches, rows_per_microbatch, dataset.seq_len)
    numbers = np.arange(dataset.global_batch).reshape(shape[:2])
    shards = sharding.addressable_devices_indices_map(shape).values()
    own = np.unique(np.concatenate([numbers[index[:2]].reshape(-1) for index in shards if index is not None]))
    read = dataset.rows(step, own)

    def shard(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return read[name][np.searchsorted(own, numbers[index[:2]])][:, :, index[2]]

    return {
        name: jax.make_array_from_callback(shape, sharding, functools.partial(shard, name))
        for name in ("tokens", "targets", "weights")
    }


class Prefetcher(Generic[T]):
    """Iterates over `make(start), ..., make(stop - 1)`, made in one background thread two steps ahead.

    It looks ahead from the second `next` on, and `used_by` waits for what is computed from the first item, so that this
    has the devices to itself: where a program runs for the first time cuDNN captures CUDA graphs, and transfers of
    another thread can break that. Runs on one H200 (jax 0.11.2) ended in their first step with CUDA errors or a
    segmentation fault.

    What `make` raises is raised by the `next` of that step. Leaving the context, or `close`, drops what was
    not asked for; it waits for the one `make` that is running and for nothing else.

    Example:
      with Prefetcher(lambda step: global_batch(dataset, step, ...), start, stop) as batches:
          for batch in batches:
              ...
    """

    def __init__(self, make: Callable[[int], T], start: int, stop: int):
        self._make = make
        self._steps = iter(range(start, stop))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ahead: collections.deque[Future[T]] = collections.deque()
        self._num_wanted, self._is_used = 1, False
        self._submit()

    def _submit(self) -> None:
        for step in itertools.islice(self._steps, self._num_wanted - len(self._ahead)):
            self._ahead.append(self._thread.submit(self._make, step))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        self._submit()
        if not self._ahead:
            raise StopIteration
        self._num_wanted = 1 + _AHEAD
        return self._ahead.popleft().result()

    def used_by(self, outputs: Any) -> None:
        """Takes arrays that are computed from the newest item; waits for them if it is the first."""
        if not self._is_used:
            jax.block_until_ready(outputs)
        self._is_used = True

    def settle(self, timeout_s: float) -> None:
        """Waits until nothing is being made, so that a program can run for the first time."""
        concurrent.futures.wait(self._ahead, timeout_s)

    def close(self) -> None:
        """Ends the thread; the iteration is over."""
        self._steps = iter(range(0))
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
