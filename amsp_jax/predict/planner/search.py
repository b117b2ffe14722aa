"""Enumerate, filter, score, rank.

The space of nested degrees is small enough to look at every point, so the minimum is exact: 286 strategies for 128
nodes of 8 data ranks with nodes filled first. Microbatch, microbatch group and
rematerialisation are further factors of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.cost import amsp
from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.planner.bounds import Bounds
from amsp_jax.predict.planner.candidates import Found, families, search_by_bound
from amsp_jax.predict.planner.scorer import Scorer
from amsp_jax.predict.planner.types import (
    Candidate,
    Estimate,
    Objective,
    Ranking,
    Reason,
    Rejection,
    Space,
    Workload,
)
from amsp_jax.strategy import Degrees, all_degrees


class NothingFits(UserError):
    """Every candidate needs more memory than a device has; `suggestions.nothing_fits_message` says what would help."""


def search(
    workload: Workload,
    cluster: Cluster,
    space: Space,
    objective: Objective = Objective.STEP_TIME,
    memory_bytes: int | None = None,
    num_exact: int = 10,
) -> Ranking:
    """Scores every candidate of the space; where models are cut, all that may be among the best.

    Args:
      workload: what is trained.
      cluster: with network and rates.
      space: what to look through.
      objective: what to minimise.
      memory_bytes: of one device; the cluster's if None.
      num_exact: where models are cut, so many of the first are certain to be those of the whole space.

    Raises:
      NothingFits: every candidate is too large; the message says by how much the nearest misses.
      UserError: the global batch does not divide, or the cluster has no network or rates.
    """
    limit = cluster.memory_bytes if memory_bytes is None else memory_bytes
    scorer = Scorer(workload, cluster, objective)
    if objective is Objective.PAPER and space.microbatch_groups != (1,):
        raise UserError(
            "--objective paper knows no groups of microbatches; leave --microbatch-group, and group of --search"
        )
    if not space.is_data_parallel:
        return _search_cut_models(scorer, space, limit, num_exact)
    ranked: list[Estimate] = []
    rejected: list[Rejection] = []
    for degrees in all_degrees(cluster.ranks):
        reason = _outside(degrees, space, objective)
        for candidate in _points(degrees, space):
            if rejection := _refuse(candidate, reason, workload) or _too_large(scorer, candidate, limit):
                rejected.append(rejection)
            else:
                ranked.append(scorer.estimate(candidate))
    if not ranked:
        raise _why_none(rejected, workload, cluster, space)
    return Ranking(
        ranked=tuple(sorted(ranked, key=_order)),
        rejected=tuple(rejected),
        memory_bytes=limit,
        objective=objective,
    )


def _search_cut_models(scorer: Scorer, space: Space, limit: int, num_exact: int) -> Ranking:
    if scorer.objective is Objective.PAPER:
        raise UserError("--objective paper knows no tensor, pipeline or context ranks; leave them at 1")
    found = search_by_bound(scorer, space, limit, num_exact)
    if not found.ranked:
        raise _no_cut_fits(scorer, space, found, limit)
    ranked = tuple(sorted(found.ranked, key=_order))
    return Ranking(
        ranked=ranked,
        rejected=tuple(found.rejected),
        memory_bytes=limit,
        objective=scorer.objective,
        not_scored=found.not_scored,
    )


def _order(estimate: Estimate) -> tuple[float, float, int]:
    """Of equal objectives the one with less to reduce in every microbatch, then the one of less memory."""
    return round(estimate.objective_s, 9), estimate.terms_s[Phase.REDUCE], estimate.memory.total


def candidates(cluster: Cluster, space: Space) -> Iterator[Candidate]:
    """Every point, unfiltered."""
    for degrees in all_degrees(cluster.ranks):
        yield from _points(degrees, space)


def _points(degrees: Degrees, space: Space) -> Iterator[Candidate]:
    for microbatch in space.microbatches:
        for remat in space.remats:
            for size in space.microbatch_groups:
                yield Candidate(degrees, microbatch, remat, microbatch_group=size)


def _outside(degrees: Degrees, space: Space, objective: Objective) -> Reason | None:
    """Why a strategy is not looked at, whatever its microbatch."""
    if space.fill_nodes and degrees.warnings:
        return Reason.NODE_NOT_FULL
    if objective is Objective.PAPER and not amsp.in_space(degrees):
        return Reason.NOT_IN_PAPER
    return None


def _refuse(candidate: Candidate, reason: Reason | None, workload: Workload) -> Rejection | None:
    """What needs no look at the model."""
    if reason is None and workload.global_batch % (candidate.microbatch * candidate.degrees.ranks.total):
        reason = Reason.BATCH
    if reason is None and candidate.accumulation(workload.global_batch) % candidate.microbatch_group:
        reason = Reason.MICROBATCH_GROUP
    return Rejection(candidate, reason) if reason else None


def _too_large(scorer: Scorer, candidate: Candidate, limit: int) -> Rejection | None:
    missing = scorer.needed_bytes(candidate) - limit
    return Rejection(candidate, Reason.MEMORY, missing) if missing > 0 else None


def _no_cut_fits(scorer: Scorer, space: Space, found: Found, limit: int) -> UserError:
    """By how much the nearest misses, of those that shard everything; or why there was nothing to score."""
    points = [family.example for family in families(scorer, Bounds(scorer), space)[0]]
    model, cluster = scorer.workload.model.name, scorer.cluster
    if not points:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in found.not_scored.most_common())
        return UserError(
            f"no way to cut {model} for {cluster.num_nodes} x {cluster.devices_per_node} devices with "
            f"--global-batch {scorer.workload.global_batch}: {reasons}; search more of tensor, pipeline, context, "
            "microbatch, or change the batch"
        )
    nearest = min(points, key=scorer.needed_bytes)
    missing = scorer.needed_bytes(nearest) - limit
    return UserError(
        f"no strategy for {model} fits on {cluster.num_devices} {cluster.device_kind}: the nearest that shards "
        f"everything ({nearest}) misses {missing / 2**30:.1f} GiB a device; search more of tensor, pipeline, remat "
        "and microbatch, or add nodes"
    )


def _why_none(rejected: list[Rejection], workload: Workload, cluster: Cluster, space: Space) -> UserError:
    ranks = cluster.ranks.total
    missing = [r.missing_bytes for r in rejected if r.reason is Reason.MEMORY]
    if missing:
        return NothingFits(
            f"no strategy for {workload.model.name} fits on {ranks} {cluster.device_kind}: the nearest misses "
            f"{min(missing) / 2**30:.1f} GiB a device"
        )
    if any(r.reason is Reason.MICROBATCH_GROUP for r in rejected):
        return UserError(
            f"global_batch={workload.global_batch} gives a step no number of microbatches that divides by "
            f"microbatch_group of {', '.join(map(str, space.microbatch_groups))}; use microbatch_group=1"
        )
    return UserError(
        f"global_batch={workload.global_batch} divides by no microbatch of {', '.join(map(str, space.microbatches))} x "
        f"{ranks} data ranks; with microbatch=1 a multiple of {ranks} does"
    )
