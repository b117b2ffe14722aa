"""The Python API as its readers meet it: each block is a whole example, on 8 simulated devices."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import amsp_jax as amsp
from amsp_jax.model import Batch

IDS, WIDTH, SEQ = 16, 8, 4


class Embed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Param(jax.random.normal(rngs.params(), (IDS, WIDTH)))

    def __call__(self, batch: Batch, rng: jax.Array) -> jax.Array:
        return self.table[...][batch["tokens"]]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 3)

    def __call__(self, x: jax.Array, batch: Batch, rng: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.weight[...])


class Head(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, IDS)) / 3)

    def __call__(self, embed: Any, x: jax.Array, batch: Batch, rng: jax.Array) -> Any:
        logits = jax.nn.log_softmax((x @ self.weight[...]).astype(jnp.float32))
        losses = -jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        return ((losses * batch["weights"]).sum(), batch["weights"].sum()), {}


class Source:
    """Rows that a formula gives: random access, so every resume and every process count sees the same batches."""

    fingerprint = "a formula"

    def rows(self, step: int, rows: np.ndarray) -> dict[str, np.ndarray]:
        ids = (3 * rows[:, None] + step + np.arange(SEQ + 1) ** 2) % IDS
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


@pytest.fixture
def model() -> amsp.Model:
    return amsp.Model(
        name="small",
        embed=amsp.Part.from_nnx(Embed),
        blocks=(amsp.Part.from_nnx(Block),) * 2,
        head=amsp.Part.from_nnx(Head),
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_trainer(model: amsp.Model) -> None:
    seen = []

    def my_eval(run: amsp.Run, metrics: Any) -> None:
        seen.append((metrics.step, float(jnp.abs(run.params["head"]["weight"]).sum())))

    run = amsp.Trainer(
        model, optax.adamw(3e-2), strategy="zero3", data=Source(), global_batch=16, steps=8, seq_len=SEQ,
        run_dir="runs/x", hooks=[amsp.hooks.every(4, my_eval)],
    ).fit()  # fmt: skip
    assert [step for step, _ in seen] == [4, 8] and seen[0][1] != seen[1][1]
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"] and run.run_dir == Path("runs/x")


def test_a_trainer_whose_strategy_the_planner_chooses(
    model: amsp.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a strategy; on one node of one device there is one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layout = amsp.runtime.launch.DeviceLayout(
        platform="cpu", num_nodes=1, devices_per_node=1, devices=tuple(jax.devices()[:1]), device_kind="cpu",
        memory_bytes=1 << 30, process_index=0, process_count=1, hosts=("here",), notes=(),
    )  # fmt: skip
    trainer = amsp.Trainer(model, optax.sgd(0.1), data=Source(), steps=2, seq_len=SEQ, layout=layout)
    run = trainer.fit()
    assert run.run_dir == Path("runs/0001") and (run.run_dir / "prediction.json").exists()


def test_a_plan_a_state_and_a_step(model: amsp.Model) -> None:
    optimizer = optax.adamw(3e-2)
    plan = amsp.make_plan("zero3", model, compute_dtype="float32")
    state, step = amsp.init_state(plan, optimizer, seed=0), amsp.make_train_step(plan, optimizer)
    losses = []
    for number in range(3):
        rows = Source().rows(number, np.arange(16))
        batch = {name: np.asarray(value[None], np.int32) for name, value in rows.items()}
        batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
        state, metrics = step(state, plan.shard(batch))
        losses.append(float(metrics.loss))
    run = amsp.Trainer(
        model, optimizer, strategy="zero3", data=Source(), global_batch=16, steps=3, seq_len=SEQ, microbatch=2,
        compute_dtype="float32",
    ).fit()  # fmt: skip
    np.testing.assert_allclose([row["loss"] for row in run.metrics], losses, rtol=1e-6)


def test_a_strategy_of_ones_own(model: amsp.Model) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amsp.strategy, "PRESETS", dict(amsp.PRESETS))

        @amsp.register_strategy("mine")
        def mine(k: int = 2) -> amsp.Strategy:
            """Parameters over k devices, gradients over a node, optimizer states over all."""
            return amsp.Strategy(params=amsp.over(k), grads=amsp.over("node"), opt_state=amsp.over("all"))

        run = amsp.Trainer(
            model, optax.sgd(0.1), strategy="mine(4)", data=Source(), steps=2, seq_len=SEQ, simulated_nodes=2,
            simulated_devices_per_node=4,
        ).fit()  # fmt: skip
    degrees = run.plan.degrees
    assert (degrees.params.total, degrees.grads.total, degrees.opt_state.total) == (4, 4, 8)


def test_rules_by_parameter(model: amsp.Model) -> None:
    """In a strategy or as a setting; the numbers are those of one strategy for all."""
    settings: dict[str, Any] = {
        "data": Source(), "global_batch": 16, "steps": 3, "seq_len": SEQ, "compute_dtype": "float32",
    }  # fmt: skip
    strategy = amsp.Strategy(params="full", grads="full", opt_state="full", rules=[(r"embed\..*", amsp.zero1())])
    ruled = amsp.Trainer(model, optax.sgd(0.1), strategy=strategy, **settings).fit()
    as_setting = amsp.Trainer(model, optax.sgd(0.1), strategy="zero3", rules={r"embed\..*": "zero1"}, **settings).fit()
    plain = amsp.Trainer(model, optax.sgd(0.1), strategy="zero3", **settings).fit()
    leaves = {leaf.path: leaf for leaf in jax.tree.leaves(ruled.plan.leaves)}
    assert not any(leaves["embed.table"].params_spec) and any(leaves["head.weight"].params_spec)
    assert str(as_setting.plan.strategy) == str(ruled.plan.strategy)
    for run in (ruled, as_setting):
        np.testing.assert_allclose(
            [row["loss"] for row in run.metrics], [row["loss"] for row in plain.metrics], rtol=1e-6
        )


def test_frozen_parameters(model: amsp.Model) -> None:
    settings: dict[str, Any] = {"data": Source(), "global_batch": 16, "steps": 3, "seq_len": SEQ, "strategy": "zero1"}
    first = amsp.Trainer(model, optax.adam(0.1), **settings, frozen=[r"embed\..*"]).fit()
    initial = amsp.init_state(first.plan, optax.adam(0.1)).params
    np.testing.assert_array_equal(first.params["embed"]["table"], initial["embed"]["table"])
    assert not np.array_equal(first.params["head"]["weight"], initial["head"]["weight"])
    moments = [leaf.shape for leaf in jax.tree.leaves(first.state.opt_state) if leaf.ndim == 2]
    assert len(moments) == 2 * 3 and "FROZEN = " in Path("runs/0001/config.gin").read_text()
