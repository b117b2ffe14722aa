"""What all trials share, and which points cannot run on it: the trainer's own checks, without a device."""

from __future__ import annotations

import dataclasses
import functools

from amsp_jax.cli.tune.point import Point
from amsp_jax.engine.context import check_sequence
from amsp_jax.engine.microbatch_groups import check_group
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule, assign_blocks
from amsp_jax.engine.plan import make_plan
from amsp_jax.errors import UserError
from amsp_jax.model import Model
from amsp_jax.run.checks import batch_shape
from amsp_jax.strategy import DataRanks, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialSetup:
    """What stays the same in all trials and decides which points can run.

    Attributes:
      num_nodes, devices_per_node: the devices.
      model: what is trained; only shapes are read.
      global_batch: sequences of a step.
      seq_len: tokens of a sequence.
    """

    num_nodes: int
    devices_per_node: int
    model: Model
    global_batch: int
    seq_len: int

    @property
    def num_devices(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.devices_per_node

    def ranks(self, point: Point) -> DataRanks:
        """The data ranks of a point; UserError where the devices do not divide."""
        max_stages = len(self.model.blocks) // point.virtual_stages
        return point.parallel.data_ranks(self.num_nodes, self.devices_per_node, max_stages)

    def key(self, point: Point) -> str:
        """Equal for points that are the same run, by the strategy's degrees, whatever it is called.

        Points that cannot run have the key of their own values.
        """
        if self.why_invalid(point):
            return str(point)
        strategy = parse(point.strategy)
        rules = "".join(f", {pattern}: {rule}" for pattern, rule in strategy.rules)
        return str(dataclasses.replace(point, strategy=f"{strategy.resolve(self.ranks(point))}{rules}"))

    @functools.cache  # noqa: B019  there is one for a search
    def why_invalid(self, point: Point) -> str | None:
        """Why the trainer would refuse a point; None for those that it takes as far as can be told without devices."""
        try:
            self._check(point)
        except UserError as error:
            return str(error)
        return None

    def _check(self, point: Point) -> None:
        ranks, parallel = self.ranks(point), point.parallel
        parse(point.strategy).resolve(ranks)
        self._check_cuts(parallel, ranks)
        check_sequence(self.seq_len, point.context, point.tensor)
        batch = batch_shape(self.global_batch, point.microbatch, ranks.total, self.seq_len, parallel.total)
        check_group(point.microbatch_group, batch.accumulation, point.pipeline)
        PipelineSchedule(point.pipeline_schedule, point.pipeline, point.virtual_stages, batch.accumulation)
        if point.pipeline > 1:
            assign_blocks(len(self.model.blocks), point.pipeline, point.virtual_stages)

    @functools.cache  # noqa: B019
    def _check_cuts(self, parallel: ModelParallel, ranks: DataRanks) -> None:
        """Whether the model can be cut so; the strategy does not matter."""
        make_plan("ddp", self.model, ranks=ranks, parallel=parallel)
