"""The step on many simulated devices: they are fixed at start-up, so a child process compiles it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("step", "step/while", "step/while/conditional")

COMPILE = """
import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 64)

from amsp_jax import DataRanks, abstract_state, make_optimizer, make_plan, make_train_step
from amsp_jax.models.registry import build_model

model = build_model("llama-tiny", {"num_layers": 2, "hidden": 64, "ffn": 128, "vocab_size": 256}, attention="xla")
optimizer = make_optimizer("adamw", 1e-3, clip_norm=1.0)
strategy = "params=8x1 grads=8x1 opt_state=8x4"
plan = make_plan(strategy, model, devices_per_node=8)
batch = {
    name: jax.ShapeDtypeStruct((4, 64, 32), dtype, sharding=plan.batch_sharding)
    for name, dtype in {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}.items()
}
step = make_train_step(plan, optimizer)
compiled = step.lower(abstract_state(plan, optimizer), batch).compile()

num_params = sum(x.size for x in jax.tree.leaves(model.abstract_params()))
counters = 4 * 4
batch_bytes = 3 * 4 * 4 * 1 * 32
assert compiled.memory_analysis().argument_size_in_bytes == 12 * num_params // 32 + batch_bytes + counters
"""


@pytest.mark.slow
def test_the_step_compiles_for_64_devices():
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_pipelined_step_has_the_plans_arguments_and_its_collectives_where_they_belong():
    command = [sys.executable, "benchmarks/scale.py", "tiny-cpu", "--num_layers", "4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)
    assert row["argument_bytes"] == row["plan_argument_bytes"]
    axes = {place: {c["axes"] for c in row["collectives"] if c["place"] == place} for place in PLACES}
    assert axes["step/while/conditional"] == {"tensor"}
    sends = [c for c in row["collectives"] if c["place"] == "step/while"]
    assert [(c["kind"], c["axes"], c["num"]) for c in sends] == [("collective-permute", "stage", 2)]
    exchanges = [c for c in row["collectives"] if c["kind"] == "all-to-all"]
    # There and back, for each of the 16 leaves of the one block that a stage has.
    assert [(c["axes"], c["place"], c["num"]) for c in exchanges] == [("stage", "step", 2 * 16)]
