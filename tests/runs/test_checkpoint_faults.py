"""Checkpoints that something happened to: damage, full disks, vanished folders, killed writers."""

import json
import os
import pathlib
import pickle
import pickletools
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from amsp_jax.errors import UserError
from amsp_jax.run.checkpoint import Checkpointer, Damaged, Intact

ROOT = pathlib.Path(__file__).parents[2]


def sharding(num_devices: int = 8) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:num_devices]), ("a",)), PartitionSpec("a"))


def state_of(step: int) -> dict[str, jax.Array]:
    values = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024) + step
    return {name: jax.device_put(values * sign, sharding()) for name, sign in (("mu", -1), ("w", 1))}


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_holds(checkpointer: Checkpointer, step: int) -> None:
    restored = checkpointer.restore(step, abstract(state_of(step)))
    for name, value in state_of(step).items():
        assert np.asarray(restored[name]).tobytes() == np.asarray(value).tobytes()


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state_of(step), {"seed": 3})
    checkpointer.wait()


def folders(directory: pathlib.Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(folder, keep=2)
    save(checkpointer, 1, 2)
    checkpointer.close()
    return folder


@pytest.fixture
def run(saved, tmp_path) -> pathlib.Path:
    """A copy of it that a test may damage."""
    return shutil.copytree(saved, tmp_path / "run")


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    truncate: r"has \d+ bytes instead of \d+",
    flip: r"has other content than was saved \(checksum",
    pathlib.Path.unlink: "is missing",
}


@pytest.mark.parametrize("change", DAMAGE, ids=lambda change: change.__name__)
def test_every_damaged_file_is_named_before_the_state_is_used(run, change):
    names = json.loads((run / "2" / "MANIFEST.json").read_text())["files"]
    assert {name.split("/")[0] for name in names} == {"meta", "state"} and len(names) > 6
    checkpointer = Checkpointer(run, keep=None)
    for name in names:
        path = run / "2" / name
        whole = path.read_bytes()
        change(path)
        expected = f"2 is damaged: {name} {DAMAGE[change]}.* step 1 with on_damaged='previous'"
        with pytest.raises(UserError, match=expected) as error:
            checkpointer.verify(2)
        assert "\n" not in str(error.value)
        with pytest.raises(UserError, match=name):
            checkpointer.restore(2, abstract(state_of(2)))
        if change is not flip:
            with pytest.raises(UserError, match=name):
                checkpointer.verify(2, full=False)
        path.write_bytes(whole)
    assert checkpointer.verify(2) is None
    assert_holds(checkpointer, 2)


def test_a_damaged_manifest_is_damage_too(run):
    checkpointer = Checkpointer(run, keep=None)
    for text in ("", "{", "[]", '{"files": {"x": 1}}', '{"files": {"x": {"bytes": "a", "crc32": ""}}}'):
        (run / "2" / "MANIFEST.json").write_text(text)
        with pytest.raises(UserError, match="MANIFEST.json cannot be read"):
            checkpointer.verify(2)
    (run / "2" / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match="MANIFEST.json is missing"):
        checkpointer.restore(2, abstract(state_of(2)))


def test_the_previous_one_is_found_and_the_damaged_one_is_set_aside(run):
    truncate(next((run / "2" / "state").rglob("d/*")))
    checkpointer = Checkpointer(run, keep=2)
    intact = checkpointer.newest_intact()
    assert intact.step == 1 and [damaged.step for damaged in intact.passed_over] == [2]
    assert "bytes instead of" in intact.passed_over[0].what
    assert checkpointer.set_aside(2) == run / "2.damaged"
    assert checkpointer.steps() == [1]
    save(checkpointer, 2)
    assert checkpointer.newest_intact() == Intact(2, [])
    flip(run / "2" / "meta" / "metadata")
    assert checkpointer.set_aside(2) == run / "2.damaged.2"
    save(checkpointer, 2, 3, 4)
    assert_holds(checkpointer, 4)
    checkpointer.close()
    assert folders(run) == ["2.damaged", "2.damaged.2", "3", "4"]


def test_none_is_intact(run):
    for step in (1, 2):
        (run / str(step) / "MANIFEST.json").unlink()
    checkpointer = Checkpointer(run, keep=None)
    missing = "MANIFEST.json is missing"
    assert checkpointer.newest_intact() == Intact(None, [Damaged(2, missing), Damaged(1, missing)])
    with pytest.raises(UserError, match="There is no older one"):
        checkpointer.verify(1)


def test_a_checkpoint_of_an_older_version_is_read_with_a_note(tmp_path):
    state = state_of(7)
    meta = {"seed": 3, "shapes": {name: list(value.shape) for name, value in state.items()}}
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "meta": ocp.JsonCheckpointHandler()}
    with ocp.CheckpointManager(tmp_path, item_handlers=handlers) as manager:
        manager.save(7, args=ocp.args.Composite(state=ocp.args.PyTreeSave(state), meta=ocp.args.JsonSave(meta)))
    checkpointer = Checkpointer(tmp_path, keep=1)
    assert checkpointer.newest_intact() == Intact(7, [])
    assert "7 was written by an older version, without checksums" in checkpointer.verify(7)
    assert checkpointer.meta(7) == meta
    assert_holds(checkpointer, 7)
    checkpointer.close()


def test_a_newer_format_is_refused(run):
    file = run / "1" / "meta" / "metadata"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": {"version": 99}}))
    with pytest.raises(UserError, match="newer version"):
        Checkpointer(run, keep=None).meta(1)


def test_the_newest_and_every_nth_stay(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2, keep_every=5)
    save(checkpointer, *range(1, 13))
    checkpointer.close()
    assert folders(tmp_path) == ["10", "11", "12", "5"]
    for keep, keep_every, name in ((0, None, "keep=0"), (1, 0, "keep_every=0")):
        with pytest.raises(UserError, match=name):
            Checkpointer(tmp_path, keep=keep, keep_every=keep_every)


def test_a_full_disk_fails_at_the_next_call_and_leaves_what_is_complete(tmp_path, capfd, caplog):
    """The limit on a file's size stands for the disk's end: writing fails in the same place."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    save(checkpointer, 1, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        checkpointer.save(3, state_of(3), {})
        with pytest.raises(UserError, match=r"could not be written: File too large\. Make room") as error:
            checkpointer.wait()
        assert "\n" not in str(error.value)
        checkpointer.save(4, state_of(4), {})
        with pytest.raises(UserError, match="could not be written: File too large"):
            checkpointer.save(5, state_of(5), {})
        assert checkpointer.steps() == [1, 2]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "Error" not in capfd.readouterr().err
    # orbax's threads log what we raise, with hundreds of lines of tracebacks.
    assert not [record for record in caplog.records if record.exc_info or "orbax" in record.pathname]
    assert_holds(checkpointer, 1)
    assert_holds(checkpointer, 2)
    # There is room again: the same step can be saved, and what it replaces goes.
    save(checkpointer, 3, 4)
    assert_holds(checkpointer, 3)
    assert checkpointer.steps() == [3, 4]
    checkpointer.close()


@pytest.mark.parametrize("part", ["write_part", "seal"])
def test_an_error_while_measuring_fails_the_save(tmp_path, monkeypatch, part):
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(tmp_path, keep=1)
    save(checkpointer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(f"amsp_jax.run.checkpoint.manifest.{part}", fail)
        checkpointer.save(2, state_of(2), {})
        with pytest.raises(UserError, match="No space left on device"):
            checkpointer.wait()
    assert checkpointer.steps() == [1] and checkpointer.verify(1) is None
    save(checkpointer, 2)
    assert_holds(checkpointer, 2)
    checkpointer.close()


def test_a_folder_that_vanishes_or_becomes_a_file(tmp_path):
    folder = tmp_path / "run"
    checkpointer = Checkpointer(folder, keep=1)
    save(checkpointer, 1)
    shutil.rmtree(folder)
    for call in (lambda: checkpointer.save(2, state_of(2), {}), checkpointer.latest_step, checkpointer.newest_intact):
        with pytest.raises(UserError, match="cannot be read: .*No such file"):
            call()
    folder.write_text("")
    with pytest.raises(UserError, match="Not a directory"):
        checkpointer.save(2, state_of(2), {})
    checkpointer.close()
    with pytest.raises(UserError, match="cannot be written"):
        Checkpointer(folder, keep=1)
    with pytest.raises(UserError, match="no such folder"):
        Checkpointer(folder, keep=None)


def test_keys_and_empty_arrays_are_saved_and_compared(tmp_path):
    def state(num_devices: int, seed: int, impl: str = "threefry2x32"):
        whole = NamedSharding(sharding(num_devices).mesh, PartitionSpec())
        key = jax.device_put(jax.random.key(seed, impl=impl), whole)
        keys = jax.device_put(jax.random.split(jax.random.key(seed, impl=impl), 8), sharding(num_devices))
        empty = jax.device_put(jnp.zeros((0, 4), jnp.bfloat16), whole)
        return {
            "noise": optax.EmptyState(),
            "key": key,
            "keys": keys,
            "empty": empty,
            "w": keys.size * whole_one(whole),
        }

    def whole_one(where):
        return jax.device_put(jnp.int32(1), where)

    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(1, state(8, 5), {})
    checkpointer.wait()
    wanted = state(2, 5)
    restored = checkpointer.restore(1, abstract(wanted))
    for name in ("key", "keys"):
        assert restored[name].dtype == wanted[name].dtype and restored[name].sharding == wanted[name].sharding
        np.testing.assert_array_equal(jax.random.key_data(restored[name]), jax.random.key_data(wanted[name]))
    assert restored["empty"].shape == (0, 4) and restored["empty"].dtype == jnp.bfloat16
    with pytest.raises(UserError, match=r"key is key<fry>\[\] there and key<rbg>\[\] in this run"):
        checkpointer.restore(1, abstract(state(2, 5, impl="rbg")))
    with pytest.raises(UserError, match=r"empty is bfloat16\[0,4\] there and float32\[0,4\]"):
        checkpointer.restore(1, {**abstract(wanted), "empty": jax.ShapeDtypeStruct((0, 4), jnp.float32)})
    checkpointer.close()


def test_nothing_is_pickled(saved, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    checkpointer = Checkpointer(saved, keep=None)
    assert_holds(checkpointer, 2)
    assert json.loads((saved / "2" / "meta" / "metadata").read_text())["seed"] == 3
    for path in saved.rglob("*"):
        if path.is_file():
            with pytest.raises(Exception):  # noqa: B017 not a sequence of pickle's opcodes
                list(pickletools.genops(path.read_bytes()))


KILLED = """
import os, pathlib, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = sys.argv[3:]
from test_checkpoint_faults import Checkpointer, save, state_of
from amsp_jax.run.checkpoint import manifest

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)

point, checkpointer = sys.argv[2], Checkpointer(sys.argv[1], keep=2)
save(checkpointer, 1)
seal = manifest.seal
if point == "while measuring":
    manifest._crc32 = killed
elif point == "before the manifest":
    manifest.seal = killed
elif point == "after the manifest":
    manifest.seal = lambda *args: (seal(*args), killed())
elif point == "after the rename":
    checkpointer._manager._checkpoint_deleter.delete_steps = killed
print("ready", flush=True)
checkpointer.save(2, state_of(2), {})
if point == "while writing":
    killed()
checkpointer.wait()
checkpointer.save(3, state_of(3), {})
checkpointer.wait()
"""

POINTS = ["while writing", "while measuring", "before the manifest", "after the manifest", "after the rename"]


def start(folder: pathlib.Path, point: str) -> subprocess.Popen:
    command = [sys.executable, "-c", KILLED, str(folder), point, str(ROOT / "tests" / "runs"), str(ROOT / "tests")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def assert_goes_on(folder: pathlib.Path) -> None:
    """Whatever is listed is whole, and the next writer saves the same steps."""
    reader = Checkpointer(folder, keep=None)
    assert reader.steps() and reader.newest_intact() == Intact(reader.latest_step(), [])
    assert_holds(reader, reader.latest_step())
    writer = Checkpointer(folder, keep=2)
    save(writer, 2, 3, 4)
    assert_holds(writer, 4)
    writer.close()
    assert folders(folder) == ["3", "4"]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_save_is_not_picked_up_and_blocks_nothing(tmp_path, point):
    child = start(tmp_path, point)
    _, err = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGKILL, err
    complete = [1, 2] if point == "after the rename" else [1]
    assert Checkpointer(tmp_path, keep=None).steps() == complete
    assert_goes_on(tmp_path)


@pytest.mark.parametrize(
    "after_ms",
    [pytest.param(ms, marks=pytest.mark.slow if ms % 100 == 40 else pytest.mark.soak) for ms in range(0, 300, 20)],
)
def test_killed_at_any_moment(tmp_path, after_ms):
    child = start(tmp_path, "never")
    assert child.stdout.readline() == "ready\n"
    time.sleep(after_ms / 1000)
    child.kill()
    child.communicate(timeout=60)
    assert_goes_on(tmp_path)


def test_a_signal_during_a_save_does_not_cut_it(tmp_path):
    """`wait` completes it, whatever the handler of SIGTERM notes down meanwhile."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        checkpointer = Checkpointer(tmp_path, keep=1)
        checkpointer.save(1, state_of(1), {})
        signal.raise_signal(signal.SIGTERM)
        checkpointer.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM] and checkpointer.newest_intact() == Intact(1, [])
    checkpointer.close()


PEAK = """
import sys
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
from amsp_jax.run.checkpoint import Checkpointer, storage
from test_checkpoint_faults import sharding

storage.RESTORE_BYTES = int(sys.argv[2])
def hwm_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

shape = (1024, 1024)
arrays = {f"w{i}": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding(int(sys.argv[3]))) for i in range(64)}
reader = Checkpointer(sys.argv[1], keep=None)
reader.verify(1)
reader.check(1, arrays)
before = hwm_bytes()
jax.block_until_ready(reader.restore(1, arrays))
print(hwm_bytes() - before)
"""


@pytest.mark.parametrize("num_devices", [8, 1])
def test_restoring_needs_the_state_and_a_bound(tmp_path, num_devices):
    """256 MiB of state with a bound of 32 MiB, written by two devices: chunks that no reader's shard is equal to."""
    state_bytes, bound_bytes = 64 << 22, 32 << 20
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(
        1, {f"w{i}": jax.device_put(np.full((1024, 1024), i, np.float32), sharding(2)) for i in range(64)}, {}
    )
    checkpointer.close()
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(bound_bytes), str(num_devices)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests' / 'runs'}", "XLA_FLAGS": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak_bytes = int(done.stdout)
    # Libraries that are loaded on the way, and the allocator's leavings.
    assert peak_bytes < state_bytes + bound_bytes + (96 << 20), peak_bytes


ONE_OF_TWO_FAILS = """
import os, sys
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
index = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, index, cluster_detection_method="deactivate")
from amsp_jax.run.checkpoint import Checkpointer, manifest
from amsp_jax.errors import UserError

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("a",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a"))
state = {"w": jax.make_array_from_callback((8,), sharding, lambda at: np.ones(8, np.float32)[at])}
checkpointer = Checkpointer(sys.argv[3], keep=1)
checkpointer.save(1, state, {})
checkpointer.wait()
if index == 1:
    def fail(*args):
        raise OSError(28, "No space left on device")
    manifest.write_part = fail
checkpointer.save(2, state, {})
try:
    checkpointer.wait()
except UserError as error:
    print(error, flush=True)
    os._exit(2)
"""


def test_a_process_that_cannot_write_says_so_at_once(tmp_path):
    """The other one waits for it inside orbax, until something that watches them ends it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, "-c", ONE_OF_TWO_FAILS]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen([*command, str(i), address, str(tmp_path)], env=environ, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    try:
        out, err = children[1].communicate(timeout=60)
        assert children[1].returncode == 2 and "No space left on device" in out, err
    finally:
        for child in children:
            child.kill()
            child.communicate()
    assert Checkpointer(tmp_path, keep=None).newest_intact() == Intact(1, [])
