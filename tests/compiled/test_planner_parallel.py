"""The planner with models that are cut: terms by hand, memory by the plan, the minimum by looking at every point."""

import dataclasses
import itertools
import json
import time

import jax
import jax.numpy as jnp
import pytest

from amsp_jax import __main__ as tools
from amsp_jax.engine.optimizer import make_optimizer
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import Kind, PipelineSchedule
from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cluster import Link, Network, named_cluster
from amsp_jax.predict.cost import model_axes
from amsp_jax.predict.cost.communication import Phase, group_of
from amsp_jax.predict.cost.pipeline_timeline import (
    Chunks,
    OnceTimes,
    half_times,
    num_slots,
    pipeline_timeline,
    tick_counts,
    ticks_seconds,
)
from amsp_jax.predict.cost.ranks import shares
from amsp_jax.predict.cost.timeline import PartTimes
from amsp_jax.predict.cost.trace import extrapolated
from amsp_jax.predict.planner import Candidate, Objective, Reason, Scorer, Space, Workload, search
from amsp_jax.predict.planner.bounds import Bounds
from amsp_jax.predict.planner.candidates import families, model_cuts
from amsp_jax.strategy import DataRanks, Degree, all_degrees, parse

SMALL = {"num_layers": 8, "hidden": 2048, "ffn": 8192, "num_heads": 16, "max_seq_len": 2048}


def workload(model="gpt-22b", global_batch=64, **overrides):
    optimizer = make_optimizer("adamw", 1e-4, weight_decay=0.1, clip_norm=1.0)
    return Workload(model=build_model(model, overrides), optimizer=optimizer, global_batch=global_batch, seq_len=2048)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(workload(**SMALL), named_cluster("frontier", 2))


def candidate(strategy="zero1", microbatch=1, remat=Remat.FULL, virtual_stages=1, schedule="1f1b", **sizes):
    parallel = ModelParallel(**sizes)
    degrees = parse(strategy).resolve(parallel.data_ranks(2, 8))
    return Candidate(degrees, microbatch, remat, parallel, virtual_stages, schedule)


# --- ticks


@pytest.mark.parametrize(
    "schedule",
    [PipelineSchedule("1f1b", 4, 1, 23), PipelineSchedule("1f1b", 4, 2, 32), PipelineSchedule("gpipe", 3, 2, 24)],
)
def test_counts_of_a_long_step_are_those_of_its_table(schedule):
    found = tick_counts(schedule)
    for half, counts in ((schedule.forward, found.forward), (schedule.backward, found.backward)):
        for kinds, count in counts.items():
            present = [(half.kind == kind).any(1) == (kind in kinds) for kind in Kind if kind is not Kind.IDLE]
            if half is schedule.forward:
                present.pop()
            assert count == sum(all(flags) for flags in zip(*present, strict=True))
    assert found.num_ticks == schedule.num_ticks and num_slots(schedule) == schedule.num_slots


@pytest.mark.parametrize(("p", "v", "m"), [(4, 1, 8), (4, 1, 64), (4, 2, 8), (8, 4, 64), (2, 1, 2)])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_bubble_of_equal_stages(p, v, m, name):
    """(p - 1)/(v m) of the ideal time; F = 1, B = 2 a virtual stage, and the last one's F inside its B."""
    times = dict.fromkeys((Kind.FIRST, Kind.MIDDLE, Kind.LAST), (1.0, 2.0))
    busy = ticks_seconds(tick_counts(PipelineSchedule(name, p, v, m)), times)
    # The forward half of the one tick that has the last virtual stage alone is left out.
    assert busy == pytest.approx((v * m + p - 1) * 3 - 1)


def part(forward_s=1.0, backward_s=2.0, **messages_s):
    return PartTimes(forward_s, backward_s, {Phase(name): (seconds,) for name, seconds in messages_s.items()})


def test_a_stage_goes_forward_twice():
    """Of two blocks: 2 forward; 2 again and 4 backward. The last one's forward pass is in its backward half."""
    middle, last = (half_times(kind, [part(), part()], slowdown=1.0) for kind in (Kind.MIDDLE, Kind.LAST))
    assert (middle.forward_s, middle.backward_s, middle.compute_s) == (2.0, 6.0, 8.0)
    assert (last.forward_s, last.backward_s, last.compute_s) == (0.0, 6.0, 6.0)


def test_gathers_of_a_half_run_one_part_ahead():
    """Forward: 3 for the first, then the block beside the gather of 3 after it, then a block alone: 3 + 3 + 1.
    Backward: the same, then 3, a block of 2 beside a gather of 3, a block beside a reduction of 4, a reduction of 4."""
    blocks = [part(forward=3.0, backward=3.0, reduce=4.0)] * 2
    found = half_times(Kind.MIDDLE, blocks, slowdown=1.0)
    assert found.forward_s == pytest.approx(7.0)
    assert found.backward_s == pytest.approx(7.0 + 3.0 + 3.0 + 4.0 + 4.0)
    assert found.wire_s == pytest.approx(2 * 6 + 6 + 8)


def test_a_step_by_hand():
    """Two stages of one block, 4 microbatches; only blocks take time, 1 and 2. Forward halves: 4 of 1. Backward halves:
    5 of 1 + 2, the last stage alone, both together three times, the first alone. Two sends of 0.1 a tick."""
    parts = [part(0.0, 0.0), part(), part(0.0, 0.0)]
    schedule, chunks = PipelineSchedule("1f1b", 2, 1, 4), Chunks.of((0, 0), 2, 1)
    timeline = pipeline_timeline(schedule, chunks, parts, OnceTimes(0.5, 0.25, 0.125), 0.1, 1.0)
    assert timeline.step_s == pytest.approx(4 * 1 + 5 * 3 + 0.875 + 2 * schedule.num_ticks * 0.1)
    # The first stage works longest: 4 x (1 + 1 + 2).
    assert timeline.compute_s == pytest.approx(16 + 0.125) and timeline.bubble_s == pytest.approx(3)
    assert timeline.step_s == pytest.approx(timeline.compute_s + timeline.exposed_s + timeline.bubble_s)


def test_uneven_stages_are_dealt_as_the_engine_does():
    chunks = Chunks.of((0,) * 6, 4, 1)
    assert [len(blocks) for stage in chunks.stages for _, blocks in stage] == [1, 2, 1]
    assert len(chunks.fullest) == 2
    with pytest.raises(UserError, match="pipeline=4"):
        Chunks.of((0, 0, 0), 4, 1)


def test_the_bubble_falls_with_microbatches_and_chunks(scorer):
    def bubble(global_batch=64, **sizes):
        other = Scorer(dataclasses.replace(scorer.workload, global_batch=global_batch), scorer.cluster)
        timeline = other.estimate(candidate(pipeline=4, tensor=2, **sizes)).timeline
        return timeline.bubble_s / timeline.step_s

    assert bubble(256) < bubble(64) < bubble(16)
    assert bubble(virtual_stages=2) < bubble()


# --- messages


def test_where_stages_lie():
    assert model_axes.stage_group(ModelParallel(pipeline=4), 8, 8) == Degree(1, 4)
    assert model_axes.stage_group(ModelParallel(pipeline=4), 1, 8) == Degree(4, 1)
    assert model_axes.stage_group(ModelParallel(pipeline=8), 4, 8) == Degree(2, 4)
    sizes = {"stage": 8, "inter_opt": 2, "intra_opt": 2, "context": 2}
    assert group_of(("stage", "inter_opt", "context"), sizes, Degree(2, 4)) == Degree(4, 8)


@pytest.mark.parametrize(
    ("remat", "gathers", "scatters"), [(Remat.NONE, 4, 4), (Remat.PROJECTIONS, 6, 4), (Remat.FULL, 6, 5)]
)
def test_tensor_and_sequence_parallelism_is_four_gathers_and_four_scatters(scorer, remat, gathers, scatters):
    """Of b s h, 2 bytes a value; and again what is not kept."""
    costs = [c for c in scorer.message_costs(candidate(tensor=4, remat=remat)) if c.message.phase is Phase.TENSOR]
    block = {c.message.kind: c for c in costs if c.part == "each block"}
    assert {c.message.num_bytes for c in costs} == {2048 * 2048 * 2}
    assert {c.message.group for c in costs} == {Degree(4, 1)}
    passes = 8 * (64 // 4)  # blocks x microbatches
    assert block["all-gather"].count == gathers * passes and block["reduce-scatter"].count == scatters * passes


def test_context_shortens_what_tensor_sends(scorer):
    def sent(**sizes):
        found = scorer.message_costs(candidate(tensor=2, **sizes))
        return next(c.message.num_bytes for c in found if c.message.phase is Phase.TENSOR)

    assert sent(context=2) == sent() // 2


def test_the_ring():
    """c = 4, kv of 10 bytes: 3 hops; backward 3, and 4 of float32 gradients; 3 more where nothing is kept."""
    assert model_axes.ring_bytes(10, 4, Remat.NONE) == (30, 30 + 80)
    assert model_axes.ring_bytes(10, 4, Remat.FULL) == (30, 30 + 80 + 30)


def test_keys_and_values_of_a_block(scorer):
    """b s h each, 2 bytes a value; of one rank 1/(t c)."""
    assert scorer.computing.trace(1, Remat.FULL).blocks[0].attended_bytes == 2 * 2048 * 2048 * 2
    of_rank = scorer.computing.rank_trace(candidate(tensor=2, context=4))
    assert of_rank.blocks[0].attended_bytes == 2 * 2048 * 2048 * 2 // 8


def test_sends_and_the_exchange_of_stages(scorer):
    """A send is b s h / (t c); the exchanges 2 + 4 bytes x parameters of blocks / (p t s_os)."""
    point = candidate("zero1", pipeline=4, tensor=2)
    costs = scorer.message_costs(point)
    send = next(c for c in costs if c.message.phase is Phase.SEND)
    assert send.message.num_bytes == 2048 * 2048 * 2 // 2
    assert send.count == 2 * scorer.schedule(point).num_ticks
    moved = [c for c in costs if c.message.kind == "all-to-all"]
    plan = make_plan("zero1", scorer.workload.model, ranks=point.degrees.ranks, parallel=point.parallel)
    _, blocks, _ = scorer.workload.model.split(plan.leaves)
    values = sum(leaf.num_opt_shard for leaf in jax.tree.leaves(blocks) if leaf.dim is not None)
    assert sum(c.count * c.message.num_bytes for c in moved) == (2 + 4) * values
    # What has been reduced is float32, whatever it was reduced in.
    narrow = Scorer(dataclasses.replace(scorer.workload, reduce_dtype=jnp.bfloat16), scorer.cluster)
    assert [c for c in narrow.message_costs(point) if c.message.kind == "all-to-all"] == moved
    ends = {c.message.axes for c in costs if c.part == "embedding" and c.message.phase is Phase.START}
    assert ends == {("intra_opt", "stage")}


def test_an_exchange_crosses_nodes_without_copies():
    """Bytes B a device over 2 x 2: links between nodes carry B/2 from each device, as of a gather of 2 B."""
    network = Network(intra=Link(bytes_per_s=1e12, latency_s=0.0), inter=Link(bytes_per_s=1e9, latency_s=0.0))
    stages = Degree(2, 2)
    message = next(model_axes.exchanges(10**9, 2, stages))
    assert model_axes.seconds(network, message) == pytest.approx(2 * (3 / 4) * 2 / 2)
    hop = model_axes.send(10**9, ModelParallel(pipeline=4), stages)
    assert model_axes.seconds(network, hop) == pytest.approx(1.0)


def test_shares_of_ranks(scorer):
    """1/t of the products and 1/(t c) of the rest; the ring's blocks are (c + 1)/(2 c) of a causal matrix's square."""
    inner = ModelParallel(tensor=4, context=2)
    leaves = scorer.states.plan(parse("ddp").resolve(DataRanks(1)), inner).leaves
    embed, block, head = shares(scorer.distinct.model, leaves, inner)
    assert block.products == pytest.approx(1 / 8) and block.others == 1 / 8
    assert block.scores == pytest.approx(3 / 4 / 8) and block.attention == pytest.approx(3 / 2 / 8)
    assert head.products == pytest.approx(1 / 8) and embed.others == 1 / 2


def test_more_tensor_ranks_compute_less_and_wait_more(scorer):
    found = [scorer.estimate(candidate(tensor=size)).timeline for size in (1, 2, 4)]
    per_sequence = [t.compute_s * size for t, size in zip(found, (1, 1 / 2, 1 / 4), strict=True)]
    assert per_sequence == sorted(per_sequence, reverse=True)
    assert found[1].exposed_s < found[2].exposed_s


# --- memory


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "params=2x1 grads=2x1 opt_state=2x1", "ddp"])
@pytest.mark.parametrize(
    "sizes", [{"pipeline": 4}, {"pipeline": 2, "tensor": 2}, {"tensor": 4}, {"context": 2, "tensor": 2}]
)
def test_states_are_the_plans_own_arithmetic(scorer, strategy, sizes):
    point = candidate(strategy, **sizes)
    plan = make_plan(strategy, scorer.workload.model, ranks=point.degrees.ranks, parallel=point.parallel)
    expected, found = plan.bytes_per_device(), scorer.memory(point)
    # AdamW has two counters beside its moments.
    assert (found.master, found.opt_state) == (expected.master, expected.moments + 8)
    assert found.params == expected.params
    if point.parallel.pipeline > 1:
        assert found.grads in (expected.grads, expected.grads + expected.master)


def test_inputs_in_flight(scorer):
    """1F1B keeps no more for more microbatches, GPipe one for each."""

    def activations(schedule, global_batch):
        other = Scorer(dataclasses.replace(scorer.workload, global_batch=global_batch), scorer.cluster)
        return other.memory(candidate(pipeline=8, schedule=schedule)).activations

    assert activations("1f1b", 32) == activations("1f1b", 128)
    assert activations("gpipe", 128) - activations("gpipe", 32) == (64 - 16) * 2048 * 2048 * 2


def test_more_ranks_hold_less(scorer):
    totals = [scorer.memory(candidate("ddp", tensor=size, remat=Remat.NONE)).total for size in (1, 2, 4, 8)]
    assert totals == sorted(totals, reverse=True)
    totals = [scorer.memory(candidate("ddp", pipeline=size, remat=Remat.NONE)).argument_bytes for size in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True)


# --- the search

SPACE = Space(
    microbatches=(1, 2, 4),
    remats=(Remat.PROJECTIONS, Remat.FULL),
    tensors=(1, 2),
    pipelines=(1, 2, 4),
    contexts=(1, 2),
    virtual_stages=(1, 2),
)


def every_point(scorer, space):
    """Each that the engine takes, without bounds."""
    for family in families(scorer, Bounds(scorer), space)[0]:
        for degrees in family.degrees:
            yield dataclasses.replace(family.example, degrees=degrees)


@pytest.mark.parametrize("memory_gib", [64, 6])
def test_the_best_are_those_of_every_point(memory_gib):
    limit, space = memory_gib * 2**30, dataclasses.replace(SPACE, microbatches=(2,), remats=(Remat.FULL,))
    scorer = Scorer(workload(global_batch=32, **SMALL), named_cluster("frontier", 2))
    times, misfits = [], 0
    for point in every_point(scorer, space):
        if scorer.needed_bytes(point) <= limit:
            times.append(scorer.estimate(point).step_s)
        else:
            misfits += 1
    ranking = search(scorer.workload, scorer.cluster, space, memory_bytes=limit, num_exact=5)
    assert [e.step_s for e in ranking.ranked[:5]] == sorted(times)[:5]
    assert len(ranking.ranked) < len(times) and (misfits > 0) == (memory_gib < 64)
    looked_at = len(ranking.ranked) + ranking.num_rejected[Reason.SLOWER] + ranking.num_rejected[Reason.MEMORY]
    assert looked_at == len(times) + misfits


def test_bounds_are_bounds(scorer):
    bounds, points = Bounds(scorer), list(every_point(scorer, SPACE))[::37]
    assert len(points) > 20
    for point in points:
        step_s = scorer.estimate(point).step_s
        assert bounds.least_s(point) <= bounds.step_s(point) * (1 + 1e-9) and bounds.step_s(point) <= step_s * (
            1 + 1e-9
        )
        assert bounds.fits(point, [point.degrees], scorer.needed_bytes(point)) == [point.degrees]


@pytest.mark.parametrize("model", ["gpt-22b", "llama-1b"])
@pytest.mark.parametrize("remat", Remat)
def test_work_is_linear_in_the_microbatch(model, remat):
    scorer = Scorer(workload(model, **({"num_layers": 1} if model == "llama-1b" else SMALL)), named_cluster("a800", 1))
    two, four, eight = (scorer.computing.trace(rows, remat) for rows in (2, 4, 8))
    found = extrapolated(two, four, 3)
    for quick, traced in zip(
        (found.embed, *found.blocks, found.head), (eight.embed, *eight.blocks, eight.head), strict=True
    ):
        assert (quick.forward, quick.backward) == (traced.forward, traced.backward)
        assert (quick.saved_bytes, quick.output_bytes) == (traced.saved_bytes, traced.output_bytes)
        assert quick.backward_bytes <= traced.backward_bytes


def test_data_parallelism_is_searched_as_ever():
    space = Space(microbatches=(1,), remats=(Remat.FULL,))
    cluster, job = named_cluster("frontier", 2), workload(**SMALL)
    alone, among = (search(job, cluster, s) for s in (space, dataclasses.replace(space, tensors=(1, 2))))
    times = {e.candidate: e.step_s for e in alone.ranked}
    assert len(times) + len(alone.rejected) == len(all_degrees(cluster.ranks)) and not alone.not_scored
    for estimate in among.ranked:
        if estimate.candidate.parallel.total == 1:
            assert estimate.step_s == times[estimate.candidate]


def test_what_is_the_same_program_is_looked_at_once(scorer):
    space = dataclasses.replace(SPACE, remats=tuple(Remat))
    points = [family.example for family in families(scorer, Bounds(scorer), space)[0]]
    assert len(set(points)) == len(points)
    for point in points:
        assert point.virtual_stages == 1 or point.parallel.pipeline > 1
        assert point.parallel.pipeline == 1 or point.remat is not Remat.NONE


def test_reasons(scorer):
    space = dataclasses.replace(SPACE, pipelines=(1, 3, 16), tensors=(1, 32), microbatches=(1, 64))
    found = families(scorer, Bounds(scorer), space)[1]
    assert set(found) >= {Reason.DEVICES, Reason.SPLIT, Reason.BATCH, Reason.NODE_NOT_FULL}
    assert len(list(model_cuts(space))) == 3 * 2 * 2


def test_nothing_fits_and_nothing_divides():
    cluster, job = named_cluster("frontier", 1), workload("gpt-1t", 8)
    space = Space(microbatches=(1,), remats=(Remat.FULL,), tensors=(8,))
    with pytest.raises(UserError, match=r"nearest that shards everything \(params=1x1.*tensor 8.*misses [0-9.]+ GiB"):
        search(job, cluster, space)
    with pytest.raises(
        UserError, match="no way to cut gpt-1t for 1 x 8 devices with --global-batch 8: .* x the global"
    ):
        search(job, cluster, dataclasses.replace(space, microbatches=(16,)))
    with pytest.raises(UserError, match="--objective paper knows no tensor"):
        search(job, cluster, space, Objective.PAPER)


@pytest.mark.parametrize("model", ["gpt-175b", "gpt-1t"])
def test_3072_gpus_are_searched_fast(model):
    """10 s alone on a machine of 2 cores, see docs/planner.md; here others run beside it."""
    job, cluster = workload(model, 4800), named_cluster("frontier", 384)
    space = Space(
        microbatches=(1, 2, 4, 8, 16),
        remats=tuple(Remat),
        tensors=(1, 2, 4, 8),
        pipelines=tuple(p for p in range(1, 129) if 3072 % p == 0),
    )
    start = time.process_time()
    ranking = search(job, cluster, space)
    assert time.process_time() - start < 60
    assert ranking.best.candidate.parallel.pipeline > 1 and ranking.best.memory.total < cluster.memory_bytes


# --- the command

JOB = (
    "plan",
    "--model",
    "gpt-22b",
    "--cluster",
    "frontier",
    "--nodes",
    "2",
    "--global-batch",
    "32",
    "--seq-len",
    "2048",
)


def plan(capsys, *flags):
    code = tools.main([*JOB, *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def refused(capsys, *flags):
    assert tools.main([*JOB, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_the_command_searches_all(capsys):
    found = plan(capsys, "--search", "tensor,pipeline,virtual_stages,remat,strategy", "--json", "--top", "3")
    told = json.loads(found)
    assert list(told)[0] == "best" and told["not_scored"]
    best = told["parallel"]
    ranks = ModelParallel(**{k: best[k] for k in ("pipeline", "context", "tensor")}).data_ranks(2, 8)
    assert str(parse(told["best"]).resolve(ranks)) == told["best"]
    assert all(entry["parallel"].keys() == best.keys() for entry in told["ranked"] + told["rejected"])


def test_gin_lines_of_a_pipeline(capsys):
    text = plan(capsys, "--tensor", "2", "--pipeline", "4", "--virtual-stages", "2", "--remat", "full", "--top", "2")
    for line in (
        "TENSOR = 2",
        "PIPELINE = 4",
        "CONTEXT = 1",
        "PIPELINE_SCHEDULE = '1f1b'",
        "VIRTUAL_STAGES = 2",
        "REMAT = 'full'",
    ):
        assert f"\n{line}\n" in text
    assert "4 stages of 2 chunks x 2 parts of each matrix, and trains 2 copies of it" in " ".join(text.split())
    assert "bubble" in text and "sends" in text and max(map(len, text.splitlines())) <= 170


def test_a_pipeline_in_full(capsys):
    text = plan(capsys, "--explain", "zero1", "--tensor", "4", "--pipeline", "4", "--remat", "full")
    for word in ("waits for other stages", "all-to-all", "collective-permute", "tensor", "the bubble is", "fits"):
        assert word in text
    told = json.loads(plan(capsys, "--explain", "zero1", "--pipeline", "4", "--remat", "full", "--json"))
    assert told["parallel"]["pipeline"] == 4 and told["bubble_s"] > 0 and told["events"] == []


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--tensor", "0"), "--tensor 0: it counts from 1"),
        (("--explain", "zero1", "--tensor", "3"), "--tensor 3"),
        (("--explain", "zero1", "--pipeline", "16", "--microbatch", "16"), "2 microbatches in a step are fewer"),
        (("--explain", "zero1", "--pipeline", "2", "--virtual-stages", "25"), "50 virtual stages"),
        (("--explain", "zero1", "--virtual-stages", "2"), "--virtual-stages 2 with --pipeline 1"),
        (("--explain", "zero1", "--tensor", "2", "--microbatch", "3"), "24 = 3 (microbatch) x 8 data ranks"),
        (("--tensor", "2", "--plot", "heat.png"), "--plot draws data parallelism alone"),
        (("--tensor", "2", "--objective", "paper"), "--objective paper knows no tensor"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, told):
    assert told in refused(capsys, *flags)


def test_every_kind_of_estimate_adds_up(scorer):
    for virtual_stages, schedule, context in itertools.product((1, 2), ("1f1b", "gpipe"), (1, 2)):
        point = candidate(pipeline=4, context=context, virtual_stages=virtual_stages, schedule=schedule)
        timeline = scorer.estimate(point).timeline
        parts = timeline.compute_s + timeline.exposed_s + timeline.bubble_s
        assert timeline.step_s == pytest.approx(parts) and min(timeline.bubble_s, timeline.exposed_s) >= 0


@pytest.mark.parametrize("frozen", [(), (r"embed\..*", r"blocks\.[01]\..*")])
def test_no_step_is_shorter_than_its_bound_where_parts_have_no_large_leaf(frozen):
    """Parts without a large trained leaf send nothing that a bound could count, not even a message of no bytes."""
    cluster, space = named_cluster("h100", 2), Space(microbatches=(1, 2), remats=(Remat.FULL,), tensors=(1, 2))
    job = dataclasses.replace(workload("llama-tiny"), seq_len=128, frozen=frozen)
    every = search(job, cluster, space, num_exact=10_000)
    bounds = Bounds(Scorer(job, cluster))
    assert all(bounds.step_s(e.candidate) <= e.step_s * (1 + 1e-9) for e in every.ranked)
    assert search(job, cluster, space, num_exact=1).best.step_s == every.best.step_s
