"""The devices of a run: their number, memory, and whether collectives over them give what they should."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from amsp_jax.cli.doctor.findings import Finding, fail, ok, one_line, warn
from amsp_jax.predict.cluster import device_peak
from amsp_jax.runtime.launch import DeviceLayout
from amsp_jax.runtime.launch.processes import number_in

_GIB = 2**30
_MIN_MEMORY_BYTES = _GIB
# XLA may take 92 % of a GPU, of which the driver keeps some; below this something else has a part.
_MIN_SHARE_OF_MEMORY = 0.7
_ALLOCATED_SHARE = 0.9
NODE, DEVICE = "node", "device"
# Enough for the protocols that large messages use; simulated devices only need to be right.
_NUM_ELEMENTS = {"cpu": 1 << 10}
_NUM_ELEMENTS_GPU = 1 << 20


def check_devices(
    layout: DeviceLayout, driver: str | None, num_visible: int, num_local: int, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """The devices against the device files and SLURM.

    Args:
      layout: all devices.
      driver: the kernel driver's version, if there is one to read.
      num_visible: GPUs that this process may use, by the device files.
      num_local: devices that jax gave this process.
      environ: of this process.
    """
    grid = f"{layout.num_nodes} node{'s' if layout.num_nodes > 1 else ''} x {layout.devices_per_node}"
    if layout.platform == "cpu":
        yield ok("devices", f"{grid} simulated on the CPU, no accelerator in use", alike=True)
    else:
        yield ok("devices", f"{grid} {layout.device_kind}, {layout.platform}, driver {driver or 'unknown'}", alike=True)
        yield from _check_counts(layout, num_visible, num_local, environ)
        if device_peak(layout.device_kind) is None:
            yield warn("device kind", f"no data sheet of {layout.device_kind}", "training works, but prints no MFU")
    for note in layout.notes:
        yield warn("settings", note)


def _check_counts(
    layout: DeviceLayout, num_visible: int, num_local: int, environ: Mapping[str, str]
) -> Iterator[Finding]:
    if layout.process_count == 1 and num_local < num_visible:
        yield fail(
            "device count",
            f"jax found {num_local} of {num_visible} GPUs that have a device file and are visible",
            "see which one nvidia-smi or rocm-smi does not list: it may have fallen off the bus",
        )
    given, nodes = environ.get("SLURM_GPUS_ON_NODE", ""), number_in(environ, "SLURM_STEP_NUM_NODES", 1)
    used, rest = divmod(len(layout.devices), nodes)
    if given.isdecimal() and (rest or int(given) != used):
        yield warn(
            "device count",
            f"SLURM gave this node {given} GPUs (SLURM_GPUS_ON_NODE), the run uses {used}",
            "start one task a node, or one a GPU (--ntasks-per-node, --gpus-per-node)",
        )


def check_memory(layout: DeviceLayout) -> Iterator[Finding]:
    """Memory a device may use; on GPUs most of it is allocated once, to see that it is really there."""
    found = f"{layout.memory_bytes / _GIB:.3g} GiB a device"
    if layout.platform == "cpu":
        found += ", its share of what the host has free"
    else:
        problem = allocation_problem(int(_ALLOCATED_SHARE * layout.memory_bytes))
        if problem:
            yield fail("memory", f"{found}, but {problem}", "end what else uses the GPUs (nvidia-smi, rocm-smi)")
            return
    yield judge_memory(layout, found)


def judge_memory(layout: DeviceLayout, found: str) -> Finding:
    """The bytes of a device against those of its data sheet, or against the least that is of use."""
    peak = device_peak(layout.device_kind)
    if layout.platform != "cpu" and peak and layout.memory_bytes < _MIN_SHARE_OF_MEMORY * peak.memory_bytes:
        return warn(
            "memory",
            f"{found} of {peak.memory_bytes / _GIB:.3g}",
            "end what else uses the GPUs, or raise XLA_PYTHON_CLIENT_MEM_FRACTION",
        )
    if layout.memory_bytes < _MIN_MEMORY_BYTES:
        return warn("memory", found, "use fewer simulated devices, or end what else uses the machine")
    return ok("memory", found)


def allocation_problem(num_bytes: int) -> str | None:
    """What happens when each local device is asked for `num_bytes` at once; None if it gives them."""
    for device in jax.local_devices():
        make = jax.jit(
            lambda: jnp.zeros((num_bytes >> 20, 1 << 20), jnp.uint8), out_shardings=SingleDeviceSharding(device)
        )
        try:
            make().block_until_ready().delete()
        except jax.errors.JaxRuntimeError as error:
            return f"{device} does not give {num_bytes / _GIB:.3g} GiB: {one_line(error)[:160]}"
    return None


def axes_to_check(layout: DeviceLayout) -> dict[str, tuple[str, ...]]:
    """The collectives worth trying, by name: over each axis that is larger than 1, and over both at once."""
    sizes = {NODE: layout.num_nodes, DEVICE: layout.devices_per_node}
    names = {DEVICE: "psum within nodes", NODE: "psum across nodes"}
    axes: dict[str, tuple[str, ...]] = {name: (axis,) for axis, name in names.items() if sizes[axis] > 1}
    return {**axes, "psum over all": (NODE, DEVICE)} if len(axes) == 2 else axes


def check_psum(check: str, layout: DeviceLayout, axes: tuple[str, ...]) -> list[Finding]:
    """A sum over `axes` of the grid of nodes and devices: its value on each device of this process, and its time."""
    mesh = Mesh(
        np.array(layout.devices).reshape(layout.num_nodes, layout.devices_per_node),
        (NODE, DEVICE),
        axis_types=(AxisType.Auto,) * 2,
    )
    spec = PartitionSpec(NODE, DEVICE)
    values = 1 + np.arange(len(layout.devices), dtype=np.int32).reshape(mesh.devices.shape)
    num_elements = _NUM_ELEMENTS.get(layout.platform, _NUM_ELEMENTS_GPU)
    make = jax.jit(
        lambda: jnp.broadcast_to(values[..., None], (*values.shape, num_elements)),
        out_shardings=NamedSharding(mesh, spec),
    )
    x = make()
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=spec, out_specs=spec))
    add(x).block_until_ready()
    begin = time.perf_counter()
    total = add(x).block_until_ready()
    seconds = time.perf_counter() - begin
    expected = np.broadcast_to(values.sum(tuple(map((NODE, DEVICE).index, axes)), keepdims=True), values.shape)
    return [judge_psum(check, total, expected, f"{4 * num_elements} bytes in {1e3 * seconds:.3g} ms")]


def judge_psum(check: str, total: jax.Array, expected: np.ndarray, how_fast: str) -> Finding:
    """Compares the local shards of `total`, `[node, device, element]`, with `expected`, `[node, device]`."""
    wrong = [
        str(shard.device)
        for shard in total.addressable_shards
        if (np.asarray(shard.data) != expected[shard.index[:2]][..., None]).any()
    ]
    if wrong:
        fix = "the devices or their links corrupt data: take this node out and have it tested"
        return fail(check, f"a wrong sum on {', '.join(wrong)}", fix)
    return ok(check, f"right on every device, {how_fast}")
