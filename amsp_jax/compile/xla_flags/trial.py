"""The final list of flags tried in a child process: XLA aborts on a flag it does not know, which nothing catches."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable

from amsp_jax.compile.xla_flags.site import Site
from amsp_jax.compile.xla_flags.text import flag_name, merge
from amsp_jax.errors import UserError
from amsp_jax.user_cache import user_cache


def checked(
    ours: list[str], users: list[str], cache: pathlib.Path | None = None, site: Site | None = None
) -> tuple[list[str], list[str]]:
    """The merged list without those of ours that this jaxlib refuses, and a note for each that is left out.

    The answer is kept in `cache` by jaxlib's version and the list, so the child process (2 s) runs once.

    Args:
      ours: of the table, the site's among them.
      users: which win.
      cache: a file; None for the user's.
      site: whose flags are in `ours`.

    Raises:
      UserError: one of the user's or the site's own flags is refused.
    """
    refused = _refused(merge(ours, users), cache or user_cache() / "xla_flags.json")
    version = importlib.metadata.version("jaxlib")
    if bad := [flag for flag in users if flag_name(flag) in refused]:
        raise UserError(
            f"XLA flags {' '.join(bad)}: jaxlib {version} does not know them, or their values. Remove or correct them."
        )
    if site and (wrong := sorted(refused & site.flags.keys())):
        raise UserError(
            f"site file {site.path}: [flags] {', '.join(wrong)}: jaxlib {version} does not know that, or its value. "
            "Correct the file."
        )
    notes = [
        f"XLA flag {flag} left out: jaxlib {version} does not know it, or its value."
        for flag in ours
        if flag_name(flag) in refused
    ]
    return merge([flag for flag in ours if flag_name(flag) not in refused], users), notes


def _refused(wanted: list[str], cache: pathlib.Path) -> set[str]:
    """The names that XLA does not know, or whose values it does not take, from the cache or a child process."""
    key = " ".join([importlib.metadata.version("jaxlib"), *wanted])
    answers = _read_cache(cache)
    if key not in answers:
        answers[key] = _try(wanted, _run_child)
        _write_cache(cache, answers)
    return set(answers[key])


def _try(wanted: list[str], run_child: Callable[[str], tuple[int, str]]) -> list[str]:
    code, output = run_child(" ".join(wanted))
    if code == 0:
        return []
    found = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", output)
    names = [flag_name(flag) for flag in found[1].split()] if found else []
    names += re.findall(r"Couldn't interpret value .* for flag (\w+)", output)
    if not names:
        last = (output.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"XLA refuses the flags {' '.join(wanted)}: {last}. Correct XLA_FLAGS.")
    return names


def _run_child(xla_flags: str) -> tuple[int, str]:
    """Exit status and messages of a process that only starts XLA, on the CPU, with these flags."""
    environment = {**os.environ, "XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return child.returncode, child.stderr


def _read_cache(path: pathlib.Path) -> dict[str, list[str]]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _write_cache(path: pathlib.Path, answers: dict[str, list[str]]) -> None:
    """Atomic, as all processes of a node may do it; without a place to write, the next run asks again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(answers, file)
        os.replace(file.name, path)
    except OSError:
        return
