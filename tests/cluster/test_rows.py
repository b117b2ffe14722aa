"""Rows of a person's own on two processes: the numbers of one process, and mistakes that are reported to both."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
CHILD = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np, optax
    count, index = int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_num_cpu_devices", 4 // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(sys.argv[1], count, index)
    import amsp_jax as amsp

    def loss(params, batch, rng):
        noise = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, (8,)))(rng)
        error = (params["w"][batch["tokens"]] * noise[:, None]).sum(-1) - 1
        return (jnp.sum(error**2 * batch["weights"]), jnp.sum(batch["weights"])), {}

    model = amsp.Model.from_loss(loss, lambda key: {"w": jax.random.normal(key, (16, 8))})
    plan = amsp.make_plan(sys.argv[4], model, devices_per_node=2, compute_dtype=jnp.float32)
    tx = optax.sgd(0.1)
    state, step = amsp.init_state(plan, tx, seed=3), amsp.make_train_step(plan, tx)
    rows = plan.local_rows(8)
    losses = []
    for number in range(3):
        draw = np.random.default_rng(number)
        batch = {"tokens": draw.integers(0, 16, (2, 8, 4), np.int32), "weights": draw.random((2, 8, 4), np.float32)}
        state, metrics = step(state, plan.shard({name: x[:, rows] for name, x in batch.items()}))
        losses.append([float(metrics.loss), float(metrics.grad_norm)])
    mistake = ""
    if count > 1:
        try:
            plan.shard({"tokens": np.zeros((2, 4 + 2 * index, 4), np.int32)})
        except amsp.UserError as error:
            mistake = str(error)
    print(json.dumps([losses, rows.tolist(), mistake, str(amsp.make_plan("zero3", model).degrees)]))
"""


def results(count: int, strategy: str) -> list:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), address, str(count)]
    children = [
        subprocess.Popen(
            [*command, str(i), strategy], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(count)
    ]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0] * count, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_rows_of_two_processes_give_the_numbers_of_one():
    # Each data rank's rows, and so dropout, are the same; its ranks are not one after another in the batch.
    strategy = "params=1x1 grads=2x1 opt_state=2x2"
    ((one, all_rows, _, degrees),) = results(1, strategy)
    two = results(2, strategy)
    assert all_rows == list(range(8)) and sorted(two[0][1] + two[1][1]) == all_rows
    assert degrees == "params=4x1 grads=4x1 opt_state=4x1"
    for losses, rows, mistake, found in two:
        np.testing.assert_allclose(losses, one, rtol=1e-6)
        assert rows != list(range(4)) and len(rows) == 4
        assert "process 0 gives a batch of 2 microbatches of 2 rows a data rank, 1 arrays, process 1 one of" in mistake
        # Two processes of one machine are one node.
        assert found == degrees
