"""How many processes make up the run, which one this is, and how they end.

The numbers come from the command line or from SLURM. Whatever else looks like several processes is an
error: N separate runs that each believe to be alone are worse than none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn

from amsp_jax.errors import UserError
from amsp_jax.runtime.launch.rendezvous import is_loopback
from amsp_jax.runtime.watchdog.watch import own_watch

_FIRST_PORT, _NUM_PORTS = 61440, 4096
# Number of processes and rank, as launchers other than SLURM give them: torchrun, Open MPI, MPICH and Intel MPI,
# MVAPICH, Flux, jsrun.
_OTHER_LAUNCHERS = {
    "WORLD_SIZE": "RANK",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
}
# Launchers that give a rank alone: PMIx, Cray's ALPS and PALS, an indexed job of Kubernetes.
_RANKS_ALONE = ("PMIX_RANK", "ALPS_APP_PE", "PALS_RANKID", "JOB_COMPLETION_INDEX")

# A lost process shows as an error of jax in the others, before or after the watch hears of it.
_CAUSE_S = 3.0
# Errors of XLA and its collectives arrive as several types; all begin with a status, as in `UNKNOWN: Gloo ...`.
_RUNTIME_ERROR = re.compile(r"[A-Z_]+: ")
_LONGEST_WORDS = 500

_num_processes = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """One process's place in the run.

    Attributes:
      coordinator: `host:port` of process 0; empty in a run of one process.
      count, index: of all processes.
      node: the launcher's name for this node, None where it has none.
      gpus_bound: the launcher already gave each process GPUs of its own.
    """

    coordinator: str = ""
    count: int = 1
    index: int = 0
    node: str | None = None
    gpus_bound: bool = False


def find_processes(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environ: Mapping[str, str] = os.environ,
) -> Processes:
    """This process's place, from the three settings if given, else from SLURM, else alone.

    Raises:
      UserError: the settings are incomplete, or the environment shows several processes that could not meet.
    """
    if num_processes == 1:
        return Processes()
    if coordinator is not None and num_processes is not None and process_id is not None:
        _refuse_other_count(num_processes, environ)
        return _explicit(coordinator, num_processes, process_id)
    in_step = bool(environ.get("SLURM_STEP_NODELIST"))
    given: dict[str, str | int | None] = {"num_processes": num_processes, "process_id": process_id}
    if not in_step:
        given = {"coordinator": coordinator, **given}
    _refuse_partial(given)
    if in_step:
        return _slurm(coordinator, environ)
    _refuse_other_launchers(environ)
    _refuse_job_without_step(environ)
    return Processes()


def _refuse_partial(given: Mapping[str, str | int | None]) -> None:
    have = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
    if have:
        raise UserError(
            f"{have} alone: a run of several processes needs coordinator, num_processes and process_id. Give all three."
        )


def _refuse_other_count(count: int, environ: Mapping[str, str]) -> None:
    """A step of one task may be one of several that make up a run; one of several tasks is a run."""
    tasks = number_in(environ, "SLURM_STEP_NUM_TASKS", 1)
    if tasks not in (1, count):
        raise UserError(
            f"num_processes={count}, but srun started SLURM_STEP_NUM_TASKS={tasks} of this step: they would wait for "
            "others in vain. Leave out coordinator, num_processes and process_id under srun."
        )


def _explicit(coordinator: str, count: int, index: int) -> Processes:
    if not 0 <= index < count:
        raise UserError(
            f"process_id={index} with num_processes={count}: ids count from 0 to {count - 1}. Correct one of them."
        )
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"coordinator={coordinator}: it is HOST:PORT of process 0, as in node001:61500. Correct it.")
    return Processes(coordinator=coordinator, count=count, index=index)


def _refuse_other_launchers(environ: Mapping[str, str]) -> None:
    """A rank of 0 alone proves nothing; the processes with higher ranks stop, and their launcher ends the first."""
    for size, rank in _OTHER_LAUNCHERS.items():
        if number_in(environ, size, 1) > 1:
            raise UserError(_not_joined(f"{size}={environ[size]}", size, rank))
    for rank in _RANKS_ALONE:
        if number_in(environ, rank, 0) > 0:
            raise UserError(_not_joined(f"{rank}={environ[rank]}", "NUMBER", rank))


def _not_joined(found: str, size: str, rank: str) -> str:
    number = size if size == "NUMBER" else f"${size}"
    return (
        f"{found}: a launcher started several processes, which do not know of each other. Give each of them "
        f"--coordinator HOST:PORT (a free port on process 0's host), --num_processes {number} and --process_id "
        f"${rank}; "
        "or --num_processes 1 to run each alone."
    )


def number_in(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """The count or index in a launcher's variable; the default where the variable is missing or empty.

    Raises:
      UserError: the variable holds something else, or is missing and has no default.
    """
    text = environ.get(name, "").strip()
    if text.isdecimal() and text.isascii():
        return int(text)
    if not text and default is not None:
        return default
    have = f"{name}={text!r} is no number" if text else f"{name} is missing or empty"
    raise UserError(
        f"{have}, though a launcher sets it. Start the process as the launcher's task, or give --coordinator "
        "HOST:PORT, --num_processes and --process_id."
    )


def _refuse_job_without_step(environ: Mapping[str, str]) -> None:
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        if number_in(environ, name, 1) > 1:
            raise UserError(
                f"{name}={environ[name]}, but this process is not a task of srun and would be alone. "
                "Start it with srun, or set num_processes=1 to use this node only."
            )


def _slurm(coordinator: str | None, environ: Mapping[str, str]) -> Processes:
    count, step_count = number_in(environ, "SLURM_NTASKS", 1), number_in(environ, "SLURM_STEP_NUM_TASKS", 1)
    if count != step_count:
        raise UserError(
            f"SLURM_NTASKS={count}, but this step has SLURM_STEP_NUM_TASKS={step_count}: this process is not one "
            f"of the job's {count}. Start it with srun, or set num_processes=1 to run it alone."
        )
    if count == 1:
        return Processes()
    num_nodes = number_in(environ, "SLURM_STEP_NUM_NODES")
    coordinator = coordinator or _slurm_coordinator(environ)
    if num_nodes > 1 and is_loopback(coordinator.rpartition(":")[0]):
        raise UserError(
            f"coordinator {coordinator} is a loopback address, which the other {num_nodes - 1} of {num_nodes} nodes "
            "cannot reach. Give the name or address of process 0's node on the network."
        )
    return Processes(
        coordinator=coordinator,
        count=count,
        index=number_in(environ, "SLURM_PROCID"),
        node=str(number_in(environ, "SLURM_NODEID")),
        gpus_bound=_binds_gpus(environ),
    )


def _slurm_coordinator(environ: Mapping[str, str]) -> str:
    """The host of process 0, at a port of the step's own: two steps of a job may run at once."""
    job, step = number_in(environ, "SLURM_JOB_ID"), number_in(environ, "SLURM_STEP_ID", 0)
    return f"{_host_of_process_0(environ)}:{_FIRST_PORT + (job + 61 * step) % _NUM_PORTS}"


def _host_of_process_0(environ: Mapping[str, str]) -> str:
    """The first host of the step; under `-m arbitrary`, which takes any order, the first of SLURM's host file."""
    arbitrary = environ.get("SLURM_DISTRIBUTION") == "arbitrary"
    if "SLURM_HET_SIZE" not in environ and not arbitrary:
        return _first_host(environ["SLURM_STEP_NODELIST"])
    with contextlib.suppress(KeyError, OSError, IndexError):
        if arbitrary:
            return pathlib.Path(environ["SLURM_HOSTFILE"]).read_text().replace(",", " ").split()[0]
    name = "SLURM_DISTRIBUTION" if arbitrary else "SLURM_HET_SIZE"
    raise UserError(
        f"{name}={environ[name]}: process 0 may be on any node. Give the coordinator as HOST:PORT of its node."
    )


def _first_host(node_list: str) -> str:
    """`gpu007` of `gpu[007-010,012],login1`."""
    found = re.match(r"([^,\[]+)(?:\[([^,\]-]+))?", node_list)
    if not found:
        raise UserError(
            f"SLURM_STEP_NODELIST={node_list!r}: no list of nodes. Give the coordinator, HOST:PORT of process 0's node."
        )
    return found[1] + (found[2] or "")


def _binds_gpus(environ: Mapping[str, str]) -> bool:
    """Whether SLURM shows each task its own GPUs, which may bear the same numbers in every task."""
    bind = environ.get("SLURM_GPU_BIND", "none")
    per_task = "SLURM_GPUS_PER_TASK" in environ or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    return per_task or bind not in ("none", "")


def end_all_on_error(count: int) -> None:
    """Makes an uncaught exception end this process at once in a run of `count` > 1.

    Without it Python's orderly exit waits minutes for the other processes, which wait for this one.
    """
    global _num_processes
    _num_processes = count
    if count == 1:
        return
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if _RUNTIME_ERROR.match(str(error)):
            # If it is only the echo of a loss, the watch names the process that is lost and ends this one.
            time.sleep(_CAUSE_S)
        show(kind, error, traceback)
        end_process(1, _last_line(error))

    sys.excepthook = hook


def _last_line(error: BaseException) -> str:
    """As the traceback's last line, and its first where that is long."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST_WORDS]


def end_process(code: int, words: str = "") -> NoReturn:
    """Ends the program with `code`: as `sys.exit` alone, at once where other processes would be waited for.

    The others are told, with `words` for the reason.
    """
    if _num_processes > 1 and code != 0:
        sys.stdout.flush()
        sys.stderr.flush()
        own_watch().leave(code, words)
        os._exit(code)
    sys.exit(code)
