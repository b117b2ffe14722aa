"""The example of a model of one's own: it runs, and what it says of strategies and dropout is so."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from amsp_jax import DataRanks, init_state, make_train_step

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "examples" / "own_model.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("own_model", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_runs():
    # As it runs where the package is installed.
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, PATH], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    losses = [[float(x) for x in re.findall(r"\d\.\d{4}", line)] for line in lines]
    assert [len(row) for row in losses] == [4, 4, 2] * 2
    for zero3, other, moved in (losses[:3], losses[3:]):
        np.testing.assert_allclose(zero3, other, atol=2e-4)
        assert moved[0] < zero3[-1] < zero3[0]


def first_steps(example, model, strategy, ranks):
    plan = example.plan_for(model, strategy, ranks)
    state = init_state(plan, example.OPTIMIZER, seed=0)
    step = make_train_step(plan, example.OPTIMIZER)
    rows = []
    for i in range(3):
        state, metrics = step(state, jax.device_put(example.make_batch(i), plan.batch_sharding))
        rows.append(jax.device_get((metrics.loss, metrics.grad_norm, metrics.aux["num_correct"])))
    return rows


@pytest.mark.parametrize("make_model", ["loss_model", "nnx_model"])
def test_dropout_is_the_same_on_one_device_and_on_eight(example, make_model):
    model = getattr(example, make_model)()
    one = first_steps(example, model, "ddp", DataRanks(1))
    eight = first_steps(example, model, "params=2x1 grads=4x1 opt_state=4x2", DataRanks(4, 2))
    np.testing.assert_allclose(eight, one, rtol=1e-5)


def test_dropout_is_there(example):
    """Another seed or step gives another loss on the same rows."""
    key = jax.random.key(0)
    params = example.init(key)
    batch = jax.tree.map(lambda x: x[0], example.make_batch(0))
    rngs = [jax.random.split(jax.random.key(seed), example.ROWS) for seed in (0, 0, 1)]
    first, again, other = (float(example.loss(params, batch, rng)[0][0]) for rng in rngs)
    assert first == again != other
