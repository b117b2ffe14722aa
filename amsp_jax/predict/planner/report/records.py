"""A ranking and an estimate as JSON: bytes of one device, seconds of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from amsp_jax.predict.cost.memory import MemoryEstimate
from amsp_jax.predict.planner.message_costs import MessageCost
from amsp_jax.predict.planner.report.explanation import PARTS, event_name, num_parts
from amsp_jax.predict.planner.report.table import TERMS, gin_lines
from amsp_jax.predict.planner.scorer import MicrobatchGroupCost
from amsp_jax.predict.planner.types import Candidate, Estimate, Ranking, Rejection


def as_json(ranking: Ranking) -> dict[str, Any]:
    """One JSON object: `best` first, then `ranked` and `rejected`, then what belongs to the best and to all."""
    best = ranking.best.candidate
    return {
        "best": str(best.degrees),
        "ranked": [estimate_json(estimate) for estimate in ranking.ranked],
        "rejected": [_rejection(rejection) for rejection in ranking.rejected],
        "microbatch": best.microbatch,
        "microbatch_group": best.microbatch_group,
        "remat": str(best.remat),
        "parallel": _parallel(best),
        "not_scored": {str(reason): count for reason, count in ranking.not_scored.items()},
        "gin": gin_lines(ranking.best),
        "objective": str(ranking.objective),
        "memory_limit_bytes": ranking.memory_bytes,
    }


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """One estimate."""
    return {
        **_point(estimate.candidate),
        "accumulation": estimate.accumulation,
        "memory_bytes": {**_parts(estimate.memory), "peak": estimate.memory.total},
        "communication_s": {TERMS[phase]: seconds for phase, seconds in estimate.terms_s.items()},
        "exposed_s": estimate.timeline.exposed_s,
        "bubble_s": estimate.timeline.bubble_s,
        "compute_s": estimate.timeline.compute_s,
        "step_s": estimate.step_s,
        "objective_s": estimate.objective_s,
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "unmeasured": list(estimate.unmeasured),
    }


def explanation_json(
    estimate: Estimate, messages: Sequence[MessageCost], memory_bytes: int, group: MicrobatchGroupCost | None = None
) -> dict[str, Any]:
    """What `explanation` says: the estimate, every collective, and the events of both streams.

    Args:
      estimate: with recorded events.
      messages: of the same candidate.
      memory_bytes: the limit.
      group: of the same candidate, where it has groups.
    """
    events = estimate.timeline.events
    parts = num_parts(estimate) if events else 0
    return {
        **estimate_json(estimate),
        "memory_limit_bytes": memory_bytes,
        "memory_margin_bytes": estimate.memory.margin_bytes,
        "memory_peak_at": estimate.memory.peak_at,
        **({"microbatch_groups": _group(group)} if group else {}),
        "collectives": [_message(cost) for cost in messages],
        "events": [{**dataclasses.asdict(event), "name": event_name(event, parts)} for event in events],
    }


def _point(candidate: Candidate) -> dict[str, Any]:
    return {
        "strategy": str(candidate.degrees),
        "microbatch": candidate.microbatch,
        "microbatch_group": candidate.microbatch_group,
        "remat": str(candidate.remat),
        "parallel": _parallel(candidate),
    }


def _parallel(candidate: Candidate) -> dict[str, Any]:
    """What the model is cut into, and the schedule of its pipeline."""
    return {
        **dataclasses.asdict(candidate.parallel),
        "pipeline_schedule": candidate.pipeline_schedule,
        "virtual_stages": candidate.virtual_stages,
    }


def _rejection(rejection: Rejection) -> dict[str, Any]:
    return {
        **_point(rejection.candidate), "reason": str(rejection.reason), "missing_bytes": rejection.missing_bytes,
    }  # fmt: skip


def _parts(memory: MemoryEstimate) -> dict[str, int]:
    return {name: getattr(memory, name) for name in PARTS}


def _group(group: MicrobatchGroupCost) -> dict[str, Any]:
    return {
        "ungrouped_peak_bytes": group.ungrouped.total,
        "ungrouped_peak_at": group.ungrouped.peak_at,
        "loop_forward_bytes": group.forward_bytes,
        "loop_backward_bytes": group.backward_bytes,
        "loop_s": group.seconds,
    }


def _message(cost: MessageCost) -> dict[str, Any]:
    message = cost.message
    return {
        "part": cost.part,
        "when": TERMS[message.phase],
        "kind": message.kind,
        "axes": list(message.axes),
        "group": str(message.group),
        "num_bytes": message.num_bytes,
        "count": cost.count,
        "seconds": cost.seconds,
        "basis": cost.basis,
    }
