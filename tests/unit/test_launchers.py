"""Other launchers than SLURM, and variables that are missing, empty or something else: one line, never a lone run."""

import os
import pwd

import pytest

from amsp_jax.cli.commands.tune import _nodes_of_job
from amsp_jax.errors import UserError
from amsp_jax.run.config import TrainConfig
from amsp_jax.runtime.launch.grid import MOST_SIMULATED, simulated_share
from amsp_jax.runtime.launch.processes import _OTHER_LAUNCHERS, _RANKS_ALONE, Processes, find_processes
from amsp_jax.user_cache import user_cache

STEP = {
    "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "1",
    "SLURM_NODEID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[007-008]",
}  # fmt: skip


@pytest.mark.parametrize(("size", "rank"), _OTHER_LAUNCHERS.items())
def test_processes_of_another_launcher_are_no_lone_runs(size: str, rank: str) -> None:
    environ = {size: "2", rank: "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    with pytest.raises(UserError, match=rf"{size}=2: a launcher .*_processes \${size} and --process_id \${rank};"):
        find_processes(None, None, None, environ)
    assert find_processes(None, 1, None, environ) == Processes()
    assert find_processes("node1:61500", 2, 1, environ).index == 1
    assert find_processes(None, None, None, {size: "1", rank: "0"}) == Processes()


@pytest.mark.parametrize("rank", _RANKS_ALONE)
def test_a_rank_above_0_shows_several_processes(rank: str) -> None:
    with pytest.raises(UserError, match=rf"{rank}=1: a launcher .* --num_processes NUMBER and --process_id \${rank};"):
        find_processes(None, None, None, {rank: "1"})
    assert find_processes(None, None, None, {rank: "0"}) == Processes()


@pytest.mark.parametrize("value", [None, "", " ", "x", "-1", "1(x2)", "\u0663"])
@pytest.mark.parametrize("name", STEP)
def test_a_variable_of_slurm_may_hold_anything(name: str, value: str | None) -> None:
    environ = {key: text for key, text in STEP.items() if key != name} | ({} if value is None else {name: value})
    try:
        found = find_processes(None, None, None, environ)
    except UserError as error:
        assert name in str(error) or "SLURM_" in str(error)
    else:
        # What is missing has a default, or is not asked for.
        assert found == Processes() or found.count == 6


@pytest.mark.parametrize("name", [*_OTHER_LAUNCHERS, *_RANKS_ALONE])
@pytest.mark.parametrize("value", ["", "two"])
def test_a_variable_of_a_launcher_may_hold_anything(name: str, value: str) -> None:
    if value:
        with pytest.raises(UserError, match=f"{name}='two' is no number"):
            find_processes(None, None, None, {name: value})
    else:
        assert find_processes(None, None, None, {name: value}) == Processes()


def test_more_simulated_devices_than_a_host_runs() -> None:
    assert simulated_share((MOST_SIMULATED // 8, 8), 1) == MOST_SIMULATED
    with pytest.raises(UserError, match=r"2,000 simulated devices, more than the 1,024"):
        simulated_share((2000, 1), 1)
    with pytest.raises(UserError, match=r"2,000 simulated devices, more than the 1,024"):
        TrainConfig(simulated_nodes=2000)


def test_the_cache_of_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for home in (None, ""):
        monkeypatch.setenv("HOME", home) if home is not None else monkeypatch.delenv("HOME", raising=False)
        with pytest.raises(UserError, match=f"user {os.getuid()} has no home folder.* XDG_CACHE_HOME"):
            user_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert str(user_cache()) == "/some/where/amsp_jax"


def test_tune_reads_the_nodes_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "")
    with pytest.raises(UserError, match="SLURM_JOB_NUM_NODES=''"):
        _nodes_of_job()
