"""The flags and environment variables of a platform and a generation of GPUs: a table with a reason for each.

What a flag does to speed is measured where docs/performance.md says so. AMD's rows are AMD's own settings for training
with jax; nothing was run on its GPUs. Variables that depend on a network (NCCL_IB_TC, NCCL_CROSS_NIC, ...) have no row:
the vendors' own advice differs, and a site file sets them.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Iterable, Iterator

from packaging.specifiers import SpecifierSet

_GPUS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One flag or variable: its name, its value as text, where it holds, and why.

    Attributes:
      name, value, reason: what is set, to what, and why.
      platforms: "cuda", "rocm" or "cpu".
      generations: of GPUs, as `launch.generation` names them; empty for all, and for one that is not known.
      jaxlib: the versions that need it, like ">=0.11,<0.12"; empty for all. For what changed its default or its
        meaning: flags that a version does not know are found out by trying.
    """

    name: str
    value: str
    platforms: tuple[str, ...]
    reason: str
    generations: tuple[str, ...] = ()
    jaxlib: str = ""


_FLAGS = (
    Rule(
        "xla_gpu_enable_latency_hiding_scheduler",
        "true",
        _GPUS,
        "Overlaps collectives with compute. On by default for Hopper in some versions only.",
    ),
    Rule(
        "xla_gpu_enable_command_buffer",
        "",
        _GPUS,
        "No CUDA or HIP graphs: they cost 1 % on sharded steps, and their capture has failed on MI250X.",
    ),
    Rule(
        "xla_gpu_enable_all_gather_combine_by_dim",
        "false",
        _GPUS,
        "Leaves of a block that are sharded along different dimensions still share one collective.",
    ),
    Rule(
        "xla_gpu_enable_reduce_scatter_combine_by_dim",
        "false",
        _GPUS,
        "As for all-gathers.",
    ),
    Rule(
        "xla_gpu_enable_nccl_comm_splitting",
        "false",
        ("cuda",),
        "A split communicator shares its parent's resources: inside a node, those of the network between nodes.",
    ),
    Rule(
        "xla_gpu_memory_limit_slop_factor",
        "95",
        ("rocm",),
        "The scheduler may plan with 95 % of memory, as AMD's own training recipes do.",
    ),
    Rule(
        "xla_gpu_enable_triton_gemm",
        "false",
        _GPUS,
        "On H200 cuBLASLt's products alone are as fast, compiling is up to twice as fast, and weight gradients are "
        "added up inside their products. AMD's own recipes use hipBLASLt alone.",
    ),
    Rule(
        "xla_gpu_dot_merger_threshold_mb",
        "0",
        ("cuda",),
        "Products of one input, up to 64 MB by default, would become one, whose weights are concatenated for each "
        "microbatch and whose gradient is not added up inside the product.",
    ),
    Rule("xla_gpu_enable_cublaslt", "true", ("rocm",), "hipBLASLt for matrix products."),
    Rule(
        "xla_cpu_collective_call_warn_stuck_timeout_seconds",
        "120",
        ("cpu",),
        "Simulated devices take turns on few cores, so that waiting is normal.",
    ),
    Rule(
        "xla_cpu_collective_call_terminate_timeout_seconds",
        "1200",
        ("cpu",),
        "By default a collective that waits 40 s for its last simulated device ends the process.",
    ),
)

_VARIABLES = (
    Rule(
        "XLA_PYTHON_CLIENT_MEM_FRACTION",
        "0.92",
        _GPUS,
        "By default jax takes 75 % of a GPU. The rest is for NCCL, cuDNN and the context.",
    ),
    Rule(
        "HSA_FORCE_FINE_GRAIN_PCIE",
        "1",
        ("rocm",),
        "RCCL's peer-to-peer access between GPUs that PCIe connects needs it, as AMD says.",
    ),
    Rule(
        "GPU_MAX_HW_QUEUES",
        "2",
        ("rocm",),
        "AMD's for training with jax: one hardware queue for compute, one for what overlaps it.",
        generations=("cdna3",),
    ),
    Rule(
        "HIP_FORCE_DEV_KERNARG",
        "1",
        ("rocm",),
        "AMD's for training with jax: arguments of kernels lie in the GPU's memory.",
        generations=("cdna3",),
    ),
    Rule(
        "HSA_NO_SCRATCH_RECLAIM",
        "1",
        ("rocm",),
        "Without it, scratch memory above a threshold is given back after every kernel.",
        generations=("cdna3",),
    ),
)


def flags(platform: str, generation: str | None = None) -> list[str]:
    """The flags we want on "cuda", "rocm" or "cpu", as `--name=value`; without a generation, the platform's alone."""
    return [f"--{rule.name}={rule.value}" for rule in _that_hold(_FLAGS, platform, generation)]


def variables(platform: str, generation: str | None = None) -> dict[str, str]:
    """The environment variables we want there, which the drivers read when jax starts the devices."""
    return {rule.name: rule.value for rule in _that_hold(_VARIABLES, platform, generation)}


def _that_hold(rules: Iterable[Rule], platform: str, generation: str | None) -> Iterator[Rule]:
    version = importlib.metadata.version("jaxlib")
    for rule in rules:
        if (
            platform in rule.platforms
            and (not rule.generations or generation in rule.generations)
            and SpecifierSet(rule.jaxlib).contains(version, prereleases=True)
        ):
            yield rule
