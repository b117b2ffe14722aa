"""Do real devices compute what one of them computes? Prints one JSON line a strategy.

    python benchmarks/equivalence.py                # every device there is, in float32 and in bfloat16
    python benchmarks/equivalence.py --devices 4    # simulated on a CPU

A LLaMA of 4 layers trains 6 steps on random tokens under several strategies; losses, gradient norms and parameters are
compared with those of one device. The first run is repeated: by how much do two runs of one program differ?
float32 runs with float32 matrix products (no TF32) and XLA attention, bfloat16 with cuDNN's.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from amsp_jax.cli import exits
from amsp_jax.engine.optimizer import make_optimizer, to_true
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.state import init_state, true_state
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

MIXED = "params=replica grads=node opt_state=full"
RUNS = [("zero3", 1), ("zero3", 1), ("zero3", 3), ("ddp", 3), ("zero1", 3), ("zero2", 3), ("mics(2)", 3), (MIXED, 3)]
"""Strategy and number of microbatches; the first twice."""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--devices", type=int, default=0, help="simulate this many on a CPU")
    p.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=("float32", "bfloat16"))
    args = p.parse_args()
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    for dtype in args.dtypes:
        attention = "xla" if dtype == "float32" or args.devices else "cudnn"
        with jax.default_matmul_precision("float32"):
            compare(dtype, attention)


def compare(dtype: str, attention: str) -> None:
    devices = jax.devices()
    nodes = 2 if len(devices) % 2 == 0 else 1
    expected = train("ddp", devices[:1], 1, dtype, attention, accumulation=1)
    for strategy, accumulation in RUNS:
        got = train(strategy, devices, nodes, dtype, attention, accumulation)
        row = {"strategy": strategy, "accumulation": accumulation, "dtype": dtype, "devices": len(devices)}
        row["device_kind"] = devices[0].device_kind
        for name, x, y in zip(("loss", "grad_norm"), got[:2], expected[:2], strict=True):
            row[name] = float(np.max(np.abs(x - y) / y))
        pairs = zip(jax.tree.leaves(got[2]), jax.tree.leaves(expected[2]), strict=True)
        row["params"] = max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)
        print(json.dumps(row), flush=True)


def train(strategy, devices, nodes, dtype, attention, accumulation):
    """(losses, gradient norms, final parameters) of 6 clipped SGD steps on 24 rows of 256 tokens."""
    model = build_model("llama-tiny", {"hidden": 256, "ffn": 768, "init_std": 0.1}, attention=attention)
    optimizer = make_optimizer("sgd", 0.3, clip_norm=1.0)
    ranks = DataRanks(len(devices) // nodes, nodes)
    plan = make_plan(strategy, model, ranks=ranks, devices=devices, compute_dtype=jnp.dtype(dtype))
    state = init_state(plan, optimizer, seed=1)
    step = make_train_step(plan, optimizer)
    draw = np.random.default_rng(0)
    losses, norms = [], []
    for _ in range(6):
        tokens = draw.integers(0, 2048, (24, 257), dtype=np.int32)
        weights = (draw.random((24, 256)) < 0.9).astype(np.float32)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        batch = {k: v.reshape(accumulation, -1, 256) for k, v in batch.items()}
        state, metrics = step(state, plan.shard(batch))
        losses.append(float(metrics.loss))
        norms.append(float(metrics.grad_norm))
    return np.array(losses), np.array(norms), jax.device_get(to_true(state.params, true_state(plan, optimizer).params))


if __name__ == "__main__":
    sys.exit(exits.run(main))
