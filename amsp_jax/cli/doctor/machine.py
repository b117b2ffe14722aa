"""What a process can say of its machine before any device starts: its name, its coordinator, shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from amsp_jax.cli.doctor.findings import Finding, fail, ok, warn
from amsp_jax.runtime.launch.processes import Processes, number_in
from amsp_jax.runtime.launch.rendezvous import is_loopback

_MIB, _GIB = 2**20, 2**30
# Containers get 64 MiB by default; NCCL keeps some 10 MiB there for each pair of processes.
_MIN_SHARED_MEMORY_BYTES = 512 * _MIB


def check_machine(processes: Processes, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Everything in this module, looked up on this machine."""
    host = socket.gethostname()
    meeting_place = processes.coordinator.rpartition(":")[0].strip("[]")
    nodes = number_in(environ, "SLURM_STEP_NUM_NODES", 1) if "SLURM_STEP_NUM_NODES" in environ else None
    if processes.count == 1 or is_loopback(meeting_place):
        nodes = 1
    yield check_host_name(host, resolve(host), nodes)
    if processes.count > 1:
        yield check_coordinator(processes.coordinator, resolve(meeting_place))
    yield check_shared_memory(Path("/dev/shm"))


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
