"""Every strategy for a model on a cluster, ranked: what fits, how long its step takes, why the others do not do."""

from amsp_jax.predict.planner.message_costs import MessageCost
from amsp_jax.predict.planner.scorer import MicrobatchGroupCost, Scorer
from amsp_jax.predict.planner.search import NothingFits, candidates, search
from amsp_jax.predict.planner.suggestions import nothing_fits_message
from amsp_jax.predict.planner.types import (
    Candidate,
    Estimate,
    Objective,
    Ranking,
    Reason,
    Rejection,
    Space,
    Workload,
    degrees_of,
    strategy_of,
)

__all__ = [
    "Candidate",
    "Estimate",
    "MicrobatchGroupCost",
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
    "degrees_of",
    "nothing_fits_message",
    "search",
    "strategy_of",
]
