"""Which platform this machine offers, found without starting a jax backend."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import pkgutil
import re
from collections.abc import Mapping

from amsp_jax.errors import UserError

_VENDORS = {"cuda": "NVIDIA", "rocm": "AMD"}
VISIBILITY = {"cuda": ("CUDA_VISIBLE_DEVICES",), "rocm": ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
"""The variables by which each driver narrows what a process sees."""


def find_platform(
    asked: str, environ: Mapping[str, str] = os.environ, root: pathlib.Path = pathlib.Path("/")
) -> tuple[str, list[str]]:
    """The platform for this run, "cuda", "rocm" or "cpu", and notes on what was passed over.

    Args:
      asked: jax's setting `jax_platforms` (`JAX_PLATFORMS`), which decides unless empty; then an accelerator
        whose jax plugin is installed is taken, else the CPU.
      environ, root: of this process and machine.

    Raises:
      UserError: `asked` names something else.
    """
    if asked:
        return _named(asked.split(",")[0].strip().lower(), root), []
    notes: list[str] = []
    for platform in ("cuda", "rocm"):
        if count_gpus(platform, environ, root) == 0:
            continue
        if _has_plugin(platform):
            return platform, notes
        package = "jax[cuda12]" if platform == "cuda" else "jax-rocm7-plugin"
        notes.append(
            f"an {_VENDORS[platform]} GPU is here, but jax has no plugin for it: the CPU is used. "
            f"Install {package} to use the GPU."
        )
    return "cpu", notes


def count_gpus(platform: str, environ: Mapping[str, str] = os.environ, root: pathlib.Path = pathlib.Path("/")) -> int:
    """GPUs that a process with this environment can use, by device files and the visibility variables."""
    present = _count_nvidia(root) if platform == "cuda" else _count_amd(root)
    return _visible(present, environ, *VISIBILITY[platform])


def _named(asked: str, root: pathlib.Path) -> str:
    if asked in ("cpu", "cuda", "rocm"):
        return asked
    if asked == "gpu":
        return "rocm" if _count_amd(root) and not _count_nvidia(root) else "cuda"
    raise UserError(f"JAX_PLATFORMS={asked}: this program runs on cpu, cuda and rocm. Unset it or choose one of these.")


def _count_nvidia(root: pathlib.Path) -> int:
    cards = len([p for p in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", p.name)])
    # Windows' Linux has one device file for all cards.
    return cards or int((root / "dev/dxg").exists())


def _count_amd(root: pathlib.Path) -> int:
    """Nodes of the kernel driver's topology that have compute units; the others are CPUs."""
    if not (root / "dev/kfd").exists():
        return 0
    properties = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    return sum(bool(re.search(r"^simd_count [1-9]", path.read_text(), re.MULTILINE)) for path in properties)


def _visible(present: int, environ: Mapping[str, str], *variables: str) -> int:
    """The drivers stop reading a list at the first entry that is no device, and -1 or nothing hides all."""
    for name in variables:
        if present and name in environ:
            entries = [entry.strip() for entry in environ[name].split(",")]
            stop = next((i for i, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
            present = min(present, stop)
    return present


def _has_plugin(platform: str) -> bool:
    """As jax itself looks: modules of the `jax_plugins` namespace and entry points of that name."""
    names = [point.value for point in importlib.metadata.entry_points(group="jax_plugins")]
    try:
        import jax_plugins
    except ModuleNotFoundError:
        pass
    else:
        names += [module.name for module in pkgutil.iter_modules(jax_plugins.__path__)]
    return any(platform in name for name in names)
