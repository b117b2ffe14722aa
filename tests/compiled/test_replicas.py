"""One changed bit in one replica is found, with the leaf, the device and the process that holds it."""

import functools
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import batches, plan_for

from amsp_jax.engine.leaves import path_name
from amsp_jax.engine.replicas import Divergence, checksum, make_replica_check
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.strategy import DataRanks

ROOT = pathlib.Path(__file__).parents[2]
STRATEGIES = ["ddp", "zero1", "zero3", "mics(2)", "hpz(4)", "params=2x1 grads=4x1 opt_state=4x1"]


def corrupted(state, wanted, flips):
    """The state with one bit of a leaf's first value flipped on each of some devices; `flips`: device id to bit."""

    def one(path, x):
        if path_name(path) != wanted:
            return x
        shards = []
        for shard in x.addressable_shards:
            values = np.array(shard.data).reshape(-1)
            if shard.device.id in flips:
                values[:1].view(np.uint32)[:] ^= np.uint32(1 << flips[shard.device.id])
            shards.append(jax.device_put(values.reshape(shard.data.shape), shard.device))
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)

    return jax.tree_util.tree_map_with_path(one, state)


@functools.cache
def trained(strategy, ranks=oracle.RANKS):
    """A model, its optimizer and plan, and the state after a step."""
    model, optimizer = oracle.model("llama", 1), oracle.optimizer("adamw")
    plan = plan_for(strategy, model, ranks)
    step = make_train_step(plan, optimizer)
    state, _ = step(oracle.initial_state(model, optimizer, plan), oracle.placed(plan, batches()[0], 1))
    return model, optimizer, plan, state


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=[] if s in ("ddp", "hpz(4)", STRATEGIES[-1]) else pytest.mark.slow) for s in STRATEGIES],
)
def test_a_flipped_bit_is_named(strategy):
    model, optimizer, plan, state = trained(strategy)
    check = make_replica_check(plan, optimizer)
    assert check(state) == []
    # A counter is replicated under every strategy; a matrix and its moment where OS replicas are left.
    paths = ["step", "opt_state.1.0.count"]
    if plan.axes.replica:
        paths += ["params.head.norm.scale", "opt_state.1.0.nu.embed.table"]
    for path in paths:
        for device in (0, 5):
            num_replicas = num_replicas_of(plan, state, path)
            expected = (jax.devices()[device],) if num_replicas > 2 else both(plan, state, path, device)
            found = check(corrupted(state, path, {device: 0}))
            assert found == [Divergence(path, expected, num_replicas)]


def leaf(state, path):
    return next(x for p, x in jax.tree_util.tree_flatten_with_path(state)[0] if path_name(p) == path)


def both(plan, state, path, device):
    """The devices that hold the shard of one of them, in the order of the mesh."""
    where = leaf(state, path).sharding.devices_indices_map(leaf(state, path).shape)
    return tuple(d for d in plan.mesh.devices.flat if where[d] == where[jax.devices()[device]])


def num_replicas_of(plan, state, path):
    return len(both(plan, state, path, 0))


def test_there_are_leaves_of_all_kinds():
    """Padded, sharded with replicas, and whole: the table above would else prove little."""
    _, _, plan, state = trained("mics(2)")
    assert num_replicas_of(plan, state, "params.head.norm.scale") == 4
    assert num_replicas_of(plan, state, "step") == 8
    assert any(x.is_padded for x in jax.tree.leaves(trained("zero3")[2].leaves))


def test_several_devices_leaves_and_ties():
    model, optimizer, plan, state = trained("ddp")
    check = make_replica_check(plan, optimizer)
    path = "params.embed.table"
    found = check(corrupted(corrupted(state, path, {1: 3, 6: 3}), "step", {7: 31}))
    assert [str(x) for x in found] == [
        "step: device 7 of process 0 differs from the rest of 8 replicas",
        f"{path}: devices 1, 6 of process 0 differ from the rest of 8 replicas",
    ]
    (found,) = check(corrupted(state, path, {0: 1, 1: 1, 2: 1, 3: 1}))
    assert str(found) == (
        f"{path}: the replicas on devices 0, 1, 2, 3, 4, 5, 6, 7 of process 0 differ, and no majority is alike"
    )


def test_one_device_has_no_replicas():
    model, optimizer, plan, state = trained("ddp", DataRanks(1))
    assert make_replica_check(plan, optimizer)(state) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_a_checksum_sees_every_value_and_every_swap(dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2, (4, 6)), dtype)
    same = checksum(x)
    assert same.dtype == jnp.uint32 and same == checksum(jnp.array(x))
    flat = np.asarray(x).reshape(-1)
    for i in range(flat.size):
        changed = flat.copy()
        changed[i] = 1 - int(changed[i])
        assert checksum(jnp.asarray(changed).reshape(x.shape)) != same
    i, j = np.flatnonzero(flat == 0)[0], np.flatnonzero(flat == 1)[-1]
    changed = flat.copy()
    changed[[i, j]] = changed[[j, i]]
    assert checksum(jnp.asarray(changed).reshape(x.shape)) != same


def test_a_checksum_sees_signs_and_payloads():
    """Two values that differ in sign alone and swap: a sum weighted by place is the same in 32 bits."""
    sums = [int(checksum(jnp.asarray(x, jnp.float32))) for x in ([1, 2, -1], [-1, 2, 1], [0, 2, 0], [-0.0, 2, 0])]
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    sums += [int(checksum(jnp.asarray(nan))) for nan in nans]
    assert len(set(sums)) == len(sums)


def test_it_compiles_once_and_keeps_the_state():
    model, optimizer, plan, state = trained("zero1")
    check = make_replica_check(plan, optimizer)
    assert check(state) == check(state) == []
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
        lambda x: x.sharding, abstract_state(plan, optimizer)
    )


CHILD = """
    import sys
    import jax
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
    import oracle, test_replicas
    from amsp_jax.engine.replicas import make_replica_check
    from amsp_jax.engine.state import init_state
    from amsp_jax.strategy import DataRanks

    model, optimizer = oracle.model("llama", 1), oracle.optimizer("sgd")
    plan = oracle.plan_for("ddp", model, DataRanks(2, 2))
    state = init_state(plan, optimizer, 3)
    check = make_replica_check(plan, optimizer)
    assert check(state) == []
    bad = plan.mesh.devices.flat[3]
    assert bad.process_index == 1
    (found,) = check(test_replicas.corrupted(state, "params.head.norm.scale", {bad.id: 7}))
    assert found.devices == (bad,), found
    print(found)
"""


def test_two_processes_get_the_same_answer():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "compiled")))
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), address]
    children = [
        subprocess.Popen([*command, str(i)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    for out, _ in outputs:
        assert "of process 1 differs from the rest of 4 replicas" in out
