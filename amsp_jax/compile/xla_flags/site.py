"""The site file: flags and environment variables of one cluster, over our table and under the user's own.

# ~/.config/amsp_jax/site.toml, or the file that AMSP_JAX_SITE names
[flags]
xla_gpu_nccl_collective_max_nchannels = 16
[environment]
NCCL_IB_TC = "106"
[remove]
flags = ["xla_gpu_enable_command_buffer"]
environment = ["HSA_NO_SCRATCH_RECLAIM"]
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amsp_jax.compile.xla_flags.text import flag_name, merge
from amsp_jax.errors import UserError

LOCATION = "AMSP_JAX_SITE"
"""The variable that names the file; empty for none."""

_TABLES = ("flags", "environment", "remove")
_SETTABLE = ("flags", "environment")
_NAMES = {"flags": r"xla_\w+", "environment": r"[A-Za-z_]\w*"}
# A blank ends a flag.
_FORBIDDEN = {"flags": r"[\s\x00]", "environment": r"\x00"}
# jax, Python and the loader have read theirs by now, and XLA_FLAGS is made of [flags].
_TOO_LATE = re.compile(r"JAX_.*|XLA_FLAGS|PYTHON.*|LD_.*")


@dataclasses.dataclass(frozen=True)
class Site:
    """What a site file says; without one, nothing.

    Attributes:
      path: of the file; None without one.
      flags: values by the flag's name, without dashes.
      environment: values by the variable's name.
      removed_flags, removed_variables: names that are taken out of our table.
    """

    path: Path | None = None
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    removed_flags: frozenset[str] = frozenset()
    removed_variables: frozenset[str] = frozenset()

    def with_flags(self, ours: list[str]) -> list[str]:
        """Our flags without the removed ones, then the site's."""
        kept = [flag for flag in ours if flag_name(flag) not in self.removed_flags]
        return merge(kept, [f"--{name}={value}" for name, value in self.flags.items()])

    def with_variables(self, ours: Mapping[str, str]) -> dict[str, str]:
        """Our variables without the removed ones, and the site's."""
        kept = {name: value for name, value in ours.items() if name not in self.removed_variables}
        return {**kept, **self.environment}


def read_site(environ: Mapping[str, str] = os.environ) -> Site:
    """The site file that `AMSP_JAX_SITE` names, or `~/.config/amsp_jax/site.toml` if it is there.

    Raises:
      UserError: the named file is not there, or the file does not follow the format.
    """
    path = _path(environ)
    if path is None:
        return Site()
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"site file {path}: {error.strerror}. Correct {LOCATION}, or set it to nothing.") from error
    except ValueError as error:
        raise UserError(f"site file {path}: no TOML: {error}. Correct the file.") from error
    return _parse(path, content)


def _path(environ: Mapping[str, str]) -> Path | None:
    if LOCATION in environ:
        return Path(environ[LOCATION]).expanduser() if environ[LOCATION] else None
    config = Path(environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = config / "amsp_jax" / "site.toml"
    return path if path.exists() else None


def _parse(path: Path, content: Mapping[str, Any]) -> Site:
    for name, table in content.items():
        if name not in _TABLES or not isinstance(table, dict):
            raise UserError(f"site file {path}: {name} is none of the tables [{'], ['.join(_TABLES)}]. Remove it.")
    flags, environment = (_values(path, table, content.get(table, {})) for table in _SETTABLE)
    removed = _removed(path, content.get("remove", {}))
    for name in environment:
        if _TOO_LATE.fullmatch(name):
            rule = "goes into [flags]" if name == "XLA_FLAGS" else "is read before this file: set it in the shell"
            raise UserError(f"site file {path}: [environment] {name} {rule}.")
    return Site(path, flags, environment, removed["flags"], removed["environment"])


def _values(path: Path, table: str, entries: Mapping[str, Any]) -> dict[str, str]:
    for name, value in entries.items():
        if not re.fullmatch(_NAMES[table], name):
            raise UserError(f"site file {path}: [{table}] {name} is no name there (like {_NAMES[table]}). Correct it.")
        if not isinstance(value, str | int | float):
            raise UserError(f"site file {path}: [{table}] {name} is {value!r}, not text, a number, true or false.")
        if re.search(_FORBIDDEN[table], str(value)):
            raise UserError(f"site file {path}: [{table}] {name} is {value!r}, with a character that ends it.")
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in entries.items()}


def _removed(path: Path, entries: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    for name, names in entries.items():
        is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
        if name not in _SETTABLE or not is_list:
            raise UserError(
                f"site file {path}: [remove] {name} = {names!r}; it may have flags and environment, lists of names."
            )
    return {name: frozenset(entries.get(name, ())) for name in _SETTABLE}
