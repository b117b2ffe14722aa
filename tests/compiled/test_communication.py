"""What the cost model says of messages; `test_collectives` holds the collectives it predicts against compiled steps."""

import math

import jax.numpy as jnp
import oracle
import pytest
from oracle import RANKS, plan_for
from oracle_step import parts_of

from amsp_jax.engine.collectives import Reduction
from amsp_jax.engine.plan import make_plan
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cost.communication import (
    Phase,
    WireDtypes,
    collectives,
    group_of,
    messages,
    step_collectives,
)
from amsp_jax.strategy import Degree


def test_messages_hold_the_bytes_of_their_leaves():
    model = oracle.model("llama")
    plan = plan_for("params=2x1 grads=4x1 opt_state=4x2", model)
    wire = WireDtypes(plan.compute_dtype, Reduction.of(jnp.bfloat16))
    for part in parts_of(plan, model):
        together = messages(part, wire)
        assert len({(m.phase, m.kind, m.axes) for m in together}) == len(together)
        alone = [c for leaf in part.leaves for c in collectives(leaf, wire, part.regathers)]
        for phase in Phase:
            assert sum(m.num_bytes for m in together if m.phase is phase) == sum(
                c.num_bytes for c in alone if c.phase is phase
            )


def test_a_group_counts_ranks_of_a_node_and_nodes():
    sizes = {"inter_opt": 4, "intra_opt": 2, "intra_param": 3}
    assert group_of(("inter_opt", "intra_opt"), sizes) == Degree(2, 4)
    assert group_of(("intra_param", "intra_opt"), sizes) == Degree(6, 1)


@pytest.mark.parametrize(("strategy", "factor"), [("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 3)])
def test_volume_of_zero_is_that_of_the_paper(strategy, factor):
    """Elements a device sends a step: 2 Psi, ZeRO-3 3 Psi, times (N - 1) / N (arXiv 1910.02054, section 7)."""
    model = build_model("llama-1b", {"num_layers": 2})
    plan = make_plan(strategy, model, ranks=RANKS)
    embed, *_, head = parts_of(plan, model)
    sent = 0.0
    for c, count in step_collectives(
        parts_of(plan, model), WireDtypes(plan.compute_dtype, Reduction.of(jnp.bfloat16)), 1
    ).items():
        passes = 2 if c.kind == "all-reduce" else 1
        sent += count * passes * c.num_bytes / 2 * (1 - 1 / c.group.total)
    expected = factor * model.numbers.num_params
    if strategy == "zero3":  # here embedding and head are gathered once, not twice
        expected -= sum(math.prod(leaf.shape) for leaf in (*embed.leaves, *head.leaves))
    assert sent == expected * (1 - 1 / RANKS.total)
