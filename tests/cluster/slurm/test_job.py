"""What the job scripts do at the end of train.py, with a stand-in for it that ends as the test says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import ROOT, Slurm

pytestmark = pytest.mark.slow

STAND_IN = """
import json, os, pathlib, signal, sys, time
start, process = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])
run_dir = pathlib.Path(next(a.split("=")[1] for a in reversed(sys.argv) if a.startswith("--gin.RUN_DIR=")))
act = json.loads(pathlib.Path("acts.json").read_text())[start]
signal.signal(signal.SIGTERM, lambda *_: os._exit(85))
if process == 0:
    print("ARGUMENTS", *sys.argv[1:], "SITE", os.environ.get("SITE"), flush=True)
    if "checkpoint" in act:
        (run_dir / "checkpoints" / str(act["checkpoint"])).mkdir(parents=True)
    pathlib.Path(f"began.{start}").touch()
while not pathlib.Path(f"began.{start}").exists():  # who ends first ends the other
    time.sleep(0.05)
end = act["ends"][process]
if end == "wait":
    pathlib.Path(f"waits.{start}.{process}").touch()
    time.sleep(60)
elif end < 0:
    os.kill(os.getpid(), -end)
sys.exit(end)
"""
DONE: dict[str, Any] = {"ends": [0, 0]}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with the stand-in."""
    shutil.copytree(ROOT / "configs/slurm", tmp_path / "project/configs/slurm")
    (tmp_path / "project/train.py").write_text(STAND_IN)
    return tmp_path / "project"


def submit(
    slurm: Slurm,
    project: Path,
    acts: list[dict[str, Any]],
    *words: str,
    script: str = "train.sbatch",
    options: Sequence[str] = (),
) -> int:
    (project / "acts.json").write_text(json.dumps(acts))
    return slurm.submit("--output=log", f"--chdir={project}", *options, project / "configs/slurm" / script, *words)


def starts(project: Path) -> int:
    return (project / "log").read_text().count("processes, start ")


@pytest.mark.parametrize(
    ("acts", "state", "num_starts", "said"),
    [
        ([{"ends": [2, "wait"]}], "FAILED", 1, "a mistake in the settings or the set-up"),
        ([{"ends": ["wait", 87]}], "FAILED", 1, "the numbers went bad"),
        (
            [{"ends": [1, 86]}, {"ends": [-9, 86]}, DONE],
            "COMPLETED",
            3,
            "requeued; there is no checkpoint, end 2 of at most 3 there",
        ),
        (
            [{"ends": [86, 1]}] * 4,
            "FAILED",
            4,
            "not requeued; there is no checkpoint, and 4 ends in a row brought no new one",
        ),
        ([{"ends": [1, 86], "checkpoint": i} for i in range(5)] + [DONE], "COMPLETED", 6, "end 1 of at most 3 there"),
    ],
    ids=["mistake", "bad numbers", "failures", "failures again and again", "failures with progress"],
)
def test_a_job_is_requeued_or_not(
    slurm: Slurm, project: Path, acts: list[dict[str, Any]], state: str, num_starts: int, said: str
) -> None:
    job = submit(slurm, project, acts)
    assert slurm.wait(job) == state, (project / "log").read_text()
    assert starts(project) == num_starts
    assert said in (project / "log").read_text()
    assert slurm.job(job)["Restarts"] == str(num_starts - 1)


def test_a_stopped_job_is_requeued_and_a_cancelled_one_is_not(slurm: Slurm, project: Path) -> None:
    job = submit(slurm, project, [{"ends": ["wait", "wait"]}] * 2)
    slurm.until(lambda: len(list(project.glob("waits.0.*"))) == 2)
    slurm.run("scancel", "--signal=TERM", job)
    slurm.until(lambda: len(list(project.glob("waits.1.*"))) == 2, job)
    assert "stopped as asked (code 85): requeued" in (project / "log").read_text()
    slurm.run("scancel", job)
    assert slurm.wait(job) == "CANCELLED"
    assert starts(project) == 2


def test_arguments_and_folders(slurm: Slurm, project: Path, tmp_path: Path) -> None:
    """Called from elsewhere, twice, the second time by a copy of the script that a user changed."""
    (project / "configs/slurm/site.sh").write_text("export SITE=ours\n")
    job = submit(slurm, project, [DONE], "configs/runs/llama_7b.gin", "--gin.STEPS=7", "--dry-run")
    assert slurm.wait(job) == "COMPLETED", (project / "log").read_text()
    expected = (
        f"--gin_file=configs/runs/llama_7b.gin --gin.STEPS=7 --dry-run --gin.RUN_DIR=runs/llama_7b-{job} SITE ours"
    )
    assert f"ARGUMENTS {expected}\n" in (project / "log").read_text()

    shutil.copy(project / "configs/slurm/train.sbatch", tmp_path / "my own.sbatch")
    words = ("--output=log", tmp_path / "my own.sbatch", "--gin_file=mine.gin", "--gin.RUN_DIR='runs/named'")
    slurm.wait(slurm.submit(*words, cwd=project))
    assert "ARGUMENTS --gin_file=mine.gin --gin.RUN_DIR='runs/named' SITE ours\n" in (project / "log").read_text()
    assert ": runs/named on n1,n2" in (project / "log").read_text().replace("n[1-2]", "n1,n2")


def test_frontier_has_what_train_has(slurm: Slurm, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On nodes that are smaller, and without modules."""
    monkeypatch.setitem(slurm.env, "BASH_FUNC_module%%", "() { echo MODULE $*; }")
    smaller = ("--partition=main", "--ntasks-per-node=1", "--cpus-per-task=2")
    acts = [{"ends": [1, 86]}, DONE]
    job = submit(slurm, project, acts, "configs/runs/gpt_22b.gin", script="frontier.sbatch", options=smaller)
    assert slurm.wait(job) == "COMPLETED", (project / "log").read_text()
    log = (project / "log").read_text()
    assert "MODULE load rocm/" in log and "requeued; there is no checkpoint, end 1 of at most 3 there" in log
    assert f"ARGUMENTS --gin_file=configs/runs/gpt_22b.gin --gin.RUN_DIR=runs/gpt_22b-{job} " in log
