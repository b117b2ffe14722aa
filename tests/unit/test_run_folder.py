"""The folder of a run: one command at a time, nothing written too early, nothing lost in a race."""

import contextlib
from pathlib import Path

import pytest

from amsp_jax.cli import settings as cli
from amsp_jax.errors import UserError
from amsp_jax.run import run_folder
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.run_folder import find_run_folder


def config(run_dir: str | None) -> TrainConfig:
    bindings = [] if run_dir is None else [f"RUN_DIR = {run_dir!r}"]
    return cli.load_config([], bindings)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_looking_writes_nothing() -> None:
    assert not find_run_folder(config("a/b")).is_same_run
    assert find_run_folder(config(None)).path == Path("runs/0001")
    assert list(Path().iterdir()) == []


def test_a_second_command_is_kept_out_until_the_first_ends() -> None:
    with find_run_folder(config("run")).claimed(config("run")) as folder:
        assert folder.path == Path("run")
        with pytest.raises(UserError, match="run_dir=run is in use: another command trains there"):
            find_run_folder(config("run"))
    again = find_run_folder(config("run"))
    assert again.is_same_run
    with again.claimed(config("run")), pytest.raises(UserError, match="in use"), again.claimed(config("run")):
        pass


def test_two_commands_that_start_at_once() -> None:
    first, second = find_run_folder(config("run")), find_run_folder(config("run"))
    with first.claimed(config("run")):
        before = sorted(Path().rglob("*"))
        with pytest.raises(UserError, match="in use"), second.claimed(config("run")):
            pass
    with pytest.raises(UserError, match="another command began a run there"), second.claimed(config("run")):
        pass
    assert sorted(Path().rglob("*")) == before


def test_a_requeued_job_waits_for_the_lock_of_a_lost_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with contextlib.ExitStack() as lost:
        lost.enter_context(find_run_folder(config("run")).claimed(config("run")))
        monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: lost.close())
        assert find_run_folder(config("run")).is_same_run


def test_two_numbered_runs_that_start_at_once() -> None:
    first, second = find_run_folder(config(None)), find_run_folder(config(None))
    with first.claimed(config(None)) as one, second.claimed(config(None)) as other:
        assert (one.path, other.path) == (Path("runs/0001"), Path("runs/0002"))


def test_a_folder_that_cannot_be_made() -> None:
    Path("file").write_text("")
    for run_dir, reason in (("file", "is a file"), ("file/run", "Not a directory"), ("/proc/run", "cannot be written")):
        with pytest.raises(UserError, match=reason):
            find_run_folder(config(run_dir))


def test_a_name_that_cannot_be() -> None:
    with pytest.raises(UserError, match="File name too long"):
        find_run_folder(config("x" * 300))


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_run_folder(config("~/run")).path == tmp_path / "run"


def test_what_happens_inside_is_not_the_folders_fault() -> None:
    with pytest.raises(OSError, match="full"), find_run_folder(config("run")).claimed(config("run")):
        raise OSError(28, "disk full")
