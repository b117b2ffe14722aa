"""`Plan.shard` on one process: what it puts where, and batches that are none; the shardings of a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from amsp_jax.engine.mesh import find_nodes
from amsp_jax.engine.plan import make_plan
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.strategy import DataRanks

MODEL = Model.from_loss(lambda p, batch, rng: ((jnp.sum(p["w"]), 1.0), {}), lambda key: {"w": jnp.ones((16, 8))})


def plan(strategy="params=1x1 grads=4x1 opt_state=4x2", **options):
    options = options or {"devices": jax.devices(), "ranks": DataRanks(4, 2)}
    return make_plan(strategy, MODEL, **options)


def test_rows_stay_in_order():
    x, by_row = np.arange(2 * 16 * 3, dtype=np.float32).reshape(2, 16, 3), np.arange(32, dtype=np.int32).reshape(2, 16)
    placed = plan().shard({"x": x, "by_row": by_row})
    assert placed["x"].sharding == plan().batch_sharding
    jax.tree.map(np.testing.assert_array_equal, placed, {"x": x, "by_row": by_row})
    assert plan().local_rows(16).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            {"x": np.ones((1, 6, 3), np.float32)},
            "6 rows in a microbatch, which do not divide by the 8 data ranks; give 8",
        ),
        ({"x": np.ones((1, 8), np.int64)}, r"batch\['x'\] is int64.*\.astype\(np.int32\)"),
        ({"x": np.ones((1, 8), np.float64)}, r"batch\['x'\] is float64.*\.astype\(np.float32\)"),
        ({"x": np.array([["a"] * 8])}, r"batch\['x'\] is of dtype <U1; rows are numbers"),
        ({"x": np.ones(8, np.float32)}, r"a batch of x \(8,\): its arrays are \[microbatches, rows, ...\]"),
        ({"x": np.ones((1, 8), np.int32), "y": np.ones((2, 8), np.int32)}, "with equal numbers of both"),
        ({}, "a batch of no arrays"),
    ],
)
def test_batches_that_are_none(rows, message):
    with pytest.raises(UserError, match=message):
        plan().shard(rows)


def test_a_plan_without_devices_has_no_place_for_rows():
    with pytest.raises(UserError, match="the plan is for devices that do not exist"):
        plan(ranks=DataRanks(4, 2)).shard({"x": np.ones((1, 8), np.int32)})


def test_devices_and_nodes_are_found():
    assert plan("zero3", devices_per_node=4).degrees.ranks == DataRanks(4, 2)
    assert plan("zero3", devices=jax.devices()[:4]).degrees.ranks == DataRanks(4, 1)
    assert make_plan("zero3", MODEL).degrees.ranks == DataRanks(8, 1)
    with pytest.raises(
        UserError, match="devices_per_node=3 does not divide the 8 devices; it must be one of 1, 2, 4, 8"
    ):
        plan(devices_per_node=3)
    with pytest.raises(UserError, match=r"devices=\[\]"):
        plan(devices=[])
    with pytest.raises(UserError, match="the ranks say both"):
        plan(devices_per_node=4, ranks=DataRanks(4, 2))


class Device:
    def __init__(self, process, slice_index=None):
        self.process_index = process
        if slice_index is not None:
            self.slice_index = slice_index


def test_processes_of_one_machine_are_one_node():
    devices = [Device(process, process % 2) for process in range(4)]
    ordered, num_nodes = find_nodes(devices)
    assert num_nodes == 2 and [d.process_index for d in ordered] == [0, 2, 1, 3]
    assert find_nodes([Device(0), Device(1)])[1] == 2
    with pytest.raises(UserError, match="the 2 nodes have 2, 1 devices"):
        find_nodes([Device(0), Device(0), Device(1)])


def test_shardings_are_what_user_code_can_place_arrays_at():
    own, x = plan(), np.arange(128, dtype=np.float32).reshape(16, 8)
    for shardings, num_rows in ((own.param_shardings, 16), (own.grad_shardings, 4), (own.opt_shardings, 2)):
        placed = jax.device_put({"w": x}, shardings)
        assert placed["w"].addressable_shards[0].data.shape == (num_rows, 8)
        np.testing.assert_array_equal(placed["w"], x)
