"""Gradients that travel between nodes in bf16, summed in float32: the program, its numbers, the planner's."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import parallel_rows
import pytest
from gpu_compiler import compiles_for_gpus
from oracle import NODES_FIRST, QUICKSTART, Run, batches, difference, plan_for
from oracle_step import FLOAT32, lowered, parts_of, predicted

from amsp_jax.compile import ahead_of_time, hlo
from amsp_jax.engine.block_backward import reduction_window
from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_grad_fn
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.cost.communication import EXCHANGE, Phase, WireDtypes, messages
from amsp_jax.predict.planner import Candidate, Scorer, Workload
from amsp_jax.strategy import DataRanks, parse

TWO_BY_TWO = DataRanks(per_node=2, num_nodes=2)
# The last two have one role inside a node and another between nodes, whichever is more significant in the stored order.
STRATEGIES = [
    *("zero1", "zero2", "zero3", "hpz", "mics", QUICKSTART),
    *(NODES_FIRST, "params=replica grads=1x2 opt_state=2x2"),
]
# Every strategy in a step of a first microbatch, a loop and a last; some in a step of one microbatch.
QUICK = [("zero1", 1), ("zero3", 4), ("mics", 4), (QUICKSTART, 4), (NODES_FIRST, 4)]
ALL = [*((strategy, 4) for strategy in STRATEGIES), ("zero1", 1), ("zero3", 1)]
CASES = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in ALL]
BF16_WIRE = Reduction.of("float32", "bfloat16")
NARROW = StepSettings(inter_node_dtype="bfloat16")
# The largest relative error of a value that is rounded to bf16.
ROUNDING = 2.0**-8


def gradients(plan, settings, accumulation=1, model=None, batch=None):
    """The gradient of the first step, as numpy."""
    model = model or oracle.model("llama")
    run = Run(model, plan, settings)
    state = oracle.initial_state(model, oracle.optimizer("sgd"), plan)
    batch = batch or batches(steps=1)[0]
    _, grads = run.grads(state.params, oracle.placed(plan, batch, accumulation), 0, state.step)
    return jax.device_get(grads)


# The numbers


@pytest.mark.parametrize(("strategy", "accumulation"), CASES)
def test_what_a_node_contributes_is_rounded_once(strategy, accumulation):
    """Gradients in float32, padded leaves: a wrong order of pieces would be no rounding."""
    plan = plan_for(strategy, oracle.model("llama"), TWO_BY_TWO)
    found = oracle.to_true(gradients(plan, NARROW, min(accumulation, 3)), oracle.initial_params(oracle.model("llama")))
    error = difference(found, gradients_of_one_device())
    # Sums in float32 differ by 1e-6 where their order does.
    assert (1e-4 < error < ROUNDING) if strategy != "mics" else error < 1e-5


@functools.cache
def gradients_of_one_device():
    return gradients(plan_for("ddp", oracle.model("llama"), DataRanks(1)), StepSettings())


@pytest.mark.parametrize(
    ("strategy", "accumulation", "largest"), [("zero1", 1, 1e-5), ("zero3", 1, 1e-5), ("zero1", 4, ROUNDING)]
)
def test_one_microbatch_of_one_rank_a_node_is_not_rounded(strategy, accumulation, largest):
    """Gradients leave the products in bf16, so that training differs by the order of the sum; more are sums."""
    plan = plan_for(strategy, oracle.model("llama"), DataRanks(1, 4), jnp.bfloat16)
    (found, state), (expected, expected_state) = (
        trained_in_bf16(plan, settings, accumulation) for settings in (NARROW, StepSettings())
    )
    norms, expected_norms = ([row.grad_norm for row in rows] for rows in (found, expected))
    np.testing.assert_allclose(norms, expected_norms, rtol=largest)
    assert difference(state.params, expected_state.params) < largest


def trained_in_bf16(plan, settings, accumulation):
    """Two steps of SGD in which bf16 is bf16: XLA would not round what is float32 before and after."""
    run = Run(oracle.model("llama"), plan, settings)
    options = {"xla_allow_excess_precision": False}
    run.grads = jax.jit(make_grad_fn(plan, settings), compiler_options=options)
    with jax.numpy_dtype_promotion("standard"):  # jax's XLA attention promotes bf16 in its backward pass
        return run.train(oracle.optimizer("sgd"), batches(rows=16, steps=2), accumulation)


def test_a_pipeline_of_two_stages_on_two_nodes_each():
    model = parallel_rows.model("llama", False, 4)
    parallel = ModelParallel(pipeline=2)
    plan = make_plan(
        "zero1",
        model,
        ranks=parallel.data_ranks(4, 2),
        devices=jax.devices(),
        compute_dtype=jnp.float32,
        parallel=parallel,
    )
    assert plan.degrees.ranks == TWO_BY_TWO
    data = parallel_rows.batches()[0]
    found, expected = (gradients(plan, settings, 2, model, data) for settings in (NARROW, StepSettings()))
    assert 0 < difference(found, expected) < ROUNDING


# The program


@pytest.mark.parametrize("strategy", ["zero3", QUICKSTART])
def test_the_reductions_own_dtype_changes_nothing(strategy):
    plan = plan_for(strategy, oracle.model("llama"), TWO_BY_TWO)
    texts = [lowered(plan, 2, settings=StepSettings(inter_node_dtype=d)).as_text() for d in (None, jnp.float32)]
    assert texts[0] == texts[1] and "all_to_all" not in texts[0]


def test_only_between_nodes_is_the_wire_bf16():
    plan = plan_for("params=2x1 grads=2x1 opt_state=2x2", oracle.model("llama"), DataRanks(2, 4), jnp.bfloat16)
    text = lowered(plan, 2, settings=NARROW).as_text()
    exchanged = re.findall(r'"stablehlo.all_to_all".*-> tensor<[\dx]+x(\w+)>', text)
    scattered = re.findall(r'"stablehlo.reduce_scatter"[\s\S]*?\}\) : \(tensor<[\dx]+x(\w+)>\)', text)
    reduced = re.findall(r'"stablehlo.all_reduce"[\s\S]*?\}\) : \(tensor<[\dx]+x(\w+)>\)', text)
    assert set(exchanged) == {"bf16"} and set(scattered) == {"f32"} and set(reduced) == {"f32"}


@pytest.mark.parametrize(("strategy", "accumulation"), CASES)
def test_the_compiled_step_has_the_predicted_collectives(strategy, accumulation):
    """By kind, groups and values: XLA for CPUs writes an exchange as its pieces, and in float32."""
    plan = plan_for(strategy, oracle.model("llama"), TWO_BY_TWO)
    found: Counter = Counter()
    in_loop = accumulation - 2 if plan.has_work_once_a_step else accumulation
    operations = {}
    for c in hlo.collectives(lowered(plan, accumulation, settings=NARROW).compile().as_text()):
        times = in_loop if c.in_loop else 1
        if c.kind == EXCHANGE:
            operations.setdefault(c.op, [c.groups, 0, times])[1] += c.num_bytes // 2
        elif not c.is_scalar:
            found[c.kind, c.groups, c.num_bytes] += times
    for groups, num_bytes, times in operations.values():
        found[EXCHANGE, groups, num_bytes] += times
    assert found == predicted(plan, accumulation, BF16_WIRE)
    assert any(kind == EXCHANGE for kind, *_ in found) == (strategy != "mics")


@pytest.mark.slow
@compiles_for_gpus
def test_exchanges_are_asynchronous_on_absent_gpus_and_as_planned():
    """Two nodes of two. XLA starts them as late as it may; what a barrier holds back runs beside products."""
    num_layers = 10
    model = build_model("llama-7b", {"num_layers": num_layers}, attention="cudnn")
    plan = make_plan(QUICKSTART, model, ranks=TWO_BY_TWO, devices=ahead_of_time.target_devices("h100", 2, 2))
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    program = ahead_of_time.compile_step(model, optimizer, plan, NARROW, (1, 2 * 4, 4096))
    spans = [span for span in hlo.analyse(program.as_text()) if span.kind == EXCHANGE]
    wire = WireDtypes(jnp.dtype(jnp.bfloat16), BF16_WIRE)
    planned = [m.num_bytes for part in parts_of(plan, model) for m in messages(part, wire) if m.kind == EXCHANGE]
    # XLA combines none of them.
    assert Counter(span.num_bytes for span in spans) == Counter(planned)
    assert {span.num_arrays for span in spans} == {1} and not any(span.is_sync for span in spans)
    _, blocks, _ = model.split(plan.leaves)
    num_held = num_layers - (reduction_window(blocks, is_last=True) or 0)
    assert sum(span.flops.matmul > 0 for span in spans) >= 3 * num_held > 0


# The planner


def test_an_exchange_is_a_message_of_its_own_and_half_the_bytes():
    plan = plan_for(QUICKSTART, oracle.model("llama"), TWO_BY_TWO)
    for part in parts_of(plan, oracle.model("llama")):
        sharded = [leaf for leaf in part.leaves if leaf.dim is not None]
        wide, narrow = (
            [m for m in messages(part, WireDtypes(plan.compute_dtype, reduction)) if m.phase is Phase.END]
            for reduction in (FLOAT32, BF16_WIRE)
        )
        assert [m.kind for m in wide] == ["reduce-scatter"]
        assert [m.kind for m in narrow] == [EXCHANGE] * len(sharded)
        assert 2 * sum(m.num_bytes for m in narrow) == sum(m.num_bytes for m in wide)


def scorer(inter_node_dtype):
    workload = Workload(
        model=build_model("llama-7b", {"num_layers": 4}), optimizer=make_optimizer("adamw", 1e-4, weight_decay=0.1),
        global_batch=64, seq_len=4096, inter_node_dtype=inter_node_dtype,
    )  # fmt: skip
    return Scorer(workload, named_cluster("a800", 2))


@pytest.mark.parametrize(("strategy", "is_faster"), [(QUICKSTART, True), ("zero1", True), ("mics(8)", False)])
def test_the_planner_expects_less_time_where_gradients_cross_nodes(strategy, is_faster):
    """mics replicates optimizer states over nodes: its all-reduce stays as it is."""
    candidate = Candidate(parse(strategy).resolve(DataRanks(8, 2)), 1, Remat.PROJECTIONS)
    wide, narrow = (scorer(dtype).estimate(candidate) for dtype in (None, "bfloat16"))
    assert (narrow.step_s < wide.step_s) if is_faster else (narrow.step_s == wide.step_s)
    assert "all-to-all 1x2" in narrow.unmeasured or not is_faster


# What is refused


@pytest.mark.parametrize(("dtype", "wire"), [("int8", None), ("float32", "int16"), ("bool", None)])
def test_gradients_travel_in_floating_point(dtype, wire):
    with pytest.raises(UserError, match="_dtype=.*floating-point"):
        Reduction.of(dtype, wire)


@pytest.mark.parametrize(
    "make", [Reduction.of, lambda dtype, wire: StepSettings(reduce_dtype=dtype, inter_node_dtype=wire).reduction]
)
def test_a_wire_wider_than_the_sum_is_refused(make):
    expected = "inter_node_dtype=float32 is not narrower than reduce_dtype=bfloat16.*set reduce_dtype=float32"
    with pytest.raises(UserError, match=expected):
        make("bfloat16", "float32")
