"""What the planner says of frozen parameters and of strategies with rules, from abstract shapes alone."""

import optax
import pytest

from amsp_jax.engine.plan import make_plan
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cluster import named_cluster
from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.planner import Candidate, Scorer, Workload, degrees_of
from amsp_jax.strategy import Strategy, parse

MODEL, CLUSTER = build_model("llama-tiny"), named_cluster("h100", 2)
FROZEN = (r"embed\..*", r"blocks\.[01]\..*")
PRESETS = ("ddp", "zero2", "zero3", "mics")


SOME, EVERY = (
    Scorer(Workload(model=MODEL, optimizer=optax.adamw(1e-3), global_batch=64, seq_len=128, frozen=names), CLUSTER)
    for names in (FROZEN, ())
)


def candidate(strategy, **fields):
    return Candidate(parse(strategy).resolve(CLUSTER.ranks), 1, Remat.FULL, **fields)


def test_blocks_with_different_frozen_leaves_are_different():
    assert DistinctBlocks.of(MODEL, FROZEN).order == (0, 0, 1, 1)
    assert DistinctBlocks.of(MODEL, (r".*norm.*",)).order == DistinctBlocks.of(MODEL).order == (0, 0, 0, 0)


@pytest.mark.parametrize("strategy", PRESETS)
def test_bytes_are_those_of_the_plan(strategy):
    exact = make_plan(strategy, MODEL, ranks=CLUSTER.ranks, frozen=FROZEN).bytes_per_device()
    counter_bytes, memory = 4, SOME.memory(candidate(strategy))
    assert (memory.master, memory.opt_state) == (exact.master, exact.moments + counter_bytes)
    assert memory.total < EVERY.memory(candidate(strategy)).total


def test_groups_of_microbatches_need_less_with_frozen_parameters():
    grouped = candidate("zero1", microbatch_group=2)
    assert SOME.memory(grouped).total < EVERY.memory(grouped).total


@pytest.mark.parametrize("strategy", PRESETS)
def test_frozen_leaves_are_gathered_and_never_reduced(strategy):
    """The embedding and blocks 0 and 1 of four reduce nothing."""
    reduced, everything = (
        {c.part for c in scorer.message_costs(candidate(strategy)) if c.message.phase in (Phase.REDUCE, Phase.END)}
        for scorer in (SOME, EVERY)
    )
    assert reduced == {"block 1", "head"}
    assert everything == {"embedding", "each block", "head"}


def test_a_strategy_with_rules_is_refused():
    strategy = Strategy(params="full", grads="full", opt_state="full", rules=[(r"embed\..*", "zero1")])
    with pytest.raises(UserError, match=r"has rules for 1 patterns.*predict it without rules"):
        degrees_of(strategy, CLUSTER.ranks)
    assert degrees_of("zero3", CLUSTER.ranks) == parse("zero3").resolve(CLUSTER.ranks)
