"""A group of microbatches in each block in turn trains as one device does, whatever surrounds it."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import parallel_rows
import pytest
from gpu_compiler import GIB, SMALL_BYTES, compiles_for_gpus, without_products
from oracle import (
    NODES_FIRST,
    QUICKSTART,
    Run,
    batches,
    difference,
    plan_for,
)

from amsp_jax.compile import ahead_of_time, hlo
from amsp_jax.compile.hlo.text import parse
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_grad_fn
from amsp_jax.errors import UserError
from amsp_jax.model import Model, Part
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks

TWO_BY_TWO = DataRanks(per_node=2, num_nodes=2)
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "mics(2)", "hpz(2)", QUICKSTART, NODES_FIRST]
# Of the 6 microbatches of a step: one group, two, three.
GROUPS = [6, 3, 2]
QUICK = [("zero1", 6), ("zero3", 3), (QUICKSTART, 2), (NODES_FIRST, 6)]


def check(strategy, settings, model_name="llama", optimizers=("sgd",)):
    model = oracle.model(model_name)
    run = Run(model, plan_for(strategy, model, TWO_BY_TWO), settings)
    oracle.check_trains_as_one_device(run, model_name, optimizers, 6)


@pytest.mark.parametrize(("strategy", "group"), QUICK)
def test_groups_train_as_one_device(strategy, group):
    check(strategy, StepSettings(microbatch_group=group))


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_of_every_strategy_train_as_one_device(strategy, group):
    check(strategy, StepSettings(microbatch_group=group), optimizers=("sgd", "adamw"))


@pytest.mark.parametrize(("remat", "peel"), [(Remat.NONE, False), (Remat.FULL, True)])
def test_settings_change_no_number(remat, peel):
    check(NODES_FIRST, StepSettings(microbatch_group=2, remat=remat, peel_first=peel, peel_last=peel))


@pytest.mark.slow
def test_gpt():
    check("zero3", StepSettings(microbatch_group=3), model_name="gpt")


def test_beside_tensor_and_context_ranks():
    model, parallel = parallel_rows.model("llama", True, 2), ModelParallel(tensor=2, context=2)
    plan = make_plan(
        "zero3",
        model,
        ranks=parallel.data_ranks(1, 8),
        devices=jax.devices(),
        compute_dtype=jnp.float32,
        parallel=parallel,
    )
    parallel_rows.check_layout(model, plan, 4, StepSettings(microbatch_group=2), ("sgd",))


def gradients(model, settings):
    plan = plan_for(QUICKSTART, model, TWO_BY_TWO)
    state = oracle.initial_state(model, oracle.optimizer("sgd"), plan)
    batch = oracle.placed(plan, batches(steps=1)[0], 6)
    return jax.device_get(Run(model, plan, settings).grads(state.params, batch, 7, state.step))


def test_a_model_without_blocks_and_with_randomness_and_aux():
    """Each row has its own key, whatever the group; aux leaves are added up."""

    def init(key):
        return {"w": jax.random.normal(key, (61, 12))}

    def loss(params, batch, rng):
        noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(rng)
        rows = jnp.sum(params["w"][batch["tokens"]] ** 2, axis=-1)
        return (jnp.sum(batch["weights"] * noise * rows), jnp.sum(batch["weights"])), {"rows": jnp.float32(len(rng))}

    model = Model.from_loss(loss, init)
    (sums, grads), (expected_sums, expected) = (gradients(model, StepSettings(microbatch_group=g)) for g in (3, 1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), sums, expected_sums)
    assert sums.aux["rows"] == oracle.ROWS and difference(grads, expected) < 1e-6


def with_dropout_and_positions():
    """What flows between its blocks, which drop elements, holds integers, random keys and masks, too."""

    def embed(params, batch, rng):
        return {
            "hidden": params["w"][batch["tokens"]],
            "positions": jnp.cumsum(batch["tokens"] % 3, axis=-1),
            "keys": rng,
            "is_token": batch["weights"] > 0,
        }

    def block(params, x, batch, rng):
        kept = jax.vmap(lambda one, other: jax.random.bernoulli(one, shape=(8,)) | jax.random.bernoulli(other))
        y = jnp.where((x["is_token"] & kept(rng, x["keys"]))[..., None], jnp.tanh(x["hidden"] @ params["w"]), 0)
        return {**x, "hidden": x["hidden"] + y + jnp.sin(x["positions"].astype(y.dtype))[..., None] * y}

    def head(params, embed, x, batch, rng):
        losses = jnp.sum((x["hidden"] @ params["w"]) ** 2, axis=-1)
        return (jnp.sum(batch["weights"] * losses), jnp.sum(batch["weights"])), {}

    def part(apply, *shape):
        return Part(lambda key: {"w": jax.random.normal(key, shape)}, apply)

    blocks = (part(block, 12, 12), Part(lambda key: {}, lambda params, x, batch, rng: x), part(block, 12, 12))
    return Model(name="own", embed=part(embed, 61, 12), blocks=blocks, head=part(head, 12, 20))


@pytest.mark.parametrize("remat", [Remat.NONE, pytest.param(Remat.FULL, marks=pytest.mark.slow), Remat.PROJECTIONS])
def test_what_flows_between_blocks_may_be_no_number(remat):
    model = with_dropout_and_positions()
    settings = [StepSettings(microbatch_group=group, remat=remat) for group in (3, 1)]
    (sums, grads), (expected_sums, expected) = (gradients(model, each) for each in settings)
    np.testing.assert_allclose(sums.loss, expected_sums.loss, rtol=1e-6)
    assert difference(grads, expected) < 1e-6


def test_gradients_narrower_between_nodes():
    settings = [StepSettings(microbatch_group=g, inter_node_dtype=d) for g, d in ((3, "bfloat16"), (3, None))]
    (_, found), (_, expected) = (gradients(oracle.model("llama"), each) for each in settings)
    assert 0 < difference(found, expected) < 2.0**-8


@pytest.mark.parametrize(
    ("group", "microbatches", "stages", "message"),
    [
        (4, 6, 1, "microbatch_group=4 does not divide the 6 microbatches of a step .* use 2 or 3 or 6 or 1"),
        (0, 1, 1, "microbatch_group=0: it must be at least 1"),
        (2, 1, 1, "does not divide the 1 microbatch of a step .* use 1"),
        (2, 4, 2, "microbatch_group=2 with pipeline=2: a pipeline has its own order"),
    ],
)
def test_what_is_no_group(group, microbatches, stages, message):
    parallel = ModelParallel(pipeline=stages)
    model = oracle.model("llama")
    plan = make_plan(
        "zero1",
        model,
        ranks=parallel.data_ranks(1, 4),
        devices=jax.devices()[:4],
        compute_dtype=jnp.float32,
        parallel=parallel,
    )
    rows = microbatches * plan.degrees.ranks.total
    grads = make_grad_fn(plan, StepSettings(microbatch_group=group))
    batch = oracle.placed(plan, batches(rows=rows, steps=1)[0], microbatches)
    with pytest.raises(UserError, match=message):
        grads(oracle.initial_state(model, oracle.optimizer("sgd"), plan).params, batch, 0, 0)


# The program for GPUs


def compile_for_h100(strategy, settings, num_layers, num_microbatches):
    model = build_model("llama-7b", {"num_layers": num_layers}, attention="cudnn")
    plan = make_plan(strategy, model, ranks=TWO_BY_TWO, devices=ahead_of_time.target_devices("h100", 2, 2))
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    return ahead_of_time.compile_step(model, optimizer, plan, settings, (num_microbatches, 4, 4096))


def products(program):
    """FLOPs of the whole program in matrix products."""
    parsed = parse(program.as_text())
    flops = hlo.op_flops(parsed)
    return sum(flops[line.name].matmul for line in parsed.computations[parsed.entry])


@pytest.mark.slow
@compiles_for_gpus
def test_collectives_run_beside_the_products_of_a_group():
    """One group of four: once a step each block is gathered beside the one before, reduced beside the one after."""
    num_layers = 5
    program = compile_for_h100(QUICKSTART, StepSettings(microbatch_group=4), num_layers, 4)
    text = program.as_text()
    spans = [span for span in hlo.analyse(text) if span.num_bytes > SMALL_BYTES]
    gathers, reductions = (
        [s for s in spans if s.kind == kind and s.num_runs == 1] for kind in ("all-gather", "reduce-scatter")
    )
    assert len(gathers) == num_layers + 2 and len(spans) == len(gathers) + len(reductions)
    # The embedding, and with it the first block, come before there is any work.
    assert without_products(gathers) == [span.op for span in gathers[:2]]
    between_nodes = [s for s in reductions if all(len({d // 2 for d in group}) > 1 for group in s.groups)]
    assert len(between_nodes) == num_layers + 2
    # After the embedding's gradient there is no work either.
    assert without_products(between_nodes)[-1:] == [between_nodes[-1].op] and len(without_products(between_nodes)) <= 2
    # Nor are slices asynchronous copies, or products computed a second time to be stacked.
    assert "fusion-start" not in text
    one_by_one = compile_for_h100(QUICKSTART, StepSettings(), num_layers, 4)
    assert products(program) == pytest.approx(products(one_by_one), rel=0.01)
    assert program.memory_analysis().temp_size_in_bytes < 13.5 * GIB
