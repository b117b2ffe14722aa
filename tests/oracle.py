"""Small models, padded batches, and training runs to compare: the oracle of every parallel run is one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from amsp_jax.engine.optimizer import make_optimizer, to_true
from amsp_jax.engine.plan import Plan, make_plan
from amsp_jax.engine.state import TrainState, abstract_state, init_state, true_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_grad_fn, make_update_fn
from amsp_jax.model import Model, Params, Part
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks, Strategy

RANKS = DataRanks(per_node=4, num_nodes=2)
STEPS, ROWS, SEQ = 4, 24, 8

PRESETS = ["ddp", "zero1", "zero2", "zero3", "mics(2)", "mics(4)", "hpz(4)", "hfsdp(2)"]
QUICKSTART = "params=replica grads=node opt_state=full"
# Each degree is another one inside a node.
THREE_DEGREES = "params=2x1 grads=4x1 opt_state=4x2"
# Parameters span the nodes before they fill one.
NODES_FIRST = "params=1x2 grads=2x2 opt_state=2x2"

# Over 8 shards the vocabulary and the hidden size are padded, and the bias of gpt's ffn is replicated.
MODELS = {
    "llama": ("llama-tiny", {"vocab_size": 61, "hidden": 60, "ffn": 20, "num_heads": 2, "num_kv_heads": 1}),
    "gpt": ("gpt-22b", {"vocab_size": 61, "hidden": 60, "ffn": 20, "num_heads": 2, "max_seq_len": 16}),
}


@functools.cache
def model(name: str, num_layers: int = 2, tied: bool = True) -> Model:
    base, overrides = MODELS[name]
    return perturbed(build_model(base, {**overrides, "num_layers": num_layers, "tied": tied, "init_std": 0.2}))


def perturbed(built: Model, noise: float = 0.1) -> Model:
    """The model with initial values at which nothing is 0 or 1 exactly."""
    block, num_layers = _perturbed(built.blocks[0], noise), len(built.blocks)
    return dataclasses.replace(
        built, embed=_perturbed(built.embed, noise), blocks=(block,) * num_layers, head=_perturbed(built.head, noise)
    )


def _perturbed(part: Part, noise: float) -> Part:
    """Initial values away from 0 and 1: a bias that starts at 0 is after one sign-like step all rounding."""

    def init(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(part.init(key))
        keys = jax.random.split(key, len(leaves))
        noisy = [x + noise * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, noisy)

    return dataclasses.replace(part, init=init)


@functools.cache
def optimizer(name: str) -> optax.GradientTransformation:
    """Clipped at every step. SGD moves far enough that a wrong scale shows in the parameters; a sign-like update is
    kept small, since it turns the rounding of a gradient near zero into a whole step."""
    return make_optimizer(name, 0.3 if name == "sgd" else 1e-3, weight_decay=0.1, clip_norm=0.3)


def plan_for(strategy: Strategy | str, model: Model, ranks: DataRanks = RANKS, dtype: Any = jnp.float32) -> Plan:
    return make_plan(strategy, model, ranks=ranks, devices=jax.devices()[: ranks.total], compute_dtype=dtype)


@functools.cache
def initial_params(model: Model) -> Params:
    return jax.device_get(init_state(plan_for("ddp", model, DataRanks(1)), optax.identity(), seed=3).params)


@functools.cache
def initial(model: Model, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of `init_state` with seed 3, of true shapes and as numpy."""
    params = initial_params(model)
    with jax.numpy_dtype_promotion("standard"):
        opt_state = jax.device_get(jax.jit(optimizer.init)(params))
    return TrainState(step=np.int32(0), seed=np.uint32(3), params=params, opt_state=opt_state)


def initial_state(model: Model, optimizer: optax.GradientTransformation, plan: Plan) -> TrainState:
    """What `init_state` gives under the plan for seed 3, as its own tests say, without a compilation for each plan."""
    return stored(initial(model, optimizer), abstract_state(plan, optimizer))


def batches(vocab: int = 61, rows: int = ROWS, seq: int = SEQ, steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Rows of very different weight: some empty, one microbatch's worth nine tenths padding."""
    rng = np.random.default_rng(7)
    result = []
    for _ in range(steps):
        tokens = rng.integers(0, vocab, (rows, seq + 1), dtype=np.int32)
        keep = np.where(np.arange(rows) % 3 == 0, 0.1, 0.9)[:, None]
        weights = (rng.random((rows, seq)) < keep).astype(np.float32)
        weights[-2:] = 0
        result.append({"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights})
    return result


def split(batch: dict[str, np.ndarray], accumulation: int) -> dict[str, np.ndarray]:
    """[rows, ...] as [microbatches, rows, ...]."""
    return {k: v.reshape(accumulation, -1, *v.shape[1:]) for k, v in batch.items()}


def placed(plan: Plan, batch: dict[str, np.ndarray], accumulation: int) -> dict[str, jax.Array]:
    """The batch in microbatches, on the plan's devices."""
    return plan.shard(split(batch, accumulation))


class Run:
    """A model under a plan: optimizers share the compiled gradient, numbers of microbatches the compiled update."""

    def __init__(self, model: Model, plan: Plan, settings: StepSettings | None = None) -> None:
        self.model, self.plan = model, plan
        self.grads = jax.jit(make_grad_fn(plan, settings or StepSettings()))
        self._updates: dict[optax.GradientTransformation, Any] = {}

    def train(
        self, optimizer: optax.GradientTransformation, data: list[dict[str, np.ndarray]], accumulation: int = 1
    ) -> tuple[list[Any], TrainState]:
        """(metrics of each step, final state of true shapes as numpy)."""
        state = initial_state(self.model, optimizer, self.plan)
        stored = jax.tree.map(lambda x: x.sharding, state)
        if optimizer not in self._updates:
            self._updates[optimizer] = self._update(optimizer, stored)
        metrics = []
        for batch in data:
            sums, grads = self.grads(state.params, placed(self.plan, batch, accumulation), state.seed, state.step)
            state, step_metrics = self._updates[optimizer](state, grads, sums)
            metrics.append(jax.device_get(step_metrics))
        assert jax.tree.map(lambda x: x.sharding, state) == stored
        return metrics, jax.device_get(to_true(state, true_state(self.plan, optimizer)))

    def _update(self, optimizer: optax.GradientTransformation, stored: TrainState) -> Any:
        shardings = (stored, jax.NamedSharding(self.plan.mesh, P()))
        return jax.jit(make_update_fn(self.plan, optimizer), out_shardings=shardings)


@functools.lru_cache(maxsize=4)
def run_of(strategy: str, model_name: str) -> Run:
    """A run with the default settings, which tests that follow each other share."""
    own = model(model_name)
    return Run(own, plan_for(strategy, own))


@functools.cache
def one_device(model_name: str, optimizer_name: str) -> tuple[list[Any], TrainState]:
    """The oracle: the same training on one device, whole batch at once."""
    return _one_device_run(model_name).train(optimizer(optimizer_name), batches())


@functools.cache
def _one_device_run(model_name: str) -> Run:
    m = model(model_name)
    return Run(m, plan_for("ddp", m, DataRanks(1)))


@functools.cache
def one_device_of(own: Model, optimizer_name: str, num_steps: int) -> tuple[list[Any], TrainState]:
    """One device's training of a model that is not the oracle's own."""
    return Run(own, plan_for("ddp", own, DataRanks(1))).train(optimizer(optimizer_name), batches(steps=num_steps))


def assert_equal_states(a: TrainState, b: TrainState, *, largest: bool, zero_gradient: str = "") -> None:
    """||a - b|| <= 1e-5 ||b|| for each leaf, and with `largest` also 1e-5 of the leaf's maximum for each value.

    Leaves whose path holds `zero_gradient` have an exact gradient of zero: rounding alone moves them, so they are
    compared absolutely where the optimizer does not blow rounding up, else left out.
    """
    flat_a, flat_b = (jax.tree_util.tree_flatten_with_path(t)[0] for t in (a, b))
    for (path, x), (_, y) in zip(flat_a, flat_b, strict=True):
        name = jax.tree_util.keystr(path)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        if zero_gradient and zero_gradient in name:
            if largest:
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-6, err_msg=name)
            continue
        error, scale = np.linalg.norm(x - y), np.linalg.norm(y)
        assert error <= 1e-5 * scale, f"{name}: {error / scale:.2e}"
        if largest:
            assert np.max(np.abs(x - y), initial=0) <= 1e-5 * np.max(np.abs(y), initial=0), name


def check_trains_as_one_device(run: Run, model_name: str, optimizers: Iterable[str], accumulation: int) -> None:
    """Loss, gradient norm, parameters and moments of the run of an own model are those of one device."""
    for name in optimizers:
        metrics, state = run.train(optimizer(name), batches(), accumulation)
        expected_metrics, expected = one_device(model_name, name)
        assert_equal_metrics(metrics, expected_metrics)
        # A key bias moves every score of a softmax alike: its exact gradient is zero.
        zero = "k']['bias" if model_name == "gpt" else ""
        assert_equal_states(state, expected, largest=name == "sgd", zero_gradient=zero)


def difference(found: Any, expected: Any) -> float:
    """Of two trees the largest of any leaf, relative to its norm."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs if np.any(b))


def assert_equal_metrics(a: list[Any], b: list[Any]) -> None:
    """Loss and gradient norm of every step to 1e-5, the number of tokens exactly."""
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x.loss, y.loss, rtol=1e-5)
        np.testing.assert_allclose(x.grad_norm, y.grad_norm, rtol=1e-5)
        assert x.num_tokens == y.num_tokens


def stored(true: TrainState, like: TrainState) -> TrainState:
    """A state of true shapes, on the devices as `like`, of `ShapeDtypeStruct`s, says: without a compilation."""

    def put(x: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        whole = np.zeros(like.shape, like.dtype)
        whole[tuple(map(slice, np.shape(x)))] = x
        return jax.device_put(whole, like.sharding)

    return jax.tree.map(put, true, like)
