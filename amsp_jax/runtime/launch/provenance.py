"""What a run ran on: versions, devices, flags and the commit, for `environment.json`."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import re
import socket
import subprocess
from typing import Any

import jax
from jax.extend.backend import get_backend

from amsp_jax.compile.xla_flags import read_site

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
# What drivers and communication libraries read.
_DRIVERS = re.compile(r"(CUDA|FI|GPU|HIP|HSA|NCCL|RCCL|ROCR|UCX|XLA_PYTHON_CLIENT)_\w+")


def environment() -> dict[str, Any]:
    """JSON values that say how to run this again; call it after `setup`, as it asks jax for its devices."""
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in _PACKAGES},
        "platform": jax.default_backend(),
        "device_kinds": sorted({device.device_kind for device in jax.devices()}),
        "num_devices": jax.device_count(),
        "num_processes": jax.process_count(),
        "hostname": socket.gethostname(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "variables": _variables(),
        "backend": get_backend().platform_version,
        "driver": _driver(pathlib.Path("/")),
        "git_commit": _git_commit(pathlib.Path(__file__)),
    }


def _variables() -> dict[str, str]:
    """Whoever set them: the shell, the site file or our table."""
    names = read_site().environment.keys() | filter(_DRIVERS.fullmatch, os.environ)
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver(root: pathlib.Path) -> str | None:
    """The version of NVIDIA's or AMD's kernel driver, None where there is none to read."""
    for name, pattern in (
        ("proc/driver/nvidia/version", r"Kernel Module.*?(\d+\.\d[\d.]*)"),
        ("sys/module/amdgpu/version", r"(\S+)"),
    ):
        try:
            found = re.search(pattern, (root / name).read_text())
        except OSError:
            continue
        if found:
            return found[1]
    return None


def _git_commit(file: pathlib.Path) -> str | None:
    """The commit of the source, with `+changes` if tracked files differ from it; None outside a repository."""
    directory = file.parent
    try:
        # An installed copy may lie inside a repository that has nothing to do with it.
        _git(directory, "ls-files", "--error-unmatch", file.name)
        commit = _git(directory, "rev-parse", "HEAD")
        changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+changes" if changes else "")


def _git(directory: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
