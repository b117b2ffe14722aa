"""The processes of a run meet once before jax does, and compare what they were told.

jax aborts the process, with a stack trace of C++, when a peer is missing or was given other numbers. Here each
process sends process 0 one line of JSON, at the address where jax's coordinator will listen afterwards, and gets
back either everyone's facts or the one sentence that says what is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from amsp_jax.errors import UserError
from amsp_jax.runtime.watchdog.messages import listen

_LINE_TIMEOUT_S = 10.0
# The answer has everyone's facts.
_LONGEST_LINE_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts:
    """What one process says of itself.

    Attributes:
      index, count: its place, as it was told.
      host: for messages.
      node: equal for processes on one machine.
      loopback: its own host name resolves to a loopback address.
      num_devices: devices it can see.
      gpus: processes of one node that have this in common share their GPUs.
      memory_bytes: of its host, available now.
      settings: what must be equal in all processes, by name.
      watch_port, watch_key: where process 0's watch listens, and what to say there; 0 and empty in the others.
    """

    index: int
    count: int
    host: str
    node: str
    loopback: bool
    num_devices: int
    gpus: str
    memory_bytes: int
    settings: Mapping[str, Any]
    watch_port: int = 0
    watch_key: str = ""


def is_loopback(host: str) -> bool:
    """True for a name or address that means this machine only; False if it does not resolve."""
    try:
        address = socket.gethostbyname(host.strip("[]"))
    except OSError:
        return host.strip("[]") == "::1"
    return address.startswith("127.")


def meet(coordinator: str, mine: Facts, timeout_s: float) -> list[Facts]:
    """The facts of all processes in order of their index.

    Raises:
      UserError: in every process that came, the same: one is missing after `timeout_s`, two have one index, or
        counts or settings differ; or `coordinator` is no name or address of process 0's host.
    """
    name, _, port = coordinator.rpartition(":")
    host = name.strip("[]")
    if mine.index > 0:
        return _join_meeting(host, int(port), mine, timeout_s)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise UserError(_unresolved(host, int(port), mine, error)) from error
    return _host_meeting(host, int(port), mine, timeout_s)


def _unresolved(host: str, port: int, mine: Facts, error: OSError) -> str:
    return (
        f"coordinator {host}:{port}: the name {host} does not resolve on {mine.host} ({error.strerror}). Give the name "
        "or address by which the nodes know process 0's host."
    )


def _host_meeting(host: str, port: int, mine: Facts, timeout_s: float) -> list[Facts]:
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        try:
            server = stack.enter_context(listen(port))
        except OSError as error:
            raise UserError(
                f"coordinator port {port} on {mine.host} cannot be opened: {error.strerror}. Choose another port."
            ) from error
        present, problem = _collect(server, stack, connections, mine, timeout_s)
        if problem and is_loopback(host):
            problem += f" Coordinator {host} is a loopback address: only processes on {mine.host} reach it."
        answer = {"error": problem} if problem else {"facts": [dataclasses.asdict(facts) for facts in present]}
        for connection in connections:
            # A process that left meanwhile has its own message.
            with contextlib.suppress(OSError):
                connection.sendall(json.dumps(answer).encode() + b"\n")
                # Who closes first keeps the port busy for a minute, and jax needs ours now.
                connection.recv(1)
    if problem:
        raise UserError(problem)
    return present


def _collect(
    server: socket.socket, stack: contextlib.ExitStack, connections: list[socket.socket], mine: Facts, timeout_s: float
) -> tuple[list[Facts], str | None]:
    """Everyone's facts in order, or the first thing that is wrong with them."""
    present = {0: mine}
    deadline = time.monotonic() + timeout_s
    while len(present) < mine.count:
        server.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            connection = stack.enter_context(server.accept()[0])
        except TimeoutError:
            return [], _missing(present, mine.count, timeout_s)
        connection.settimeout(_LINE_TIMEOUT_S)
        try:
            facts = _facts(_read_line(connection))
        # Deep nesting ends in a RecursionError.
        except (OSError, ValueError, TypeError, RecursionError):
            # Not one of ours: a port scanner, or a health check.
            continue
        connections.append(connection)
        problem = _compare(mine, facts, present)
        if problem:
            return [], problem
        present[facts.index] = facts
    return [present[index] for index in sorted(present)], None


def _facts(line: bytes) -> Facts:
    """What a process says of itself; ValueError or TypeError where it is not that."""
    facts = Facts(**json.loads(line))
    for field in dataclasses.fields(Facts):
        value = getattr(facts, field.name)
        kind = {"int": int, "str": str, "bool": bool}.get(str(field.type), dict)
        if type(value) is not kind:
            raise TypeError(f"{field.name} is {value!r}")
    if not 0 <= facts.index < facts.count:
        raise ValueError(f"process {facts.index} of {facts.count}")
    return facts


def _missing(present: Mapping[int, Facts], count: int, timeout_s: float) -> str:
    absent = [index for index in range(count) if index not in present]
    names = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    return (
        f"{len(present)} of {count} processes came within {timeout_s:g} s; missing: {names}. "
        "Start them all with the same coordinator and num_processes, on nodes that reach each other."
    )


def _compare(mine: Facts, other: Facts, present: Mapping[int, Facts]) -> str | None:
    if other.count != mine.count:
        return (
            f"processes disagree: num_processes is {mine.count} in process 0 on {mine.host} and {other.count} in "
            f"process {other.index} on {other.host}. Start all with the same number."
        )
    if other.index in present:
        hosts = f"{present[other.index].host} and {other.host}"
        return f"two processes have process_id={other.index}, on {hosts}. Number them from 0 to {mine.count - 1}."
    for name in {**mine.settings, **other.settings}:
        ours, theirs = mine.settings.get(name), other.settings.get(name)
        if ours != theirs:
            return (
                f"processes disagree: {name}={ours} in process 0 on {mine.host} and {name}={theirs} in process "
                f"{other.index} on {other.host}. Start all alike."
            )
    return None


def _join_meeting(host: str, port: int, mine: Facts, timeout_s: float) -> list[Facts]:
    with _connect(host, port, mine, timeout_s) as connection:
        # Process 0 waits for others as long as we waited for it.
        connection.settimeout(timeout_s + _LINE_TIMEOUT_S)
        try:
            connection.sendall(json.dumps(dataclasses.asdict(mine)).encode() + b"\n")
            answer = json.loads(_read_line(connection))
        except (OSError, ValueError) as error:
            raise UserError(
                f"process {mine.index}: what answers at coordinator {host}:{port} is not process 0 of this run, or it "
                "ended. See process 0's messages, or choose another port."
            ) from error
    if "error" in answer:
        raise UserError(answer["error"])
    return [Facts(**facts) for facts in answer["facts"]]


def _connect(host: str, port: int, mine: Facts, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.01))
        except OSError as error:
            if time.monotonic() >= deadline:
                if isinstance(error, socket.gaierror):
                    raise UserError(_unresolved(host, port, mine, error)) from error
                raise UserError(
                    f"process {mine.index} of {mine.count} on {mine.host} found no process 0 at coordinator "
                    f"{host}:{port} within {timeout_s:g} s ({error.strerror or error}). Check that process 0 runs on "
                    "that host, and that the name is not a loopback address of this one."
                ) from error
            time.sleep(0.1)


def _read_line(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as file:
        return file.readline(_LONGEST_LINE_BYTES)
