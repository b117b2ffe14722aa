"""Flags as text: `--xla_x=1` in lists, where later ones win, and as the options of one compilation."""

from __future__ import annotations

from collections.abc import Iterable


def flag_name(flag: str) -> str:
    """`xla_x` of `--xla_x=1` or `--xla_x`."""
    return flag.lstrip("-").split("=", 1)[0]


def merge(*lists: Iterable[str]) -> list[str]:
    """All flags in order; of two with one name the later list's counts, so the user's go last."""
    by_name = {flag_name(flag): flag for one in lists for flag in one}
    return list(by_name.values())


def as_options(flags: Iterable[str]) -> dict[str, str]:
    """Flags as the compiler options of one compilation, where XLA writes `True` and `False` with a capital."""
    pairs = (flag.lstrip("-").split("=", 1) for flag in flags)
    return {name: value.capitalize() if value in ("true", "false") else value for name, value in pairs}


def without(options: dict[str, str], users: str) -> dict[str, str]:
    """The options that the user's flags, a text like `XLA_FLAGS`, do not name: the user's values win."""
    named = {flag_name(flag) for flag in users.split()}
    return {name: value for name, value in options.items() if name not in named}
