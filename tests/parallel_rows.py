"""Trains the layouts of `parallel_table` and one device, and compares; a program for those of 16 devices.

python tests/parallel_rows.py 3 17    # rows of the table; prints a line of JSON for each
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import conftest  # noqa: F401
    import jax

    jax.config.update("jax_num_cpu_devices", 16)

import jax
import jax.numpy as jnp
import optax
import oracle
import parallel_table
from oracle import Run, assert_equal_metrics, assert_equal_states
from parallel_table import Row

from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.state import TrainState
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.model import Model
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

# Of 4 tensor ranks 6 heads, 61 words and 22 columns want padding, and 2 or 3 KV heads are fewer; 3 on 2 ranks are
# padded. Of 8 or 16 shards no dimension divides.
SIZES = {"vocab_size": 61, "hidden": 60, "ffn": 22, "num_heads": 6, "init_std": 0.1}
NOISE = 0.03
OPTIMIZERS = ("sgd", "adamw")


@functools.cache
def model(name: str, tied: bool, num_layers: int, loss_chunks: int = 1) -> Model:
    """Milder than the oracle's: at its weights each block back multiplies gradients, and with them their rounding."""
    sizes = {**SIZES, "num_layers": num_layers, "tied": tied, "loss_chunks": loss_chunks}
    if name == "llama":
        return oracle.perturbed(build_model("llama-tiny", {**sizes, "num_kv_heads": 3 if tied else 2}), NOISE)
    return oracle.perturbed(build_model("gpt-22b", {**sizes, "max_seq_len": 16}), NOISE)


@functools.cache
def batches() -> list[dict[str, Any]]:
    return oracle.batches(rows=parallel_table.ROWS, steps=2)


@functools.cache
def optimizer(name: str) -> optax.GradientTransformation:
    """As the oracle's, with smaller sign-like updates: gradients of nine layers are less exact than of two."""
    return oracle.optimizer(name) if name == "sgd" else make_optimizer(name, 1e-4, weight_decay=0.1, clip_norm=0.3)


@functools.cache
def one_device(model: Model) -> Run:
    return Run(model, make_plan("ddp", model, ranks=DataRanks(1), devices=jax.devices()[:1], compute_dtype=jnp.float32))


@functools.cache
def expected(model: Model, name: str) -> tuple[list[Any], TrainState]:
    return one_device(model).train(optimizer(name), batches())


def check(row: Row) -> None:
    """Raises AssertionError unless the layout trains as one device does."""
    check_layout(
        model(row.model, row.tied, row.num_layers),
        plan_of(row),
        row.microbatches,
        StepSettings(pipeline_schedule=row.schedule[0] or "1f1b", virtual_stages=row.schedule[1]),
        OPTIMIZERS,
    )


def plan_of(row: Row) -> Plan:
    own = model(row.model, row.tied, row.num_layers)
    devices = jax.devices()[: row.num_devices]
    return make_plan(
        row.strategy, own, ranks=row.ranks, devices=devices, compute_dtype=jnp.float32, parallel=row.parallel
    )


def check_layout(
    model: Model,
    plan: Plan,
    microbatches: int,
    settings: StepSettings,
    optimizers: tuple[str, ...],
    like: Model | None = None,
) -> None:
    """Two steps under the plan are those of one device: loss, gradient norm, parameters and moments.

    That device trains the model `like`, the same if None.
    """
    run = Run(model, plan, settings)
    # A key bias moves every score of a softmax alike: its exact gradient is zero.
    zero = "k']['bias" if model.name.startswith("gpt") else ""
    for name in optimizers:
        metrics, state = run.train(optimizer(name), batches(), microbatches)
        expected_metrics, expected_state = expected(like or model, name)
        assert_equal_metrics(metrics, expected_metrics)
        assert_equal_states(state, expected_state, largest=name == "sgd", zero_gradient=zero)


def main(numbers: list[str]) -> None:
    for number in numbers:
        try:
            check(parallel_table.table()[int(number)])
            problem = ""
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps({"row": int(number), "problem": problem}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
