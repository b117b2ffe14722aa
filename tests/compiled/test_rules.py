"""Strategies of single leaves: the numbers of one device, the planned bytes, the expected collectives, and mistakes."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import oracle
import parallel_rows
import pytest
from oracle import QUICKSTART, Run, assert_equal_metrics, assert_equal_states, batches, one_device, plan_for
from test_collectives import ROWS, expected, lowered

from amsp_jax.compile import hlo
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.strategy import DataRanks, parse

TWO_BY_TWO = DataRanks(per_node=2, num_nodes=2)
RULES = {
    "embedding zero1": parse("zero3", {r"embed\..*": "zero1"}),
    "blocks differ": parse(
        "zero2", {r"blocks\.0\..*": "zero3", r"blocks\.1\.mlp.*": "mics(2)", r"head\..*": QUICKSTART, r".*scale": "ddp"}
    ),
    "cut axes": parse(
        "zero1",
        {
            r"blocks\..*": "params=1x1 grads=1x2 opt_state=2x2",
            r"embed\..*": "params=2x1 grads=2x1 opt_state=2x2",
        },
    ),
}
ONCE = StepSettings()


@pytest.mark.parametrize(
    ("name", "accumulation", "settings"),
    [
        ("embedding zero1", 3, ONCE),
        ("blocks differ", 3, ONCE),
        ("cut axes", 3, ONCE),
        ("blocks differ", 6, StepSettings(microbatch_group=2)),
        pytest.param("embedding zero1", 6, StepSettings(microbatch_group=3), marks=pytest.mark.slow),
        pytest.param("cut axes", 1, StepSettings(peel_first=False, peel_last=False), marks=pytest.mark.slow),
    ],
)
def test_rules_train_as_one_device(name, accumulation, settings):
    model = oracle.model("llama")
    run = Run(model, plan_for(RULES[name], model, TWO_BY_TWO), settings)
    metrics, state = run.train(oracle.optimizer("sgd"), batches(), accumulation)
    expected_metrics, expected_state = one_device("llama", "sgd")
    assert_equal_metrics(metrics, expected_metrics)
    assert_equal_states(state, expected_state, largest=True)


@pytest.mark.parametrize("parallel", [ModelParallel(tensor=2), ModelParallel(pipeline=2)], ids=str)
def test_rules_beside_tensor_ranks_and_stages(parallel):
    model = parallel_rows.model("llama", True, 2)
    strategy = parse("zero3", {r"embed\..*": "zero1", r".*scale": "zero2"})
    plan = make_plan(
        strategy, model, devices=jax.devices(), devices_per_node=4, compute_dtype=jnp.float32, parallel=parallel
    )
    parallel_rows.check_layout(model, plan, 3, ONCE, ("sgd",))


@pytest.mark.parametrize("name", RULES)
def test_collectives_and_bytes(name):
    model = oracle.model("llama")
    plan = plan_for(RULES[name], model)
    program = lowered(plan, 4).compile()
    found = hlo.collectives(program.as_text())
    assert Counter((c.kind, c.groups, c.shape, c.in_loop) for c in found if not c.is_scalar) == expected(plan, 4)
    # Three arrays of the batch; the steps done, as the state, Adam and clipping count them, and the seed.
    planned, batch = plan.bytes_per_device(), 3 * 4 * 4 * ROWS * oracle.SEQ // 8
    rest = program.memory_analysis().argument_size_in_bytes - planned.master - planned.moments - batch
    assert 0 < rest <= 16


def test_bytes_are_the_sum_of_each_rule_s():
    model = oracle.model("llama")
    plan = make_plan(RULES["embedding zero1"], model, ranks=TWO_BY_TWO)
    zero3, zero1 = (make_plan(name, model, ranks=TWO_BY_TWO) for name in ("zero3", "zero1"))
    embed, *_ = jax.tree.leaves(model.split(zero1.leaves)[0])
    assert embed.path == "embed.table" and plan.leaves["embed"]["table"].kind != zero3.leaves["embed"]["table"].kind
    # The table is whole in P and G; of master and moments both have a quarter.
    table = 61 * 60
    padded = embed.storage_shape[0] * embed.storage_shape[1]
    assert padded >= table
    ours, theirs = plan.bytes_per_device(), zero3.bytes_per_device()
    assert ours.params - theirs.params == 2 * padded and ours.grads - theirs.grads == 4 * (padded - padded // 4)
    assert (ours.master, ours.moments) == (theirs.master, theirs.moments)


def test_without_rules_the_mesh_is_as_before_and_rules_of_equal_degrees_change_nothing():
    model = oracle.model("llama")
    plain, ruled = (plan_for(s, model) for s in ("zero3", parse("zero3", {r"embed\..*": "zero3"})))
    assert plain.leaves == ruled.leaves and plain.mesh == ruled.mesh and plain.batch_spec == ruled.batch_spec


def test_axes_are_cut_where_a_rule_needs_a_cut():
    model = oracle.model("llama")
    plan = make_plan(parse("zero1", {r"embed\..*": "mics(4)", r"head\..*": "hpz(2)"}), model, ranks=DataRanks(8, 4))
    assert dict(plan.mesh.shape) == {"inter_opt": 4, "intra_opt1": 2, "intra_opt2": 2, "intra_opt3": 2}
    table = plan.leaves["embed"]["table"]
    assert table.param_axes == ("intra_opt2", "intra_opt3") and table.replica_axes == ("inter_opt", "intra_opt1")
    text = str(plan)
    assert "rule      embed\\..*: params=4x1 grads=4x1 opt_state=4x1\n" in text
    assert "1:intra_opt2+intra_opt3" in text


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({r"embed\.tabel": "zero1"}, r"rules: 'embed.*tabel' matches no parameter; .* such as embed\.table"),
        ({"embed": "zero1"}, "rules: 'embed' matches no parameter; a pattern matches the whole name"),
        ({".*": "zero1", r"embed\..*": "ddp"}, "decides nothing: earlier rules match all of its parameters"),
        (
            {r"embed\..*": "params=1x1 grads=3x1 opt_state=6x1", r"head\..*": "params=1x1 grads=2x1 opt_state=6x1"},
            r"inside a node the degree 2 of 'params=1x1 grads=2x1 opt_state=6x1' and 3 of .* do not nest",
        ),
        ({r"embed\..*": "mics(4)"}, r"rules: 'embed.*': 'mics.4.' .*does not fit 2 nodes x 6 data ranks"),
    ],
)
def test_rules_that_fit_no_mesh(rules, message):
    with pytest.raises(UserError, match=message):
        make_plan(parse("zero3", rules), oracle.model("llama"), ranks=DataRanks(6, 2))


def test_blocks_of_one_place_in_two_stages_have_one_strategy():
    model = parallel_rows.model("llama", True, 2)
    strategy = parse("zero3", {r"blocks\.1\..*": "zero1"})
    plan = make_plan(strategy, model, devices=jax.devices(), parallel=ModelParallel(pipeline=2))
    with pytest.raises(UserError, match=r"blocks\.0\..* and blocks\.1\..* are sharded differently"):
        lowered(dataclasses.replace(plan, model=model), 4)
