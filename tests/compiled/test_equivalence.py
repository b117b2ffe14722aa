"""Every strategy trains as one device does: loss, gradient norm, parameters and moments, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from oracle import (
    NODES_FIRST,
    PRESETS,
    QUICKSTART,
    RANKS,
    THREE_DEGREES,
    Run,
    assert_equal_metrics,
    assert_equal_states,
    batches,
    one_device,
    plan_for,
)

from amsp_jax.engine.block_backward import num_untied, reduction_window
from amsp_jax.engine.eval_step import make_eval_step
from amsp_jax.engine.optimizer import to_true
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.state import abstract_state, init_state, reshard, true_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.strategy import DataRanks, all_degrees, parse

NOT_PRESETS = [QUICKSTART, THREE_DEGREES, NODES_FIRST]
PRESET_TRIPLES = {str(parse(strategy).resolve(RANKS)) for strategy in [*PRESETS, *NOT_PRESETS]}
OTHER_TRIPLES = [str(d) for d in all_degrees(RANKS) if str(d) not in PRESET_TRIPLES]


def check(strategy, accumulation, optimizers, model_name="llama", settings=None):
    model = oracle.model(model_name)
    run = Run(model, plan_for(strategy, model), settings) if settings else oracle.run_of(strategy, model_name)
    oracle.check_trains_as_one_device(run, model_name, optimizers, accumulation)


@pytest.mark.parametrize("strategy", [*PRESETS, *NOT_PRESETS])
def test_presets_train_as_one_device(strategy):
    """Three microbatches: the first, the loop, and the last, which reduces what is reduced once a step."""
    check(strategy, 3, ["adamw", "sgd"])


@pytest.mark.parametrize("strategy", ["zero1", "zero3", THREE_DEGREES])
def test_one_microbatch_is_first_and_last(strategy):
    check(strategy, 1, ["sgd"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulation"), [(triple, (3, 1)[i % 2]) for i, triple in enumerate(OTHER_TRIPLES)]
)
def test_every_other_triple_trains_as_one_device(strategy, accumulation):
    """Every triple; one half with one microbatch, the other with three. Two would not divide 24 rows by 8 ranks."""
    check(strategy, accumulation, ["adamw", "sgd"] if accumulation == 3 else ["sgd"])


def test_there_are_forty_triples():
    assert len(PRESET_TRIPLES | set(OTHER_TRIPLES)) == 40


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "muon", "lamb"])
def test_other_optimizers_see_true_shapes(optimizer):
    """The padded leaves would spoil Adafactor's means, LAMB's norms and Muon's iteration."""
    check("zero3", 3, [optimizer])


def test_gpt():
    check(THREE_DEGREES, 3, ["adamw", "sgd"], model_name="gpt")


@pytest.mark.parametrize(("remat", "peel"), [(Remat.NONE, True), (Remat.FULL, False), (Remat.FULL, True)])
def test_settings_change_no_number(remat, peel):
    """Beside the default, which is `projections` with both peeled."""
    check(
        THREE_DEGREES,
        3,
        ["sgd"],
        settings=StepSettings(remat=remat, peel_first=peel, peel_last=peel),
    )


@pytest.mark.parametrize(
    ("strategy", "accumulation", "ranks"),
    [
        ("zero1", 3, RANKS),
        ("zero2", 3, RANKS),
        ("zero2", 1, DataRanks(4)),
        ("zero3", 1, RANKS),
        ("zero3", 2, DataRanks(4)),
        (QUICKSTART, 3, RANKS),
    ],
)
def test_blocks_that_wait_for_reductions_train_as_one_device(strategy, accumulation, ranks):
    """More blocks than may wait for one another, and a head with a matrix of its own; inside a node, gradients are made
    before the next block begins."""
    num_layers = 7 if strategy in ("zero3", QUICKSTART) else 5
    model, optimizer = oracle.model("llama", num_layers=num_layers, tied=False), oracle.optimizer("sgd")
    plan = plan_for(strategy, model, ranks)
    window = reduction_window(model.split(plan.leaves)[1], is_last=True)
    assert window and window < len(model.blocks)
    metrics, state = Run(model, plan).train(optimizer, batches(steps=1), accumulation)
    expected_metrics, expected = oracle.one_device_of(model, "sgd", 1)
    assert_equal_metrics(metrics, expected_metrics)
    assert_equal_states(state, expected, largest=True)


@pytest.mark.parametrize(
    ("strategy", "ranks", "window", "expected"),
    [
        ("zero2", DataRanks(4), 4, 4),
        ("zero3", DataRanks(4), 6, 6),
        ("zero3", DataRanks(4), 12, 8),
        (QUICKSTART, DataRanks(4, 2), 4, 4),
        ("mics", DataRanks(4, 2), 6, 6),
        ("zero2", DataRanks(4, 2), 4, 8),
        ("zero1", DataRanks(4), 3, 8),
        ("ddp", DataRanks(4), None, 8),
        ("zero3", DataRanks(1), None, 8),
    ],
)
def test_gradients_are_made_at_once_where_they_are_reduced_inside_a_node(strategy, ranks, window, expected):
    model = oracle.model("llama", num_layers=8)
    blocks = model.split(plan_for(strategy, model, ranks).leaves)[1]
    assert num_untied(blocks, window) == expected


@pytest.mark.parametrize(
    ("strategy", "accumulation", "settings"),
    [("zero3", 1, {}), (QUICKSTART, 3, {}), ("zero2", 3, {"microbatch_group": 3}), ("zero3", 2, {"pipeline": 2})],
)
def test_equal_blocks_are_traced_once(strategy, accumulation, settings):
    """However many there are: the calls of a block's function, in Python, are those of the first, and of the first that
    makes its gradients at once."""
    counts = [num_block_calls(strategy, accumulation, num_layers, **settings) for num_layers in (8, 10)]
    assert 0 < counts[0] == counts[1]


def num_block_calls(strategy, accumulation, num_layers, pipeline=1, **settings):
    model = oracle.model("llama", num_layers)
    block, calls = model.blocks[0], []

    def apply(*args):
        calls.append(args)
        return block.apply(*args)

    model = dataclasses.replace(model, blocks=(dataclasses.replace(block, apply=apply),) * num_layers)
    parallel = ModelParallel(pipeline=pipeline)
    ranks = parallel.data_ranks(num_nodes=2, devices_per_node=4)
    plan = make_plan(
        strategy, model, ranks=ranks, devices=jax.devices(), compute_dtype=jnp.dtype("float32"), parallel=parallel
    )
    step = make_train_step(plan, oracle.optimizer("sgd"), StepSettings(**settings))
    batch = oracle.split(batches(steps=1)[0], accumulation)
    step.trace(abstract_state(plan, oracle.optimizer("sgd")), batch)
    return len(calls)


def test_oracle_is_plain_jax():
    """The one-device run itself equals jax.grad of the model called by hand."""
    model = oracle.model("llama")
    optimizer = oracle.optimizer("sgd")
    state = init_state(plan_for("ddp", model, DataRanks(1)), optimizer, seed=3)
    params, opt_state = state.params, state.opt_state

    def loss(params, batch):
        x = model.embed.apply(params["embed"], batch, None)
        for part, block in zip(model.blocks, params["blocks"], strict=True):
            x = part.apply(block, x, batch, None)
        (total, weight), _ = model.head.apply(params["head"], params["embed"], x, batch, None)
        return total / weight

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    for batch, expected in zip(batches(), one_device("llama", "sgd")[0], strict=True):
        value, grads = value_and_grad(params, jax.tree.map(jnp.asarray, batch))
        np.testing.assert_allclose(value, expected.loss, rtol=1e-5)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = jax.tree.map(jnp.add, params, updates)
    expected = one_device("llama", "sgd")[1].params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), params, expected)


def test_train_step_composes_the_two_halves_and_compiles_once():
    model, optimizer = oracle.model("llama"), oracle.optimizer("adamw")
    plan = plan_for(QUICKSTART, model)
    state = init_state(plan, optimizer, seed=3)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = make_train_step(plan, optimizer)
    metrics = []
    for batch in batches():
        state, row = step(state, oracle.placed(plan, batch, 3))
        metrics.append(jax.device_get(row))
    assert step._cache_size() == 1
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    expected_metrics, expected = one_device("llama", "adamw")
    assert_equal_metrics(metrics, expected_metrics)
    assert_equal_states(jax.device_get(to_true(state, true_state(plan, optimizer))), expected, largest=False)


def test_microbatches_without_a_valid_token_give_no_nan():
    model, optimizer = oracle.model("llama"), oracle.optimizer("adamw")
    plan = plan_for("zero3", model)
    batch = batches(steps=1)[0]
    batch["weights"] = np.zeros_like(batch["weights"])
    metrics, state = Run(model, plan).train(optimizer, [batch], 3)
    assert metrics[0].loss == 0 and metrics[0].grad_norm == 0 and metrics[0].num_tokens == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))


@pytest.mark.parametrize("group", [1, 65])
def test_small_gradients_survive_many_microbatches(group):
    """One large and 64 tiny microbatches in bf16: the float32 accumulator keeps the small terms."""
    model = oracle.model("llama", num_layers=1)
    plan = plan_for("zero2", model, DataRanks(2), jnp.bfloat16)
    rows = 2 * 65
    tokens = np.tile(np.arange(9, dtype=np.int32), (rows, 1))
    weights = np.full((rows, 8), 2.0**-10, np.float32)
    weights[:2] = 1
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    state = init_state(plan, oracle.optimizer("sgd"), seed=3)
    run, alone = Run(model, plan, StepSettings(microbatch_group=group)), Run(model, plan)
    # jax's XLA attention promotes bf16 in its backward pass.
    with jax.numpy_dtype_promotion("standard"):
        _, many = run.grads(state.params, oracle.placed(plan, batch, 65), 0, 0)
        _, one = alone.grads(state.params, oracle.placed(plan, {k: v[:2] for k, v in batch.items()}, 1), 0, 0)
    ratio = np.linalg.norm(many["head"]["norm"]["scale"]) / np.linalg.norm(one["head"]["norm"]["scale"])
    np.testing.assert_allclose(ratio, 1 + 64 * 2.0**-10, rtol=2e-3)


@pytest.mark.parametrize("ranks", [DataRanks(2), DataRanks(4, 2)])
def test_initial_parameters_are_bit_identical_on_every_mesh(ranks):
    model, optimizer = oracle.model("llama"), oracle.optimizer("adamw")
    one = plan_for("ddp", model, DataRanks(1))
    true, reference = true_state(one, optimizer), init_state(one, optimizer, seed=5)
    for strategy in ("ddp", "zero3"):
        state = init_state(plan_for(strategy, model, ranks), optimizer, seed=5)
        jax.tree.map(np.testing.assert_array_equal, to_true(state.params, true.params), reference.params)


def test_reshard_moves_a_live_state_bit_for_bit():
    model, optimizer = oracle.model("llama"), oracle.optimizer("adamw")
    old = plan_for("zero3", model)
    step = make_train_step(old, optimizer)
    state, _ = step(init_state(old, optimizer, seed=3), oracle.placed(old, batches()[0], 1))
    new = make_plan(QUICKSTART, model, ranks=DataRanks(2, 2), devices=jax.devices()[4:], compute_dtype=jnp.float32)
    moved = reshard(state, new)
    true = true_state(old, optimizer)
    jax.tree.map(np.testing.assert_array_equal, to_true(moved, true), to_true(state, true))
    assert jax.tree.map(lambda x: x.sharding, moved.params) == new.opt_shardings
    back = reshard(moved, old)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    make_train_step(new, optimizer)(moved, oracle.placed(new, batches()[1], 1))


def test_evaluation_equals_the_training_loss():
    model, optimizer = oracle.model("llama"), oracle.optimizer("adamw")
    plan = plan_for(QUICKSTART, model)
    state = init_state(plan, optimizer, seed=3)
    sums = make_eval_step(plan)(state.params, oracle.placed(plan, batches()[0], 3))
    np.testing.assert_allclose(sums.loss / sums.weight, one_device("llama", "adamw")[0][0].loss, rtol=1e-5)


@pytest.mark.parametrize("other", ["zero3", QUICKSTART])
def test_reshard_shares_no_buffer(other):
    model, optimizer = oracle.model("llama"), oracle.optimizer("sgd")
    state = init_state(plan_for("zero3", model), optimizer, seed=3)
    plan = plan_for(other, model)
    moved = reshard(state, plan)
    make_train_step(plan, optimizer)(moved, plan.shard(oracle.split(batches()[0], 1)))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state))


def test_weights_below_one_are_no_special_case():
    """The mean loss does not depend on the unit in which tokens are weighted."""
    model, optimizer = oracle.model("llama"), oracle.optimizer("sgd")
    run = Run(model, plan_for("zero3", model))
    light = [{**b, "weights": b["weights"] * np.float32(2.0**-20)} for b in batches()]
    metrics, state = run.train(optimizer, light)
    for row, expected in zip(metrics, one_device("llama", "sgd")[0], strict=True):
        np.testing.assert_allclose([row.loss, row.grad_norm], [expected.loss, expected.grad_norm], rtol=1e-5)
    assert_equal_states(state, one_device("llama", "sgd")[1], largest=True)


def test_reshard_keeps_statistics_that_look_like_another_parameter():
    """A factored statistic of a/w is as long as w with its padding, and w is the end of its path."""

    def init(key):
        return {"w": jnp.ones(1001), "a": {"w": jax.random.normal(key, (1008, 130))}}

    def loss(params, batch, rng):
        total = jnp.sum(params["w"] ** 2) + jnp.sum(params["a"]["w"] ** 2)
        return (jnp.sum(batch["weights"]) * total, jnp.sum(batch["weights"])), {}

    model, optimizer = Model.from_loss(loss, init), optax.adafactor(1e-2)
    old, new = plan_for("zero3", model), plan_for("ddp", model)
    batch = oracle.placed(old, {"weights": np.ones((8, 1), np.float32)}, 1)
    state, _ = make_train_step(old, optimizer)(init_state(old, optimizer, 3), batch)
    true, moved = true_state(new, optimizer), reshard(state, new)
    assert jax.tree.map(jnp.shape, moved.opt_state) == jax.tree.map(jnp.shape, true.opt_state)
    jax.tree.map(np.testing.assert_array_equal, to_true(moved, true), to_true(state, true))


@pytest.mark.parametrize("group", [1, 2])
def test_sums_are_in_float32_whatever_a_model_gives(group):
    """767 tokens are no number of bfloat16, 31 and 32 are."""

    def loss(params, batch, rng):
        losses = params["w"][batch["tokens"]] * batch["weights"]
        return (jnp.sum(losses).astype(jnp.bfloat16), jnp.sum(batch["weights"]).astype(jnp.bfloat16)), {}

    model, optimizer = Model.from_loss(loss, lambda key: {"w": jnp.ones(8)}), optax.sgd(0.1)
    plan = plan_for("zero2", model, DataRanks(per_node=4, num_nodes=1))
    weights = np.ones((6, 16, 8), np.float32)
    weights[0, 0, 0] = 0
    batch = plan.shard({"tokens": np.zeros((6, 16, 8), np.int32), "weights": weights})
    state = init_state(plan, optimizer, seed=0)
    sums = make_eval_step(plan)(state.params, batch)
    state, metrics = make_train_step(plan, optimizer, StepSettings(microbatch_group=group))(state, batch)
    assert (sums.loss, sums.weight) == (767, 767)
    assert (metrics.num_tokens, metrics.loss, metrics.grad_norm) == (767, 1, 1)


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (lambda losses, weights: jnp.mean(losses), r"shapes \(\);"),
        (lambda losses, weights: (jnp.sum(losses), jnp.sum(weights)), r"shapes \(\(\), \(\)\);"),
        (
            lambda losses, weights: ((jnp.sum(losses)[None], jnp.sum(weights)), {}),
            r"shapes \(\(\(1,\), \(\)\), \{\}\);",
        ),
    ],
)
def test_a_loss_that_gives_something_else_is_told_what_it_gives(output, told):
    def loss(params, batch, rng):
        return output(params["w"][batch["tokens"]] * batch["weights"], batch["weights"])

    model, optimizer = Model.from_loss(loss, lambda key: {"w": jnp.ones(8)}), optax.sgd(0.1)
    plan = plan_for("zero2", model, DataRanks(per_node=2, num_nodes=1))
    batch = plan.shard({"tokens": np.zeros((1, 2, 8), np.int32), "weights": np.ones((1, 2, 8), np.float32)})
    step = make_train_step(plan, optimizer)
    with pytest.raises(UserError, match=told + " it must return"):
        step(init_state(plan, optimizer, seed=0), batch)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"remat": "bogus"}, "remat='bogus': it must be one of none, projections, full"),
        ({"microbatch_group": 2.0}, "microbatch_group=2.0: it must be a whole number"),
        ({"virtual_stages": "two"}, "virtual_stages='two'"),
    ],
)
def test_settings_that_are_none(settings, told):
    with pytest.raises(UserError, match=told):
        StepSettings(**settings)


def test_rematerialisation_as_text():
    assert StepSettings(remat="full").remat is Remat.FULL


@pytest.mark.parametrize("settings", [{"pipeline_schedule": "bogus"}, {"virtual_stages": 2}])
def test_a_pipelines_settings_are_checked_without_stages(settings):
    model, optimizer = oracle.model("llama"), optax.sgd(0.1)
    plan = plan_for("zero2", model, DataRanks(per_node=2, num_nodes=1))
    step = make_train_step(plan, optimizer, StepSettings(**settings))
    with pytest.raises(UserError, match="pipeline_schedule='bogus'|virtual_stages=2 with pipeline=1"):
        step.lower(abstract_state(plan, optimizer), oracle.placed(plan, oracle.batches(steps=1)[0], 1))


@pytest.mark.parametrize("shapes", [{"tokens": (2, 4), "weights": (1, 4)}, {"tokens": (0, 4), "weights": (0, 4)}, {}])
def test_arrays_of_a_batch_have_as_many_microbatches(shapes):
    def loss(params, batch, rng):
        return (jnp.sum(params["w"]), jnp.ones(())), {}

    model, optimizer = Model.from_loss(loss, lambda key: {"w": jnp.ones(8)}), optax.sgd(0.1)
    plan = plan_for("zero2", model, DataRanks(per_node=2, num_nodes=1))
    batch = {name: jax.ShapeDtypeStruct((*shape, 8), jnp.float32) for name, shape in shapes.items()}
    step = make_train_step(plan, optimizer)
    with pytest.raises(UserError, match="a batch of .*equal numbers of both"):
        step.lower(abstract_state(plan, optimizer), batch)
