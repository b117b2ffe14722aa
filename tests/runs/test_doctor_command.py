"""The doctor as a command, alone and between processes: one table, whatever happens to one of them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from doctor_fakes import layout, raising, wait_for_the_stuck

from amsp_jax.__main__ import parse_args
from amsp_jax.cli.commands import doctor as command
from amsp_jax.cli.doctor import cluster, findings, shared_folder
from amsp_jax.cli.doctor.findings import Status, merge
from amsp_jax.cli.doctor.key_value_store import KeyValueStore
from amsp_jax.errors import UserError

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).parents[2]
OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL


# Between processes


def test_a_process_alone_reads_what_it_put():
    store = KeyValueStore(0, 1)
    store.put("x", {"a": 1})
    store.wait_for_all("y", 1)
    assert store.get_all("x", 1) == {0: {"a": 1}}


def test_files_that_processes_share(tmp_path):
    path = tmp_path / "file"
    path.write_text("token")
    assert shared_folder.check_shared(path, "token", 0).status == OK
    assert shared_folder.check_shared(path, "other", 0).status == FAIL
    unseen = shared_folder.check_shared(tmp_path / "elsewhere" / "file", "token", 0.3)
    assert unseen.status == FAIL and "does not see process 0's file" in unseen.found


# The command


def run_here(*arguments):
    """The command in this process, which has eight devices."""
    args = parse_args(["doctor", "--simulated-nodes", "2", "--simulated-devices-per-node", "4", *arguments])
    code = 0
    try:
        command.run(args)
    except SystemExit as end:
        code = end.code
    return code


def test_all_is_well(capfd, tmp_path):
    assert run_here("--run-dir", str(tmp_path)) == 0
    *lines, last = capfd.readouterr().out.splitlines()
    assert all(line.startswith(("ok ", "warn ")) for line in lines)
    assert last.startswith(f"{len(lines)} findings: ") and last.endswith(" 0 FAIL")
    assert sum("psum" in line for line in lines) == 3


def test_json(capfd, tmp_path):
    (tmp_path / "file").touch()
    assert run_here("--json", "--run-dir", str(tmp_path / "file")) == 1
    said = json.loads(capfd.readouterr().out)
    bad = [finding for finding in said["findings"] if finding["status"] == "FAIL"]
    assert [finding["check"] for finding in bad] == ["run folder"], bad
    assert not said["ok"] and said["counts"]["FAIL"] == 1 and sum(said["counts"].values()) == len(said["findings"])
    assert bad[0]["fix"]


def test_devices_that_cannot_start(capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(cluster.launch, "setup", raising(RuntimeError("no\ndriver")))
    assert run_here("--run-dir", str(tmp_path)) == 1
    assert "FAIL  start                   RuntimeError: no driver -> check the driver" in capfd.readouterr().out


def test_a_job_without_srun(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert run_here("--run-dir", str(tmp_path)) == 1
    assert "FAIL  processes               SLURM_NTASKS=4, but this process is not" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeout", "0"], "argument --timeout: 0 is no number above 0"),
        (["--simulated-nodes", "x"], "x is no number above 0"),
        (["--process-id", "1"], "process_id=1 alone"),
        (["--coordinator", "h", "--num-processes", "2", "--process-id", "0"], "HOST:PORT"),
    ],
)
def test_mistakes_in_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        args = parse_args(["doctor", *arguments])
        command.run(args)


def test_a_collective_that_hangs_ends_the_checks_of_collectives(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(cluster, "check_psum", lambda name, layout, axes: release.wait(60))
    with contextlib.closing(cluster._try_collectives(layout(), 0.2)) as found:
        (only,) = found
    release.set()
    wait_for_the_stuck()
    assert only.check == "psum within nodes" and only.found == "no answer within 0.2 s" and "NCCL_DEBUG" in only.fix


def test_a_process_that_does_not_report():
    fine = ["a", [["x", "ok", "fine", "", False]]]
    (missing,) = cluster._missing({0: fine, 2: fine}, 4)
    assert missing.status == FAIL and missing.found == "no report from 1, 3 of 4"
    assert merge(cluster._reports({0: fine, 2: fine})) == [findings.ok("x", "fine")]


def start(index, address, *arguments, patch=""):
    code = "import sys, time\nfrom amsp_jax.cli.doctor import cluster\nfrom amsp_jax.runtime import launch\n"
    code += f"from amsp_jax.__main__ import main\n{patch}\nlaunch.end_process(main(sys.argv[1:]))"
    place = ["--coordinator", address, "--num-processes", "2", "--process-id", str(index)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, "doctor", *place, *arguments]
    return subprocess.Popen(command, env=environ, stdout=-1, stderr=-1, text=True)


def run_two(*arguments, patch="", first=""):
    """Output and exit code of two processes; `patch` is a statement that the second runs first, `first` the first."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    children = [start(0, address, *arguments, patch=first), start(1, address, *arguments, patch=patch)]
    try:
        outs = [child.communicate(timeout=120) for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, *out) for child, out in zip(children, outs, strict=True)]


def test_two_processes_print_one_table(tmp_path):
    (code, out, err), (other_code, other_out, _) = run_two("--run-dir", str(tmp_path))
    assert code == other_code == 0, out + err
    assert other_out == ""
    for name in ("coordinator", "shared run folder", "psum within nodes", "psum across nodes"):
        assert f"\nok    {name} " in out
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "arguments", "found"),
    [
        # Not the first axis, which this process could sum alone.
        (
            "real = cluster.check_psum; "
            "cluster.check_psum = lambda name, *rest: time.sleep(60) if 'across' in name else real(name, *rest)",
            ["--timeout", "5"],
            "FAIL  psum across nodes       no answer within 5 s",
        ),
        (
            "from amsp_jax.cli.doctor import packages; packages.platform.python_version = lambda: '3.99.1'",
            [],
            "process 1 on {host}: 3.99.1 -> use the same in every process",
        ),
        (
            "from amsp_jax.cli.doctor import shared_folder as shared; shared.check_shared.__code__ = "
            "(lambda path, token, timeout_s: shared.fail('shared run folder', 'not seen', 'share')).__code__; "
            "shared.check_shared.__globals__['shared'] = shared",
            [],
            "FAIL  shared run folder       process 1 on {host}: not seen -> share",
        ),
    ],
)
def test_two_processes_of_which_one_is_ill(tmp_path, patch, arguments, found):
    (code, out, err), (other_code, other_out, _) = run_two("--run-dir", str(tmp_path), *arguments, patch=patch)
    assert code == other_code == 1, out + err
    assert found.format(host=socket.gethostname()) in out and other_out == ""


@pytest.mark.slow
def test_a_process_that_dies_is_named(tmp_path):
    (code, out, err), (other_code, _, _) = run_two(
        *("--run-dir", str(tmp_path), "--timeout", "5"),
        patch="import os; cluster.check_memory = lambda _: os._exit(9)",
        first="cluster._REPORT_S = cluster._SHARED_S = 10.0",
    )
    assert (code, other_code) == (1, 9), err
    assert "FAIL  processes               no report from 1 of 2 -> " in out
    assert "FAIL  shared run folder " in out
