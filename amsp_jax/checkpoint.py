"""Checkpoints: any pytree of global arrays saved under one mesh and restored under any other.

What is stored depends on neither the strategy nor the classes of the state: a flat dictionary of
`path -> array`, and a JSON object beside it. Padding is not part of the truth: restoring cuts or
zero-fills each leaf to the length that the new strategy wants (docs/design/checkpoints.md).
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from amsp_jax.errors import UserError

Shapes = Mapping[str, Sequence[int]]
"""The true shape of each leaf, without padding, by its path (`leaf_paths`)."""


def leaf_paths(tree: Any) -> list[str]:
    """The name of every leaf in the order of `jax.tree.leaves`: `params/blocks/0/mlp/up`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]


class Checkpointer:
    """The checkpoints of one run: asynchronous saves, of which the newest `keep` stay.

    In a run of several processes all of them construct it and call its methods alike, on one shared
    file system. A save that was cut short is never listed.

        checkpointer = Checkpointer(run_dir / "checkpoints", keep=3)
        checkpointer.save(100, state, {"seed": 0})
        state = checkpointer.restore(100, abstract_state)
    """

    def __init__(self, directory: str | pathlib.Path, keep: int | None) -> None:
        """Opens `directory`.

        Args:
          directory: created if need be; holds one folder a step.
          keep: how many checkpoints stay; None opens for reading and touches nothing.

        Raises:
          UserError: it cannot be written, or does not exist when opened for reading.
        """
        self.directory = pathlib.Path(directory).absolute()
        if keep is None:
            if not self.directory.is_dir():
                raise UserError(
                    f"{self.directory} has no checkpoints: there is no such folder. Name a run that saved one."
                )
        elif keep < 1:
            raise UserError(f"keep={keep}: at least 1 checkpoint is kept. Set it to 1 or more.")
        else:
            _require_writable(self.directory)
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                read_only=keep is None,
                create=keep is not None,
                # What a killed run left behind goes when the run starts again, but never under a reader.
                cleanup_tmp_directories=keep is not None,
            ),
            item_handlers={"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()},
        )

    def save(self, step: int, state: Any, meta: Mapping[str, Any]) -> None:
        """Copies `state` to the host and returns; the files are written in the background.

        `state` may be donated as soon as this returns. A step that is already there is left alone.

        Args:
          step: the number of finished training steps.
          state: a pytree of global arrays.
          meta: JSON values saved with it. `meta["shapes"]` says the true shapes (`Shapes`); without it
            the leaves are taken to have no padding.

        Raises:
          UserError: the files of this or of the previous save could not be written.
        """
        paths, leaves = _unique_paths(state), jax.tree.leaves(state)
        shapes = meta.get("shapes") or {path: leaf.shape for path, leaf in zip(paths, leaves, strict=True)}
        assert set(shapes) == set(paths), f"shapes and leaves differ: {sorted(set(shapes) ^ set(paths))}"
        meta = {**meta, "shapes": {path: list(shape) for path, shape in shapes.items()}}
        if step in self._manager.all_steps():
            return
        with self._writing():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(dict(zip(paths, leaves, strict=True))), meta=ocp.args.JsonSave(meta)
                ),
                force=True,
            )

    def latest_step(self) -> int | None:
        """The newest complete checkpoint, None if there is none."""
        return self._manager.latest_step()

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON object saved with `step`, `shapes` included.

        Raises:
          UserError: there is no such checkpoint, or it cannot be read.
        """
        self._require(step)
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, abstract_state: Any, true_shapes: Shapes | None = None, partial: bool = False) -> Any:
        """Reads `step` into the structure, storage shapes and shardings of `abstract_state`.

        Each process reads only what its devices hold.

        Args:
          step: one of the saved steps.
          abstract_state: a pytree of `jax.ShapeDtypeStruct` with shardings, on any mesh.
          true_shapes: the shapes of its leaves without padding; None if they have none.
          partial: `abstract_state` is only some parts of what was saved, whole ones by their names at the top:
            `{"params": ...}` of a state leaves the optimizer's part unread.

        Returns:
          Global arrays: the saved values, zeros in the padding.

        Raises:
          UserError: as `check` does; a file cannot be read.
        """
        self.check(step, abstract_state, true_shapes, partial=partial)
        paths, leaves = _unique_paths(abstract_state), jax.tree.leaves(abstract_state)
        target = dict(zip(paths, leaves, strict=True))
        # strict=False is what lets the stored and the wanted padding differ.
        restore_args = {
            path: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False)
            for path, leaf in target.items()
        }
        state = ocp.args.PyTreeRestore(item=target, restore_args=restore_args, partial_restore=partial)
        with self._reading(step):
            arrays = self._manager.restore(step, args=ocp.args.Composite(state=state))["state"]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in paths])

    def check(self, step: int, abstract_state: Any, true_shapes: Shapes | None = None, partial: bool = False) -> None:
        """Finds out whether `restore` would work by its arguments, from the names and shapes that were saved.

        Raises:
          UserError: no such checkpoint; a leaf is missing, is left over, or has another true shape or dtype.
        """
        paths, leaves = _unique_paths(abstract_state), jax.tree.leaves(abstract_state)
        saved_shapes = self.meta(step)["shapes"]
        with self._reading(step):
            stored = self._manager.item_metadata(step)["state"].tree
        if partial:
            parts = {_part(path) for path in paths}
            stored = {path: array for path, array in stored.items() if _part(path) in parts}
        self._require_same_leaves(step, set(stored), set(paths))
        for path, leaf in zip(paths, leaves, strict=True):
            true_shape = tuple(true_shapes[path]) if true_shapes is not None else leaf.shape
            self._require_same_array(
                step, path, (tuple(saved_shapes[path]), stored[path].dtype), (true_shape, leaf.dtype)
            )

    def wait(self) -> None:
        """Returns when every save is complete on disk; raises `UserError` if one failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the saves and ends the background threads."""
        with self._writing():
            self._manager.close()

    def _require(self, step: int) -> None:
        steps = sorted(self._manager.all_steps())
        if step not in steps:
            have = f"steps {', '.join(map(str, steps))} are there" if steps else "it has no complete checkpoint"
            raise UserError(f"{self.directory} has no checkpoint of step {step}: {have}.")

    def _require_same_leaves(self, step: int, stored: set[str], wanted: set[str]) -> None:
        missing, extra = sorted(wanted - stored), sorted(stored - wanted)
        if missing or extra:
            parts = [f"it lacks {_some(missing)}"] if missing else []
            parts += [f"it has {_some(extra)} besides"] if extra else []
            raise UserError(
                f"checkpoint {self.directory / str(step)} is of another model or optimizer: {' and '.join(parts)} "
                f"({len(stored)} leaves there, {len(wanted)} in this run). Use the model and optimizer that wrote it, "
                "or another RUN_DIR."
            )

    def _require_same_array(self, step: int, path: str, stored: tuple[Any, Any], wanted: tuple[Any, Any]) -> None:
        if stored != wanted:
            raise UserError(
                f"checkpoint {self.directory / str(step)} does not fit: {path} is {_array(*stored)} there and "
                f"{_array(*wanted)} in this run. Use the model and optimizer that wrote it, or another RUN_DIR."
            )

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        # Damaged files surface as many types, those of tensorstore, protobuf and json among them.
        except (ValueError, KeyError, OSError, RuntimeError) as error:
            older = [s for s in self._manager.all_steps() if s < step]
            advice = f"Delete that folder to go on from step {max(older)}." if older else "There is no older one."
            raise UserError(
                f"checkpoint {self.directory / str(step)} cannot be read: {_first_line(error)}. "
                f"Its files are damaged or out of reach. {advice}"
            ) from error

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"a checkpoint in {self.directory} could not be written: {_first_line(error)}. "
                "Make room or set another RUN_DIR; the complete checkpoints are untouched."
            ) from error


def _unique_paths(tree: Any) -> list[str]:
    paths = leaf_paths(tree)
    twice = sorted({path for path in paths if paths.count(path) > 1}) if len(set(paths)) < len(paths) else []
    if twice:
        raise UserError(
            f"two leaves of the state are both named {_some(twice)}. Use keys without '/' in parameter trees."
        )
    return paths


def _require_writable(directory: pathlib.Path) -> None:
    """Finds out before the first step, not at the first save."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"checkpoint folder {directory} cannot be written: {_first_line(error)}. Set RUN_DIR to a folder you own."
        ) from error


def _part(path: str) -> str:
    """The part of the state that a leaf belongs to: its name at the top."""
    return path.split("/", 1)[0]


def _array(shape: tuple[int, ...], dtype: Any) -> str:
    return f"{jax.numpy.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
