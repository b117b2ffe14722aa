"""A job that meets one fault after another ends with the losses, to the bit, of one that meets none.

`python -m pytest -n0 -m slow tests/cluster/slurm/test_faults.py --fault-table=docs/reliability.md` writes the table
there.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_table import Fault
from slurm_cluster import NUM_NODES, ROOT, TINY_GIN, Slurm

from amsp_jax.run.metrics import read_rows

pytestmark = pytest.mark.slow

NUM_STEPS, CHECKPOINT_EVERY = 30, 5
PROCESS_FAULTS = ("kill -9 of a process", "exception in a process", "SIGSTOP of a process", "a process hangs")
# What the watch and the job script say of a fault.
SAID = r"^process \d+ on .*|^stopped .*|(?<=: )(?:failed|stopped) .*: requeued; .*$"
COMPARED = ("step", "loss", "grad_norm", "learning_rate", "num_tokens")


def flags(corpus: Path) -> list[str]:
    return [f"--gin.DATA={corpus}", f"--gin.STEPS={NUM_STEPS}", f"--gin.CHECKPOINT_EVERY={CHECKPOINT_EVERY}"]


@pytest.fixture(scope="module")
def uninterrupted(slurm_session: Slurm, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
    command = ("python", ROOT / "train.py", f"--gin_file={TINY_GIN}", *flags(corpus), f"--gin.RUN_DIR={run_dir}")
    slurm_session.srun(*command, num_nodes=2, per_node=1)
    return numbers(run_dir)


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    rows = [{name: row[name] for name in COMPARED} for row in read_rows(run_dir / "metrics.jsonl")]
    return rows + read_rows(run_dir / "validation.jsonl")


@dataclasses.dataclass
class Job:
    """A batch job by the user's own script, whose `python` is faulty.py."""

    slurm: Slurm
    folder: Path
    number: int = 0

    def submit(self, faults: list[dict[str, Any]], corpus: Path, *options: str) -> None:
        faults = [{**fault, "saved": fault["step"] - fault["step"] % CHECKPOINT_EVERY} for fault in faults]
        (self.folder / "faults.json").write_text(json.dumps(faults))
        shim = self.folder / "bin/python"
        shim.parent.mkdir()
        # Called as `python -u train.py ...`.
        faulty = f"{sys.executable} -u {Path(__file__).with_name('faulty.py')} {self.folder}"
        shim.write_text(f'#!/bin/sh\nshift\nexec {faulty} "$@"\n')
        shim.chmod(0o755)
        before = (f"--output={self.folder / 'log'}", f"--chdir={self.folder}", *options)
        path = f"--export=ALL,PATH={shim.parent}:{self.slurm.env['PATH']}"
        script = ROOT / "configs/slurm/train.sbatch"
        self.number = self.slurm.submit(*before, path, script, TINY_GIN, *flags(corpus), "--gin.RUN_DIR=run")

    @property
    def log(self) -> str:
        file = self.folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def nodes(self) -> list[str]:
        return self.slurm.run("scontrol", "show", "hostnames", self.slurm.job(self.number)["NodeList"]).split()

    def steps(self) -> list[dict[str, Any]]:
        file = self.folder / "steps.jsonl"
        text = file.read_text() if file.exists() else ""
        # The last line may be half written.
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def say(self) -> str:
        return f"{self.log[-6000:]}\n{self.slurm.job(self.number)}"

    def survive(self, name: str, step: int, happens: Callable[[], Any] | None = None) -> Fault:
        """Waits for the fault at `step`, or makes it, and for the training to go on in the job's next start."""
        seen = len(self.log)
        self.slurm.until((self.folder / f"at.{step}").exists, self.number)
        if happens is not None:
            happens()
        begun, restarts = time.time(), self._restarts()
        start = max(row["start"] for row in self.steps())
        (self.folder / f"go.{step}").touch()
        self.slurm.until(lambda: self._has_ended(restarts), self.number)
        ended = time.time()
        self.slurm.until(lambda: any(row["start"] > start for row in self.steps()), self.number)
        before = [row for row in self.steps() if row["start"] == start]
        after = next(row for row in self.steps() if row["start"] > start)
        said = list(dict.fromkeys(re.findall(SAID, self.log[seen:], re.MULTILINE)))
        return Fault(
            name=name,
            said=said,
            end_s=ended - begun,
            continue_s=after["time"] - begun,
            steps_lost=before[-1]["step"] - after["step"] + 1,
        )

    def _restarts(self) -> str:
        return self.slurm.job(self.number)["Restarts"]

    def _has_ended(self, restarts: str) -> bool:
        job = self.slurm.job(self.number)
        assert job["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"), self.say()
        return job["JobState"] != "RUNNING" or job["Restarts"] != restarts


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path) -> Job:
    return Job(slurm, tmp_path)


def test_a_process_fails(
    job: Job, corpus: Path, uninterrupted: list[dict[str, Any]], fault_table: list[Fault], tmp_path: Path
) -> None:
    faults = [("kill", 7, 0), ("raise", 12, 1), ("stop", 17, 1), ("hang", 22, 1)]
    job.submit([{"what": what, "step": step, "process": process} for what, step, process in faults], corpus)
    for name, (_, step, process) in zip(PROCESS_FAULTS, faults, strict=True):
        fault = job.survive(name, step)
        fault_table.append(fault)
        # Process 0 may have dispatched one more.
        assert fault.steps_lost in (step % CHECKPOINT_EVERY, step % CHECKPOINT_EVERY + 1)
        assert any(f"process {process}" in line for line in fault.said), job.say()
    assert job.slurm.wait(job.number) == "COMPLETED", job.say()
    assert numbers(tmp_path / "run") == uninterrupted


def test_the_cluster_fails(
    job: Job, corpus: Path, uninterrupted: list[dict[str, Any]], fault_table: list[Fault], tmp_path: Path
) -> None:
    slurm = job.slurm
    job.submit([{"what": "pause", "step": step} for step in (7, 12, 17, 22)], corpus, "--partition=low")

    def terminate() -> None:
        slurm.run("scancel", "--signal=TERM", job.number)
        time.sleep(1)

    def preempt() -> None:
        slurm.submit("--partition=high", f"--nodes={NUM_NODES}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        slurm.until(lambda: slurm.job(job.number).get("PreemptTime", "None") != "None")
        time.sleep(1)

    lost_nodes = []

    def cut() -> None:
        lost_nodes.append(job.nodes()[-1])
        slurm.cluster("node-net", lost_nodes[-1], "down")

    def kill() -> None:
        lost_nodes.append(slurm.job(job.number)["BatchHost"])
        slurm.cluster("node-kill", lost_nodes[-1])

    for step, name, happens, lost in (
        (7, "SIGTERM, as before a time limit", terminate, (0,)),
        (12, "preemption", preempt, (0,)),
        (17, "network of a node cut", cut, (2, 3)),
        (22, "node of process 0 and of the job script lost", kill, (2, 3)),
    ):
        fault = job.survive(name, step, happens)
        fault_table.append(fault)
        assert fault.steps_lost in lost, job.say()
        assert not {*lost_nodes} & {*job.nodes()}
    assert slurm.wait(job.number) == "COMPLETED", job.say()
    assert numbers(tmp_path / "run") == uninterrupted
