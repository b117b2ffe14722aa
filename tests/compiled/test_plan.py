"""A plan: the specs of every leaf and why, its bytes by hand and in the compiled program, its printed form."""

import math
import time
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracle import QUICKSTART, THREE_DEGREES

from amsp_jax.engine.leaves import LARGE_LEAF
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.plan import make_plan, plan_parameters, spec_text
from amsp_jax.engine.state import abstract_state
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.engine.train_step import make_grad_fn, make_train_step
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.models.registry import build_model
from amsp_jax.strategy import DataRanks, all_degrees

RANKS = DataRanks(per_node=4, num_nodes=2)
STRATEGIES = ["ddp", "zero1", "zero2", "zero3", "mics(2)", "hpz(4)", "hfsdp(2)", QUICKSTART, THREE_DEGREES]
MICROBATCHES, ROWS, SEQ = 4, 8, 16


def shape(*dims):
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def plan_leaf(dims, strategy="zero3", ranks=RANKS):
    return plan_parameters(strategy, {"w": shape(*dims)}, ranks).leaves["w"]


@pytest.mark.parametrize(
    ("strategy", "params", "grads", "opt"),
    [
        ("ddp", P(), P(), P()),
        ("zero1", P(), P(), P(("inter_opt", "intra_opt"))),
        ("zero2", P(), P(("inter_grad", "intra_grad")), P(("inter_grad", "intra_grad"))),
        ("zero3", *[P(("inter_param", "intra_param"))] * 3),
        ("mics(4)", *[P("intra_param")] * 3),
        ("hpz(4)", P("intra_param"), *[P(("intra_param", "inter_grad"))] * 2),
        ("hfsdp(2)", *[P("intra_param")] * 2, P(("intra_param", "inter_opt", "intra_opt"))),
        (QUICKSTART, P(), P("intra_grad"), P(("intra_grad", "inter_opt"))),
        (
            THREE_DEGREES,
            P("intra_param"),
            P(("intra_param", "intra_grad")),
            P(("intra_param", "intra_grad", "inter_opt")),
        ),
    ],
)
def test_specs_split_one_dimension_param_axes_first(strategy, params, grads, opt):
    plan = plan_parameters(strategy, {"w": shape(16, 24)}, RANKS)
    leaf = plan.leaves["w"]
    assert (leaf.params_spec, leaf.grads_spec, leaf.opt_spec) == (params, grads, opt)
    assert plan.param_shardings == {"w": NamedSharding(plan.mesh, params)}
    assert plan.grad_shardings == {"w": NamedSharding(plan.mesh, grads)}
    assert plan.opt_shardings == {"w": NamedSharding(plan.mesh, opt)}


def test_rows_of_the_batch_are_split_over_every_axis():
    assert plan_parameters(QUICKSTART, {}, RANKS).batch_spec == P(None, ("intra_grad", "inter_opt"))
    assert plan_parameters("mics(4)", {}, RANKS).batch_spec == P(None, ("intra_param", "inter_replica"))
    assert plan_parameters("zero3", {}, DataRanks(1)).batch_spec == P(None, None)


@pytest.mark.parametrize(
    ("dims", "dim", "stored", "note"),
    [
        ((16, 24), 0, (16, 24), ""),
        ((6, 24), 1, (6, 24), ""),
        ((3, 5, 8), 2, (3, 5, 8), ""),
        # No dimension divides: the one that wastes least is padded, by an eighth at most.
        ((61, 60), 0, (64, 60), "dimension 0 padded 61 -> 64 to divide by 8"),
        ((60, 63), 1, (60, 64), "dimension 1 padded 63 -> 64 to divide by 8"),
        ((30,), 0, (32,), "dimension 0 padded 30 -> 32 to divide by 8"),
        ((20,), None, (20,), "replicated: small, and no dimension of (20,) divides by 8"),
        ((1, 1), None, (1, 1), "replicated: small, and no dimension of (1, 1) divides by 8"),
        ((), None, (), "replicated: a scalar"),
    ],
)
def test_choice_of_dimension(dims, dim, stored, note):
    leaf = plan_leaf(dims)
    assert (leaf.dim, leaf.storage_shape, leaf.note) == (dim, stored, note)
    assert leaf.is_padded == (stored != dims)
    if dim is None:
        assert leaf.opt_spec == P() and leaf.replica_axes == ("inter_param", "intra_param")


def test_a_large_leaf_is_padded_whatever_that_costs():
    ranks = DataRanks(per_node=8, num_nodes=128)
    leaf = plan_leaf((1100, 1100), ranks=ranks)
    assert math.prod(leaf.shape) >= LARGE_LEAF
    assert (leaf.storage_shape, leaf.note) == ((2048, 1100), "dimension 0 padded 1100 -> 2048 to divide by 1024")
    assert (
        plan_leaf((600, 600), ranks=ranks).note == "replicated: small, and no dimension of (600, 600) divides by 1024"
    )


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_what_is_not_to_be_sharded_needs_no_note(strategy):
    ranks = RANKS if strategy == "ddp" else DataRanks(1)
    for dims in ((61, 60), (20,), ()):
        assert plan_leaf(dims, strategy, ranks).note == ""


@pytest.mark.parametrize("degrees", all_degrees(RANKS), ids=str)
def test_shard_shapes_are_those_of_the_shardings(degrees):
    plan = plan_parameters(str(degrees), [shape(16, 24), shape(61, 60), shape(6, 24), shape(20), shape()], RANKS)
    for leaf in plan.leaves:
        for spec, number in (
            (leaf.params_spec, leaf.num_params_shard),
            (leaf.grads_spec, leaf.num_grads_shard),
            (leaf.opt_spec, leaf.num_opt_shard),
        ):
            assert number == math.prod(NamedSharding(plan.mesh, spec).shard_shape(leaf.storage_shape))


@pytest.mark.parametrize("degrees", all_degrees(RANKS), ids=str)
def test_bytes_are_the_arithmetic_of_the_strategy(degrees):
    """Divisible shapes: 2/s_p where P is not OS's shard already, 4/s_g, and 12/s_os bytes a parameter."""
    num_params = 16 * 24 + 8 * 40
    got = plan_parameters(str(degrees), {"a": shape(16, 24), "b": shape(8, 40)}, RANKS).bytes_per_device()
    s_p, s_g, s_os = degrees.params.total, degrees.grads.total, degrees.opt_state.total
    assert got.params == (2 * num_params // s_p if s_p < s_os or s_p == 1 else 0)
    assert got.grads == 4 * num_params // s_g
    assert (got.master, got.moments) == (4 * num_params // s_os, 8 * num_params // s_os)
    assert got.total == got.params + got.grads + got.master + got.moments


def test_bytes_count_padding_and_replicas():
    plan = plan_parameters(QUICKSTART, {"padded": shape(61, 60), "small": shape(20)}, RANKS)
    got = plan.bytes_per_device()
    # The padded leaf is stored as [64, 60]: P whole, G over 4, OS over 8. The small leaf is whole throughout.
    assert got.params == 2 * (64 * 60 + 20)
    assert got.grads == 4 * (64 * 60 // 4 + 20)
    assert got.master == 4 * (64 * 60 // 8 + 20)
    assert got.moments == 2 * got.master
    assert (
        plan_parameters(QUICKSTART, {"w": shape(8)}, RANKS, compute_dtype=jnp.float32).bytes_per_device().params
        == 4 * 8
    )


GOLDEN = """\
strategy  params=replica grads=node opt_state=full
degrees   params=1x1 grads=4x1 opt_state=4x2 on 2 nodes x 4 data ranks
mesh      inter_opt 2, intra_grad 4
leaf              count  shape  P        G             OS                      bytes/device P      G     OS
blocks.*.bias         2  20     replica  replica       replica                             80    160    480
blocks.*.weight       2  16x24  replica  0:intra_grad  0:intra_grad+inter_opt           1,536    768  1,152
embed.table           1  61x60  replica  0:intra_grad  0:intra_grad+inter_opt           7,680  3,840  5,760
head.temperature      1         replica  replica       replica                              2      4     12
head.weight           1  6x16   replica  1:intra_grad  1:intra_grad+inter_opt             192     96    144
total                 7                                                                 9,490  4,868  7,548
  blocks.*.bias: replicated: small, and no dimension of (20,) divides by 8
  embed.table: dimension 0 padded 61 -> 64 to divide by 8
  head.temperature: replicated: a scalar
P: bfloat16 copy kept for the step, none where P = OS is sharded; G: float32, while microbatches accumulate; \
OS: float32 master and two moments
sum: 21,906 bytes on each device (0.00 GiB), before activations"""


def test_printed_plan():
    block = {"weight": shape(16, 24), "bias": shape(20)}
    head = {"weight": shape(6, 16), "temperature": shape()}
    tree = {"embed": {"table": shape(61, 60)}, "blocks": [block, block], "head": head}
    assert str(plan_parameters(QUICKSTART, tree, RANKS)) == GOLDEN


def test_printed_plan_warns_of_unfilled_nodes():
    text = str(plan_parameters("params=1x1 grads=1x1 opt_state=2x2", {"w": shape(8)}, RANKS))
    assert "warning   opt_state=2x2 leaves ranks of a node unused" in text


def test_spec_text():
    assert spec_text(P()) == "replica"
    assert spec_text(P(None, "intra_param")) == "1:intra_param"
    assert spec_text(P(("intra_param", "inter_opt"))) == "0:intra_param+inter_opt"


def test_a_plan_for_a_thousand_devices_that_are_not_there():
    start = time.perf_counter()
    params = build_model("llama-30b").abstract_params()
    plan = plan_parameters("params=8x1 grads=8x1 opt_state=8x4", params, DataRanks(per_node=8, num_nodes=128))
    text = str(plan)
    assert time.perf_counter() - start < 5
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    got = plan.bytes_per_device()
    assert (got.params, got.grads) == (2 * num_params // 8, 4 * num_params // 8)
    assert got.master + got.moments == 12 * num_params // 32
    assert "128 nodes x 8 data ranks" in text and "0:intra_param+inter_opt" in text


def bigram():
    """Two matrices whose every dimension divides by 8."""

    def init(key):
        return {"embed": jax.random.normal(key, (64, 32)), "head": jax.random.normal(key, (32, 64))}

    def loss(params, batch, rng):
        logits = (params["embed"][batch["tokens"]] @ params["head"]).astype(jnp.float32)
        logp = jax.nn.log_softmax(logits)
        losses = -jnp.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
        return (jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])), ()

    return Model.from_loss(loss, init)


def abstract_batch(plan):
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    dims = MICROBATCHES, ROWS, SEQ
    return {k: jax.ShapeDtypeStruct(dims, dtype, sharding=plan.batch_sharding) for k, dtype in dtypes.items()}


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "mics(2)", QUICKSTART, THREE_DEGREES])
def test_the_compiled_step_holds_exactly_the_planned_bytes(strategy):
    model, optimizer = bigram(), make_optimizer("adamw", 1e-3, clip_norm=1.0)
    plan = make_plan(strategy, model, ranks=RANKS, devices=jax.devices())
    state = abstract_state(plan, optimizer)
    step = make_train_step(plan, optimizer)
    memory = step.lower(state, abstract_batch(plan)).compile().memory_analysis()

    planned, num_params = plan.bytes_per_device(), 2 * 64 * 32
    assert planned.master + planned.moments == 12 * num_params // plan.degrees.opt_state.total
    # Three arrays of 4 bytes; the steps done, as the state, Adam and the schedule count them; and the seed.
    batch = 3 * 4 * MICROBATCHES * (ROWS // 8) * SEQ
    counters = 4 * 4
    assert memory.argument_size_in_bytes == planned.master + planned.moments + batch + counters


def local_arrays(plan, model):
    """What the accumulation loop inside `shard_map` reads and what it carries: shapes and dtypes on one device."""
    params = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.storage_shape, jnp.float32, sharding=s),
        plan.leaves,
        plan.opt_shardings,
    )
    grads = make_grad_fn(plan, StepSettings(peel_first=False, peel_last=False))
    jaxpr = jax.make_jaxpr(grads)(params, abstract_batch(plan), np.uint32(0), np.int32(0)).jaxpr
    (mapped,) = [e for e in jaxpr.eqns if e.primitive.name == "shard_map"]
    (loop,) = [e for e in mapped.params["jaxpr"].eqns if e.primitive.name == "scan"]
    read, carried = (Counter((v.aval.shape, v.aval.dtype.name) for v in vs) for vs in (loop.invars, loop.outvars))
    return read - carried, carried


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_loop_holds_params_and_grads_of_the_planned_shapes(strategy):
    model = bigram()
    plan = make_plan(strategy, model, ranks=RANKS, devices=jax.devices())
    read, carried = local_arrays(plan, model)

    shards = {}
    for name in ("params", "grads"):
        s = getattr(plan.degrees, name).total
        shards[name] = [(64 // s, 32), (32 // s, 64)]
    # The loop's counter and the microbatch's, the sums of the loss and of the weights, and the float32 accumulator at
    # the G sharding.
    scalars = Counter({((), "int32"): 2, ((), "float32"): 2})
    assert carried == scalars + Counter((dims, "float32") for dims in shards["grads"])
    # The master is cast at each use where its shard is P's, but once where it is whole.
    is_master = plan.degrees.params == plan.degrees.opt_state and plan.degrees.params.total > 1
    dtype = "float32" if is_master else "bfloat16"
    assert not Counter((dims, dtype) for dims in shards["params"]) - read


def test_an_empty_leaf_is_replicated():
    leaf = plan_parameters("zero3", {"none": shape(0, 8)}, DataRanks(4, 2)).leaves["none"]
    assert leaf.dim is None and leaf.note == "replicated: it has no values"
    assert leaf.num_opt_shard == 0


def test_a_parameter_that_holds_nothing_is_named():
    """XLA's compiler crashes on a sharded one."""
    model = Model.from_loss(lambda params, batch, rng: ((0.0, 1.0), {}), lambda key: {"w": jnp.ones((0, 4))})
    with pytest.raises(UserError, match=r"parameter \['w'\] has shape \(0, 4\) and holds nothing; leave it out"):
        model.abstract_params()
