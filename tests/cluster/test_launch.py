"""Platform detection, XLA flags, and processes that find one another or say why not."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap
import threading

import jax
import pytest

from amsp_jax.errors import UserError
from amsp_jax.runtime.launch import environment, rendezvous, setup
from amsp_jax.runtime.launch.accelerator import count_gpus, find_platform
from amsp_jax.runtime.launch.grid import real_grid, share_gpus
from amsp_jax.runtime.launch.processes import Processes, find_processes
from amsp_jax.runtime.launch.program_cache import keep_programs
from amsp_jax.runtime.launch.provenance import _git_commit
from amsp_jax.runtime.launch.rendezvous import Facts, meet
from amsp_jax.runtime.watchdog.messages import allow_connections

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    """Answers about XLA flags do not come from, or go to, the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


# Platform


def machine(tmp_path, nvidia=0, amd=0):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    for i in range(nvidia):
        (tmp_path / "dev" / f"nvidia{i}").touch()
    if amd:
        (tmp_path / "dev" / "kfd").touch()
    # The driver's first node is the CPU.
    for i in range(amd + 1):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(i)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count 8\nsimd_count {440 if i else 0}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("asked", "gpus", "plugins", "platform"),
    [
        ("", {}, [], "cpu"),
        ("", {"nvidia": 4}, ["jax_plugins.xla_cuda12"], "cuda"),
        ("", {"amd": 8}, ["jax_rocm7_plugin"], "rocm"),
        ("", {}, ["jax_plugins.xla_cuda12"], "cpu"),
        ("", {"nvidia": 4}, [], "cpu"),
        ("cpu", {"nvidia": 4}, ["jax_plugins.xla_cuda12"], "cpu"),
        ("cuda,cpu", {}, [], "cuda"),
        ("gpu", {"amd": 1}, [], "rocm"),
        ("gpu", {"nvidia": 1}, [], "cuda"),
    ],
)
def test_platform(tmp_path, monkeypatch, asked, gpus, plugins, platform):
    monkeypatch.setattr(
        "amsp_jax.runtime.launch.accelerator._has_plugin", lambda wanted: any(wanted in plugin for plugin in plugins)
    )
    found, notes = find_platform(asked, {}, machine(tmp_path, **gpus))
    assert found == platform
    assert bool(notes) == (platform == "cpu" and bool(gpus) and not plugins)


def test_an_unknown_platform_is_named():
    with pytest.raises(UserError, match="JAX_PLATFORMS=tpu"):
        find_platform("tpu")


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,2"}, 1),
    ],
)
def test_visible_gpus(tmp_path, variables, count):
    assert count_gpus("cuda", variables, machine(tmp_path, nvidia=4)) == count


# Processes

SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_ID": "1",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008,010],login1",
    "SLURM_PROCID": "5",
    "SLURM_NODEID": "1",
}


def test_slurm():
    assert find_processes(None, None, None, SLURM) == Processes(
        coordinator=f"gpu007:{61440 + 5061 % 4096}", count=6, index=5, node="1"
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("node1", "node1"), ("a1,b2", "a1"), ("n[3-5]", "n3"), ("n[03,07-9]", "n03"), ("a-b[1-2]", "a-b1")],
)
def test_first_host_of_a_node_list(nodes, host):
    processes = find_processes(None, None, None, {**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert processes.coordinator.split(":")[0] == host


def test_process_0_of_an_arbitrary_distribution_is_on_the_first_host_of_the_file(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("gpu010\ngpu007\n")
    environ = {**SLURM, "SLURM_DISTRIBUTION": "arbitrary", "SLURM_HOSTFILE": str(hosts)}
    assert find_processes(None, None, None, environ).coordinator.startswith("gpu010:")


def test_alone():
    assert find_processes(None, None, None, {}) == Processes()
    assert find_processes(None, 1, None, SLURM) == Processes()
    assert find_processes("node1:123", 6, 1, SLURM).coordinator == "node1:123"
    assert find_processes("node1:123", 2, 1, {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}).count == 2


@pytest.mark.parametrize(
    ("settings", "environ", "message"),
    [
        ((None, None, None), {"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4, but this process is not a task of srun"),
        ((None, None, None), {"SLURM_JOB_NUM_NODES": "2"}, "SLURM_JOB_NUM_NODES=2"),
        ((None, None, None), {**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, "SLURM_NTASKS=6, but this step has .*=1"),
        ((None, None, None), {**SLURM, "SLURM_DISTRIBUTION": "arbitrary"}, "SLURM_DISTRIBUTION=arbitrary"),
        ((None, None, None), {**SLURM, "SLURM_HET_SIZE": "2"}, "SLURM_HET_SIZE=2: process 0 may be on any node"),
        (("node1:123", 5, 1), SLURM, "num_processes=5, but srun started SLURM_STEP_NUM_TASKS=6"),
        (("localhost:1", None, None), SLURM, "loopback address, which the other 1 of 2 nodes"),
        (("h:1", 2, None), {}, "coordinator=h:1, num_processes=2 alone"),
        ((None, 2, None), SLURM, "num_processes=2 alone"),
        (("h", 2, 1), {}, "HOST:PORT"),
        (("h:1", 2, 2), {}, "process_id=2 with num_processes=2"),
    ],
)
def test_what_would_be_separate_runs_is_an_error(settings, environ, message):
    with pytest.raises(UserError, match=message):
        find_processes(*settings, environ)


def facts(index, count=2, node="a", num_devices=4, gpus="", **settings):
    return Facts(
        index=index,
        count=count,
        host=f"host-{node}",
        node=node,
        loopback=False,
        num_devices=num_devices,
        gpus=gpus,
        memory_bytes=1,
        settings=settings,
    )


@pytest.mark.parametrize(
    ("nodes", "gpus", "visible", "ids"),
    [
        ("a", [""], 4, [None]),
        ("ab", ["", ""], 4, [None, None]),
        ("aaaa", [""] * 4, 4, [[0], [1], [2], [3]]),
        ("aabb", [""] * 4, 4, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ("aa", ["CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"], 2, [None, None]),
    ],
)
def test_processes_of_a_node_share_the_gpus_that_they_see(nodes, gpus, visible, ids):
    everyone = [
        facts(i, node=node, gpus=seen, num_devices=visible)
        for i, (node, seen) in enumerate(zip(nodes, gpus, strict=True))
    ]
    found = [share_gpus(everyone, i) for i in range(len(nodes))]
    assert [own for own, _ in found] == ids
    assert [f.num_devices for f in found[0][1]] == [len(own or range(visible)) for own in ids]


def test_gpus_that_do_not_divide_over_processes():
    with pytest.raises(UserError, match="4 visible GPUs do not divide over the 3 processes on host-a"):
        share_gpus([facts(i) for i in range(3)], 0)


@pytest.mark.parametrize("bound", [{"SLURM_GPUS_PER_TASK": "1"}, {"SLURM_TRES_PER_TASK": "gres/gpu:2"}])
def test_gpus_that_slurm_bound_are_not_shared(bound):
    assert not find_processes(None, None, None, SLURM).gpus_bound
    assert find_processes(None, None, None, {**SLURM, **bound}).gpus_bound


@pytest.mark.parametrize(
    ("nodes", "devices_per_node", "grid"),
    [("a", None, (1, 4)), ("aabb", None, (2, 8)), ("abab", None, (2, 8)), ("a", 2, (2, 2)), ("ab", 1, (8, 1))],
)
def test_real_devices_in_nodes(nodes, devices_per_node, grid):
    found = real_grid([facts(i, node=node) for i, node in enumerate(nodes)], devices_per_node)
    assert (found.num_nodes, found.devices_per_node) == grid
    assert found.node_of_process == tuple("ab".index(node) for node in nodes)


def test_node_sizes_that_contradict_the_devices():
    with pytest.raises(UserError, match="DEVICES_PER_NODE=3 does not divide the 4 devices"):
        real_grid([facts(0)], 3)
    with pytest.raises(UserError, match="different numbers of devices: host-a 4, host-b 2"):
        real_grid([facts(0), facts(1, node="b", num_devices=2)], None)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def gather(*everyone, timeout_s=5.0):
    """What `meet` returns or raises in each of several threads."""
    address, results = f"127.0.0.1:{free_port()}", {}

    def run(key, mine):
        try:
            results[key] = meet(address, mine, timeout_s)
        except UserError as error:
            results[key] = str(error)

    threads = [threading.Thread(target=run, args=item) for item in enumerate(everyone)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[key] for key in range(len(everyone))]


def test_processes_learn_of_one_another():
    everyone = [facts(i, count=3, platform="cpu") for i in range(3)]
    assert gather(*everyone) == [everyone] * 3


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (facts(1, count=3, grid=4), "num_processes is 2 in process 0 on host-a and 3 in process 1"),
        (facts(1, grid=8), "grid=4 in process 0 on host-a and grid=8 in process 1"),
        (facts(1, grid=4, SEED="1"), "SEED=None in process 0 on host-a and SEED=1 in process 1"),
    ],
)
def test_processes_that_disagree_all_say_so(second, message):
    for result in gather(facts(0, grid=4), second):
        assert message in result


def test_two_of_one_number():
    results = gather(facts(0, count=3), facts(1, count=3), facts(1, count=3, node="b"))
    assert all("two processes have process_id=1" in result for result in results)


def test_a_missing_process_is_named():
    first, second = gather(facts(0, count=3), facts(1, count=3), timeout_s=0.5)
    assert first == second and "2 of 3 processes came within 0.5 s; missing: 2." in first
    assert "127.0.0.1 is a loopback address: only processes on host-a reach it" in first
    (alone,) = gather(facts(1), timeout_s=0.3)
    assert "found no process 0" in alone


@pytest.mark.parametrize("index", [0, 1])
def test_a_coordinator_that_does_not_resolve_is_named(index):
    with pytest.raises(UserError, match="coordinator no.such.host.invalid:1: the name .* does not resolve on host-a"):
        meet("no.such.host.invalid:1", facts(index), 0.2)


def test_more_processes_than_files_may_be_open(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 4096))
    with pytest.raises(UserError, match="process 0 needs 16896 open files for 8192 processes, but may have 4096"):
        allow_connections(8192)
    limits = []
    monkeypatch.setattr("resource.setrlimit", lambda _, pair: limits.append(pair))
    allow_connections(8)
    assert limits == [(528, 4096)]


# Setup

CHILD = """
import sys
import jax
import numpy as np
from amsp_jax.errors import UserError
from amsp_jax.runtime.launch import end_process, setup
import os
os.environ.pop("JAX_PLATFORMS", None)
jax.config.update("jax_platforms", None)
try:
    layout = setup(simulated_nodes=2, simulated_devices_per_node=2, **SETTINGS)
except UserError as error:
    print(error, file=sys.stderr)
    end_process(2)
"""


def start(settings: dict, code: str) -> subprocess.Popen:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    source = CHILD.replace("SETTINGS", repr(settings)) + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-c", source], env=environ, stdout=-1, stderr=-1, text=True)


def start_two(code: str) -> list[subprocess.Popen]:
    address = f"127.0.0.1:{free_port()}"
    return [start({"coordinator": address, "num_processes": 2, "process_id": i}, code) for i in range(2)]


def test_setup_in_this_process_takes_the_devices_that_are_there(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    jax.devices()
    layout = setup(simulated_nodes=2, simulated_devices_per_node=4, devices_per_node=4)
    assert (layout.platform, layout.num_nodes, layout.devices_per_node) == ("cpu", 2, 4)
    assert layout.devices == tuple(jax.devices()) and layout.memory_bytes > 0
    assert layout.notes == ("DEVICES_PER_NODE=4 without effect: no accelerator is in use.",)
    assert layout.cluster().peak_flops is None and layout.cluster().num_devices == 8
    with pytest.raises(UserError, match="4 simulated devices are asked for .* runs with 8"):
        setup(simulated_nodes=2, simulated_devices_per_node=2)
    with pytest.raises(UserError, match="SIMULATED_NODES=0"):
        setup(simulated_nodes=0)


def test_a_gpu_that_is_not_there_is_an_error_not_the_cpu():
    code = CHILD.replace('jax.config.update("jax_platforms", None)', 'jax.config.update("jax_platforms", "cuda,cpu")')
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code.replace("SETTINGS", "{}")]
    child = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert child.returncode == 2, child.stderr
    assert "jax cannot start on cuda" in child.stderr.splitlines()[-1]


def test_environment_is_json():
    found = json.loads(json.dumps(environment()))
    assert found["jax"] == jax.__version__ and found["num_devices"] == 8 and found["driver"] is None


def test_two_processes_add_up():
    children = start_two(
        """
        mesh = jax.sharding.Mesh(np.array(layout.devices).reshape(2, 2), ("node", "device"))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("node", "device")))
        values = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
        x = jax.make_array_from_callback((4,), sharding, lambda index: values[index])
        total = jax.shard_map(lambda x: jax.lax.psum(x, ("node", "device")), mesh=mesh, in_specs=sharding.spec,
                              out_specs=jax.sharding.PartitionSpec())(x)
        print(layout.process_index, layout.process_count, len(layout.devices), float(total.addressable_data(0)[0]))
        """
    )
    results = [child.communicate(timeout=60) for child in children]
    for index, (child, (out, err)) in enumerate(zip(children, results, strict=True)):
        assert child.returncode == 0, err
        assert out.splitlines()[-1] == f"{index} 2 4 15.0"


def test_an_exception_in_one_process_ends_both_at_once():
    children = start_two(
        """
        import time
        if layout.process_index == 1:
            raise RuntimeError("broken on purpose")
        time.sleep(600)
        """
    )
    try:
        _, err = children[1].communicate(timeout=120)
        assert children[1].returncode == 1 and err.splitlines()[-1] == "RuntimeError: broken on purpose"
        _, err = children[0].communicate(timeout=60)
        assert children[0].returncode == 86
        assert "process 1 on" in err.splitlines()[-1] and "failed: RuntimeError: broken on purpose" in err
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.slow
def test_a_killed_process_is_named_by_one_that_waits_for_it_in_a_collective():
    children = start_two(
        """
        from amsp_jax.runtime.launch.process_0 import add_up
        print("ready", flush=True)
        while True:
            add_up(layout.devices)
        """
    )
    try:
        for child in children:
            while child.stdout.readline() != "ready\n":
                assert child.poll() is None, child.communicate()[1]
        children[1].kill()
        _, err = children[0].communicate(timeout=60)
        assert children[0].returncode == 86
        assert "process 1 on" in err.splitlines()[-1] and "is lost: its connection closed" in err
    finally:
        for child in children:
            child.kill()
            child.communicate()


@pytest.mark.slow
def test_settings_that_differ_are_named():
    address = f"127.0.0.1:{free_port()}"
    common = {"coordinator": address, "num_processes": 2}
    children = [start({**common, "process_id": i, "same": {"SEED": str(i), "STEPS": "9"}}, "") for i in range(2)]
    for child in children:
        _, err = child.communicate(timeout=120)
        assert child.returncode == 2
        assert "processes disagree: SEED=0 in process 0 on" in err.splitlines()[-1]


def test_a_lone_process_says_that_it_is_alone():
    child = start(
        {"coordinator": f"127.0.0.1:{free_port()}", "num_processes": 2, "process_id": 0, "timeout_s": 0.5}, ""
    )
    _, err = child.communicate(timeout=30)
    assert child.returncode == 2
    assert err.splitlines()[-1].startswith("1 of 2 processes came within")


def test_the_commit_is_that_of_the_source_wherever_the_run_starts(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.mkdir()
    (source / "module.py").write_text("")
    for command in (["init", "-q"], ["add", "module.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=source, check=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    commit = _git_commit(source / "module.py")
    assert commit is not None and len(commit) == 40
    (source / "module.py").write_text("changed")
    assert _git_commit(source / "module.py") == f"{commit}+changes"
    assert _git_commit(tmp_path / "elsewhere" / "module.py") is None


@pytest.mark.parametrize(
    "change",
    [{"index": 2}, {"index": -1}, {"index": "0"}, {"index": True}, {"index": None}, {"settings": []}, {"host": 3}],
)
def test_what_a_stranger_says_is_not_taken_for_a_process(change):
    facts = rendezvous.Facts(
        index=1, count=2, host="n2", node="1", loopback=False, num_devices=1, gpus="", memory_bytes=1, settings={}
    )
    line = json.dumps(dataclasses.asdict(facts)).encode()
    assert rendezvous._facts(line) == facts
    with pytest.raises((ValueError, TypeError)):
        rendezvous._facts(json.dumps(dataclasses.asdict(facts) | change).encode())


@pytest.fixture
def cache_settings():
    """jax's own, put back after the test."""
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("cache_settings")
def test_programs_of_gpus_are_kept_where_the_user_did_not_say_where(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert keep_programs("cpu") == [] and jax.config.jax_compilation_cache_dir is None
    folder = str(tmp_path / "amsp_jax" / "programs")
    assert keep_programs("cuda") == [f"compiled programs: {folder}"]
    assert jax.config.jax_compilation_cache_dir == folder
    jax.config.update("jax_compilation_cache_dir", "/mine")
    assert keep_programs("rocm") == [] and jax.config.jax_compilation_cache_dir == "/mine"


@pytest.mark.usefixtures("cache_settings")
def test_a_cache_that_is_switched_off_stays_off(monkeypatch):
    jax.config.update("jax_enable_compilation_cache", False)
    assert keep_programs("cuda") == [] and jax.config.jax_compilation_cache_dir is None
