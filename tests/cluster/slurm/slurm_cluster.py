"""What the SLURM tests ask of the cluster of cluster.sh."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CLUSTER_SH = Path(__file__).with_name("cluster.sh")
TINY_GIN = Path(__file__).with_name("tiny.gin")
NUM_NODES = 4
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# Started in the second in which its last run ended, a node takes a job for one that was killed.
_REQUEUE_WAIT_S = 2.0


class Slurm:
    """The cluster. Whatever is asked of it has a limit of time."""

    def __init__(self, conf: str, mode: str, cache: Path) -> None:
        self.mode = mode
        kept = {
            name: value
            for name, value in os.environ.items()
            if not re.match("SLURM_(?!CI_)|SBATCH_|SRUN_|JAX_|XLA_|.*proxy", name, re.IGNORECASE)
        }
        self.env = {
            **kept,
            "SLURM_CONF": conf,
            # `python` of job scripts is the one that runs these tests.
            "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}",
            "XDG_CACHE_HOME": str(cache),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            # Compilation is most of a start, and every start compiles the same.
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def run(self, *command: object, check: bool = True, timeout: float = 60, cwd: Path | None = None) -> str:
        """Runs a command and returns what it printed on both streams."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-8000:]}"
        return done.stdout

    def srun(self, *command: object, num_nodes: int, per_node: int, timeout: float = 240) -> str:
        """Runs a step of its own job, one bad task ends it."""
        shape = ("--kill-on-bad-exit=1", f"--nodes={num_nodes}", f"--ntasks-per-node={per_node}")
        return self.run("srun", *shape, f"--time={timeout / 60 + 1:.0f}", *command, timeout=timeout)

    def submit(self, *words: object, cwd: Path | None = None) -> int:
        """Submits a batch job and returns its number."""
        return int(self.run("sbatch", "--parsable", *words, cwd=cwd).split(";")[0])

    def job(self, number: int) -> dict[str, str]:
        """What SLURM says of a job, by name."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait(self, number: int, states: Sequence[str] = ENDED, timeout: float = 240) -> str:
        """Waits until the job is in one of the states, and returns that; a requeued job starts at once."""
        self.until(lambda: self.job(number)["JobState"] in states, number, timeout)
        return self.job(number)["JobState"]

    def until(self, condition: Callable[[], bool], number: int | None = None, timeout: float = 240) -> None:
        """Waits for the condition; meanwhile the job of this number, if requeued, starts at once."""
        deadline = time.monotonic() + timeout
        waits_since = math.inf
        while not condition():
            now = time.monotonic()
            assert now < deadline, self.job(number) if number else self.run("squeue")
            # A requeued job waits until its old credentials are void, longer than it must.
            if not number or self.job(number)["Reason"] != "BeginTime":
                waits_since = math.inf
            elif now - (waits_since := min(waits_since, now)) > _REQUEUE_WAIT_S:
                self.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
                waits_since = math.inf
            time.sleep(0.2)

    def cluster(self, *words: str) -> str:
        """A command of cluster.sh, such as node-kill n2."""
        return self.run(CLUSTER_SH, *words)

    def reset(self) -> None:
        """Ends all jobs and brings all nodes back."""
        self.run("scancel", f"--user={os.geteuid()}", check=False)
        for node in (f"n{i}" for i in range(1, NUM_NODES + 1)):
            if self.mode == "netns":
                self.cluster("node-net", node, "up")
            # SLURM asks a node that did not answer again only after minutes; one that starts registers at once.
            if "DOWN" in self.run("scontrol", "show", "node", node):
                self.run(CLUSTER_SH, "node-kill", node, check=False)
            self.cluster("node-start", node)
        deadline = time.monotonic() + 60
        while self.run("squeue", "--noheader") or self._num_idle() < NUM_NODES:
            assert time.monotonic() < deadline, self.run("sinfo", "--Node", "--long") + self.run("squeue")
            time.sleep(0.2)

    def _num_idle(self) -> int:
        return len(self.run("sinfo", "--noheader", "--Node", "--partition=main", "--states=idle").splitlines())
