"""Enumerate, filter, score, rank.

The space of nested degrees is small enough to look at every point, so the minimum is exact: 286 strategies for 128
nodes of 8 data ranks with nodes filled first. Microbatch and rematerialisation are further factors of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterator

from amsp_jax.cluster import Cluster
from amsp_jax.cost.papers import amsp
from amsp_jax.errors import UserError
from amsp_jax.planner.scorer import Scorer
from amsp_jax.planner.types import (
    Candidate,
    Estimate,
    Objective,
    Ranking,
    Reason,
    Rejection,
    Space,
    Workload,
)
from amsp_jax.stack import Remat
from amsp_jax.strategy import all_degrees


def search(
    workload: Workload,
    cluster: Cluster,
    space: Space,
    objective: Objective = Objective.STEP_TIME,
    memory_bytes: int | None = None,
) -> Ranking:
    """Scores every candidate of the space.

    Args:
      workload: what is trained.
      cluster: with network and rates.
      space: what to look through.
      objective: what to minimise.
      memory_bytes: of one device; the cluster's if None.

    Raises:
      UserError: nothing fits; the message says by how much the nearest misses and what would make it fit.
    """
    limit = memory_bytes or cluster.memory_bytes
    scorer = Scorer(workload, cluster, objective)
    ranked: list[Estimate] = []
    rejected: list[Rejection] = []
    for candidate in candidates(cluster, space):
        if rejection := _refuse(candidate, workload, space, objective) or _too_large(scorer, candidate, limit):
            rejected.append(rejection)
        else:
            ranked.append(scorer.estimate(candidate))
    if not ranked:
        raise UserError(_nothing_fits(rejected, workload, cluster, space, limit))
    return Ranking(
        # Of equal times the one that leaves more memory.
        ranked=tuple(sorted(ranked, key=lambda e: (e.objective_s, e.memory.total))),
        rejected=tuple(rejected),
        memory_bytes=limit,
        objective=objective,
    )


def candidates(cluster: Cluster, space: Space) -> Iterator[Candidate]:
    """Every point, unfiltered."""
    for degrees in all_degrees(cluster.ranks):
        for microbatch in space.microbatches:
            for remat in space.remats:
                yield Candidate(degrees, microbatch, remat)


def _refuse(candidate: Candidate, workload: Workload, space: Space, objective: Objective) -> Rejection | None:
    """What needs no look at the model."""
    degrees = candidate.degrees
    if space.fill_nodes and degrees.warnings:
        return Rejection(candidate, Reason.NODE_NOT_FULL)
    if objective is Objective.PAPER and not amsp.in_space(degrees):
        return Rejection(candidate, Reason.NOT_IN_PAPER)
    if workload.global_batch % (candidate.microbatch * degrees.ranks.total):
        return Rejection(candidate, Reason.BATCH)
    return None


def _too_large(scorer: Scorer, candidate: Candidate, limit: int) -> Rejection | None:
    missing = scorer.needed_bytes(candidate) - limit
    return Rejection(candidate, Reason.MEMORY, missing) if missing > 0 else None


def _nothing_fits(rejected: list[Rejection], workload: Workload, cluster: Cluster, space: Space, limit: int) -> str:
    ranks = cluster.ranks.total
    too_large = [r for r in rejected if r.reason is Reason.MEMORY]
    if not too_large:
        return (
            f"GLOBAL_BATCH={workload.global_batch} divides by no MICROBATCH of "
            f"{', '.join(map(str, space.microbatches))} x {ranks} data ranks; a multiple of {ranks} does with "
            "MICROBATCH=1"
        )
    nearest = min(too_large, key=lambda r: r.missing_bytes)
    point = nearest.candidate
    return (
        f"no strategy for {workload.model.name} fits on {cluster.num_nodes} nodes of {cluster.devices_per_node} "
        f"{cluster.device_kind}: the nearest, {point.degrees} with microbatch {point.microbatch} and remat "
        f"{point.remat}, needs {_gib(limit + nearest.missing_bytes)} of {_gib(limit)} a device, "
        f"{_gib(nearest.missing_bytes)} too much; {_remedy(point, space)}"
    )


def _remedy(point: Candidate, space: Space) -> str:
    remedies = []
    if point.microbatch > 1:
        remedies.append("a smaller microbatch (--search microbatch)")
    if Remat.FULL not in space.remats:
        remedies.append("more rematerialisation (--remat full, or --search remat)")
    remedies.append("more nodes, a shorter sequence or a smaller model would")
    return ", ".join(remedies)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
