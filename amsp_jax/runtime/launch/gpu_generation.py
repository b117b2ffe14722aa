"""Which generation of GPUs this machine has, found without starting a jax backend."""

from __future__ import annotations

import pathlib
import re
import subprocess

_NVIDIA = {
    "hopper": re.compile(r"\b(G?H100|H800|G?H200|H20)\b"),
    "ampere": re.compile(r"\b(A100|A800|A30|A40|A10G?)\b"),
}
# Versions of the instruction set, as the kernel driver writes them: gfx90a and gfx942.
_AMD = {"90010": "cdna2", "90402": "cdna3"}
_TIMEOUT_S = 20.0


def find_generation(platform: str, root: pathlib.Path = pathlib.Path("/")) -> str | None:
    """The generation of this machine's GPUs: "hopper" (H100, H200, ...), "ampere" (A100, ...), "cdna2" (MI210,
    MI250, MI250X) or "cdna3" (MI300A, MI300X, MI325X). None for others, for GPUs of several, and where nothing says.

    Args:
      platform: "cuda" or "rocm"; anything else has none.
      root: of this machine's files.
    """
    if platform == "rocm":
        found = {_AMD.get(version) for version in _amd_versions(root)}
    else:
        found = {_nvidia_generation(name) for name in _nvidia_names(root)} if platform == "cuda" else set()
    return found.pop() if len(found) == 1 else None


def _amd_versions(root: pathlib.Path) -> list[str]:
    """Of the nodes of the kernel driver's topology that are GPUs; CPUs have version 0."""
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")
    found = (re.search(r"^gfx_target_version (\d+)", path.read_text(), re.MULTILINE) for path in nodes)
    return [line[1] for line in found if line and line[1] != "0"]


def _nvidia_generation(name: str) -> str | None:
    return next((generation for generation, pattern in _NVIDIA.items() if pattern.search(name)), None)


def _nvidia_names(root: pathlib.Path) -> list[str]:
    """Product names by the kernel driver, or by nvidia-smi where a container hides the driver's files."""
    files = root.glob("proc/driver/nvidia/gpus/*/information")
    found = (re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE) for path in files)
    return [line[1] for line in found if line] or _ask_nvidia_smi()


def _ask_nvidia_smi() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]
