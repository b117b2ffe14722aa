"""`amsp-jax doctor`: what this machine or cluster lacks for training, and what to do."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from amsp_jax.cli.doctor.files import check_folder
from amsp_jax.cli.doctor.findings import Finding, examine, fail, is_stuck, one_line
from amsp_jax.cli.doctor.machine import check_machine
from amsp_jax.cli.doctor.requirements import check_imports
from amsp_jax.cli.doctor.table import Table, title_of
from amsp_jax.errors import UserError
from amsp_jax.runtime.launch.processes import Processes, find_processes
from amsp_jax.user_cache import user_cache

# Names and limits of this machine; imports and files, which may be on a slow network file system that answers.
_LOOK_S, _IMPORT_S, _FILES_S = 30.0, 180.0, 60.0
_STDOUT, _STDERR = 1, 2


def run(args: argparse.Namespace) -> None:
    """Prints the table, in process 0 for all processes; ends the program with 1 where something FAILs.

    Raises:
      UserError: arguments that contradict one another.
    """
    processes, problems = _place(args)
    with _stdout_to_ourselves() as stdout:
        table = Table(stdout, args.json)
        code = _check(args, processes, problems, table)
        if is_stuck() or processes.count > 1:
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


def _check(args: argparse.Namespace, processes: Processes, problems: list[Finding], table: Table) -> int:
    """Looks at this machine and then, if the processes are known and jax can be imported, at the devices of all."""
    mine = [*problems, *_look_around(args, processes)]
    if problems:
        return table.print(mine, title_of(processes))
    try:
        from amsp_jax.cli.doctor import cluster
    except Exception as error:  # a package that is broken fails in any way, and jax without numpy in an odd one
        # The finding on imports says what to install.
        mine.append(fail("devices", f"not looked at: {one_line(error)}"))
        return table.print(mine, title_of(processes))
    return cluster.check_cluster(args, processes, mine, table)


def _place(args: argparse.Namespace) -> tuple[Processes, list[Finding]]:
    """This process's place; what the environment has against it is a finding, what the arguments have an error."""
    given = (args.coordinator, args.num_processes, args.process_id)
    try:
        return find_processes(*given), []
    except UserError as error:
        if given != (None, None, None):
            raise
        return Processes(), [fail("processes", one_line(error))]


def _look_around(args: argparse.Namespace, processes: Processes) -> list[Finding]:
    """What needs no device."""
    busy = "the disk or network file system of this machine does not answer: ask who runs it"
    look = [
        ("packages", _check_packages, _IMPORT_S),
        ("machine", lambda: check_machine(processes), _LOOK_S),
        ("run folder", lambda: check_folder("run folder", args.run_dir), _FILES_S),
        ("cache", lambda: check_folder("cache", user_cache()), _FILES_S),
    ]
    examined = [examine(name, check, limit_s=limit_s, if_stuck=busy) for name, check, limit_s in look]
    return [finding for each in examined for finding in each.findings]


def _check_packages() -> Iterator[Finding]:
    """The packages can be imported, and their versions fit; a package that is missing may be one that we need here."""
    yield check_imports()
    with contextlib.suppress(ModuleNotFoundError):
        from amsp_jax.cli.doctor.packages import check_packages

        yield from check_packages()
