"""What the planner expects of points: which do not fit into memory, and where to begin."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from amsp_jax.cli.tune.point import Point
from amsp_jax.cli.tune.trial_setup import TrialSetup
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import Cluster, load_cluster
from amsp_jax.predict.planner import Candidate, Scorer, Workload, degrees_of
from amsp_jax.strategy import parse
from amsp_jax.user_cache import user_cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What is expected.

    Attributes:
      step_s: seconds of a step by point; points that are not in it fit, or nothing is known of them.
      too_large: why a point does not fit, by point.
    """

    step_s: Mapping[Point, float] = dataclasses.field(default_factory=dict)
    too_large: Mapping[Point, str] = dataclasses.field(default_factory=dict)

    def best(self, count: int, setup: TrialSetup) -> list[Point]:
        """The points with the shortest steps, the best first; of those that are the same run, one."""
        firsts: dict[str, Point] = {}
        for point in sorted(self.step_s, key=self.step_s.__getitem__):
            firsts.setdefault(setup.key(point), point)
        return list(firsts.values())[:count]


def forecast(points: Iterable[Point], setup: TrialSetup, workload: Workload, cluster: Cluster) -> Forecast:
    """Scores points that can run.

    Args:
      points: points that the trainer would accept.
      setup: what all trials share.
      workload: what is trained.
      cluster: the devices of a trial, with network and rates.

    Raises:
      UserError: the cluster has no network or rates.
    """
    scorer, limit = Scorer(workload, cluster), cluster.memory_bytes
    step_s: dict[Point, float] = {}
    too_large: dict[Point, str] = {}

    @functools.cache
    def expected(candidate: Candidate) -> tuple[float, str]:
        missing = scorer.needed_bytes(candidate) - limit
        if missing > 0:
            return math.inf, f"needs {missing / 2**30:.1f} GiB more than the {limit / 2**30:.1f} GiB of a device"
        return scorer.estimate(candidate).step_s, ""

    for point in points:
        # Of a strategy with rules nothing is predicted, so it is tried.
        if parse(point.strategy).rules:
            continue
        seconds, misfit = expected(_candidate(point, setup))
        if misfit:
            too_large[point] = misfit
        else:
            step_s[point] = seconds
    return Forecast(step_s=step_s, too_large=too_large)


def _candidate(point: Point, setup: TrialSetup) -> Candidate:
    return Candidate(
        degrees_of(point.strategy, setup.ranks(point)),
        point.microbatch,
        Remat(point.remat),
        point.parallel,
        point.virtual_stages,
        point.pipeline_schedule,
        point.microbatch_group,
    )


def kept_calibration(setup: TrialSetup, is_cpu: bool) -> Path | None:
    """The newest file that a run with STRATEGY='auto' kept for such a grid; None if there is none."""
    folder = user_cache() / "clusters"
    grid = f"{setup.num_nodes}x{setup.devices_per_node}"
    found = [path for path in folder.glob(f"*_{grid}_jax-*.json") if _is_readable(path, is_cpu)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _is_readable(path: Path, is_cpu: bool) -> bool:
    try:
        return (load_cluster(path).device_kind == "cpu") == is_cpu
    except UserError:
        return False
