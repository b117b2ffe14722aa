"""Jobs that cannot start say why within seconds, and are not requeued; a dry run prints the plan and ends."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault_table import Fault
from slurm_cluster import ROOT, TINY_GIN, Slurm

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "configs/slurm/train.sbatch"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        (
            "coordinator that does not resolve",
            [SCRIPT, TINY_GIN, "--coordinator=nowhere.invalid:61500"],
            "the name nowhere.invalid does not resolve on n1",
        ),
        (
            "loopback coordinator",
            [SCRIPT, TINY_GIN, "--coordinator=127.0.0.1:61500"],
            "coordinator 127.0.0.1:61500 is a loopback address, which the other 1 of 2 nodes cannot reach",
        ),
        (
            "another number of processes than SLURM's",
            [SCRIPT, TINY_GIN, "--num_processes=3"],
            "num_processes=3 alone",
        ),
        (
            "`python train.py` without srun",
            ["--nodes=2", "--ntasks-per-node=1", f"--wrap=python {ROOT / 'train.py'} --gin_file={TINY_GIN}"],
            "SLURM_NTASKS=2, but this process is not a task of srun and would be alone",
        ),
    ],
    ids=["unresolvable", "loopback", "other number", "no srun"],
)
def test_a_job_that_cannot_start_says_why(
    slurm: Slurm, corpus: Path, tmp_path: Path, fault_table: list[Fault], name: str, words: Sequence[object], said: str
) -> None:
    begun = time.time()
    job = slurm.submit("--output=log", *words, cwd=tmp_path)
    assert slurm.wait(job) == "FAILED"
    log = (tmp_path / "log").read_text(errors="replace")
    assert said in log
    assert (slurm.job(job)["ExitCode"], slurm.job(job)["Restarts"]) == ("2:0", "0"), log
    errors = list(dict.fromkeys(re.findall(r"^error: .*", log, re.MULTILINE)))
    fault_table.append(Fault(name=name, said=errors, end_s=time.time() - begun))


def test_a_dry_run_prints_the_layout_and_the_plan(slurm: Slurm, corpus: Path, tmp_path: Path) -> None:
    job = slurm.submit("--output=log", SCRIPT, TINY_GIN, f"--gin.DATA={corpus}", "--dry-run", cwd=tmp_path)
    assert slurm.wait(job) == "COMPLETED"
    log = (tmp_path / "log").read_text(errors="replace")
    assert "dry run: it would train steps 1 to 20" in log and "degrees   params=1x1 grads=2x1 opt_state=2x2" in log
    assert not (tmp_path / "runs").exists()
