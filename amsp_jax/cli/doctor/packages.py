"""Python and packages: what is installed against what the packages themselves ask for."""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Iterator, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from amsp_jax.cli.doctor.findings import Finding, fail, ok
from amsp_jax.cli.doctor.requirements import project_requirements, requirements_of

_PLUGIN = re.compile(r"jax-(cuda|rocm)\d*-(plugin|pjrt)")
_JAX = re.compile(rf"jax|jaxlib|{_PLUGIN.pattern}")


def check_packages() -> Iterator[Finding]:
    """The running Python and the installed packages against the project's and jax's own metadata."""
    installed = installed_versions()
    python, requirements = project_requirements()
    yield check_python(platform.python_version(), python)
    yield check_minimums(requirements, installed)
    yield check_jax({name: requirements_of(name) for name in installed if _JAX.fullmatch(name)}, installed)


def check_python(running: str, wanted: str) -> Finding:
    """`running` against a specifier such as `>=3.11`."""
    if running not in SpecifierSet(wanted):
        return fail("python", f"{running}, but it must be {wanted}", f"make an environment with Python {wanted}")
    return ok("python", running, alike=True)


def check_minimums(requirements: Sequence[str], installed: Mapping[str, str]) -> Finding:
    """The project's requirements, those of its extras left out."""
    wanted = applying(requirements)
    missing = unmet(wanted, installed, absent=True)
    if missing:
        return fail("packages", "; ".join(missing), "python -m pip install --upgrade -e . in the project's folder")
    names = [canonicalize_name(requirement.name) for requirement in wanted]
    return ok("packages", ", ".join(f"{name} {installed[name]}" for name in names), alike=True)


def check_jax(requires: Mapping[str, Sequence[str]], installed: Mapping[str, str]) -> Finding:
    """That jax, jaxlib and the plugins are of one release, as their own metadata say.

    Args:
      requires: the requirements of each of them that is installed.
      installed: versions by name.
    """
    among = {name: version for name, version in installed.items() if _JAX.fullmatch(name)}
    wrong = [
        f"{name} {among[name]} wants {problem}"
        for name, texts in requires.items()
        for problem in unmet(applying(texts, _extras_in_use(texts, among)), among, absent=False)
    ]
    if wrong:
        fix = "install one release of all: python -m pip install --upgrade jax, or jax[cuda12] and its like on GPUs"
        return fail("jax", "; ".join(wrong), fix)
    return ok("jax", ", ".join(f"{name} {version}" for name, version in sorted(among.items())), alike=True)


def applying(requirements: Sequence[str], extras: Sequence[str] = ()) -> list[Requirement]:
    """Those requirements that count on this Python and machine, with these extras."""
    parsed = map(Requirement, requirements)
    return [r for r in parsed if not r.marker or any(r.marker.evaluate({"extra": e}) for e in ("", *extras))]


def _extras_in_use(requirements: Sequence[str], installed: Mapping[str, str]) -> list[str]:
    """The extras that bring a plugin which is installed: `cuda12` where there is `jax-cuda12-plugin`."""
    plugins = [text for text in requirements if _PLUGIN.fullmatch(Requirement(text).name)]
    there = [text for text in plugins if canonicalize_name(Requirement(text).name) in installed]
    return [found[1] for text in there if (found := re.search(r"extra == ['\"]([\w-]+)", text))]


def unmet(requirements: Sequence[Requirement], installed: Mapping[str, str], *, absent: bool) -> list[str]:
    """The requirements that `installed` does not meet; a package that is not there counts if `absent`."""
    problems = []
    for requirement in requirements:
        version = installed.get(canonicalize_name(requirement.name))
        wanted = f"{requirement.name}{requirement.specifier}"
        if version is None and absent:
            problems.append(f"{wanted} is not installed")
        elif version is not None and not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{wanted}, but {version} is installed")
    return list(dict.fromkeys(problems))


def installed_versions() -> dict[str, str]:
    """Versions by canonical name; of two copies on the path the first counts, as for an import."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        # A half-removed package has no name.
        if distribution.metadata["Name"]:
            found.setdefault(canonicalize_name(distribution.metadata["Name"]), distribution.version)
    return found
