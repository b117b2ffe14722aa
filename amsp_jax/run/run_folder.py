"""The folder of a run: which run it holds, and whether another command continues it.

`run.json` records what makes a run that run. Everything else may change between two commands: the strategy, the
number of devices, the number of steps.

Nothing is written outside of the folder: a file of it that is a link is refused. A folder that is a link, such as
`checkpoints` on a larger disk, is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from amsp_jax.errors import UserError
from amsp_jax.run.config import TrainConfig

DEFAULT_PARENT = Path("runs")
CONFIG_FILE = "config.gin"
TOKENIZER_FILE = "tokenizer.json"
CHECKPOINTS = "checkpoints"
IDENTITY = ("model", "model_overrides", "end_of_document", "seed", "global_batch", "seq_len", "optimizer", "frozen")
"""The settings that make a run: with another value it is another run. The data are told by their content."""
HOW_COMPUTED = ("attention", "loss_chunks")
"""The fields of `model_overrides` that do not: they change how a model is computed, not which it is."""

_RECORD = "run.json"
_FINGERPRINT = "data_fingerprint"
_LOCK = ".lock"
_LOST_LOCK_S = 120


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A folder that this run may use; nothing is written before `claimed`.

    Attributes:
      path: the folder.
      is_same_run: it already holds this run, which goes on from its last checkpoint.
      is_numbered: the next free number; another command may take it first.
      data: the setting that the run began with.
      fingerprint: of the content of its data; empty if it is not known.
    """

    path: Path
    is_same_run: bool
    is_numbered: bool = False
    data: str = ""
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    @contextlib.contextmanager
    def claimed(self, config: TrainConfig, fingerprint: Mapping[str, str] | None = None) -> Iterator[RunFolder]:
        """Makes the folder, records which run it holds, and keeps other commands out until the context ends.

        Args:
          config: the settings.
          fingerprint: of the content of the data.

        Raises:
          UserError: it cannot be written, or another command was faster.
        """
        with contextlib.ExitStack() as stack:
            with _writing(self.path):
                folder = self._made()
                _refuse_links(folder.path)
                stack.enter_context(_locked(folder.path))
                if not self.is_same_run and (folder.path / _RECORD).exists():
                    raise UserError(f"run_dir={folder.path}: another command began a run there; choose another folder")
            record = {**identity(config), "data": config.data, _FINGERPRINT: dict(fingerprint or {})}
            folder.write(_RECORD, json.dumps(record, indent=2) + "\n")
            yield folder

    def _made(self) -> RunFolder:
        folder = self
        while folder.is_numbered:
            try:
                folder.path.mkdir(parents=True)
                return folder
            except FileExistsError:
                folder = dataclasses.replace(self, path=_next_numbered(self.path.parent))
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def write(self, name: str, text: str) -> None:
        """Writes one file of the folder, whole or not at all, in place of a link if there is one."""
        assert name == Path(name).name, name
        part = self.path / f".{name}.part"
        with _writing(self.path):
            # What a killed run left, or a link: "x" writes through neither.
            part.unlink(missing_ok=True)
            with part.open("x", encoding="utf-8") as file:
                file.write(text)
            part.replace(self.path / name)


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings of `IDENTITY`, as JSON values, without what is `HOW_COMPUTED`."""
    return _identity(json.loads(json.dumps({name: getattr(config, name) for name in IDENTITY})))


def _identity(settings: Mapping[str, Any]) -> dict[str, Any]:
    overrides = settings.get("model_overrides")
    if not isinstance(overrides, dict):
        return {**settings}
    return {**settings, "model_overrides": {k: v for k, v in overrides.items() if k not in HOW_COMPUTED}}


def find_run_folder(config: TrainConfig) -> RunFolder:
    """The folder that `run_dir` names, or the next number under `runs/`. Reads only.

    Raises:
      UserError: it holds a different run, or files that are no run.
    """
    if config.run_dir is None:
        _require_writable(DEFAULT_PARENT)
        return RunFolder(_next_numbered(DEFAULT_PARENT), is_same_run=False, is_numbered=True)
    path = _named(config.run_dir)
    _require_writable(path)
    with _writing(path):
        if not path.is_dir() or not any(path.iterdir()):
            return RunFolder(path, is_same_run=False)
        record = _read_record(path)
        _require_same(path, record, identity(config))
        _refuse_links(path)
        if (path / _LOCK).exists():
            with _locked(path):
                pass
    fingerprint = record.get(_FINGERPRINT)
    return RunFolder(
        path,
        is_same_run=True,
        data=str(record.get("data", "")),
        fingerprint=fingerprint if isinstance(fingerprint, dict) else {},
    )


def _named(run_dir: str) -> Path:
    try:
        path = Path(run_dir).expanduser()
        # Whether the system can write it down: no NUL, no half of a surrogate pair.
        os.fsencode(path)
        if "\0" in run_dir:
            raise ValueError("it holds a NUL")
    # No such user as in `~user`.
    except (RuntimeError, ValueError) as error:
        raise UserError(f"run_dir={run_dir!r} cannot be a path: {error}; choose another folder") from None
    return path


def _refuse_links(path: Path) -> None:
    links = sorted(entry.name for entry in path.iterdir() if entry.is_symlink() and not entry.is_dir())
    if links:
        raise UserError(
            f"run_dir={path}: {links[0]} is a link, and the run would write where it leads; only folders may be "
            f"links, as {CHECKPOINTS} on another disk. Remove it"
        )


def _require_writable(path: Path) -> None:
    """Finds out before the devices start, by a nameless file in the nearest folder that there is."""
    with _writing(path):
        if path.exists() and not path.is_dir():
            raise UserError(f"run_dir={path} is a file; name a folder")
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"run_dir={path} cannot be written: {error.strerror}; choose another folder") from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the folder against other commands; the lock ends with the process, however that ends."""
    # The lock of a node that was lost outlives it for a while; a requeued job waits for that.
    deadline = time.monotonic() + (_LOST_LOCK_S if int(os.environ.get("SLURM_RESTART_COUNT", "0")) else 0)
    with (path / _LOCK).open("a") as file:
        while not _locks(file):
            if time.monotonic() >= deadline:
                raise UserError(
                    f"run_dir={path} is in use: another command trains there; wait for its end, or choose another "
                    "folder"
                )
            time.sleep(1)
        yield


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks: then it is up to the user.
        pass
    return True


def _next_numbered(parent: Path) -> Path:
    numbers = [int(p.name) for p in parent.glob("*") if p.name.isdecimal()]
    return parent / f"{max(numbers, default=0) + 1:04d}"


def _read_record(path: Path) -> Mapping[str, Any]:
    try:
        record = json.loads((path / _RECORD).read_bytes())
    except (OSError, ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise UserError(f"run_dir={path} holds files but no readable {_RECORD}, so it is no run; choose another folder")
    return record


def _require_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    there = _identity(there)
    differs = [f"{k}={there.get(k)!r} there and {k}={v!r} here" for k, v in here.items() if there.get(k) != v]
    if differs:
        raise UserError(
            f"run_dir={path} holds a different run: {'; '.join(differs)}. "
            "Choose another folder, or set these as they are there"
        )
