"""`amsp-jax doctor`: what this machine or cluster lacks for training, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

import jax

from amsp_jax.cli import doctor
from amsp_jax.cli.doctor import Exchange, Finding, Report, Status, examine
from amsp_jax.errors import UserError
from amsp_jax.runtime import launch
from amsp_jax.runtime.launch import Layout
from amsp_jax.runtime.launch.accelerator import count_gpus, find_platform
from amsp_jax.runtime.launch.processes import Processes, find_processes
from amsp_jax.user_cache import user_cache

# Reading files and metadata, on a network file system that answers.
_LOOK_S, _FILES_S = 30.0, 60.0
# The meeting and jax's own start each have a minute.
_START_S = 240.0
_SHARED_S = 120.0
_REPORT_S, _GOODBYE_S, _LEAVE_S = 30.0, 10.0, 0.5
_STDOUT, _STDERR = 1, 2


def run(args: argparse.Namespace) -> None:
    """Prints the table, in process 0 for all processes; ends the program with 1 where something FAILs.

    Raises:
      UserError: arguments that contradict one another.
    """
    processes, problems = _place(args)
    with _stdout_to_ourselves() as stdout:
        table = _Table(stdout, args.json)
        code = _check(args, processes, problems, table)
        if doctor.is_stuck() or processes.count > 1:
            # An orderly end would wait for the thread that hangs, and for processes that may be lost.
            sys.stderr.flush()
            os._exit(code)
    if code:
        sys.exit(code)


@contextlib.contextmanager
def _stdout_to_ourselves() -> Iterator[TextIO]:
    """Stdout for the table alone: what C++ libraries print there goes to stderr."""
    with os.fdopen(os.dup(_STDOUT), "w") as ours:
        sys.stdout.flush()
        os.dup2(_STDERR, _STDOUT)
        try:
            yield ours
        finally:
            ours.flush()
            os.dup2(ours.fileno(), _STDOUT)


@dataclasses.dataclass(frozen=True)
class _Table:
    """Where findings are printed, and how."""

    stdout: TextIO
    as_json: bool

    def print(self, findings: Sequence[Finding], title: str | None = None) -> int:
        """Prints them and returns the exit code."""
        counts = doctor.count(findings)
        is_good = not counts[Status.FAIL]
        if self.as_json:
            values = {"ok": is_good, "counts": counts, "findings": [dataclasses.asdict(f) for f in findings]}
            text = json.dumps(values, indent=2)
        else:
            text = "\n".join([*([title] if title else []), *map(str, findings), doctor.summary(findings)])
        print(text, file=self.stdout, flush=True)
        return 0 if is_good else 1


def _check(args: argparse.Namespace, processes: Processes, problems: list[Finding], table: _Table) -> int:
    """Everything, in an order in which each thing needs what was checked before; returns the exit code."""
    mine = [*problems, *_look_around(args, processes)]
    layout = None if problems else _start(args, processes, mine, table)
    if layout is None:
        return table.print(mine, _title(processes))
    exchange = Exchange(layout.process_index, layout.process_count)
    mine += _look_at_devices(args, layout, exchange)
    return _conclude(args, mine, exchange, table)


def _place(args: argparse.Namespace) -> tuple[Processes, list[Finding]]:
    """This process's place; what the environment has against it is a finding, what the arguments have an error."""
    given = (args.coordinator, args.num_processes, args.process_id)
    try:
        return find_processes(*given), []
    except UserError as error:
        if given != (None, None, None):
            raise
        return Processes(), [doctor.fail("processes", doctor.one_line(error))]


def _look_around(args: argparse.Namespace, processes: Processes) -> list[Finding]:
    """What needs no device."""
    busy = "the disk or network file system of this machine does not answer: ask who runs it"
    look = [
        ("packages", doctor.check_packages, _LOOK_S),
        ("machine", lambda: doctor.check_machine(processes), _LOOK_S),
        ("run folder", lambda: doctor.check_run_folder(args.run_dir), _FILES_S),
        ("cache", lambda: doctor.check_folder("cache", user_cache()), _FILES_S),
    ]
    examined = [examine(name, check, limit_s=limit_s, if_stuck=busy) for name, check, limit_s in look]
    return [finding for each in examined for finding in each.findings]


def _start(args: argparse.Namespace, processes: Processes, mine: list[Finding], table: _Table) -> Layout | None:
    """The devices; None, and a finding more, where they cannot be had."""

    def give_up() -> None:
        stuck = f"the processes and devices did not start within {_START_S:g} s"
        fix = "see the messages of the driver (dmesg) and of the other processes"
        table.print([*mine, doctor.fail("start", stuck, fix)], _title(processes))
        os._exit(1)

    # A process that dies is a line of the table. The watch and, without this setting, jax end the others with it.
    jax.config.update("jax_enable_recoverability", True)
    try:
        with _time_limit(_START_S, give_up):
            nodes, per_node = _grid(args, processes)
            return launch.setup(
                simulated_nodes=nodes,
                simulated_devices_per_node=per_node,
                devices_per_node=args.devices_per_node,
                coordinator=args.coordinator,
                num_processes=args.num_processes,
                process_id=args.process_id,
                watched=False,
            )
    except UserError as error:
        mine.append(doctor.fail("start", doctor.one_line(error)))
    except Exception as error:  # a driver or plugin may fail in any way
        problem = f"{type(error).__name__}: {doctor.one_line(error)}"
        mine.append(doctor.fail("start", problem, "check the driver and jax's plugin; JAX_PLATFORMS=cpu does without"))
    return None


@contextlib.contextmanager
def _time_limit(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """For what only the main thread may do."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _platform() -> str:
    return find_platform(jax.config.jax_platforms or "")[0]  # type: ignore[attr-defined]


def _grid(args: argparse.Namespace, processes: Processes) -> tuple[int | None, int | None]:
    """As asked for; else, on the CPU, enough simulated devices for a collective on each axis."""
    nodes, per_node = args.simulated_nodes, args.simulated_devices_per_node
    if nodes is None and per_node is None and _platform() == "cpu":
        nodes, per_node = max(processes.count, 2), 2
    return nodes, per_node


def _look_at_devices(args: argparse.Namespace, layout: Layout, exchange: Exchange) -> Iterator[Finding]:
    """What needs them, from the harmless to what may hang."""

    def devices() -> Iterator[Finding]:
        visible = 0 if layout.platform == "cpu" else count_gpus(layout.platform)
        driver = launch.environment()["driver"]
        yield from doctor.check_devices(layout, driver, visible, jax.local_device_count())

    def shared() -> Iterator[Finding]:
        return doctor.check_shared_between(exchange, args.run_dir)

    broken = "the driver does not answer: look into dmesg, and reboot the node"
    yield from examine("devices", devices, limit_s=_LOOK_S, if_stuck=broken).findings
    yield from examine("memory", lambda: doctor.check_memory(layout), limit_s=_LOOK_S, if_stuck=broken).findings
    if layout.process_count > 1:
        lost = "see whether all processes still run, and reach the run folder"
        findings, all_came = examine("shared run folder", shared, limit_s=_SHARED_S, if_stuck=lost)
        yield from findings
        if not all_came:
            # A collective would only wait for them.
            return
    yield from _try_collectives(layout, args.timeout)


def _try_collectives(layout: Layout, limit_s: float) -> Iterator[Finding]:
    advice = "set NCCL_DEBUG=INFO and run again: it names the link; NCCL_SOCKET_IFNAME chooses the interface"
    if layout.platform == "cpu":
        advice = "see whether every process still runs, and whether a firewall closes ports between the nodes"
    for name, axes in doctor.axes_to_check(layout).items():
        look = functools.partial(doctor.check_psum, name, layout, axes)
        findings, finished = examine(name, look, limit_s=limit_s, if_stuck=advice)
        yield from findings
        if not finished:
            # The next one would wait behind it.
            return


def _conclude(args: argparse.Namespace, mine: Sequence[Finding], exchange: Exchange, table: _Table) -> int:
    """The exit code, the same in all processes, after process 0 has printed everyone's findings."""
    # All processes have the same limits, so they are at most one collective apart.
    patience_s = args.timeout + _REPORT_S
    exchange.tell("report", [socket.gethostname(), [dataclasses.astuple(finding) for finding in mine]])
    if exchange.index > 0:
        try:
            code = exchange.hear("verdict", 0, 2 * patience_s)
        except TimeoutError:
            lost = doctor.fail("processes", f"process 0 printed no table within {2 * patience_s:g} s")
            code = table.print([*mine, lost], f"process {exchange.index} on {socket.gethostname()}:")
        exchange.tell("goodbye", True)
        return code
    heard = exchange.hear_all("report", patience_s)
    code = table.print([*_missing(heard, exchange.count), *doctor.merge(_reports(heard))])
    exchange.tell("verdict", code)
    exchange.tell("goodbye", True)
    # jax's coordinator ends with process 0, and takes those with it that have not left yet.
    exchange.hear_all("goodbye", _GOODBYE_S)
    time.sleep(_LEAVE_S)
    return code


def _reports(heard: dict[int, Any]) -> list[Report]:
    return [
        Report(process, host, tuple(Finding(check, Status(status), *rest) for check, status, *rest in findings))
        for process, (host, findings) in sorted(heard.items())
    ]


def _missing(heard: dict[int, Any], num_processes: int) -> list[Finding]:
    silent = [process for process in range(num_processes) if process not in heard]
    if not silent:
        return []
    fix = "see the output of these processes, and whether their nodes are up"
    return [doctor.fail("processes", f"no report from {doctor.ranges(silent)} of {num_processes}", fix)]


def _title(processes: Processes) -> str | None:
    """Processes that did not meet print a table each."""
    return f"process {processes.index} on {socket.gethostname()}:" if processes.count > 1 else None
