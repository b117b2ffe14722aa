"""The step on many simulated devices: they are fixed at start-up, so a child process compiles it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

COMPILE = """
import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 64)

from amsp_jax import DataRanks, StepSettings, abstract_state, make_optimizer, make_plan, make_train_step
from models.registry import build_model

model = build_model("llama-tiny", {"num_layers": 2, "hidden": 64, "ffn": 128, "vocab_size": 256}, attention="xla")
optimizer = make_optimizer("adamw", 1e-3, clip_norm=1.0)
strategy = "params=8x1 grads=8x1 opt_state=8x4"
plan = make_plan(strategy, model.abstract_params(), DataRanks(per_node=8, num_nodes=8), jax.devices())
batch = {
    name: jax.ShapeDtypeStruct((4, 64, 32), dtype, sharding=plan.batch_sharding)
    for name, dtype in {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}.items()
}
seed = jax.ShapeDtypeStruct((), jnp.uint32, sharding=plan.replicated)
step = make_train_step(model, optimizer, plan, StepSettings())
compiled = step.lower(abstract_state(model, optimizer, plan), batch, seed).compile()

num_params = sum(x.size for x in jax.tree.leaves(model.abstract_params()))
counters = 3 * 4
batch_bytes = 3 * 4 * 4 * 1 * 32
assert compiled.memory_analysis().argument_size_in_bytes == 12 * num_params // 32 + batch_bytes + counters
"""


@pytest.mark.slow
def test_the_step_compiles_for_64_devices():
    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
