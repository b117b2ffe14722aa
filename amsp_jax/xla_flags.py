"""The XLA flags of a run, a table with a reason for each, and what is set for one compilation.

XLA aborts the process on a flag it does not know, which no `except` catches, and flags come and go with
versions. So a child process tries the final list once, and what it refuses is left out with a note. XLA reads
flags once a process; what depends on the strategy goes with the compilation, as `combine_thresholds`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.strategy import Degrees
from amsp_jax.user_cache import user_cache

_GPUS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class _Rule:
    """One flag: its name, its value as text, where it holds, and why."""

    name: str
    value: str
    platforms: tuple[str, ...]
    reason: str


_RULES = (
    _Rule(
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        _GPUS,
        "Overlaps collectives with compute. On by default for Hopper in some versions only.",
    ),
    _Rule(
        "xla_gpu_enable_command_buffer",
        "",
        _GPUS,
        "No CUDA or HIP graphs: they cost 1 % on sharded steps, and their capture has failed on MI250X.",
    ),
    _Rule(
        "xla_gpu_enable_all_gather_combine_by_dim",
        "false",
        _GPUS,
        "Leaves of a block that are sharded along different dimensions still share one collective.",
    ),
    _Rule(
        "xla_gpu_enable_reduce_scatter_combine_by_dim",
        "false",
        _GPUS,
        "As for all-gathers.",
    ),
    _Rule(
        "xla_gpu_enable_nccl_comm_splitting",
        "false",
        ("cuda",),
        "A split communicator shares its parent's resources: inside a node, those of the network between nodes.",
    ),
    _Rule(
        "xla_gpu_memory_limit_slop_factor",
        "95",
        ("rocm",),
        "The scheduler may plan with 95 % of memory, as AMD's own training recipes do.",
    ),
    _Rule(
        "xla_gpu_enable_triton_gemm",
        "false",
        ("rocm",),
        "hipBLASLt is faster there. On NVIDIA it stays on: without it a 7B step took 17 % longer.",
    ),
    _Rule("xla_gpu_enable_cublaslt", "true", ("rocm",), "hipBLASLt for matrix products."),
    _Rule(
        "xla_cpu_collective_call_warn_stuck_timeout_seconds",
        "120",
        ("cpu",),
        "Simulated devices take turns on few cores, so that waiting is normal.",
    ),
    _Rule(
        "xla_cpu_collective_call_terminate_timeout_seconds",
        "1200",
        ("cpu",),
        "By default a collective that waits 40 s for its last simulated device ends the process.",
    ),
)


def flags(platform: str) -> list[str]:
    """The flags we want on "cuda", "rocm" or "cpu", as `--name=value`."""
    return [f"--{rule.name}={rule.value}" for rule in _RULES if platform in rule.platforms]


def as_options(flags: Iterable[str]) -> dict[str, str]:
    """Flags as the compiler options of one compilation, where XLA writes `True` and `False` with a capital."""
    pairs = (flag.lstrip("-").split("=", 1) for flag in flags)
    return {name: value.capitalize() if value in ("true", "false") else value for name, value in pairs}


def combine_thresholds(
    model: Model, degrees: Degrees, compute_dtype: Any, reduce_dtype: Any, tensor: int = 1
) -> dict[str, str]:
    """Compiler options for GPUs: collectives are combined up to one block.

    Then the leaves of a block share one collective, and blocks are not merged: their collectives could not overlap
    the blocks between. XLA counts the bytes of results: a gathered block in the compute dtype; a scattered one, which
    is also what replicas then all-reduce, in the reduction dtype over the ranks that share a gradient.

    Args:
      model: whose first block counts, or its head if it has none.
      degrees: the resolved strategy.
      compute_dtype: of gathered parameters.
      reduce_dtype: of reduced gradients.
      tensor: ranks that share each matrix.
    """
    _, blocks, head = model.split(model.abstract_params())
    num_params = sum(x.size for x in jax.tree.leaves(blocks[0] if blocks else head)) // tensor
    gather_bytes = num_params * jnp.dtype(compute_dtype).itemsize
    scatter_bytes = num_params // degrees.grads.total * jnp.dtype(reduce_dtype).itemsize
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": str(gather_bytes),
        "xla_gpu_reduce_scatter_combine_threshold_bytes": str(scatter_bytes),
        "xla_gpu_all_reduce_combine_threshold_bytes": str(scatter_bytes),
    }


def without(options: dict[str, str], users: str) -> dict[str, str]:
    """The options that the user's flags, a text like `XLA_FLAGS`, do not name: the user's values win."""
    named = {flag_name(flag) for flag in users.split()}
    return {name: value for name, value in options.items() if name not in named}


def merge(*lists: Iterable[str]) -> list[str]:
    """All flags in order; of two with one name the later list's counts, so the user's go last."""
    by_name = {flag_name(flag): flag for one in lists for flag in one}
    return list(by_name.values())


def flag_name(flag: str) -> str:
    """`xla_x` of `--xla_x=1` or `--xla_x`."""
    return flag.lstrip("-").split("=", 1)[0]


def checked(ours: list[str], users: list[str], cache: pathlib.Path | None = None) -> tuple[list[str], list[str]]:
    """The merged list without those of ours that this jaxlib refuses, and a note for each that is left out.

    The answer is kept in `cache` by jaxlib's version and the list, so the child process (2 s) runs once.

    Raises:
      UserError: one of the user's own flags is refused.
    """
    refused = _refused(merge(ours, users), cache or user_cache() / "xla_flags.json")
    version = importlib.metadata.version("jaxlib")
    bad = [flag for flag in users if flag_name(flag) in refused]
    if bad:
        raise UserError(f"XLA flags {' '.join(bad)}: jaxlib {version} does not know them. Remove or correct them.")
    notes = [
        f"XLA flag {flag} left out: jaxlib {version} does not know it." for flag in ours if flag_name(flag) in refused
    ]
    return merge([flag for flag in ours if flag_name(flag) not in refused], users), notes


def _refused(wanted: list[str], cache: pathlib.Path) -> set[str]:
    """The names that XLA does not know, from the cache or a child process."""
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
