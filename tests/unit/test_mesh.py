"""From degrees to a mesh: its axes, and which devices hold a copy together."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

from amsp_jax.engine.mesh import DataAxes, axis_sizes, data_axes, level, make_mesh
from amsp_jax.errors import UserError
from amsp_jax.strategy import DataRanks, all_degrees, parse

RANKS = DataRanks(per_node=4, num_nodes=2)


def resolve(text, ranks=RANKS):
    return parse(text).resolve(ranks)


def groups(degrees, axes):
    """The rank numbers of each group along `axes`, node by node, as sorted lists; ranks stand in for devices."""
    sizes = axis_sizes(degrees)
    ranks = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    inside = [i for i, axis in enumerate(sizes) if axis in axes]
    together = np.moveaxis(ranks, inside, range(-len(inside), 0)) if inside else ranks[..., None]
    members = math.prod(sizes[axis] for axis in axes)
    return sorted(sorted(group) for group in together.reshape(-1, members).tolist())


@pytest.mark.parametrize(
    ("text", "shape", "axes"),
    [
        ("ddp", {"inter_replica": 2, "intra_replica": 4}, DataAxes((), (), (), ("inter_replica", "intra_replica"))),
        ("zero1", {"inter_opt": 2, "intra_opt": 4}, DataAxes((), (), ("inter_opt", "intra_opt"), ())),
        ("zero3", {"inter_param": 2, "intra_param": 4}, DataAxes(("inter_param", "intra_param"), (), (), ())),
        ("mics(4)", {"inter_replica": 2, "intra_param": 4}, DataAxes(("intra_param",), (), (), ("inter_replica",))),
        ("hpz(4)", {"inter_grad": 2, "intra_param": 4}, DataAxes(("intra_param",), ("inter_grad",), (), ())),
        (
            "params=replica grads=node opt_state=full",
            {"inter_opt": 2, "intra_grad": 4},
            DataAxes((), ("intra_grad",), ("inter_opt",), ()),
        ),
        (
            "params=1x1 grads=2x1 opt_state=4x2",
            {"inter_opt": 2, "intra_opt": 2, "intra_grad": 2},
            DataAxes((), ("intra_grad",), ("inter_opt", "intra_opt"), ()),
        ),
    ],
)
def test_axes_are_named_ordered_and_sized(text, shape, axes):
    degrees = resolve(text)
    mesh = make_mesh(degrees, jax.devices())
    assert list(mesh.shape.items()) == list(shape.items())
    assert list(make_mesh(degrees).shape.items()) == list(shape.items())
    assert data_axes(degrees) == axes


def test_all_axes_outer_to_inner():
    degrees = resolve("params=2x2 grads=4x4 opt_state=8x8", DataRanks(16, 16))
    assert list(axis_sizes(degrees).items()) == [
        (f"{lvl}_{role}", 2) for lvl in ("inter", "intra") for role in ("replica", "opt", "grad", "param")
    ]
    axes = data_axes(degrees)
    assert axes.all == tuple(f"{lvl}_{r}" for r in ("param", "grad", "opt", "replica") for lvl in ("inter", "intra"))
    assert [level(axis) for axis in axes.param] == ["inter", "intra"]


def test_groups_of_the_amsp_paper():
    """16 ranks, s_p = 2, s_os = 4: parameter shards on adjacent ranks, optimizer states across two of those groups."""
    degrees = resolve("params=2x1 grads=2x1 opt_state=4x1", DataRanks(per_node=8, num_nodes=2))
    axes = data_axes(degrees)
    assert groups(degrees, axes.param) == [[i, i + 1] for i in range(0, 16, 2)]
    assert groups(degrees, axes.opt)[:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(degrees, axes.param + axes.grad + axes.opt) == [[i, i + 1, i + 2, i + 3] for i in range(0, 16, 4)]
    # One parameter shard is on every second rank, one optimizer shard on every fourth.
    assert groups(degrees, axes.opt + axes.replica) == [list(range(0, 16, 2)), list(range(1, 16, 2))]
    assert groups(degrees, axes.replica) == [[i, i + 4, i + 8, i + 12] for i in range(4)]


def test_groups_of_mics():
    """MiCS (arXiv 2205.00119): a world of 8, everything over 4 consecutive ranks."""
    degrees = resolve("mics(4)")
    axes = data_axes(degrees)
    assert groups(degrees, axes.param) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(degrees, axes.replica) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_devices_lie_in_the_mesh_node_by_node():
    """The mesh that XLA gets has the groups computed above from rank numbers."""
    for degrees in all_degrees(RANKS):
        mesh = make_mesh(degrees, jax.devices())
        assert [d.id for d in mesh.devices.flat] == list(range(8))
        for i, axis in enumerate(mesh.axis_names):
            ids = np.vectorize(lambda d: d.id)(np.moveaxis(mesh.devices, i, -1)).reshape(-1, mesh.shape[axis])
            assert sorted(ids.tolist()) == groups(degrees, (axis,))


def test_axes_of_a_level_stay_on_it():
    """Neighbours along an intra axis share a node of 4; those along an inter axis have the same place in theirs."""
    for degrees in all_degrees(RANKS):
        for axis in data_axes(degrees).all:
            for group in groups(degrees, (axis,)):
                distinct = {rank // 4 if level(axis) == "intra" else rank % 4 for rank in group}
                assert len(distinct) == 1


@pytest.mark.parametrize("degrees", all_degrees(RANKS), ids=str)
def test_axes_multiply_to_the_degrees(degrees):
    sizes, axes = axis_sizes(degrees), data_axes(degrees)

    def product(names):
        return math.prod(sizes[name] for name in names)

    assert product(axes.param) == degrees.params.total
    assert product(axes.param + axes.grad) == degrees.grads.total
    assert product(axes.param + axes.grad + axes.opt) == degrees.opt_state.total
    assert product(axes.all) == RANKS.total


def test_one_device_has_a_mesh():
    mesh = make_mesh(resolve("zero3", DataRanks(1)), jax.devices()[:1])
    assert isinstance(mesh, Mesh) and mesh.size == 1
    assert data_axes(resolve("zero3", DataRanks(1))).all == ()


def test_a_mesh_of_devices_that_are_not_there():
    mesh = make_mesh(resolve("params=8x1 grads=8x1 opt_state=8x4", DataRanks(8, 128)))
    assert isinstance(mesh, AbstractMesh)
    assert mesh.shape == {"inter_replica": 32, "inter_opt": 4, "intra_param": 8}


@pytest.mark.parametrize("count", [0, 1, 7])
def test_as_many_devices_as_ranks(count):
    with pytest.raises(UserError, match=f"2 nodes x 4 data ranks are 8 data ranks, but {count} devices are given"):
        make_mesh(resolve("zero3"), jax.devices()[:count])
