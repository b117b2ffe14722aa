"""A folder of things that took time to make, safe for processes that make the same thing at once."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from amsp_jax.errors import UserError
from amsp_jax.user_cache import user_cache


def open_cache(directory: Path | None) -> tuple[Path, str]:
    """A writable cache folder, and a note for the person where it is not the usual one.

    Args:
      directory: the folder to use; None is `$XDG_CACHE_HOME/amsp_jax`, or `~/.cache/amsp_jax`. Where that one
        cannot be written, a temporary folder stands in until the process ends.

    Raises:
      UserError: a `directory` was given and cannot be written.
    """
    usual = directory or user_cache()
    try:
        usual.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=usual):
            pass
    except OSError as error:
        if directory is not None:
            raise UserError(f"the cache folder {directory} cannot be written: {error.strerror}.") from error
        temporary = tempfile.mkdtemp(prefix="amsp_jax-")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return Path(temporary), f"{usual} cannot be written, so nothing is cached for the next start"
    return usual, ""


def cached(cache: Path, name: str, build: Callable[[Path], object]) -> Path:
    """The folder `cache/name`, filled by `build(folder)` if it is not there yet.

    The folder appears whole or not at all. Of two processes that build at once the first to finish
    publishes and the other one throws its copy away.

    Raises:
      UserError: the disk is full, or over quota.
    """
    target = cache / name
    if target.is_dir():
        return target
    building = None
    try:
        building = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
        build(building)
        # mkdtemp makes folders for the owner alone, a cache may be shared.
        building.chmod(0o755)
        _publish(building, target)
    except OSError as error:
        raise UserError(
            f"cannot write the data cache {target}: {error.strerror or error}. Free some space, or set XDG_CACHE_HOME "
            "to another disk."
        ) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return target


def _publish(building: Path, target: Path) -> None:
    try:
        building.rename(target)
    except OSError:
        # A folder that is not empty cannot be replaced by a rename: another process was first.
        if not target.is_dir():
            raise
