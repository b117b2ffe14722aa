"""Compilation of the training step for target devices: XLA's memory, collectives and schedule without the GPUs.

The compiler of jax's CUDA plugin needs a description of a device (`targets/`), not the device. Compilation runs in this
process and changes no flag and no environment variable of the process: flags and combine thresholds are passed as
compiler options, as the thresholds are on real GPUs. A child process would only cost its start. Without CUDA's
libraries jax loads the plugin only if jax itself runs on the CPU, so a command calls `keep_jax_on_cpu` before it uses
jax.

Only NVIDIA GPUs can be targets: AMD's plugin (0.10.2) does not load on a machine without an AMD GPU.

The program differs from the program on real devices in one way. On real devices XLA times several kernels for each
matrix product; here it cannot time any, so kernels and their workspaces may differ. Triton's products are off even
where a user turns them on, because XLA would choose them everywhere if it cannot time them.
"""

from __future__ import annotations

import os
import re
from importlib import resources
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

from amsp_jax.compile import xla_flags
from amsp_jax.engine.plan import Plan
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.predict.cost.trace import cudnn_assumed

TARGETS = {"a100": r"A[18]00", "h100": r"H[18]00", "h200": r"H200"}
"""For each file of `targets/` a pattern of the device names that the file describes."""

_UNTIMED = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": "False"}


def target_name(device_kind: str) -> str:
    """Finds the key of `TARGETS` for a device name of jax or of a cluster.

    Raises:
      UserError: no target describes the device.
    """
    for target, pattern in TARGETS.items():
        if re.search(rf"(?<!\w){pattern}(?!\w)", device_kind, re.IGNORECASE):
            return target
    raise UserError(
        f"{device_kind}: target devices are NVIDIA {', '.join(TARGETS).upper()}, A800 and H800; choose a cluster of "
        "one of these devices"
    )


def keep_jax_on_cpu() -> None:
    """Keeps jax of this process on the CPU unless `JAX_PLATFORMS` is set; must be called before jax is used."""
    if not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", "cpu")


def target_devices(target: str, num_nodes: int, devices_per_node: int) -> tuple[jax.Device, ...]:
    """Target devices to compile for, node after node; arrays cannot be put on them.

    Args:
      target: a key of `TARGETS`.
      num_nodes, devices_per_node: the grid of devices.

    Raises:
      UserError: jax has no compiler for the devices or does not understand the description; jaxlib does not know a
        flag of `XLA_FLAGS`.
    """
    if users := os.environ.get("XLA_FLAGS", "").split():
        xla_flags.checked([], users)
    description = resources.files("amsp_jax").joinpath(f"compile/targets/{target}.txtpb").read_text()
    topology = f"1x{num_nodes}x{devices_per_node}"
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=description, topology=topology)
    except NotImplementedError:
        raise UserError(
            f"compiling for the target {target} needs jax's CUDA plugin, of jax's own version {jax.__version__}, and "
            "JAX_PLATFORMS=cpu where CUDA is not installed; the plugin comes with: pip install -e '.[cuda]'"
        ) from None
    except jax.errors.JaxRuntimeError as error:
        raise UserError(
            f"jax {jax.__version__} does not understand the description of {target}: {str(error).splitlines()[0]} "
            "Install the newest jax that this package allows."
        ) from None
    return tuple(found.devices)


def compile_step(
    model: Model, optimizer: optax.GradientTransformation, plan: Plan, settings: StepSettings, shape: tuple[int, ...]
) -> jax.stages.Compiled:
    """Compiles the training step with the flags and thresholds of `train.py`; a user's `XLA_FLAGS` win.

    Args:
      model: built with the attention of the target, cuDNN's where it has it.
      optimizer: any optax transform.
      plan: made with `target_devices`.
      settings: how the step computes.
      shape: of the batch's arrays, [microbatches, rows over all ranks, tokens].

    Returns:
      A program with `.as_text()` and `.memory_analysis()`; it cannot run.
    """
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=plan.batch_sharding) for name, dtype in dtypes.items()}
    with cudnn_assumed():
        step: Any = make_train_step(plan, optimizer, settings)
        lowered = step.lower(abstract_state(plan, optimizer), batch)
        return lowered.compile(compiler_options=compiler_options(model, plan, settings))


def compiler_options(model: Model, plan: Plan, settings: StepSettings) -> dict[str, str]:
    """The compiler options of `compile_step`: flags, combine thresholds, and no autotuning."""
    ours = xla_flags.as_options(xla_flags.flags("cuda"))
    tensor = plan.parallel.tensor
    ours |= xla_flags.combine_thresholds(model, plan.block_degrees, plan.compute_dtype, settings.reduction, tensor)
    return xla_flags.without(ours, os.environ.get("XLA_FLAGS", "")) | _UNTIMED
