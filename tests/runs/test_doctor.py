"""Every condition that the doctor knows, injected: each gives one line, none a traceback or a hang."""

import dataclasses
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from doctor_fakes import SHEET, layout, raising, wait_for_the_stuck

from amsp_jax.cli.doctor import devices, files, findings, machine, packages, requirements
from amsp_jax.cli.doctor.findings import Finding, Report, Status, examine, merge, ranges
from amsp_jax.errors import UserError
from amsp_jax.runtime.launch.processes import Processes

pytestmark = pytest.mark.usefixtures("clean_environment")

ROOT = Path(__file__).parents[2]
OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL


def statuses(found):
    return [finding.status for finding in found]


# Findings


def test_a_finding_is_one_line():
    assert str(findings.fail("jax", "is old", "update it")) == "FAIL  jax                     is old -> update it"
    assert str(findings.ok("python", "3.12")) == "ok    python                  3.12"


@pytest.mark.parametrize(
    ("error", "text", "fix"),
    [
        (OSError("two\nlines"), "OSError: two lines", "this check could not finish"),
        (UserError("a: wrong. Do b."), "a: wrong. Do b.", ""),
        (TimeoutError("nobody came"), "nobody came", "try again"),
        (
            jax.errors.JaxRuntimeError("INTERNAL: NCCL failed\n=== Source Location Trace: ===\na.cc:1"),
            "INTERNAL: NCCL failed",
            "try again",
        ),
    ],
)
def test_a_check_that_raises_is_a_line(error, text, fix):
    def look():
        yield findings.ok("first", "fine")
        raise error

    (first, second), finished = examine("second", look, limit_s=60, if_stuck="try again")
    assert not finished
    assert first.status == OK and second.check == "second"
    assert (second.status, second.found) == (FAIL, text) and second.fix.startswith(fix)


def test_a_check_that_hangs_is_a_line():
    release = threading.Event()

    def look():
        yield findings.ok("first", "fine")
        release.wait(60)

    (first, second), finished = examine("second", look, limit_s=0.2, if_stuck="kick it")
    assert first.status == OK and not finished
    assert second == Finding("second", FAIL, "no answer within 0.2 s", "kick it")
    assert findings.is_stuck()
    release.set()
    wait_for_the_stuck()


def reports(*each, check="x"):
    return [Report(i, f"host{i // 2}", tuple(own)) for i, own in enumerate(each)]


def test_processes_that_agree_are_one_line():
    fine = findings.ok("x", "fine")
    assert merge(reports(*[[fine]] * 4)) == [fine]
    bad = findings.fail("x", "bad", "mend")
    assert merge(reports(*[[bad]] * 4)) == [bad]


def test_numbers_may_differ_where_all_is_well():
    assert merge(reports([findings.ok("x", "1 GiB")], [findings.ok("x", "2 GiB")])) == [findings.ok("x", "1 GiB")]


def test_the_processes_that_differ_are_named():
    fine, bad = findings.ok("x", "fine"), findings.warn("x", "1 GiB", "more")
    worse = findings.fail("x", "0 GiB", "much more")
    also = dataclasses.replace(bad, found="2 GiB")
    lines = merge(reports([fine], [bad], [worse], [also]))
    assert [(line.status, line.found) for line in lines] == [
        (WARN, "processes 1, 3 on host0, host1: 1 GiB"),
        (FAIL, "process 2 on host1: 0 GiB"),
    ]


def test_what_must_be_alike_and_is_not():
    old, new = (findings.ok("x", text, alike=True) for text in ("1.0", "1.1"))
    (line,) = merge(reports([old], [old], [new], [old]))
    assert line.status == FAIL
    assert line.found == "processes 0-1, 3 on host0, host1: 1.0; process 2 on host1: 1.1"


def test_many_hosts_are_counted():
    assert (
        findings.who([Report(i, f"n{i}", ()) for i in range(6)]) == "processes 0-5 on n0, n1, n2, n3 and 2 more hosts"
    )


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1], "0-1"), ([5, 0, 1, 2], "0-2, 5"), ([0, 2, 4], "0, 2, 4")]
)
def test_ranges(numbers, text):
    assert ranges(numbers) == text


def test_summary():
    one_each = [findings.ok("a", ""), findings.warn("b", ""), findings.fail("c", "")]
    assert findings.summary(one_each) == "3 findings: 1 ok, 1 warn, 1 FAIL. Fix what FAILs first."
    assert findings.summary(one_each[:2]) == "2 findings: 1 ok, 1 warn, 0 FAIL"


# Packages


def test_this_installation_is_fine():
    assert statuses([requirements.check_imports(), *packages.check_packages()]) == [OK] * 4


def test_a_package_that_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    finding = requirements.check_imports(["numpy>=1", "orbax-checkpoint>=0.11", "no_such_package", "x; extra == 'y'"])
    assert finding.status == FAIL
    assert "orbax-checkpoint cannot be imported: ModuleNotFoundError: import of orbax.checkpoint" in finding.found
    assert "; no_such_package cannot be imported: ModuleNotFoundError: No module named" in finding.found
    assert finding.fix.endswith("--force-reinstall orbax-checkpoint no_such_package")
    assert requirements.check_imports(["numpy>=1"]) == findings.ok("imports", "1 packages can be imported")


def broken_module(folder, name):
    """A package that is installed, but lacks one of its own requirements: it comes first on the path."""
    (folder / f"{name}.py").write_text("import a_requirement_that_is_missing\n")


def required_modules():
    names = [re.match(r"[\w.-]+", text)[0] for text in requirements.project_requirements()[1]]
    return sorted({requirements._MODULES.get(name, name).split(".")[0] for name in names} | {"jaxlib"})


# The processes and devices start without these.
NOT_NEEDED_TO_START = {"orbax", "gin", "grain", "etils", "tokenizers", "matplotlib"}


@pytest.mark.slow
@pytest.mark.parametrize("module", required_modules())
def test_the_doctor_runs_where_a_package_is_broken(module, tmp_path):
    broken_module(tmp_path, module)
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "amsp_jax", "doctor", "--run-dir", str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stderr
    # jaxlib's own C++ prints one where numpy is broken.
    assert module == "numpy" or "Traceback" not in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FAIL  imports ")]
    assert " cannot be imported: " in line
    assert ("ok    psum within nodes" in done.stdout) == (module in NOT_NEEDED_TO_START)


@pytest.mark.parametrize(("running", "status"), [("3.10.4", FAIL), ("3.11.0", OK), ("3.13.1", OK)])
def test_python(running, status):
    assert packages.check_python(running, ">=3.11").status == status


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({"jax": "0.10.2", "optax": "0.2.6"}, "jax 0.10.2, optax 0.2.6"),
        ({"jax": "0.11.0.dev3", "optax": "0.10"}, "jax 0.11.0.dev3, optax 0.10"),
        ({"jax": "0.9.9", "optax": "0.2.6"}, "jax>=0.10.2, but 0.9.9 is installed"),
        ({"jax": "0.10.2"}, "optax>=0.2.6 is not installed"),
    ],
)
def test_minimum_versions(installed, found):
    wanted = ["jax>=0.10.2", "optax>=0.2.6", 'tensorboard>=2.16; extra == "tensorboard"', "x>9; python_version < '3.0'"]
    assert packages.check_minimums(wanted, installed).found == found


JAX = [
    "jaxlib<=0.10.2,>=0.10.1",
    'jaxlib==0.10.1; extra == "ci"',
    'jaxlib<=0.10.2,>=0.10.2; extra == "cuda12"',
    'jax-cuda12-plugin[with-cuda]<=0.10.2,>=0.10.2; extra == "cuda12"',
    'jax-rocm7-plugin==0.10.2.*; extra == "rocm7-local"',
]
PLUGIN = {"jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"jaxlib": "0.10.1"}, "jax 0.10.2, jaxlib 0.10.1"),
        ({"jaxlib": "0.10.0"}, "jax 0.10.2 wants jaxlib<=0.10.2,>=0.10.1, but 0.10.0 is installed"),
        ({"jaxlib": "0.10.2", **PLUGIN}, "jax 0.10.2, jax-cuda12-pjrt 0.10.2, jax-cuda12-plugin 0.10.2, jaxlib 0.10.2"),
        ({"jaxlib": "0.10.1", **PLUGIN}, "jax 0.10.2 wants jaxlib<=0.10.2,>=0.10.2, but 0.10.1 is installed"),
        (
            {"jaxlib": "0.10.2", **PLUGIN, "jax-cuda12-pjrt": "0.10.1"},
            "jax-cuda12-plugin 0.10.2 wants jax-cuda12-pjrt==0.10.2, but 0.10.1 is installed",
        ),
        (
            {"jaxlib": "0.10.2", "jax-rocm7-plugin": "0.9.1"},
            "jax 0.10.2 wants jax-rocm7-plugin==0.10.2.*, but 0.9.1 is installed",
        ),
    ],
)
def test_jax_jaxlib_and_plugins(versions, found):
    installed = {"jax": "0.10.2", **versions, "numpy": "2.0"}
    requires = {name: [] for name in versions} | {"jax": JAX}
    if "jax-cuda12-plugin" in versions:
        requires["jax-cuda12-plugin"] = ["jax-cuda12-pjrt==0.10.2"]
    finding = packages.check_jax(requires, installed)
    assert finding.found == found and (finding.status == FAIL) == ("wants" in found)


def test_requirements_without_a_checkout(tmp_path):
    python, texts = requirements.project_requirements(tmp_path / "pyproject.toml")
    assert python == ">=3.11" and any(text.startswith("jax>=") for text in texts)


# Machine


@pytest.mark.parametrize(
    ("address", "num_nodes", "status"),
    [
        ("10.0.0.7", 4, OK),
        ("127.0.1.1", 1, OK),
        ("127.0.1.1", 4, FAIL),
        ("::1", 4, FAIL),
        ("127.0.1.1", None, WARN),
        (None, 1, WARN),
        (None, 4, FAIL),
        (None, None, FAIL),
    ],
)
def test_host_name(address, num_nodes, status):
    finding = machine.check_host_name("node1", address, num_nodes)
    assert finding.status == status and bool(finding.fix) == (status != OK)


def test_coordinator():
    assert machine.check_coordinator("node1:61500", "10.0.0.1").status == OK
    assert machine.check_coordinator("node1:61500", None).status == FAIL


def test_names_are_looked_up():
    assert machine.resolve("localhost") in ("127.0.0.1", "::1")
    assert machine.resolve("no.such.host.invalid") is None


def fake_statvfs(monkeypatch, **values):
    full = {"f_frsize": 4096, "f_blocks": 2**30, "f_bavail": 2**30, "f_files": 1000, "f_favail": 1000, **values}
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**full))
    return SimpleNamespace(**full)


def test_shared_memory(monkeypatch, tmp_path):
    missing = machine.check_shared_memory(tmp_path / "shm")
    assert missing.status == WARN and "No such file" in missing.found
    fake_statvfs(monkeypatch, f_blocks=2**14, f_bavail=2**14)
    small = machine.check_shared_memory(tmp_path)
    assert small.status == WARN and "has 0.0625 of 0.0625 GiB free" in small.found
    fake_statvfs(monkeypatch)
    assert machine.check_shared_memory(tmp_path).status == OK


@pytest.mark.parametrize(
    ("processes", "checks"),
    [
        (Processes(), ["host name"]),
        (Processes(coordinator="localhost:1", count=2), ["host name", "coordinator"]),
    ],
)
def test_this_machine(processes, checks):
    found = list(machine.check_machine(processes, {}))
    assert [finding.check for finding in found] == [*checks, "shared memory"]
    assert FAIL not in statuses(found)


# Files


def test_a_folder_that_is_not_there_yet(tmp_path):
    found = list(files.check_folder("run folder", tmp_path / "runs" / "1"))
    assert [finding.check for finding in found] == ["run folder", "run folder: space"]
    assert found[0].status == OK and str(tmp_path) in found[0].found
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    (finding,) = files.check_folder("run folder", tmp_path / "file")
    assert finding.status == FAIL and "it is a file" in finding.found
    # Root may write everywhere but here.
    (finding,) = files.check_folder("run folder", Path("/proc/runs"))
    assert finding.status == FAIL and finding.found.startswith("/proc: ")


@pytest.mark.parametrize(
    ("values", "status", "found"),
    [
        ({}, OK, "4.1e+03 GiB free"),
        ({"f_bavail": 2**20}, WARN, "4 GiB free"),
        ({"f_bavail": 1}, FAIL, "GiB free"),
        ({"f_favail": 0}, FAIL, "no file entry (inode) of 1000"),
        ({"f_files": 0, "f_favail": 0}, OK, "GiB free"),
    ],
)
def test_space(monkeypatch, tmp_path, values, status, found):
    finding = files.check_space("disk", tmp_path, fake_statvfs(monkeypatch, **values))
    assert finding.status == status and found in finding.found


# Devices

ALONE = {"num_nodes": 1, "devices": tuple(range(4)), "process_count": 1}


@pytest.mark.parametrize(
    ("changes", "visible", "environ", "found"),
    [
        ({}, 4, {}, ["ok devices: 2 nodes x 4 NVIDIA H100 80GB HBM3, cuda, driver 580.1"]),
        ({}, 4, {"SLURM_GPUS_ON_NODE": "4", "SLURM_STEP_NUM_NODES": "2"}, ["ok devices"]),
        (
            {},
            4,
            {"SLURM_GPUS_ON_NODE": "8", "SLURM_STEP_NUM_NODES": "2"},
            ["ok devices", "warn device count: SLURM gave this node 8 GPUs (SLURM_GPUS_ON_NODE), the run uses 4"],
        ),
        (ALONE, 5, {}, ["ok devices", "FAIL device count: jax found 4 of 5 GPUs"]),
        (ALONE, 1, {}, ["ok devices"]),
        ({"device_kind": "Tesla T4"}, 4, {}, ["ok devices", "warn device kind: no data sheet of Tesla T4"]),
        ({"platform": "cpu", "device_kind": "cpu"}, 0, {}, ["ok devices: 2 nodes x 4 simulated on the CPU"]),
        ({"notes": ("X without effect.",)}, 4, {}, ["ok devices", "warn settings: X without effect."]),
    ],
)
def test_devices(changes, visible, environ, found):
    lines = list(devices.check_devices(layout(**changes), "580.1", visible, 4, environ))
    assert len(lines) == len(found)
    for line, start in zip(lines, found, strict=True):
        assert f"{line.status} {line.check}: {line.found}".startswith(start)


@pytest.mark.parametrize(
    ("changes", "problem", "status"),
    [
        ({}, None, OK),
        ({}, "device 3 does not give 60 GiB", FAIL),
        ({"memory_bytes": SHEET // 2}, None, WARN),
        ({"platform": "cpu", "device_kind": "cpu", "memory_bytes": 2**32}, None, OK),
        ({"platform": "cpu", "device_kind": "cpu", "memory_bytes": 2**28}, None, WARN),
    ],
)
def test_memory(monkeypatch, changes, problem, status):
    monkeypatch.setattr(devices, "allocation_problem", lambda num_bytes: problem)
    (finding,) = devices.check_memory(layout(**changes))
    assert finding.status == status and (problem or "GiB a device") in finding.found


def test_memory_is_allocated_on_each_device(monkeypatch):
    assert devices.allocation_problem(1 << 20) is None
    monkeypatch.setattr(
        jax, "jit", lambda *args, **kwargs: raising(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x"))
    )
    assert "does not give 0.000977 GiB: RESOURCE_EXHAUSTED: x" in devices.allocation_problem(1 << 20)


@pytest.mark.parametrize(
    ("grid", "names"),
    [
        ((1, 1), []),
        ((1, 8), ["psum within nodes"]),
        ((8, 1), ["psum across nodes"]),
        ((2, 4), ["psum within nodes", "psum across nodes", "psum over all"]),
    ],
)
def test_a_collective_on_every_axis(grid, names):
    here = layout(
        platform="cpu", num_nodes=grid[0], devices_per_node=grid[1], devices=tuple(jax.devices()[: grid[0] * grid[1]])
    )
    axes = devices.axes_to_check(here)
    assert list(axes) == names
    for name, own in axes.items():
        (finding,) = devices.check_psum(name, here, own)
        assert finding.status == OK and finding.found.startswith("right on every device, 4096 bytes")


def test_a_wrong_sum_names_the_device():
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "device"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("node", "device"))
    values = np.full((2, 4, 3), 7, np.int32)
    values[1, 2, 0] = 8
    total = jax.device_put(values, sharding)
    finding = devices.judge_psum("psum", total, np.full((2, 4), 7), "")
    assert finding.status == FAIL and finding.found == f"a wrong sum on {mesh.devices[1, 2]}"
