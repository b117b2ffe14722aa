"""What a command line decides about printed text; it imports no jax, so that a command can decide it first."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

_spelling: Callable[[str], str] = str


def spell_with(spelling: Callable[[str], str]) -> None:
    """From now on `spelled` applies this function: a command line writes settings in its own way."""
    global _spelling
    _spelling = spelling


def spelled(text: str) -> str:
    """The text in the words of the command line that runs; unchanged without one."""
    return _spelling(text)


def print_any_text() -> None:
    """From now on printing cannot fail: a character that the terminal's encoding lacks is printed as an escape."""
    for stream in (sys.stdout, sys.stderr):
        # A notebook's or a test's stream may be of another kind; such streams take any text.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
