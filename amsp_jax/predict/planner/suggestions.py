"""Where no strategy fits: by how much the nearest misses, and changes that were computed to make one fit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.planner.scorer import Scorer
from amsp_jax.predict.planner.types import Candidate, Objective, Space, Workload
from amsp_jax.strategy import Degrees, all_degrees, parse

_MOST_NODES = 1024
_SHORTEST = 512
# What attention's kernels and the parts of a sequence need its length to be a multiple of, at most.
_LENGTH_UNIT = 128


@dataclasses.dataclass(frozen=True)
class _Change:
    """What might make a strategy fit, in the words of the command line."""

    text: str
    workload: Workload
    cluster: Cluster
    space: Space


def nothing_fits_message(workload: Workload, cluster: Cluster, space: Space, objective: Objective, limit: int) -> str:
    """One line: the nearest candidate, what it misses, and every change that was found to help.

    Args:
      workload, cluster, space, objective: of a search in which all were too large.
      limit: bytes of one device.
    """
    asked = Scorer(workload, cluster, objective)
    # One that leaves part of a node unused never needs less.
    filled = [degrees for degrees in all_degrees(cluster.ranks) if not degrees.warnings]
    nearest = min(_points(asked, space, filled), key=asked.needed_bytes)
    needed = asked.needed_bytes(nearest)
    remedies = [found for found in _remedies(workload, cluster, space, objective, limit) if found]
    told = f"It fits with {', or with '.join(remedies)}" if remedies else _hopeless(cluster)
    return (
        f"no strategy for {workload.model.name} fits on {cluster.num_nodes} x {cluster.devices_per_node} "
        f"{cluster.device_kind}: the nearest, {nearest.degrees} with microbatch {nearest.microbatch} and remat "
        f"{nearest.remat}, needs {_gib(needed)} of {_gib(limit)} a device, {_gib(needed - limit)} too much. {told}"
    )


def _hopeless(cluster: Cluster) -> str:
    nodes = cluster.num_nodes
    while nodes * 2 <= _MOST_NODES:
        nodes *= 2
    return (
        f"Nor does it with --remat full and --microbatch 1 on up to {nodes} nodes, or with sequences of {_SHORTEST} "
        "tokens; choose a smaller model"
    )


def _points(scorer: Scorer, space: Space, degrees: Iterable[Degrees]) -> list[Candidate]:
    """Those by which the batch divides."""
    batch, ranks = scorer.workload.global_batch, scorer.cluster.ranks.total
    factors = itertools.product(degrees, space.microbatches, space.remats, space.microbatch_groups)
    points = [Candidate(one, microbatch, remat, microbatch_group=size) for one, microbatch, remat, size in factors]
    divided = [point for point in points if batch % (point.microbatch * ranks) == 0]
    return [point for point in divided if point.accumulation(batch) % point.microbatch_group == 0]


def _remedies(
    workload: Workload, cluster: Cluster, space: Space, objective: Objective, limit: int
) -> Iterator[str | None]:
    """The first of each kind of change that helps: what is kept, how many nodes, how long a sequence."""
    as_asked = _Change("", workload, cluster, space)
    frugal = _frugal(as_asked)
    for changes in ([frugal], _more_nodes(as_asked), _shorter(as_asked)):
        yield next((c.text for c in changes if c.text and _fits(c, objective, limit)), None)
    if frugal.text and not _fits(frugal, objective, limit):
        yield next((c.text for c in _more_nodes(frugal) if _fits(c, objective, limit)), None)


def _frugal(change: _Change) -> _Change:
    """All that saves memory and changes no numbers: full rematerialisation, microbatch 1, no groups."""
    words = []
    if Remat.FULL not in change.space.remats:
        words.append("--remat full")
    if 1 not in change.space.microbatches:
        words.append("--microbatch 1")
    if 1 not in change.space.microbatch_groups:
        words.append("--microbatch-group 1")
    space = dataclasses.replace(change.space, remats=(Remat.FULL,), microbatches=(1,), microbatch_groups=(1,))
    return dataclasses.replace(change, text=" ".join(words), space=space)


def _more_nodes(change: _Change) -> Iterator[_Change]:
    """Twice as many, and so on, with as many sequences a device."""
    factor = 2
    while (nodes := change.cluster.num_nodes * factor) <= _MOST_NODES:
        batch = change.workload.global_batch * factor
        yield dataclasses.replace(
            change,
            text=f"{change.text} --nodes {nodes} --global-batch {batch}".strip(),
            workload=dataclasses.replace(change.workload, global_batch=batch),
            cluster=change.cluster.with_nodes(nodes),
        )
        factor *= 2


def _shorter(change: _Change) -> Iterator[_Change]:
    """About half as long, and so on."""
    length = change.workload.seq_len
    while (length := length // 2 // _LENGTH_UNIT * _LENGTH_UNIT) >= _SHORTEST:
        workload = dataclasses.replace(change.workload, seq_len=length)
        yield dataclasses.replace(change, text=f"--seq-len {length}", workload=workload)


def _fits(change: _Change, objective: Objective, limit: int) -> bool:
    """Whether everything sharded over all devices does."""
    scorer = Scorer(change.workload, change.cluster, objective)
    full = parse("zero3").resolve(change.cluster.ranks)
    return any(scorer.needed_bytes(point) <= limit for point in _points(scorer, change.space, [full]))


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
