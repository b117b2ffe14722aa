"""What the project needs, and whether it can be imported; this module itself needs nothing but Python."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from amsp_jax.cli.doctor.findings import Finding, fail, ok, one_line

_OURS = "amsp-jax"
_PYPROJECT = Path(__file__).resolve().parents[3] / "pyproject.toml"
# Distributions whose module has another name.
_MODULES = {"orbax-checkpoint": "orbax.checkpoint", "gin-config": "gin"}


def check_imports(requirements: Iterable[str] | None = None) -> Finding:
    """Imports every required package: one of its own requirements may be missing, or built for another Python.

    Args:
      requirements: as in pyproject.toml; None: the project's.
    """
    texts = project_requirements()[1] if requirements is None else requirements
    names = [re.match(r"[\w.-]+", text)[0] for text in texts if ";" not in text]  # type: ignore[index]
    problems = {name: problem for name in names if (problem := _import_problem(_MODULES.get(name, name)))}
    if problems:
        found = "; ".join(f"{name} cannot be imported: {problem}" for name, problem in problems.items())
        return fail("imports", found, f"python -m pip install --upgrade --force-reinstall {' '.join(problems)}")
    return ok("imports", f"{len(names)} packages can be imported")


def _import_problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken package may fail in any way
        return f"{type(error).__name__}: {one_line(error)}"
    return None


def project_requirements(pyproject: Path = _PYPROJECT) -> tuple[str, Sequence[str]]:
    """The Python and the packages that the project needs: by its checkout, else by what is installed."""
    if pyproject.is_file():
        project = tomllib.loads(pyproject.read_text())["project"]
        return project["requires-python"], project["dependencies"]
    metadata = importlib.metadata.metadata(_OURS)
    return metadata["Requires-Python"], requirements_of(_OURS)


def requirements_of(name: str) -> Sequence[str]:
    """The requirements that the metadata of an installed distribution list."""
    return importlib.metadata.requires(name) or ()
