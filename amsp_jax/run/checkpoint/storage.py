"""orbax, set up for a training state: how arrays become files and files become arrays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import future, multihost

from amsp_jax.run.checkpoint import manifest
from amsp_jax.run.checkpoint.leaves import Leaves

STATE = "state"
CHUNK_BYTES = 64 << 20
"""The unit of reading. Without a limit it is the shard of the mesh that saved: one device's whole array is read by
each of eight."""
RESTORE_BYTES = 2 << 30
"""What one process reads at a time, besides what is already on its devices; more only for a single larger leaf."""
# Slower than any disk that is worth waiting for; a process that is gone is noticed by others long before.
PATIENCE_S = 2 * 60 * 60
_TEXT_BYTES = 1024
_POLL_S = 0.1
# orbax adds the time to this file at the very end; nothing is read from it.
_REWRITTEN = frozenset({"_CHECKPOINT_METADATA"})
_barriers = itertools.count()


class Handler(ocp.PyTreeCheckpointHandler):
    """Writes arrays, then measures what was written, still in the background, before the checkpoint is complete."""

    def __init__(self) -> None:
        # Random mantissas do not shrink enough to be worth the time, and without a limit on what is written at once all
        # is one transaction: a full disk is one error, not one a chunk (docs/design/checkpoints.md).
        arrays = ocp.BasePyTreeCheckpointHandler(use_compression=False, save_concurrent_bytes=None)
        super().__init__(handler_impl=arrays)
        self._step_folder = Path()
        self._own: Future[None] = Future()
        self._own.set_result(None)
        self.own_text: str | None = None

    async def async_save(self, directory: Any, *args: Any, **kwargs: Any) -> list[future.Future]:
        """Orbax's own, whose last part, in this process, is its part of the manifest."""
        folder = Path(directory)
        self._step_folder = folder.parent
        own: Future[None] = Future()
        self._own, own_text = own, self.own_text
        try:
            written = await super().async_save(directory, *args, **kwargs) or []
        except BaseException as error:
            own.set_exception(error)
            raise
        return [_Reported(future.ChainedFuture(written, functools.partial(_write_own, folder, own_text)), own)]

    def seal(self) -> None:
        """Completes the manifest; called in one process, when all have written and before the last rename."""
        manifest.seal(self._step_folder, jax.process_count(), _REWRITTEN)

    def wait_for_own(self, raise_errors: Callable[[], None]) -> None:
        """Returns when this process has written its part of the last save; raises what made it fail.

        Where one of several processes fails, orbax waits in all of them for the others, hours in the end: the one that
        knows what happened must not. What fails before there is a part of its own, `raise_errors` knows.
        """
        if jax.process_count() == 1:
            return
        deadline = time.monotonic() + PATIENCE_S
        while not self._own.done() and time.monotonic() < deadline:
            raise_errors()
            wait([self._own], timeout=_POLL_S)
        self._own.result(0)


class _Reported:
    """A future of orbax's that tells another one how it ended."""

    def __init__(self, inner: future.Future, outcome: Future[None]) -> None:
        self._inner, self._outcome = inner, outcome

    def result(self, timeout: float | None = None) -> None:
        try:
            self._inner.result(timeout)
        except BaseException as error:
            self._outcome.set_exception(error)
            raise
        self._outcome.set_result(None)

    def cancel(self) -> None:
        self._inner.cancel()


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.PyTreeSave):
    """The arguments of `Handler` when it saves."""


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.PyTreeRestore):
    """The arguments of `Handler` when it restores."""


def save_args(leaves: Leaves) -> Save:
    """What to give to the manager."""
    return Save(leaves, save_args={path: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for path in leaves})


def stored_dtypes(step_folder: Path) -> dict[str, str]:
    """The dtype of each array, by its path, as orbax knows it."""
    return {path: str(array.dtype) for path, array in _stored_arrays(step_folder).items()}


def read(step_folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Leaves:
    """Reads arrays into their new shardings; other padding is cut off or filled with zeros.

    A process needs no more host memory than its share of the arrays (where devices are host memory) and
    `RESTORE_BYTES`, or the largest leaf where that is larger.
    """
    # strict=False is what lets the stored and the wanted padding differ.
    restore_args = {
        path: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False)
        for path, leaf in wanted.items()
    }
    stored = _stored_arrays(step_folder)
    # orbax refuses to read what is as large as its limit.
    largest_bytes = max(math.prod(stored[path].shape) * np.dtype(stored[path].dtype).itemsize for path in wanted)
    limit_gb = max(RESTORE_BYTES, largest_bytes + 1) / 1e9
    partial = len(wanted) < len(stored)
    args = ocp.args.PyTreeRestore(item=dict(wanted), restore_args=restore_args, partial_restore=partial)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit_gb)) as reader:
        return reader.restore(step_folder / STATE, args=args)


_reported_before: Callable[[Any], Any] = sys.__unraisablehook__


def _report_unraisable(found: Any) -> None:
    """Reports an error that nobody can catch as before, but for those of tensorstore's threads after a failed save.

    Their writes end when the event loop that waited for them is gone, and each would print a traceback.
    """
    if found.exc_type is not RuntimeError or str(found.exc_value) != "Event loop is closed":
        _reported_before(found)


class FailuresOnce(logging.Filter):
    """Keeps orbax from logging failures, with tracebacks of all its threads, that `Checkpointer` raises as one line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for what is not to be logged."""
        is_failure = record.levelno >= logging.ERROR or record.exc_info is not None
        return not (is_failure and f"{os.sep}orbax{os.sep}" in record.pathname)

    def start(self) -> None:
        """Begins; twice is once."""
        logging.getLogger("absl").addFilter(self)
        if sys.unraisablehook is not _report_unraisable:
            global _reported_before
            _reported_before, sys.unraisablehook = sys.unraisablehook, _report_unraisable

    def stop(self) -> None:
        """Lets orbax log again, for whoever else uses it in this process."""
        logging.getLogger("absl").removeFilter(self)


def barrier() -> None:
    """Returns when all processes are here. A collective would give up on a late one within a minute."""
    if jax.process_count() > 1:
        key = f"amsp_jax checkpoint {next(_barriers)}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=PATIENCE_S * 1000)


def first_of_all(text: str | None) -> str | None:
    """The text of the first process that has one, in all of them."""
    if jax.process_count() == 1:
        return text
    barrier()
    own = np.zeros(_TEXT_BYTES, np.uint8)
    data = np.frombuffer((text or "").encode()[:_TEXT_BYTES], np.uint8)
    own[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(own)).astype(np.uint8)
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    return next((text for text in texts if text), None)


def _stored_arrays(step_folder: Path) -> dict[str, Any]:
    """Shape and dtype of each array, by its path, without reading it."""
    return ocp.PyTreeCheckpointHandler().metadata(epath.Path(step_folder / STATE)).tree


def own_file(step_folder: Path) -> Path:
    """The file of a checkpoint that holds this process's own text."""
    return step_folder / f"process_{jax.process_index()}.json"


def _write_own(folder: Path, own_text: str | None) -> None:
    """This process's own text, and its part of the manifest: with OCDBT each process writes into its own folder."""
    index = jax.process_index()
    also = []
    if own_text is not None:
        also = [own_file(folder.parent)]
        manifest.write_text(also[0], own_text)
    part, name = folder / f"ocdbt.process_{index}", f"{STATE}/ocdbt.process_{index}"
    manifest.write_part(folder.parent, index, part, name, also)
