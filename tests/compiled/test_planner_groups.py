"""Groups of microbatches: what the cost model says of them against compiled steps, and the planner's search."""

import dataclasses
import itertools
import json
from collections import Counter

import oracle
import pytest
from oracle import RANKS, THREE_DEGREES, plan_for
from oracle_step import lowered, predicted
from planner_workloads import ONE, workload

from amsp_jax.compile import hlo
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.cost.communication import ONCE, Phase
from amsp_jax.predict.cost.timeline import PartTimes, StepTimes, simulate
from amsp_jax.predict.planner import (
    Candidate,
    NothingFits,
    Objective,
    Reason,
    Scorer,
    Space,
    nothing_fits_message,
    report,
    search,
)
from amsp_jax.predict.planner.bounds import Bounds
from amsp_jax.strategy import DataRanks, parse

STRATEGIES = ["zero1", "zero2", "zero3", "mics(2)", THREE_DEGREES]
QUICK = [("zero1", 4), ("zero3", 2), (THREE_DEGREES, 2)]


# --- collectives


def check(strategy, accumulation, group):
    """By kind, groups and bytes of the result, how often each collective of arrays runs in a step."""
    plan = plan_for(strategy, oracle.model("llama"))
    program = lowered(plan, accumulation, settings=StepSettings(microbatch_group=group)).compile()
    counts = Counter()
    for c in hlo.collectives(program.as_text()):
        if not c.is_scalar:
            counts[c.kind, c.groups, c.num_bytes] += c.num_runs
    assert counts == predicted(plan, accumulation // group)


@pytest.mark.parametrize(("strategy", "group"), QUICK)
def test_a_step_of_groups_has_the_predicted_collectives(strategy, group):
    check(strategy, 4, group)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "group"), sorted({*itertools.product(STRATEGIES, (2, 4))} - {*QUICK}))
def test_groups_of_every_strategy_have_the_predicted_collectives(strategy, group):
    check(strategy, 4, group)


@pytest.mark.slow
def test_between_the_first_and_the_last_group_is_a_loop():
    check(THREE_DEGREES, 8, 2)


# --- the timeline


def part(forward_s=1.0, backward_s=2.0, **messages_s):
    return PartTimes(forward_s, backward_s, {Phase(name): (seconds,) for name, seconds in messages_s.items()})


def step(*parts, rounds=1, peel=True, window=2, num_beside=None):
    times = StepTimes(parts, 0.0, window, 1.0, is_grouped=True, num_beside=num_beside)
    return simulate(times, rounds, peel, record=True)


def starts(timeline, stream):
    return {e.name: e.start_s for e in timeline.events if e.stream == stream}


EDGE = part(0.0, 0.0)


def test_without_communication_it_is_the_sum():
    timeline = step(EDGE, part(), part(), EDGE, rounds=3)
    assert timeline.step_s == timeline.compute_s == 3 * 2 * 3.0
    assert timeline.exposed_s == timeline.communication_s == 0


def test_parameters_come_one_part_ahead():
    """Of the one group: a part's P shard and what is gathered of it, once the part two before has run."""
    timeline = step(EDGE, *[part(start=0.1, forward=0.2, backward=0.2)] * 4, EDGE)
    found = starts(timeline, "communication")
    assert [found[f"P shard {i}"] for i in (1, 2, 3, 4)] == pytest.approx([0.0, 0.3, 1.3, 2.3])
    assert [found[f"gather {i}"] for i in (1, 2, 3, 4)] == pytest.approx([0.1, 0.4, 1.4, 2.4])
    # Two after the head, which the first of them waits for, then one for each block that is done.
    assert [found[f"gather again {i}"] for i in (4, 3, 2, 1)] == pytest.approx([4.3, 4.5, 6.5, 8.5])


def test_p_shards_come_so_in_the_first_of_several_groups_too():
    found = starts(step(EDGE, *[part(start=0.5)] * 4, EDGE, rounds=2), "communication")
    assert [found[f"P shard {i}"] for i in (1, 2, 3, 4)] == pytest.approx([0.0, 0.5, 1.5, 2.5])


def test_gradients_are_reduced_in_order():
    """What is done once a step, too, before the next part's of every group."""
    blocks = [part(0.0, 1.0, reduce=1.0, end=2.0)] * 3
    spans = [e.name for e in step(EDGE, *blocks, EDGE).events if e.stream == "communication"]
    assert spans == [f"{name} {i}" for i in (3, 2, 1) for name in ("reduce", "reduce at the end")]


@pytest.mark.parametrize("phase", ["reduce", "end"])
def test_a_block_waits_for_the_reduction_of_two_before(phase):
    timeline = step(EDGE, *[part(0.0, 1.0, **{phase: 10.0})] * 4, EDGE)
    found = starts(timeline, "compute")
    assert [found[f"backward {i}"] for i in (4, 3, 2, 1)] == pytest.approx([0.0, 1.0, 11.0, 21.0])
    assert timeline.step_s == pytest.approx(41.0)


@pytest.mark.parametrize("num_beside", [None, 1])
def test_slow_links_are_the_limit(num_beside):
    """The sum of messages, and what nothing hides: the last forward, the first backward pass."""
    blocks = [part(1.0, 2.0, forward=10.0, backward=10.0, end=20.0)] * 5
    timeline = step(part(0.5, 0.5), *blocks, EDGE, num_beside=num_beside)
    assert timeline.communication_s == pytest.approx(5 * 40.0)
    assert timeline.communication_s < timeline.step_s < timeline.communication_s + 2 * 3.0 + 1.0


def test_of_two_messages_one_runs_beside_a_loop():
    """Forward a gather does; backward, too, while the reduction that is there before it has nothing beside it."""
    blocks = [part(1.0, 2.0, forward=0.5, backward=0.5, reduce=0.7)] * 3
    timeline = step(EDGE, *blocks, EDGE, num_beside=1)
    # The first gather, the first one again; the reduction beside which block 1 is gathered, and the last.
    assert timeline.exposed_s == pytest.approx(0.5 + 0.5 + 2 * 0.7)
    assert timeline.step_s == pytest.approx(3 * 3.0 + timeline.exposed_s)
    assert step(EDGE, *blocks, EDGE).exposed_s == pytest.approx(0.5 + 0.5 + 0.7)


def test_a_message_ends_before_the_next_loop_begins():
    """Though nothing needs it: of a block's gradients, those of once a step."""
    timeline = step(EDGE, *[part(1.0, 2.0, end=5.0)] * 3, EDGE, num_beside=1)
    assert timeline.step_s == pytest.approx(3 * 1.0 + 2.0 + 3 * 5.0)
    assert timeline.communication_s == pytest.approx(15.0)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_busy_and_waiting_add_up(rounds):
    blocks = [part(0.3, 0.2, start=0.2, forward=0.1), *[part(start=0.7, forward=0.6, backward=0.9, reduce=1.1)] * 3]
    for peel, num_beside in itertools.product((True, False), (None, 1, 2)):
        timeline = step(*blocks, part(0.5, 0.5, end=1.0), rounds=rounds, peel=peel, num_beside=num_beside)
        assert timeline.step_s == pytest.approx(timeline.compute_s + timeline.exposed_s)


# --- the planner


def point(strategy, group, ranks=RANKS, **fields):
    return Candidate(parse(strategy).resolve(ranks), 1, Remat.PROJECTIONS, microbatch_group=group, **fields)


@pytest.fixture(scope="module")
def scorer():
    return Scorer(workload(global_batch=256, num_layers=8), named_cluster("h100", 4))


FOUR_NODES = DataRanks(8, 4)
PLANNED = ["ddp", "zero1", "zero2", "zero3", "mics(8)", "params=replica grads=node opt_state=full"]


@pytest.mark.parametrize("strategy", PLANNED)
def test_larger_groups_communicate_no_more_and_need_more_memory(scorer, strategy):
    estimates = [scorer.estimate(point(strategy, group, FOUR_NODES)) for group in (1, 2, 4, 8)]
    assert [e.rounds for e in estimates] == [8, 4, 2, 1] and {e.accumulation for e in estimates} == {8}
    for fewer, more in zip(estimates, estimates[1:], strict=False):
        assert sum(more.terms_s.values()) <= sum(fewer.terms_s.values()) * (1 + 1e-9)
        for phase in Phase:
            expected = fewer.terms_s[phase] if phase in ONCE else fewer.terms_s[phase] / 2
            assert more.terms_s[phase] == pytest.approx(expected)
    totals = [e.memory.activations for e in estimates[1:]]
    assert totals == sorted(totals)


@pytest.mark.parametrize("strategy", PLANNED)
@pytest.mark.parametrize("group", [2, 8])
def test_messages_and_bounds_agree_with_the_timeline(scorer, strategy, group):
    candidate, bounds = point(strategy, group, FOUR_NODES), Bounds(scorer)
    estimate = scorer.estimate(candidate)
    assert sum(c.count * c.seconds for c in scorer.message_costs(candidate)) == pytest.approx(
        estimate.timeline.communication_s
    )
    assert bounds.step_s(candidate) <= estimate.step_s
    assert bounds.fits(candidate, [candidate.degrees], scorer.needed_bytes(candidate)) == [candidate.degrees]


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_beside_loops_a_group_computes_what_microbatches_do(scorer, strategy):
    """And adds as many gradients as there are groups after the first."""
    points = [point(strategy, group, FOUR_NODES) for group in (1, 2, 4, 8)]
    loops_s = [0.0, *(scorer.microbatch_group_cost(candidate).seconds for candidate in points[1:])]
    others = [scorer.compute_s(candidate) - seconds for candidate, seconds in zip(points, loops_s, strict=True)]
    once = others[2] - others[3]
    assert once > 0 and min(loops_s[1:]) > 0
    assert [others[0] - others[1], others[1] - others[2]] == pytest.approx([4 * once, 2 * once])
    assert scorer.microbatch_group_cost(points[0]) is None
    assert scorer.microbatch_group_cost(points[3]).ungrouped == scorer.memory(points[0])


def test_tensor_messages_are_each_microbatchs(scorer):
    parallel = ModelParallel(tensor=2)
    ranks = DataRanks(4, 4)
    alone, grouped = (scorer.estimate(point("zero3", group, ranks, parallel=parallel)) for group in (1, 4))
    assert grouped.terms_s[Phase.TENSOR] == pytest.approx(alone.terms_s[Phase.TENSOR])
    assert grouped.terms_s[Phase.TENSOR] > 0
    assert grouped.terms_s[Phase.REDUCE] == pytest.approx(alone.terms_s[Phase.REDUCE] / 4)


def test_groups_are_searched_and_those_that_do_not_divide_are_rejected():
    job, cluster = workload(global_batch=64, num_layers=8), named_cluster("h100", 2)
    space = dataclasses.replace(ONE, microbatch_groups=(1, 2, 3, 4, 8))
    ranking, alone = search(job, cluster, space), search(job, cluster, ONE)
    assert {e.candidate.microbatch_group for e in ranking.ranked} == {1, 2, 4}
    refused = {r.candidate.microbatch_group for r in ranking.rejected if r.reason is Reason.MICROBATCH_GROUP}
    assert refused == {3, 8} and ranking.best.step_s <= alone.best.step_s
    without = [e for e in ranking.ranked if e.candidate.microbatch_group == 1]
    assert [(e.candidate, e.step_s, e.memory) for e in without] == [
        (e.candidate, e.step_s, e.memory) for e in alone.ranked
    ]
    assert "group" in report.ranking_table(ranking, 3) and "group" not in report.ranking_table(alone, 3)
    assert str(Reason.MICROBATCH_GROUP) in report.rejected_lines(ranking)
    told = json.loads(json.dumps(report.as_json(ranking)))
    assert {entry["microbatch_group"] for entry in told["ranked"]} == {1, 2, 4}


def test_a_cut_models_groups_are_searched_as_if_each_point_were():
    """Of stages there are none."""
    job, cluster = workload(global_batch=64, num_layers=8), named_cluster("h100", 2)
    space = Space(
        microbatches=(1,), remats=(Remat.FULL,), microbatch_groups=(1, 3, 4), tensors=(1, 2), pipelines=(1, 2)
    )
    ranking = search(job, cluster, space, num_exact=10_000)
    found = {
        (e.candidate.parallel.pipeline, e.candidate.parallel.tensor, e.candidate.microbatch_group)
        for e in ranking.ranked
    }
    assert found == {(p, t, g) for p in (1, 2) for t in (1, 2) for g in (1, 4) if g == 1 or p == 1}
    assert ranking.not_scored[Reason.MICROBATCH_GROUP] > 0
    first = search(job, cluster, space, num_exact=3).ranked[:3]
    assert [e.step_s for e in first] == [e.step_s for e in ranking.ranked[:3]]


def test_a_group_that_divides_nothing_is_an_error():
    with pytest.raises(UserError, match="microbatch_group of 3; use microbatch_group=1"):
        search(
            workload(global_batch=64, num_layers=2),
            named_cluster("h100", 2),
            dataclasses.replace(ONE, microbatch_groups=(3,)),
        )


def test_the_papers_objective_knows_no_groups():
    with pytest.raises(UserError, match="objective paper knows no groups"):
        search(
            workload(global_batch=64),
            named_cluster("h100", 2),
            dataclasses.replace(ONE, microbatch_groups=(2,)),
            Objective.PAPER,
        )


def test_where_a_group_does_not_fit_none_may():
    job, cluster = workload(global_batch=16), named_cluster("a100", 1)
    space, limit = dataclasses.replace(ONE, microbatch_groups=(2,)), 27 * 2**30
    with pytest.raises(NothingFits):
        search(job, cluster, space, memory_bytes=limit)
    assert "--microbatch-group 1" in nothing_fits_message(job, cluster, space, Objective.STEP_TIME, limit)


@pytest.mark.parametrize("wrong", [(), (0,), (True,)])
def test_groups_of_a_space_count_from_one(wrong):
    with pytest.raises(UserError, match="Space"):
        dataclasses.replace(ONE, microbatch_groups=wrong)
