"""Gin files as data: a config can set settings and include other files, and nothing else.

gin imports every module that a file names while it parses it, and `@module.function()` calls what the attributes of
any imported module lead to. So each file is parsed first with nothing behind its names, and gin sees it only if all
it holds is harmless.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gin import config_parser

from amsp_jax.errors import UserError

# Configs have a few kilobytes; what is larger is something else.
_MAX_BYTES = 1 << 20
_MAX_FILES = 100


def checked_files(path: Path, search: Sequence[Path]) -> list[Path]:
    """The gin file and all that it includes, directly or not, found to be harmless.

    Args:
      path: the file.
      search: folders that relative includes are looked up in, in order, as gin does.

    Raises:
      UserError: a file is missing, is no text, includes itself, or holds an import, a reference to code or a binding
        of anything but a setting; it says where.
      Exception: whatever gin's parser raises for what is not gin.
    """
    files = []
    for file in _checked(path, search, ()):
        files.append(file)
        if len(files) > _MAX_FILES:
            raise UserError(f"{path} includes more than {_MAX_FILES} files, twice the same ones counted; include fewer")
    return files


def check_text(text: str, name: str) -> list[tuple[str, str]]:
    """Checks a text as a file is checked, and returns the names that it includes, each with its place.

    Args:
      text: in gin's language.
      name: for messages.

    Raises:
      UserError, Exception: as `checked_files`.
    """
    includes = []
    delegate = _NothingBehindNames()
    for statement in config_parser.ConfigParser(_named(text, name), delegate):
        where = f"{name}, line {statement.location.line_num}"
        if delegate.references:
            raise UserError(
                f"{where}: '@{delegate.references[0]}' refers to code, which a config may not; it sets settings, "
                "as STEPS = 100"
            )
        if isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{where}: '{statement.format()}': a config imports no code; remove the line")
        if isinstance(statement, config_parser.IncludeStatement):
            includes.append((statement.filename, where))
        else:
            _check_target(statement, where)
    return includes


def _checked(path: Path, search: Sequence[Path], including: tuple[Path, ...]) -> Iterator[Path]:
    real = path.resolve()
    if real in including:
        raise UserError(f"{path} includes itself, through {' and '.join(map(str, including))}; remove one include")
    yield path
    for name, where in check_text(_text_of(path), str(path)):
        # An absolute name stays what it is when joined to a folder.
        found = next((folder / name for folder in search if (folder / name).is_file()), None)
        if found is None:
            folders = " or ".join(dict.fromkeys(str(folder.absolute()) for folder in search))
            raise UserError(f"{where}: include {name!r}: no such file in {folders}")
        yield from _checked(found, search, (*including, real))


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {path} cannot be read as text: {error}") from None
    if len(content) > _MAX_BYTES:
        raise UserError(f"config file {path} has more than {_MAX_BYTES:,} bytes; it is no config")
    return text


def _named(text: str, name: str) -> io.StringIO:
    """A file whose name gin's parser puts into its own errors; its lines end where those of an opened one do."""
    file = io.StringIO(text, newline=None)
    file.name = name
    return file


def _check_target(statement: Any, where: str) -> None:
    """A binding sets a macro; nothing else can be bound."""
    is_binding = isinstance(statement, config_parser.BindingStatement)
    if is_binding and not statement.arg_name:
        return
    name = f"{statement.selector}.{statement.arg_name}" if is_binding else statement.selector
    raise UserError(f"{where}: {name}: a config binds settings alone, as STEPS = 100; remove the line")


class _NothingBehindNames(config_parser.ParserDelegate):
    """Takes note of references to code, and makes nothing of them."""

    def __init__(self) -> None:
        self.references: list[str] = []

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> None:
        """Notes one."""
        self.references.append(scoped_configurable_name)

    def macro(self, macro_name: str) -> str:
        """A value of its own, as it may be the key of a dictionary."""
        return macro_name
