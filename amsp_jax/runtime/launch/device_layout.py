"""`setup`: everything between the settings and the devices, in the order that jax demands."""

from __future__ import annotations

import atexit
import dataclasses
import os
import pathlib
import re
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jaxlib.version

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import Cluster, device_peak
from amsp_jax.runtime.launch.accelerator import VISIBILITY, count_gpus, find_platform
from amsp_jax.runtime.launch.grid import Grid, real_grid, share_gpus, simulated_grid, simulated_share
from amsp_jax.runtime.launch.process_0 import add_up
from amsp_jax.runtime.launch.processes import Processes, end_all_on_error, find_processes
from amsp_jax.runtime.launch.profile import find_profile
from amsp_jax.runtime.launch.program_cache import keep_programs
from amsp_jax.runtime.launch.rendezvous import Facts, is_loopback, meet
from amsp_jax.runtime.watchdog.messages import allow_connections, listen
from amsp_jax.runtime.watchdog.watch import Watch, own_watch

# The second line behind the watch. A dead peer is noticed after the heartbeat's timeout (jax: 100 s); a process that
# ends waits this long for the others (jax: 300 s).
_HEARTBEAT_S, _SHUTDOWN_S = 30, 60
# For the drivers of the devices, and jax's own exchange between the processes.
_DEVICES_S = 120.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLayout:
    """The devices of a run.

    Attributes:
      platform: "cpu", "cuda" or "rocm".
      num_nodes, devices_per_node: their grid.
      devices: all of them, node after node; within a node by process, then by local index.
      device_kind: as jax says it.
      memory_bytes: that one device may use; on the CPU, its share of the host's available memory.
      process_index, process_count: this process and all of them.
      hosts: of each process.
      notes: lines for the user about settings that have no effect here, and the like.
      settings: lines on the XLA flags and variables that were set.
    """

    platform: str
    num_nodes: int
    devices_per_node: int
    devices: tuple[jax.Device, ...]
    device_kind: str
    memory_bytes: int
    process_index: int
    process_count: int
    hosts: tuple[str, ...]
    notes: tuple[str, ...]
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Which process on which host has which devices of which node, and what was set for them."""
        head = f"{self.num_nodes} nodes x {self.devices_per_node} devices: {self.device_kind} ({self.platform})"
        return "\n".join(
            [
                head,
                "process  host              node: devices",
                *map(self._process_row, range(self.process_count)),
                *self.settings,
            ]
        )

    def _process_row(self, index: int) -> str:
        places = [divmod(i, self.devices_per_node) for i, d in enumerate(self.devices) if d.process_index == index]
        nodes = {node: [str(device) for n, device in places if n == node] for node, _ in places}
        held = "; ".join(f"{node}: {', '.join(devices)}" for node, devices in nodes.items())
        return f"{index:<7}  {self.hosts[index]:<16}  {held}"

    def cluster(self) -> Cluster:
        """The same in numbers, with the device's peak where its data sheet is known."""
        peak = device_peak(self.device_kind)
        return Cluster(
            name="simulated" if self.platform == "cpu" else "running",
            num_nodes=self.num_nodes,
            devices_per_node=self.devices_per_node,
            device_kind=self.device_kind,
            memory_bytes=self.memory_bytes,
            peak_flops=peak.flops if peak else None,
            source=f"the running devices; peak: {peak.source if peak else 'unknown'}",
        )


def setup(
    *,
    simulated_nodes: int | None = None,
    simulated_devices_per_node: int | None = None,
    devices_per_node: int | None = None,
    extra_xla_flags: str = "",
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_s: float = 60.0,
    same: Mapping[str, str] | None = None,
    watched: bool = True,
) -> DeviceLayout:
    """Chooses the platform, joins the processes, sets XLA's flags and returns the devices in order.

    Call it once, before jax is used for anything but shapes.

    Args:
      simulated_nodes, simulated_devices_per_node: the grid on the CPU, over all processes; 1 where None.
      devices_per_node: splits each real node into logical ones of this size; None leaves them whole.
      extra_xla_flags: as in `XLA_FLAGS`, and stronger.
      coordinator, num_processes, process_id: for a run of several processes that SLURM did not start;
        `num_processes=1` keeps a process alone wherever it runs.
      timeout_s: how long the processes wait for one another, and for their first collective.
      same: names and values, such as the settings of the run, that must be equal in all processes.
      watched: False leaves out the watch and the first collective, for a program that is to find out itself what
        is lost or broken.

    Raises:
      UserError: the settings contradict one another, the devices, or those of another process.
    """
    platform, notes = find_platform(_asked_platforms())
    request = DeviceRequest(simulated_nodes, simulated_devices_per_node, devices_per_node)
    processes, watch = find_processes(coordinator, num_processes, process_id), own_watch()
    end_all_on_error(processes.count)
    kind = _CpuStart if platform == "cpu" else _GpuStart
    start = kind(platform, request, processes)
    profile = find_profile(platform)
    # Processes whose GPUs or site files differ would compile steps that wait for one another.
    alike = {**start.alike(), "the list of XLA flags": " ".join(profile.flags), **(same or {})}
    watch.doing("waiting for the other processes")
    everyone = _meet(processes, platform, start.num_local, alike, timeout_s, watched)
    grid, everyone = start.arrange(everyone)
    settings, refused = profile.apply(extra_xla_flags)
    settings += keep_programs(platform)
    start.choose_backend()
    watch.doing("starting the devices", _DEVICES_S)
    _connect(processes, start.gpu_ids, timeout_s)
    start.check_backend()
    grid, everyone = start.corrected(grid, everyone)
    devices = _ordered_devices(grid, everyone)
    if watched and processes.count > 1:
        watch.doing("running the first collective", timeout_s)
        add_up(devices)
    watch.doing("starting")
    return DeviceLayout(
        platform=platform,
        num_nodes=grid.num_nodes,
        devices_per_node=grid.devices_per_node,
        devices=devices,
        device_kind=devices[0].device_kind,
        memory_bytes=start.memory_bytes(everyone),
        process_index=processes.index,
        process_count=processes.count,
        hosts=tuple(facts.host for facts in everyone),
        notes=(*notes, *start.notes(), *refused),
        settings=tuple(settings),
    )


@dataclasses.dataclass(frozen=True)
class DeviceRequest:
    """The devices that the settings ask for.

    Attributes:
      simulated_nodes, simulated_devices_per_node: the grid on the CPU; None counts as 1.
      devices_per_node: size of the logical nodes that real nodes are split into; None leaves them whole.
    """

    simulated_nodes: int | None = None
    simulated_devices_per_node: int | None = None
    devices_per_node: int | None = None

    @property
    def simulated(self) -> tuple[int, int]:
        """Simulated nodes, and devices of each."""
        nodes, per_node = self.simulated_nodes, self.simulated_devices_per_node
        return 1 if nodes is None else nodes, 1 if per_node is None else per_node


class _CpuStart:
    """Start on simulated devices: their number is a setting, and each process runs its share of them."""

    gpu_ids: list[int] | None = None

    def __init__(self, platform: str, request: DeviceRequest, processes: Processes) -> None:
        self._request, self._processes = request, processes
        self.num_local = simulated_share(request.simulated, processes.count)

    def notes(self) -> list[str]:
        """Lines on settings without effect."""
        return _unused("no accelerator is in use", DEVICES_PER_NODE=self._request.devices_per_node)

    def alike(self) -> dict[str, Any]:
        """Settings of the devices that must be equal in all processes."""
        nodes, per_node = self._request.simulated
        return {"SIMULATED_NODES": nodes, "SIMULATED_DEVICES_PER_NODE": per_node}

    def arrange(self, everyone: list[Facts]) -> tuple[Grid, list[Facts]]:
        """The grid of nodes, and every process with its own number of devices."""
        return simulated_grid(self._request.simulated, everyone), everyone

    def choose_backend(self) -> None:
        """Sets jax's options before any device is used."""
        if not _asked_platforms():
            jax.config.update("jax_platforms", "cpu")
        if self._processes.count > 1:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        try:
            jax.config.update("jax_num_cpu_devices", self.num_local)
        except RuntimeError as error:
            # jax was used before, which is fine if it has what is asked for.
            if jax.local_device_count() != self.num_local:
                raise UserError(
                    f"{self.num_local} simulated devices are asked for in this process, but jax already runs with "
                    f"{jax.local_device_count()}. Call setup before jax is used, or ask for as many."
                ) from error

    def check_backend(self) -> None:
        """Starts jax's devices; an error if they are not the CPU's."""
        _start_backend("cpu", "cpu")

    def corrected(self, grid: Grid, everyone: list[Facts]) -> tuple[Grid, list[Facts]]:
        """The same: a simulated device is there."""
        return grid, everyone

    def memory_bytes(self, everyone: list[Facts]) -> int:
        """Memory of a device: the least share of a host's, so that every process judges a plan alike."""
        return min(
            facts.memory_bytes // sum(other.num_devices for other in everyone if other.node == facts.node)
            for facts in everyone
        )


class _GpuStart:
    """Start on GPUs: their number is read from device files, and processes of one node share what they see."""

    def __init__(self, platform: str, request: DeviceRequest, processes: Processes) -> None:
        self._platform, self._request, self._processes = platform, request, processes
        self.num_local = max(count_gpus(platform), 1)
        self.gpu_ids: list[int] | None = None

    def notes(self) -> list[str]:
        """Lines on settings without effect."""
        return _unused(
            "an accelerator is in use",
            SIMULATED_NODES=self._request.simulated_nodes,
            SIMULATED_DEVICES_PER_NODE=self._request.simulated_devices_per_node,
        )

    def alike(self) -> dict[str, Any]:
        """Settings of the devices that must be equal in all processes."""
        return {"DEVICES_PER_NODE": self._request.devices_per_node}

    def arrange(self, everyone: list[Facts]) -> tuple[Grid, list[Facts]]:
        """The grid of nodes, and every process with its own number of devices."""
        self.gpu_ids, everyone = share_gpus(everyone, self._processes.index)
        return real_grid(everyone, self._request.devices_per_node), everyone

    def choose_backend(self) -> None:
        """Names the platform: a named GPU that fails to start is an error; unnamed, jax would go on with the CPU."""
        if not _asked_platforms():
            jax.config.update("jax_platforms", f"{self._platform},cpu")

    def check_backend(self) -> None:
        """Starts jax's devices; an error if they are not GPUs."""
        _start_backend(self._platform, "gpu")

    def corrected(self, grid: Grid, everyone: list[Facts]) -> tuple[Grid, list[Facts]]:
        """A process alone takes the number of GPUs that jax found: device files gave an estimate."""
        if self._processes.count > 1:
            return grid, everyone
        everyone = [dataclasses.replace(everyone[0], num_devices=jax.device_count())]
        return real_grid(everyone, self._request.devices_per_node), everyone

    def memory_bytes(self, everyone: list[Facts]) -> int:
        """Memory of a device that jax may use."""
        return min((device.memory_stats() or {}).get("bytes_limit", 0) for device in jax.local_devices())


def _asked_platforms() -> str:
    """`JAX_PLATFORMS`, or what the program set in its place; empty if neither."""
    return jax.config.jax_platforms or ""  # type: ignore[attr-defined]


def _unused(why: str, **settings: int | None) -> list[str]:
    given = [f"{name}={value}" for name, value in settings.items() if value is not None]
    return [f"{', '.join(given)} without effect: {why}."] if given else []


def _meet(
    processes: Processes, platform: str, num_local: int, asked: dict[str, Any], timeout_s: float, watched: bool
) -> list[Facts]:
    """What every process says of itself, `asked` being the same for all; from here on they watch one another."""
    host = socket.gethostname()
    listener = None
    if watched and processes.count > 1 and processes.index == 0:
        allow_connections(processes.count)
        listener = listen(0)
    mine = Facts(
        index=processes.index,
        count=processes.count,
        host=host,
        node=processes.node or _machine_id() or host,
        loopback=is_loopback(host),
        num_devices=num_local,
        gpus=_gpu_group(platform, processes),
        memory_bytes=_available_memory(),
        settings={"the platform": platform, **_versions(), **asked},
        watch_port=listener.getsockname()[1] if listener else 0,
        watch_key=secrets.token_hex(8) if listener else "",
    )
    if processes.count == 1:
        return [mine]
    everyone = meet(processes.coordinator, mine, timeout_s)
    if watched:
        _watch_one_another(own_watch(), processes, everyone, listener)
    lonely = [facts.host for facts in everyone if facts.loopback]
    # gloo, which carries collectives between CPUs, binds to the address of the host's own name.
    if platform == "cpu" and len({facts.node for facts in everyone}) > 1 and lonely:
        raise UserError(
            f"on host {lonely[0]} its own name is a loopback address, so the other nodes cannot reach it. "
            "Give it its network address in /etc/hosts."
        )
    return everyone


def _versions() -> dict[str, str]:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, "python": python}


def _watch_one_another(
    watch: Watch, processes: Processes, everyone: list[Facts], listener: socket.socket | None
) -> None:
    hosts, leader = [facts.host for facts in everyone], everyone[0]
    if listener:
        watch.lead(hosts, listener, leader.watch_key)
    else:
        host = processes.coordinator.rpartition(":")[0].strip("[]")
        watch.follow(processes.index, hosts, (host, leader.watch_port), leader.watch_key)
    atexit.register(watch.leave, 0)


def _gpu_group(platform: str, processes: Processes) -> str:
    if processes.gpus_bound:
        return f"process {processes.index}"
    return " ".join(f"{name}={os.environ.get(name)}" for name in VISIBILITY.get(platform, ()))


def _connect(processes: Processes, gpu_ids: list[int] | None, timeout_s: float) -> None:
    if processes.count == 1:
        return
    # It would take the place of the handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            processes.coordinator,
            processes.count,
            processes.index,
            local_device_ids=gpu_ids,
            # We know already, and under SLURM jax would take one GPU a process whatever the number of processes.
            cluster_detection_method="deactivate",
            initialization_timeout=int(timeout_s),
            heartbeat_timeout_seconds=_HEARTBEAT_S,
            shutdown_timeout_seconds=_SHUTDOWN_S,
        )
    except RuntimeError as error:
        raise UserError(f"process {processes.index} could not join {processes.coordinator}: {error}.") from error


def _start_backend(platform: str, wanted: str) -> None:
    try:
        found = jax.default_backend()
    # jax asserts that some platform of the list was usable.
    except (RuntimeError, AssertionError) as error:
        found = str(error) or "no device found"
    if found != wanted:
        raise UserError(
            f"jax cannot start on {platform} ({found}). Check the driver and jax's plugin, or set JAX_PLATFORMS=cpu."
        )


def _ordered_devices(grid: Grid, everyone: list[Facts]) -> tuple[jax.Device, ...]:
    devices = jax.devices()
    for facts in everyone:
        found = sum(device.process_index == facts.index for device in devices)
        if found != facts.num_devices:
            raise UserError(
                f"process {facts.index} on {facts.host} has {found} devices in jax, but {facts.num_devices} by its "
                "environment. Check the visible devices of each process."
            )
    return tuple(sorted(devices, key=lambda d: (grid.node_of_process[d.process_index], d.process_index, d.id)))


def _available_memory() -> int:
    """Bytes of the host that are free to use, within the container's limit if there is one."""
    meminfo = pathlib.Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
    available = int(found[1]) * 1024 if found else 0
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(available, int(text)) if text.isdigit() else available


def _machine_id() -> str | None:
    """Equal for all processes of a machine, containers included, where host names may not be."""
    path = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else None
