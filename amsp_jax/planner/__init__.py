"""Every strategy for a model on a cluster, ranked: what fits, how long its step takes, why the others do not do."""

from amsp_jax.planner.remedy import nothing_fits
from amsp_jax.planner.scorer import GroupCost, MessageCost, Scorer
from amsp_jax.planner.search import NothingFits, candidates, search
from amsp_jax.planner.types import (
    Candidate,
    Estimate,
    Objective,
    Ranking,
    Reason,
    Rejection,
    Space,
    Workload,
    strategy_of,
)

__all__ = [
    "Candidate",
    "Estimate",
    "GroupCost",
    "MessageCost",
    "NothingFits",
    "Objective",
    "Ranking",
    "Reason",
    "Rejection",
    "Scorer",
    "Space",
    "Workload",
    "candidates",
    "nothing_fits",
    "search",
    "strategy_of",
]
