"""What a process can say of its machine before any device starts: names, network interfaces, limits."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from amsp_jax.cli.doctor.findings import Finding, fail, ok, warn
from amsp_jax.runtime.launch.processes import Processes
from amsp_jax.runtime.launch.rendezvous import is_loopback

_MIB, _GIB = 2**20, 2**30
# Each checkpoint leaf, corpus file and peer is a file; the usual soft limit is 1024.
_MIN_OPEN_FILES = 4096
# Containers get 64 MiB by default; NCCL keeps some 10 MiB there for each pair of processes.
_MIN_SHARED_MEMORY_BYTES = 512 * _MIB
# The kernel's classes of adapters that write into memory by themselves: InfiniBand and RoCE, Slingshot.
_RDMA = ("infiniband", "cxi")


def check_machine(processes: Processes, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Everything in this module, looked up on this machine."""
    host = socket.gethostname()
    meeting_place = processes.coordinator.rpartition(":")[0].strip("[]")
    nodes = int(environ["SLURM_STEP_NUM_NODES"]) if "SLURM_STEP_NUM_NODES" in environ else None
    if processes.count == 1 or is_loopback(meeting_place):
        nodes = 1
    yield check_host_name(host, resolve(host), nodes)
    if processes.count > 1:
        yield check_coordinator(processes.coordinator, resolve(meeting_place))
    yield from check_interfaces(environ, interfaces())
    yield check_shared_memory(Path("/dev/shm"))
    yield check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield check_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], has_rdma(Path("/")))


def resolve(host: str) -> str | None:
    """The address of a name, None if it has none."""
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        return None


def check_host_name(host: str, address: str | None, num_nodes: int | None) -> Finding:
    """That other nodes, where there are any, would reach this one by its own name.

    Args:
      host: its name.
      address: what that resolves to.
      num_nodes: of the run; None where no launcher says.
    """
    check, alone = "host name", num_nodes == 1
    if address is None:
        problem = f"{host} does not resolve"
        if alone:
            return warn(check, problem, f"add '127.0.1.1 {host}' to /etc/hosts; for several nodes, its network address")
        return fail(check, problem, "enter this host in DNS, or its network address in /etc/hosts of every node")
    if not is_loopback(address) or alone:
        return ok(check, f"{host} is {address}")
    problem = f"{host} is the loopback address {address}, which no other node reaches"
    fix = "give the name its network address in /etc/hosts"
    if num_nodes is None:
        return warn(check, problem, f"{fix}, unless all processes are on this machine")
    return fail(check, problem, fix)


def check_coordinator(coordinator: str, address: str | None) -> Finding:
    """That the coordinator's name has an address here; whether it answers is seen when the processes meet."""
    if address is None:
        return fail(
            "coordinator",
            f"the host of {coordinator} does not resolve",
            "enter it in DNS or /etc/hosts of every node, or give --coordinator an address",
        )
    return ok("coordinator", f"{coordinator} is {address}")


def interfaces(root: Path = Path("/")) -> dict[str, bool]:
    """The network interfaces, and whether each is up as far as the kernel knows."""
    states = {}
    for _, name in socket.if_nameindex():
        try:
            state = (root / "sys/class/net" / name / "operstate").read_text().strip()
        except OSError:
            state = "unknown"
        states[name] = state in ("up", "unknown")
    return states


def check_interfaces(environ: Mapping[str, str], present: Mapping[str, bool]) -> Iterator[Finding]:
    """What NCCL or RCCL will use, as `NCCL_SOCKET_IFNAME` selects among the interfaces that are `present`."""
    setting = environ.get("NCCL_SOCKET_IFNAME", "")
    others = [name for name, is_up in present.items() if is_up and not name.startswith(("lo", "docker"))]
    if not setting:
        yield ok("network interfaces", f"{', '.join(others) or 'lo only'}; NCCL_SOCKET_IFNAME unset, NCCL chooses")
        return
    chosen = [name for name in present if selects(setting, name)]
    listed = f"NCCL_SOCKET_IFNAME={setting} selects"
    fix = f"set it to one of {', '.join(others) or 'those there are'}, or unset it"
    if not chosen:
        yield fail("network interfaces", f"{listed} none of {', '.join(present)}", fix)
    elif not any(present[name] for name in chosen):
        yield fail("network interfaces", f"{listed} {', '.join(chosen)}, which is down", fix)
    else:
        yield ok("network interfaces", f"{listed} {', '.join(chosen)}")


def selects(setting: str, interface: str) -> bool:
    """NCCL's rule: a list of prefixes, of whole names after `=`, and all but those after `^`."""
    excludes = setting.startswith("^")
    names = setting.removeprefix("^")
    exact = names.startswith("=")
    listed = [name for name in names.removeprefix("=").split(",") if name]
    fits = any(interface == name if exact else interface.startswith(name) for name in listed)
    return fits != excludes


def check_shared_memory(path: Path) -> Finding:
    """The memory through which the processes of a node exchange data."""
    try:
        stat = os.statvfs(path)
    except OSError as error:
        return warn("shared memory", f"{path}: {error.strerror}", f"mount a tmpfs of 1 GiB or more at {path}")
    total, free = stat.f_frsize * stat.f_blocks, stat.f_frsize * stat.f_bavail
    found = f"{path} has {free / _GIB:.3g} of {total / _GIB:.3g} GiB free"
    if free < _MIN_SHARED_MEMORY_BYTES:
        fix = (
            "NCCL between the processes of a node may fail: give the container --shm-size=1g, or remove old files there"
        )
        return warn("shared memory", found, fix)
    return ok("shared memory", found)


def check_open_files(soft: int, hard: int) -> Finding:
    """`ulimit -n`."""
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "no limit")
    if soft < _MIN_OPEN_FILES:
        can = hard == resource.RLIM_INFINITY or hard >= _MIN_OPEN_FILES
        fix = "ulimit -n 65536 before the start" if can else "ask for a higher hard limit in limits.conf"
        return warn("open files", f"at most {soft} (ulimit -n)", fix)
    return ok("open files", f"at most {soft}")


def has_rdma(root: Path) -> bool:
    """Whether the machine has InfiniBand, RoCE or Slingshot adapters, which need locked memory."""
    return any((root / "sys/class" / kind).is_dir() and any((root / "sys/class" / kind).iterdir()) for kind in _RDMA)


def check_locked_memory(soft: int, rdma: bool) -> Finding:
    """`ulimit -l`, which matters to adapters that write into memory by themselves."""
    if soft == resource.RLIM_INFINITY:
        return ok("locked memory", "no limit")
    found = f"at most {soft / _MIB:.3g} MiB"
    if rdma:
        fix = "ulimit -l unlimited (limits.conf; for SLURM, PropagateResourceLimitsExcept=MEMLOCK)"
        return warn("locked memory", f"{found}, and this node has RDMA adapters", fix)
    return ok("locked memory", f"{found}; no RDMA adapter here")
