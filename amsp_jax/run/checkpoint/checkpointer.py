"""The checkpoints of one run: saved in the background, complete or absent, verified before they are used.

What is stored depends on neither the strategy nor the classes of the state: a flat dictionary of
`path -> array`, and a JSON object beside it. Padding is not part of the truth: restoring cuts or
zero-fills each leaf to the length that the new strategy wants (docs/design/checkpoints.md).
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from amsp_jax.errors import UserError
from amsp_jax.run.checkpoint import leaves as lv
from amsp_jax.run.checkpoint import manifest, storage
from amsp_jax.run.checkpoint.leaves import Kind, Shapes

_PROBE = ".probe"
_META, _META_FILE = "meta", "metadata"
# What this module adds to the JSON object of the caller. A checkpoint without it was written before manifests.
_FORMAT = "format"
_VERSION = 2
_NUM_OWN = "num_own_texts"


class Damaged(NamedTuple):
    """A checkpoint that was passed over, and what is wrong with it."""

    step: int
    what: str


class Intact(NamedTuple):
    """The newest step that verifies, None if none does, and the newer ones that do not, the newest first."""

    step: int | None
    passed_over: Sequence[Damaged]


class Checkpointer:
    """The checkpoints of one run: asynchronous saves, of which the newest `keep` stay.

    In a run of several processes all of them construct it and call its methods alike, on one shared
    file system. A save that was cut short is never listed.

        checkpointer = Checkpointer(run_dir / "checkpoints", keep=3)
        checkpointer.save(100, state, {"seed": 0})
        state = checkpointer.restore(100, abstract_state)
    """

    def __init__(self, directory: str | pathlib.Path, keep: int | None, keep_every: int | None = None) -> None:
        """Opens `directory`.

        Args:
          directory: created if need be; holds one folder a step.
          keep: how many of the newest checkpoints stay; None opens for reading and touches nothing.
          keep_every: every step that it divides stays besides.

        Raises:
          UserError: it cannot be written, or does not exist when opened for reading.
        """
        self.directory = pathlib.Path(directory).absolute()
        self._manager: ocp.CheckpointManager | None = None
        if keep is None:
            if not self.directory.is_dir():
                raise UserError(
                    f"{self.directory} has no checkpoints: there is no such folder. Name a run that saved one."
                )
            return
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: it is a number of steps or checkpoints. Set it to 1 or more.")
        _require_writable(self.directory)
        if jax.process_index() == 0:
            # A run that was killed while it tried the folder leaves what it made there.
            for left in self.directory.glob(f"{_PROBE}*"):
                with contextlib.suppress(OSError):
                    left.rmdir()
        self._handler, self._logs = storage.Handler(), storage.FailuresOnce()
        self._logs.start()
        self._manager = self._make_manager(keep, keep_every)

    def save(self, step: int, state: Any, meta: Mapping[str, Any], own: str | None = None) -> None:
        """Copies `state` to the host and returns; the files are written and measured in the background.

        `state` may be donated as soon as this returns. A step that is already there is left alone. Waits for the
        save before this one.

        Args:
          step: the number of finished training steps.
          state: a pytree of global arrays.
          meta: JSON values saved with it. `meta["shapes"]` says the true shapes (`Shapes`); without it
            the leaves are taken to have no padding.
          own: a text of this process, such as where its data stand; all processes give one or none does.

        Raises:
          UserError: the files of this or of the previous save could not be written.
        """
        assert self._manager is not None, "opened for reading"
        leaves = lv.by_path(state)
        shapes = meta.get("shapes") or {path: leaf.shape for path, leaf in leaves.items()}
        assert set(shapes) == set(leaves), f"shapes and leaves differ: {sorted(set(shapes) ^ set(leaves))}"
        shapes = {path: list(shape) for path, shape in shapes.items()}
        written = {"version": _VERSION, "dtypes": {path: str(leaf.dtype) for path, leaf in leaves.items()}}
        written |= {} if own is None else {_NUM_OWN: jax.process_count()}
        # orbax also lists the one that is being written.
        if step in self.steps() or step in self._manager.all_steps():
            return
        with self._writing():
            self._handler.wait_for_own(self._manager.check_for_errors)
            if jax.process_index() == 0:
                # orbax makes the step's folder in a thread whose failure is told to nobody.
                with tempfile.TemporaryDirectory(prefix=_PROBE, dir=self.directory):
                    pass
            self._handler.own_text = own
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=storage.save_args(lv.to_stored(leaves)),
                    meta=ocp.args.JsonSave({**meta, "shapes": shapes, _FORMAT: written}),
                ),
                force=True,
            )

    def steps(self) -> list[int]:
        """Every complete checkpoint, whether its files are still as they were or not, the oldest first."""
        with self._reaching():
            names = [path.name for path in self.directory.iterdir() if path.is_dir()]
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, None if there is none."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON object saved with `step`, `shapes` included.

        Raises:
          UserError: there is no such checkpoint, or it cannot be read.
        """
        return {name: value for name, value in self._meta(step).items() if name != _FORMAT}

    def own(self, step: int) -> str | None:
        """The text that this process gave to `save`; None if it gave none.

        Raises:
          UserError: another number of processes saved the checkpoint; there is no such one, or it cannot be read.
        """
        num_saved, num_here = self._meta(step).get(_FORMAT, {}).get(_NUM_OWN), jax.process_count()
        if num_saved is None:
            return None
        if num_saved != num_here:
            raise UserError(
                f"checkpoint {self._folder(step)} holds the state of the data's iterator of {num_saved} processes, and "
                f"this run has {num_here}. Start {num_saved} processes, or give a source with rows(step, rows), which "
                "continues on any number."
            )
        with self._reading(step):
            return storage.own_file(self._folder(step)).read_text(encoding="utf-8")

    def verify(self, step: int, full: bool = True) -> str | None:
        """Compares the files of a checkpoint with what was written.

        Several processes share the work.

        Args:
          step: one of the saved steps.
          full: reads every file; otherwise only their sizes are looked at, at once.

        Returns:
          None, or a note: what was written by an older version has no checksums.

        Raises:
          UserError: a file is missing, or has another size or content; no such checkpoint.
        """
        self._require(step)
        if what := self._damage(step, full):
            raise self._not_usable(step, f"is damaged: {what}")
        if (self._folder(step) / manifest.MANIFEST).exists():
            return None
        return f"{self._folder(step)} was written by an older version, without checksums; it is not verified"

    def newest_intact(self, steps: Sequence[int] | None = None, full: bool = True) -> Intact:
        """The newest checkpoint that verifies, and the newer ones that do not.

        Of `steps`, the same in all processes; None: of all.
        """
        passed_over: list[Damaged] = []
        for step in sorted(self.steps() if steps is None else steps, reverse=True):
            what = self._damage(step, full)
            if what is None:
                return Intact(step, passed_over)
            passed_over.append(Damaged(step, what))
        return Intact(None, passed_over)

    def set_aside(self, step: int) -> pathlib.Path:
        """Renames a damaged checkpoint, so that it is neither listed nor in the way of the same step's next save.

        Returns:
          Its new place: `STEP.damaged`, or `STEP.damaged.2` where that is taken.

        Raises:
          UserError: there is no such checkpoint, or the folder cannot be written.
        """
        self._require(step)
        target, number = self.directory / f"{step}.damaged", 1
        while target.exists():
            number += 1
            target = self.directory / f"{step}.damaged.{number}"
        storage.barrier()
        with self._writing():
            if jax.process_index() == 0:
                self._folder(step).rename(target)
        storage.barrier()
        if self._manager is not None:
            self._manager.reload()
        return target

    def restore(
        self,
        step: int,
        abstract_state: Any,
        true_shapes: Shapes | None = None,
        partial: bool = False,
        verify: bool = True,
    ) -> Any:
        """Reads `step` into the structure, storage shapes and shardings of `abstract_state`.

        Each process reads only what its devices hold.

        Args:
          step: one of the saved steps.
          abstract_state: a pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh.
          true_shapes: the shapes of its leaves without padding; None if they have none.
          partial: `abstract_state` is only some parts of what was saved, whole ones by their names at the top:
            `{"params": ...}` of a state leaves the optimizer's part unread.
          verify: compares all files with what was written before any is used; False if that was just done.

        Returns:
          Global arrays: the saved values, zeros in the padding.

        Raises:
          UserError: as `check` and `verify` do; a file cannot be read.
        """
        self.check(step, abstract_state, true_shapes, partial=partial)
        if verify:
            self.verify(step)
        wanted = lv.by_path(abstract_state)
        to_read = {path: lv.stored_struct(leaf) for path, leaf in wanted.items() if leaf.size}
        with self._reading(step):
            stored = storage.read(self._folder(step), to_read)
        arrays = [lv.from_stored(path, leaf, stored) for path, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), arrays)

    def check(self, step: int, abstract_state: Any, true_shapes: Shapes | None = None, partial: bool = False) -> None:
        """Finds out whether `restore` would work by its arguments, from the names and shapes that were saved.

        Raises:
          UserError: no such checkpoint; a leaf is missing, is left over, or has another true shape or dtype.
        """
        wanted, saved = lv.by_path(abstract_state), self._kinds(step)
        if partial:
            parts = {lv.part_of(path) for path in wanted}
            saved = {path: kind for path, kind in saved.items() if lv.part_of(path) in parts}
        self._require_same_leaves(step, set(saved), set(wanted))
        for path, leaf in wanted.items():
            shape = leaf.shape if true_shapes is None else true_shapes[path]
            self._require_same_kind(step, path, saved[path], Kind(str(leaf.dtype), tuple(shape)))

    def raise_failed(self) -> None:
        """Raises `UserError` if a save in the background has failed in this process; does not wait for any."""
        if self._manager is not None:
            with self._writing():
                self._manager.check_for_errors()

    def is_saving(self) -> bool:
        """Whether a save in the background of this process is not complete yet; does not wait for it."""
        return self._manager is not None and self._manager.is_saving_in_progress()

    def wait(self) -> None:
        """Returns when every save is complete on disk; raises `UserError` if one failed."""
        if self._manager is not None:
            with self._writing():
                self._handler.wait_for_own(self._manager.check_for_errors)
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the saves and ends the background threads."""
        if self._manager is not None:
            with self._writing():
                self._handler.wait_for_own(self._manager.check_for_errors)
                self._manager.close()
            self._logs.stop()

    def _make_manager(self, keep: int, keep_every: int | None) -> ocp.CheckpointManager:
        policies = ocp.checkpoint_managers
        kept: list[Any] = [policies.LatestN(keep)] + ([policies.EveryNSteps(keep_every)] if keep_every else [])
        with self._writing():
            return ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=policies.AnyPreservationPolicy(kept),
                    # What a killed run left behind goes when the run starts again.
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(
                        timeout_secs=storage.PATIENCE_S, post_finalization_callback=self._handler.seal
                    ),
                ),
                item_handlers={_META: ocp.JsonCheckpointHandler(_META_FILE), storage.STATE: self._handler},
            )

    def _folder(self, step: int) -> pathlib.Path:
        return self.directory / str(step)

    def _require(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            have = f"steps {', '.join(map(str, steps))} are there" if steps else "it has no complete checkpoint"
            raise UserError(f"{self.directory} has no checkpoint of step {step}: {have}.")

    def _meta(self, step: int) -> dict[str, Any]:
        self._require(step)
        with self._reading(step):
            meta = json.loads((self._folder(step) / _META / _META_FILE).read_text())
            version = meta.get(_FORMAT, {"version": 1})["version"]
        if version > _VERSION:
            raise UserError(
                f"checkpoint {self._folder(step)} was written by a newer version (format {version}, this one reads "
                f"up to {_VERSION}). Use the version that wrote it."
            )
        return meta

    def _kinds(self, step: int) -> dict[str, Kind]:
        """What each saved leaf is, by its path."""
        meta = self._meta(step)
        with self._reading(step):
            dtypes = meta[_FORMAT]["dtypes"] if _FORMAT in meta else storage.stored_dtypes(self._folder(step))
            return {path: Kind(dtype, tuple(meta["shapes"][path])) for path, dtype in dtypes.items()}

    def _damage(self, step: int, full: bool) -> str | None:
        """What is wrong with the files, the same answer in all processes."""
        share = (jax.process_index(), jax.process_count())
        return storage.first_of_all(self._damage_here(step, full, share))

    def _damage_here(self, step: int, full: bool, share: tuple[int, int] = (0, 1)) -> str | None:
        folder = self._folder(step)
        if (folder / manifest.MANIFEST).exists():
            return manifest.damage(folder, full, share)
        try:
            meta = json.loads((folder / _META / _META_FILE).read_text())
        except (OSError, ValueError):
            return f"{_META}/{_META_FILE} cannot be read, and there is no {manifest.MANIFEST}"
        return f"{manifest.MANIFEST} is missing" if _FORMAT in meta else None

    def _not_usable(self, step: int, why: str) -> UserError:
        older = [s for s in self.steps() if s < step]
        advice = (
            f"Training goes on from step {max(older)} with on_damaged='previous'."
            if older
            else "There is no older one."
        )
        return UserError(f"checkpoint {self._folder(step)} {why}. {advice}")

    def _require_same_leaves(self, step: int, saved: set[str], wanted: set[str]) -> None:
        missing, extra = sorted(wanted - saved), sorted(saved - wanted)
        if missing or extra:
            parts = [f"it lacks {lv.some(missing)}"] if missing else []
            parts += [f"it has {lv.some(extra)} besides"] if extra else []
            raise UserError(
                f"checkpoint {self._folder(step)} is of another model or optimizer: {' and '.join(parts)} "
                f"({len(saved)} leaves there, {len(wanted)} in this run). Use the model and optimizer that wrote it, "
                "or another run folder."
            )

    def _require_same_kind(self, step: int, path: str, saved: Kind, wanted: Kind) -> None:
        if saved != wanted:
            raise UserError(
                f"checkpoint {self._folder(step)} does not fit: {path} is {saved} there and {wanted} in this run. "
                "Use the model and optimizer that wrote it, or another run folder."
            )

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"checkpoint folder {self.directory} cannot be read: {_first_line(error)}. Bring it back, or set "
                "another run folder."
            ) from error

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        # Damaged files surface as many types, those of tensorstore, protobuf and json among them, and as Exception.
        except Exception as error:
            what = self._damage_here(step, full=True)
            why = f"is damaged: {what}" if what else f"cannot be read: {_first_line(error)}"
            raise self._not_usable(step, why) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        # The same: a full disk is a ValueError of tensorstore's.
        except Exception as error:
            if self._manager is not None and self.directory.is_dir():
                # orbax has already struck off its list what the save that failed would have replaced.
                self._manager.reload()
            raise UserError(
                f"a checkpoint in {self.directory} could not be written: {_first_line(error)}. "
                "Make room or choose another run folder; the complete checkpoints are untouched."
            ) from error


def _require_writable(directory: pathlib.Path) -> None:
    """Finds out before the first step, not at the first save."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"checkpoint folder {directory} cannot be written: {_first_line(error)}. Set run_dir to a folder you own."
        ) from error


def _first_line(error: BaseException) -> str:
    """What happened; of tensorstore's long messages only what the operating system said."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    said = re.search(r"([^:]+) \[os_error_code=", line)
    return said[1].strip() if said else line
