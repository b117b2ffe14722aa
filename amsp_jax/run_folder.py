"""The folder of a run: which run it holds, and whether another command continues it.

`run.json` records what makes a run that run. Everything else may change between two commands: the strategy, the
number of devices, the number of steps.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amsp_jax.config import TrainConfig
from amsp_jax.errors import UserError

DEFAULT_PARENT = Path("runs")
CONFIG_FILE = "config.gin"
TOKENIZER_FILE = "tokenizer.json"
CHECKPOINTS = "checkpoints"
IDENTITY = ("model", "model_overrides", "data", "end_of_document", "seed", "global_batch", "seq_len", "optimizer")
"""The settings that make a run: with another value it is another run."""

_RECORD = "run.json"


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """A folder that this run may use; nothing is written before `create`.

    Attributes:
      path: the folder.
      is_same_run: it already holds this run, which goes on from its last checkpoint.
    """

    path: Path
    is_same_run: bool

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / CHECKPOINTS

    def create(self, config: TrainConfig) -> None:
        """Makes the folder and records which run it holds."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.write(_RECORD, json.dumps(identity(config), indent=2) + "\n")
        except OSError as error:
            raise UserError(f"RUN_DIR={self.path} cannot be written: {error.strerror}; choose another folder") from None

    def write(self, name: str, text: str) -> None:
        """Writes one file of the folder, whole or not at all."""
        part = self.path / f".{name}.part"
        part.write_text(text)
        part.replace(self.path / name)


def identity(config: TrainConfig) -> dict[str, Any]:
    """The settings of `IDENTITY`, as JSON values."""
    return json.loads(json.dumps({name: getattr(config, name) for name in IDENTITY}))


def find_run_folder(config: TrainConfig) -> RunFolder:
    """The folder that `RUN_DIR` names, or the next number under `runs/`. Reads only.

    Raises:
      UserError: it holds a different run, or files that are no run.
    """
    if config.run_dir is None:
        return RunFolder(_next_numbered(DEFAULT_PARENT), False)
    path = Path(config.run_dir)
    if path.exists() and not path.is_dir():
        raise UserError(f"RUN_DIR={path} is a file; name a folder")
    if not path.is_dir() or not any(path.iterdir()):
        return RunFolder(path, False)
    _require_same(path, _read_record(path), identity(config))
    return RunFolder(path, True)


def _next_numbered(parent: Path) -> Path:
    numbers = [int(p.name) for p in parent.glob("*") if p.name.isdecimal()]
    return parent / f"{max(numbers, default=0) + 1:04d}"


def _read_record(path: Path) -> Mapping[str, Any]:
    try:
        return json.loads((path / _RECORD).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"RUN_DIR={path} holds files but no readable {_RECORD}, so it is no run; choose another folder"
        ) from None


def _require_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differs = [f"{k.upper()} {there.get(k)!r} there, {v!r} here" for k, v in here.items() if there.get(k) != v]
    if differs:
        raise UserError(
            f"RUN_DIR={path} holds a different run: {'; '.join(differs)}. "
            "Choose another RUN_DIR, or set these as they are there"
        )
