"""What needs jax: starts the processes and their devices, checks them, and prints one table for all processes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from amsp_jax.cli.doctor.devices import axes_to_check, check_devices, check_memory, check_psum
from amsp_jax.cli.doctor.findings import Finding, Report, Status, examine, fail, merge, one_line, ranges
from amsp_jax.cli.doctor.key_value_store import KeyValueStore
from amsp_jax.cli.doctor.shared_folder import check_shared_between
from amsp_jax.cli.doctor.table import Table, title_of
from amsp_jax.errors import UserError
from amsp_jax.runtime import launch
from amsp_jax.runtime.launch import DeviceLayout
from amsp_jax.runtime.launch.accelerator import count_gpus, find_platform
from amsp_jax.runtime.launch.processes import Processes

# Looking at devices that answer.
_LOOK_S = 30.0
# The meeting and jax's own start each have a minute.
_START_S = 240.0
_SHARED_S = 120.0
_REPORT_S, _GOODBYE_S, _LEAVE_S = 30.0, 10.0, 0.5


def check_cluster(args: argparse.Namespace, processes: Processes, mine: list[Finding], table: Table) -> int:
    """Checks devices and collectives, in an order in which each thing needs what was checked before.

    Args:
      args: of the command.
      processes: this process's place.
      mine: its findings so far; more are added.
      table: where they are printed.

    Returns:
      The exit code, after the table was printed.
    """
    layout = _start(args, processes, mine, table)
    if layout is None:
        return table.print(mine, title_of(processes))
    store = KeyValueStore(layout.process_index, layout.process_count)
    mine += _look_at_devices(args, layout, store)
    return _conclude(args, mine, store, table)


def _start(args: argparse.Namespace, processes: Processes, mine: list[Finding], table: Table) -> DeviceLayout | None:
    """The devices; None, and a finding more, where they cannot be had."""

    def give_up() -> None:
        stuck = f"the processes and devices did not start within {_START_S:g} s"
        fix = "see the messages of the driver (dmesg) and of the other processes"
        table.print([*mine, fail("start", stuck, fix)], title_of(processes))
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
        mine.append(fail("start", one_line(error)))
    except Exception as error:  # a driver or plugin may fail in any way
        problem = f"{type(error).__name__}: {one_line(error)}"
        mine.append(fail("start", problem, "check the driver and jax's plugin; JAX_PLATFORMS=cpu does without"))
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


def _look_at_devices(args: argparse.Namespace, layout: DeviceLayout, store: KeyValueStore) -> Iterator[Finding]:
    """What needs them, from the harmless to what may hang."""

    def devices() -> Iterator[Finding]:
        visible = 0 if layout.platform == "cpu" else count_gpus(layout.platform)
        driver = launch.environment()["driver"]
        yield from check_devices(layout, driver, visible, jax.local_device_count())

    def shared_folder() -> Iterator[Finding]:
        return check_shared_between(store, args.run_dir)

    broken = "the driver does not answer: look into dmesg, and reboot the node"
    yield from examine("devices", devices, limit_s=_LOOK_S, if_stuck=broken).findings
    yield from examine("memory", lambda: check_memory(layout), limit_s=_LOOK_S, if_stuck=broken).findings
    if layout.process_count > 1:
        lost = "see whether all processes still run, and reach the run folder"
        findings, all_came = examine("shared run folder", shared_folder, limit_s=_SHARED_S, if_stuck=lost)
        yield from findings
        if not all_came:
            # A collective would only wait for them.
            return
    yield from _try_collectives(layout, args.timeout)


def _try_collectives(layout: DeviceLayout, limit_s: float) -> Iterator[Finding]:
    advice = "set NCCL_DEBUG=INFO and run again: it names the link; NCCL_SOCKET_IFNAME chooses the interface"
    if layout.platform == "cpu":
        advice = "see whether every process still runs, and whether a firewall closes ports between the nodes"
    for name, axes in axes_to_check(layout).items():
        look = functools.partial(check_psum, name, layout, axes)
        findings, finished = examine(name, look, limit_s=limit_s, if_stuck=advice)
        yield from findings
        if not finished:
            # The next one would wait behind it.
            return


def _conclude(args: argparse.Namespace, mine: Sequence[Finding], store: KeyValueStore, table: Table) -> int:
    """The exit code, the same in all processes, after process 0 has printed everyone's findings."""
    # All processes have the same limits, so they are at most one collective apart.
    patience_s = args.timeout + _REPORT_S
    store.put("report", [socket.gethostname(), [dataclasses.astuple(finding) for finding in mine]])
    if store.index > 0:
        try:
            code = store.get("verdict", 0, 2 * patience_s)
        except TimeoutError:
            lost = fail("processes", f"process 0 printed no table within {2 * patience_s:g} s")
            code = table.print([*mine, lost], f"process {store.index} on {socket.gethostname()}:")
        store.put("goodbye", True)
        return code
    heard = store.get_all("report", patience_s)
    code = table.print([*_missing(heard, store.count), *merge(_reports(heard))])
    store.put("verdict", code)
    store.put("goodbye", True)
    # jax's coordinator ends with process 0, and takes those with it that have not left yet.
    store.get_all("goodbye", _GOODBYE_S)
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
    return [fail("processes", f"no report from {ranges(silent)} of {num_processes}", fix)]
