"""The planner: its space, its filters, its minimum, its words, and how long it takes."""

import dataclasses
import json

import pytest
from planner_workloads import ONE, workload

from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import CLUSTERS, Link, Network, named_cluster
from amsp_jax.predict.planner import (
    Candidate,
    NothingFits,
    Objective,
    Reason,
    Scorer,
    Space,
    candidates,
    compute_costs,
    nothing_fits_message,
    report,
    search,
)
from amsp_jax.strategy import DataRanks, parse


@pytest.mark.parametrize(("nodes", "filled"), [(128, 286), (64, 220), (16, 120), (4, 56), (1, 20)])
def test_the_space_is_every_nested_triple(nodes, filled):
    """With the paper's further rule for gradients they are 121 for 128 nodes: see test_papers."""
    cluster = named_cluster("a800", nodes)
    points = list(candidates(cluster, ONE))
    assert len(points) == len({p.degrees for p in points})
    assert sum(not p.degrees.warnings for p in points) == filled


def test_the_best_is_the_minimum_of_what_fits():
    cluster = named_cluster("h100", 4)
    ranking = search(workload(global_batch=128), cluster, ONE)
    times = [e.step_s for e in ranking.ranked]
    assert times == sorted(times) and ranking.best.step_s == times[0]
    assert all(e.memory.total <= cluster.memory_bytes for e in ranking.ranked)
    assert len(ranking.ranked) + len(ranking.rejected) == len(list(candidates(cluster, ONE)))
    for rejection in ranking.rejected:
        assert (rejection.missing_bytes > 0) == (rejection.reason is Reason.MEMORY)


def test_what_is_equal_is_looked_at_once(monkeypatch):
    """1024 devices in a second: one trace for all strategies, each distinct block once, no plan of the whole model."""
    calls, whole = [], compute_costs.trace_model
    monkeypatch.setattr(compute_costs, "trace_model", lambda *args: calls.append(args) or whole(*args))
    search(workload(), named_cluster("a800", 128), ONE)
    assert len(calls) == 1 and len(calls[0][0].model.blocks) == 1


def test_every_factor_is_searched():
    space = Space(microbatches=(1, 2, 4), remats=tuple(Remat))
    ranking = search(workload(global_batch=512), named_cluster("h200", 8), space)
    points = [e.candidate for e in ranking.ranked]
    assert {p.microbatch for p in points} == {1, 2, 4} and {p.remat for p in points} == set(Remat)
    alone = search(workload(global_batch=512), named_cluster("h200", 8), ONE)
    assert ranking.best.step_s <= alone.best.step_s


def test_a_faster_network_is_never_slower():
    job, cluster = workload(global_batch=64), named_cluster("h100", 4)
    link = cluster.network.inter
    faster = dataclasses.replace(link, bytes_per_s=4 * link.bytes_per_s)
    fast = dataclasses.replace(cluster, network=dataclasses.replace(cluster.network, inter=faster))
    slow_times = {e.candidate: e.step_s for e in search(job, cluster, ONE).ranked}
    for estimate in search(job, fast, ONE).ranked:
        assert estimate.step_s <= slow_times[estimate.candidate] * (1 + 1e-9)


def test_a_slow_network_between_nodes_keeps_gathers_inside_a_node():
    """What MiCS, hybrid FSDP and AMSP are for."""
    cluster = named_cluster("h100", 8)
    crawling = Network(intra=cluster.network.intra, inter=Link(bytes_per_s=1e9, latency_s=1e-4))
    ranking = search(workload(global_batch=512), dataclasses.replace(cluster, network=crawling), ONE)
    assert ranking.best.candidate.degrees.params.inter == 1
    assert ranking.best.candidate.degrees.grads.inter == 1


def test_one_device_has_one_strategy():
    cluster = dataclasses.replace(named_cluster("h200", 1), devices_per_node=1)
    ranking = search(workload("llama-1b", 4), cluster, ONE)
    assert str(ranking.best.candidate.degrees) == "params=1x1 grads=1x1 opt_state=1x1"
    assert ranking.best.timeline.communication_s == 0


def test_nothing_fits_says_by_how_much_and_what_would():
    job, cluster = dataclasses.replace(workload("gpt-1t", 8), seq_len=2048), named_cluster("a800", 1)
    with pytest.raises(NothingFits, match="no strategy for gpt-1t fits on 8 NVIDIA A800.*misses [0-9.]+ GiB a device"):
        search(job, cluster, ONE)
    told = nothing_fits_message(job, cluster, ONE, Objective.STEP_TIME, cluster.memory_bytes)
    assert "GiB too much" in told and ("It fits with" in told or "choose a smaller model" in told)


def test_a_batch_that_does_not_divide():
    with pytest.raises(UserError, match="global_batch=100 divides by no microbatch of 1 x 128 data ranks"):
        search(workload(global_batch=100), named_cluster("a800", 16), ONE)


def test_a_cluster_without_rates():
    cluster = dataclasses.replace(named_cluster("a800", 1), network=None)
    with pytest.raises(UserError, match="calibrate --out"):
        Scorer(workload(), cluster)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_preset_can_be_planned_on(name):
    job = dataclasses.replace(workload("llama-1b", 128), seq_len=1024)
    assert search(job, named_cluster(name, 2), ONE).best.step_s > 0


def test_json_has_best_first_and_every_candidate():
    ranking = search(workload(global_batch=64), named_cluster("a800", 4), ONE)
    text = json.dumps(report.as_json(ranking))
    told = json.loads(text)
    assert list(told)[0] == "best" and parse(told["best"]).resolve(DataRanks(8, 4)) == ranking.best.candidate.degrees
    assert told["ranked"][0]["strategy"] == told["best"]
    assert len(told["ranked"]) + len(told["rejected"]) == len(list(candidates(named_cluster("a800", 4), ONE)))
    assert told["ranked"][0]["memory_bytes"]["peak"] == ranking.best.memory.total


def test_an_explanation_has_every_message_and_adds_up():
    scorer = Scorer(workload(global_batch=64), named_cluster("a800", 4))
    candidate = Candidate(parse("params=8x1 grads=8x1 opt_state=8x4").resolve(DataRanks(8, 4)), 1, Remat.PROJECTIONS)
    estimate, costs = scorer.estimate(candidate, record=True), scorer.message_costs(candidate)
    assert sum(c.count * c.seconds for c in costs) == pytest.approx(estimate.timeline.communication_s)
    text = report.explanation(estimate, costs, scorer.cluster.memory_bytes)
    for word in ("each block", "embedding", "head", "reduce-scatter", "all-gather", "limit", "forward", "backward"):
        assert word in text


def test_tables_have_a_line_each():
    ranking = search(workload(global_batch=64), named_cluster("a800", 4), ONE)
    table = report.ranking_table(ranking, 3).splitlines()
    assert len(table) == 5 and str(ranking.best.candidate.degrees) in table[2]
    assert sum(int(line.split()[0]) for line in report.rejected_lines(ranking).splitlines()) == len(
        list(candidates(named_cluster("a800", 4), ONE))
    )


def test_the_papers_objective_picks_the_papers_strategy():
    """7B, 16 nodes of 8 A800, 8 microbatches, no recomputation, 80 GiB: P = G = 1x1, OS inside the node (Table IV)."""
    space = Space(microbatches=(1,), remats=(Remat.NONE,))
    ranking = search(workload(), named_cluster("a800", 16), space, Objective.PAPER, memory_bytes=80 * 2**30)
    best = ranking.best.candidate.degrees
    assert (best.params.total, best.grads.total) == (1, 1) and best.opt_state.inter == 1 and best.opt_state.intra > 1
    assert len(ranking.ranked) + ranking.num_rejected[Reason.MEMORY] == 64


@pytest.mark.parametrize("wrong", [{"global_batch": 0}, {"global_batch": -48}, {"seq_len": 0}, {"seq_len": 1.5}])
def test_a_workload_counts_from_one(wrong):
    with pytest.raises(UserError, match=rf"{next(iter(wrong))}=.*at least 1"):
        dataclasses.replace(workload(), **wrong)


def test_a_space_is_not_empty():
    for wrong in ({"microbatches": ()}, {"microbatches": (0,)}, {"remats": ()}):
        with pytest.raises(UserError, match="Space"):
            dataclasses.replace(ONE, **wrong)


def test_no_memory_fits_nothing():
    with pytest.raises(NothingFits):
        search(workload(global_batch=64), named_cluster("a800", 1), ONE, memory_bytes=0)


def test_one_device_needs_no_network():
    alone = dataclasses.replace(named_cluster("h200", 1), devices_per_node=1, network=None)
    assert search(workload("llama-1b", 4), alone, ONE).best.step_s > 0
    with pytest.raises(UserError, match="8 devices, has no network: it was measured on one device alone"):
        Scorer(workload(), dataclasses.replace(named_cluster("h200", 1), network=None))
