"""Tensor, context and pipeline parallelism under every strategy train as one device does, in float32."""

import functools
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import parallel_rows
import parallel_table
import pytest
from parallel_table import FACTORS, table

from amsp_jax.engine.eval_step import make_eval_step, make_logits_step
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.step_settings import StepSettings

QUICK = [number for number, row in enumerate(table()) if row.num_devices == 8][:2]
"""Of the rows that need no process of their own, the first have the most pairs: they are in every run."""
BATCH = 8
"""Rows of 16 devices that one process computes."""


def rows_of(num_devices):
    """Those of one model follow each other: a process trains it on one device once."""

    def mark(number):
        return pytest.param(number, id=str(table()[number]), marks=[] if number in QUICK else pytest.mark.slow)

    def model_of(number):
        row = table()[number]
        return row.model, row.tied, row.num_layers

    numbers = [number for number, row in enumerate(table()) if row.num_devices == num_devices]
    return [mark(number) for number in sorted(numbers, key=model_of)]


def cannot_be(pair):
    """Whether two values exclude each other: fewer microbatches than stages, or in no groups of them; no schedule."""
    microbatches, pipeline = pair.get("microbatches"), pair.get("pipeline")
    name, virtual_stages = pair.get("schedule", (None, 1))
    if microbatches and pipeline:
        return microbatches < pipeline
    if pipeline and name is not None:
        return (pipeline > 1) != bool(name)
    if microbatches and name:
        return microbatches == 1 or (virtual_stages > 1 and microbatches == 3)
    return False


def test_the_table_has_every_pair_that_can_meet():
    rows = table()
    assert len(rows) <= 60 and all(row.is_feasible for row in rows)
    met = {pair for row in rows for pair in row.pairs()}
    assert met == {pair for row in parallel_table.feasible() for pair in row.pairs()}
    # Every class of strategy meets every value, and nothing else is impossible but what cannot be at once.
    values = {name: {(name, value) for value in choices} for name, choices in FACTORS.items()}
    missing = {pair for a, b in itertools.combinations(values, 2) for pair in itertools.product(values[a], values[b])}
    missing -= met
    assert not [pair for pair in missing if pair[0][0] == "strategy"]
    assert all(cannot_be(dict(pair)) for pair in missing), missing


@pytest.mark.parametrize("number", rows_of(8))
def test_eight_devices_train_as_one(number):
    parallel_rows.check(table()[number])


@functools.cache
def problems(numbers):
    """What went wrong with rows of 16 devices, computed in a process of their own; empty where nothing."""
    command = [sys.executable, parallel_rows.__file__, *map(str, numbers)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    return {row["row"]: row["problem"] for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("number", rows_of(16))
def test_sixteen_devices_train_as_one(number, request):
    chosen = [item.callspec.params["number"] for item in request.session.items if item.originalname == SIXTEEN]
    batch = chosen.index(number) // BATCH * BATCH
    assert not (problem := problems(tuple(chosen[batch : batch + BATCH]))[number]), problem


SIXTEEN = test_sixteen_devices_train_as_one.__name__


def plan_of(model, strategy, num_devices=8, **parallel):
    cut = ModelParallel(**parallel)
    return make_plan(
        strategy,
        model,
        ranks=cut.data_ranks(1, num_devices),
        devices=jax.devices()[:num_devices],
        compute_dtype=jnp.float32,
        parallel=cut,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizers"),
    [
        ("zero3", ("adafactor", "lion", "lamb", "muon")),
        ("zero1", ("adafactor", "lion", "lamb", "muon")),
    ],
)
def test_other_optimizers_see_true_leaves(strategy, optimizers):
    """Neither padding nor stages nor tensor ranks show in Adafactor's means, LAMB's norms or Muon's iteration."""
    model = parallel_rows.model("llama", False, 3)
    plan = plan_of(model, strategy, pipeline=2, tensor=2)
    parallel_rows.check_layout(model, plan, 2, StepSettings(), optimizers)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("llama", {"tensor": 2, "pipeline": 2, "context": 2}),
        pytest.param("gpt", {"tensor": 4, "context": 2}, marks=pytest.mark.slow),
    ],
)
def test_evaluation_and_logits_are_those_of_one_device(name, parallel):
    model = parallel_rows.model(name, name == "gpt", 3)
    plan, one = plan_of(model, "zero3", **parallel), parallel_rows.one_device(model).plan
    batch, results = parallel_rows.batches()[0], []
    for each, microbatches in ((plan, 3), (one, 1)):
        params = oracle.initial_state(model, oracle.optimizer("sgd"), each).params
        placed = oracle.placed(each, batch, microbatches)
        sums = make_eval_step(each)(params, placed)
        logits = np.asarray(make_logits_step(each)(params, placed))
        results.append((float(sums.loss), float(sums.weight), logits.reshape(-1, *logits.shape[2:])))
    (loss, weight, logits), (one_loss, one_weight, one_logits) = results
    assert weight == one_weight and logits.shape == one_logits.shape
    np.testing.assert_allclose(loss, one_loss, rtol=1e-5)
    np.testing.assert_allclose(logits, one_logits, rtol=0, atol=1e-5 * np.abs(one_logits).max())
