"""What sharded states cost: the plan of a strategy, its collectives with their seconds, and the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from amsp_jax.engine.leaves import LeafPlan
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import Plan, plan_parameters
from amsp_jax.errors import UserError
from amsp_jax.model import Params
from amsp_jax.predict.cluster import Cluster, Network, Rates
from amsp_jax.predict.cost import compute, model_axes
from amsp_jax.predict.cost.communication import Collective, PartPlans, Phase, WireDtypes, messages, part_plans
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.storage import leaf_counts
from amsp_jax.predict.planner.types import Workload, strategy_of
from amsp_jax.strategy import DataRanks, Degree, Degrees, parse

ALONE = ModelParallel()
"""A model that is not cut."""
Timed = tuple[Collective, float]
"""A message and its seconds."""


@dataclasses.dataclass(frozen=True)
class StateCost:
    """What the states of one strategy cost.

    Attributes:
      parts: the leaves of the model's parts.
      messages: for each distinct part, its messages.
      accumulate_s: for each distinct part, seconds to add a microbatch's gradients to those before.
      optimizer_s: seconds of the update.
    """

    parts: PartPlans
    messages: list[list[Timed]]
    accumulate_s: list[float]
    optimizer_s: float


class StateCosts:
    """Plans and costs of states, each computed once for a strategy and a way to cut the model."""

    def __init__(self, workload: Workload, cluster: Cluster, distinct: DistinctBlocks, rates: Rates) -> None:
        self.workload, self.cluster, self.distinct, self.rates = workload, cluster, distinct, rates
        self.network = cluster.network or Network()
        self.wire = WireDtypes(jnp.dtype(workload.compute_dtype), workload.reduction)
        self._abstract_params = distinct.model.abstract_params()
        self._plans: dict[tuple[Degrees, ModelParallel], Plan] = {}
        self._costs: dict[tuple[Degrees, ModelParallel], StateCost] = {}

    def plan(self, degrees: Degrees, parallel: ModelParallel = ALONE) -> Plan:
        """The plan of the model with each distinct block once.

        Raises:
          UserError: the model does not split over the tensor or context ranks.
        """
        key = degrees, parallel
        if (plan := self._plans.get(key)) is None:
            plan = self._plans[key] = self._planned(degrees, parallel)
        return plan

    def _planned(self, degrees: Degrees, parallel: ModelParallel) -> Plan:
        splits, dtype = self._splits(parallel), self.workload.compute_dtype
        plan = plan_parameters(
            strategy_of(degrees), self._abstract_params, degrees.ranks, None, dtype, parallel=parallel, splits=splits
        )
        return dataclasses.replace(plan, leaves=self.distinct.with_frozen(plan.leaves))

    def _splits(self, parallel: ModelParallel) -> Params | None:
        splits = self.distinct.model.splits()
        if splits is None and parallel.tensor * parallel.context > 1:
            raise UserError(
                f"{parallel}: {self.distinct.model.name} does not say how its parameters are split (Part.splits); use "
                "tensor=1 and context=1"
            )
        return splits

    def cost(self, degrees: Degrees, parallel: ModelParallel = ALONE) -> StateCost:
        """What the states cost beside computing."""
        key = degrees, parallel
        if (cost := self._costs.get(key)) is None:
            cost = self._costs[key] = self._cost(degrees, parallel)
        return cost

    def _cost(self, degrees: Degrees, parallel: ModelParallel) -> StateCost:
        plan = self.plan(degrees, parallel)
        parts = part_plans(self.distinct.model, plan.leaves, self.distinct.order, self.stages(parallel))
        return StateCost(
            parts=parts,
            messages=self._messages(parts, parallel),
            accumulate_s=[compute.accumulation_seconds(part.leaves, self.rates) for part in parts.parts],
            optimizer_s=compute.optimizer_seconds(self.distinct, plan, self.workload.optimizer, self.rates),
        )

    def stages(self, parallel: ModelParallel) -> Degree:
        """How many stages lie in a node, times how many nodes they span."""
        return model_axes.stage_group(parallel, self.cluster.num_nodes, self.cluster.devices_per_node)

    def _messages(self, plans: PartPlans, parallel: ModelParallel) -> list[list[Timed]]:
        parts, stages = plans.parts, self.stages(parallel)
        found = [messages(part, self.wire) for part in parts]
        if parallel.pipeline > 1:
            for some, part in zip(found[1:-1], parts[1:-1], strict=True):
                values = sum(leaf.num_opt_shard for leaf in part.leaves if leaf.dim is not None)
                some += model_axes.exchanges(values, self.wire.gather.itemsize, stages)
        return [self.timed(some) for some in found]

    def timed(self, some: Sequence[Collective]) -> list[Timed]:
        """Messages with their seconds on the cluster's network."""
        return [(message, model_axes.seconds(self.network, message)) for message in some]

    def one_device(self) -> Plan:
        """The plan of one device, on which every leaf is whole."""
        return self.plan(parse("ddp").resolve(DataRanks(1)))

    def whole_leaves(self) -> list[tuple[LeafPlan, int]]:
        """The distinct leaves, and how many of each the whole model has."""
        return leaf_counts(self.distinct, self.one_device())


def by_phase(costs: Sequence[Timed]) -> dict[Phase, tuple[float, ...]]:
    """The seconds of messages, by phase."""
    seconds: dict[Phase, tuple[float, ...]] = {}
    for message, time in costs:
        seconds[message.phase] = (*seconds.get(message.phase, ()), time)
    return seconds
