"""Checkpoints: every mesh to every other, padding, donation, damage."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from amsp_jax.errors import UserError
from amsp_jax.run.checkpoint import Checkpointer, leaf_paths

TRUE_SHAPES = {"step": [], "params/blocks/0/w": [10, 6], "params/blocks/1/w": [8, 3], "opt/0/mu": [10, 6]}


class Moments(NamedTuple):
    mu: Any


@flax.struct.dataclass
class State:
    step: Any
    params: Any
    opt: Any


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    return Mesh(devices.reshape(sizes), tuple("abc"[: len(sizes)]))


def padded(value: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(value, [(0, rows - value.shape[0])] + [(0, 0)] * (value.ndim - 1))


def make_state(mesh: Mesh, spec: PartitionSpec, rows: int) -> State:
    """A state whose 10-row leaves are padded to `rows`."""
    w = np.arange(60, dtype=np.float32).reshape(10, 6) + 1

    def put(value: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, spec))

    blocks = [{"w": put(padded(w, rows), spec)}, {"w": put(np.full((8, 3), 7.5, np.float32), PartitionSpec())}]
    step = put(np.int32(5), PartitionSpec())
    return State(step=step, params={"blocks": blocks}, opt=(Moments(mu=put(padded(-w, rows), spec)),))


def abstract(state: State) -> State:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_same(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.sharding == y.sharding and x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


P = PartitionSpec
MESHES = [
    ((8,), P("a"), 16),
    ((2, 4), P(("b", "a")), 16),
    ((4,), P("a"), 12),
    ((2, 2), P("a", "b"), 10),
    ((1,), P(), 10),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One checkpoint of step 5, padded from 10 rows to 12, on a mesh of 2 x 3."""
    folder = tmp_path_factory.mktemp("saved")
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(5, make_state(mesh_of(2, 3), P(("a", "b")), 12), {"seed": 3, "shapes": TRUE_SHAPES})
    checkpointer.close()
    return folder


@pytest.mark.parametrize(("sizes", "spec", "rows"), MESHES)
def test_restores_the_bytes_on_another_mesh_with_other_padding(saved, sizes, spec, rows):
    wanted = make_state(mesh_of(*sizes), spec, rows)
    checkpointer = Checkpointer(saved, keep=None)
    assert_same(checkpointer.restore(5, abstract(wanted), TRUE_SHAPES), wanted)
    checkpointer.close()


def test_a_part_is_read_without_the_rest(saved):
    """The parameters, whatever optimizer they were saved with."""
    wanted = {"params": make_state(mesh_of(4), P("a"), 12).params}
    checkpointer = Checkpointer(saved, keep=None)
    assert_same(checkpointer.restore(5, abstract(wanted), TRUE_SHAPES, partial=True), wanted)
    fewer = {"params": {"blocks": wanted["params"]["blocks"][:1]}}
    with pytest.raises(UserError, match="it has params/blocks/1/w besides"):
        checkpointer.restore(5, abstract(fewer), TRUE_SHAPES, partial=True)
    more = {"params": {**wanted["params"], "head": wanted["params"]["blocks"][1]["w"]}}
    with pytest.raises(UserError, match="it lacks params/head"):
        checkpointer.restore(5, abstract(more), {**TRUE_SHAPES, "params/head": [8, 3]}, partial=True)
    checkpointer.close()


def test_meta_comes_back(saved):
    checkpointer = Checkpointer(saved, keep=None)
    assert checkpointer.latest_step() == 5
    assert checkpointer.meta(5) == {"seed": 3, "shapes": TRUE_SHAPES}
    checkpointer.close()


def test_paths_name_every_kind_of_container():
    assert leaf_paths(make_state(mesh_of(1), P(), 10)) == list(TRUE_SHAPES)


def test_state_may_be_donated_right_after_save(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    sharding = NamedSharding(mesh_of(8), P("a"))
    state = {"w": jax.device_put(np.ones((1 << 20,), np.float32), sharding)}
    overwrite = jax.jit(lambda s: {"w": s["w"] * 0 - 1}, donate_argnums=0)
    checkpointer.save(1, state, {})
    for _ in range(3):
        state = overwrite(state)
    jax.block_until_ready(state)
    checkpointer.wait()
    restored = checkpointer.restore(1, {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.float32, sharding=sharding)})
    assert (np.asarray(restored["w"]) == 1).all()
    checkpointer.close()


def test_keeps_the_last_and_leaves_a_saved_step_alone(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 10, 10):
        checkpointer.save(step, {"x": jnp.float32(step)}, {})
    checkpointer.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["10", "2"]


def test_an_incomplete_save_is_not_picked_up_and_a_new_run_removes_it(saved, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    cut = folder / "9.orbax-checkpoint-tmp"
    shutil.copytree(folder / "5", cut)
    shutil.rmtree(cut / "meta")
    reader = Checkpointer(folder, keep=None)
    assert reader.latest_step() == 5 and cut.exists()
    reader.close()
    writer = Checkpointer(folder, keep=1)
    assert writer.latest_step() == 5
    writer.save(9, {"x": jnp.float32(9)}, {})
    writer.wait()
    assert writer.latest_step() == 9 and not cut.exists()
    writer.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.replace(params={"blocks": s.params["blocks"][:1]}),
            r"has params/blocks/1/w besides \(4 leaves there, 3",
        ),
        (lambda s: s.replace(opt=(*s.opt, {"nu": s.step})), r"lacks opt/1/nu \(4 leaves there, 5"),
        (
            lambda s: s.replace(step=jax.ShapeDtypeStruct((), jnp.float32, sharding=s.step.sharding)),
            r"step is int32\[\] there and float32\[\]",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_named(saved, change, message):
    checkpointer = Checkpointer(saved, keep=None)
    with pytest.raises(UserError, match=message):
        checkpointer.restore(5, change(abstract(make_state(mesh_of(1), P(), 10))), {**TRUE_SHAPES})
    checkpointer.close()


def test_another_true_shape_is_an_error_even_if_the_padded_shapes_agree(saved):
    checkpointer = Checkpointer(saved, keep=None)
    other = {**TRUE_SHAPES, "opt/0/mu": [11, 6]}
    with pytest.raises(UserError, match=r"opt/0/mu is float32\[10,6\] there and float32\[11,6\] in this run"):
        checkpointer.restore(5, abstract(make_state(mesh_of(4), P("a"), 12)), other)
    checkpointer.close()


def test_no_checkpoint_and_no_folder(tmp_path):
    checkpointer = Checkpointer(tmp_path / "new", keep=1)
    assert checkpointer.latest_step() is None
    with pytest.raises(UserError, match="no checkpoint of step 3: it has no complete checkpoint"):
        checkpointer.meta(3)
    checkpointer.close()
    with pytest.raises(UserError, match="there is no such folder"):
        Checkpointer(tmp_path / "absent", keep=None)


def test_what_a_killed_run_tried_the_folder_with_is_removed(tmp_path):
    (tmp_path / ".probe1234").mkdir()
    Checkpointer(tmp_path, keep=1).close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        Checkpointer(tmp_path / "file" / "checkpoints", keep=1)


def test_two_leaves_of_one_name_are_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=1)
    with pytest.raises(UserError, match="both named a/b"):
        checkpointer.save(1, {"a": {"b": jnp.float32(0)}, "a/b": jnp.float32(1)}, {})
    checkpointer.close()


def test_meta_is_plain_json_on_disk(saved):
    file = (saved / "5" / "meta").glob("meta*")
    assert json.loads(next(file).read_text())["seed"] == 3


TWO_PROCESSES = """
import pathlib, sys
import jax
import numpy as np
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
index = int(sys.argv[1])
jax.distributed.initialize(sys.argv[2], 2, index, cluster_detection_method="deactivate")
import json
from amsp_jax.run.checkpoint import Checkpointer, storage
from amsp_jax.errors import UserError

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
values = np.arange(12, dtype=np.float32).reshape(6, 2)

def put(value, *spec):
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])

checkpointer = Checkpointer(sys.argv[3], keep=1)
for step in (1, 2):
    state = {"w": put(np.pad(values * step, ((0, 2), (0, 0))), ("a", "b"))}
    checkpointer.save(step, state, {"shapes": {"w": [6, 2]}}, own=f"{index} at {step}")
checkpointer.wait()
assert checkpointer.latest_step() == 2
wanted = put(values * 2, "b", "a")
abstract = {"w": jax.ShapeDtypeStruct((6, 2), np.float32, sharding=wanted.sharding)}
restored = checkpointer.restore(2, abstract, {"w": [6, 2]})
for got, want in zip(restored["w"].addressable_shards, wanted.addressable_shards, strict=True):
    np.testing.assert_array_equal(got.data, want.data)
assert checkpointer.verify(2) is None
assert checkpointer.own(2) == f"{index} at 2"
checkpointer.close()

# Both say what only one of them has found, whoever's share the damaged file is in, and process 0 sets it aside.
files = json.loads((pathlib.Path(sys.argv[3]) / "2" / "MANIFEST.json").read_text())["files"]
assert {part for name in files for part in name.split("/")} >= {"ocdbt.process_0", "ocdbt.process_1"}
for name in sorted(files):
    path = pathlib.Path(sys.argv[3]) / "2" / name
    storage.barrier()
    if index == 0:
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    storage.barrier()
    reader = Checkpointer(sys.argv[3], keep=None)
    try:
        reader.restore(2, abstract, {"w": [6, 2]})
        raise SystemExit(f"{name} was read")
    except UserError as error:
        assert name in str(error), error
    (damaged,) = reader.newest_intact().passed_over
    assert damaged.step == 2 and name in damaged.what
    storage.barrier()
    if index == 0:
        path.write_bytes(whole)
storage.barrier()
assert reader.newest_intact().step == 2
print("done")
"""


def test_two_processes_save_and_restore_and_one_reads_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    command = [sys.executable, "-c", TWO_PROCESSES]
    children = [
        subprocess.Popen([*command, str(i), address, str(tmp_path)], env=environ, stdout=-1, stderr=-1, text=True)
        for i in range(2)
    ]
    for child, (out, err) in [(child, child.communicate(timeout=60)) for child in children]:
        assert child.returncode == 0 and out.endswith("done\n"), err
    checkpointer = Checkpointer(tmp_path, keep=None)
    sharding = NamedSharding(mesh_of(3), P("a"))
    wanted = {"w": jax.device_put(np.arange(12, dtype=np.float32).reshape(6, 2) * 2, sharding)}
    assert_same(checkpointer.restore(2, abstract(wanted), {"w": [6, 2]}), wanted)
    with pytest.raises(UserError, match=r"iterator of 2 processes, and this run has 1.*rows\(step, rows\)"):
        checkpointer.own(2)
    checkpointer.close()


def test_a_process_has_a_text_of_its_own_in_a_checkpoint(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=2)
    state = {"w": jax.device_put(np.ones(4, np.float32), NamedSharding(mesh_of(2), P("a")))}
    checkpointer.save(1, state, {})
    checkpointer.save(2, state, {}, own="über 2")
    checkpointer.close()
    reader = Checkpointer(tmp_path, keep=None)
    assert (reader.own(1), reader.own(2)) == (None, "über 2") and reader.meta(2) == reader.meta(1)
    (tmp_path / "2" / "process_0.json").write_text("other")
    with pytest.raises(UserError, match="process_0.json has"):
        reader.verify(2)
