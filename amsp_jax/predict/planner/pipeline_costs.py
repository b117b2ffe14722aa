"""What pipeline stages cost: their schedule, the blocks of each stage, the hops between stages, and the timeline."""

from __future__ import annotations

from collections.abc import Sequence

from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.predict.cost import model_axes
from amsp_jax.predict.cost.communication import ONCE, Collective, Phase
from amsp_jax.predict.cost.pipeline_timeline import Chunks, OnceTimes, pipeline_timeline
from amsp_jax.predict.cost.timeline import PartTimes, Timeline
from amsp_jax.predict.planner.state_costs import StateCosts
from amsp_jax.predict.planner.types import Candidate
from amsp_jax.strategy import Degrees


class PipelineCosts:
    """Schedules and timelines of stages; the collectives of once a step are summed once for a strategy."""

    def __init__(self, states: StateCosts) -> None:
        self.states, self.order = states, states.distinct.order
        self._once: dict[tuple[Degrees, ModelParallel, int], OnceTimes] = {}

    def schedule(self, candidate: Candidate) -> PipelineSchedule:
        """The schedule of a candidate's pipeline.

        Raises:
          UserError: the microbatches of a step do not fill the schedule.
        """
        accumulation = candidate.accumulation(self.states.workload.global_batch)
        name, stages = candidate.pipeline_schedule, candidate.parallel.pipeline
        return PipelineSchedule(name, stages, candidate.virtual_stages, accumulation)

    def chunks(self, candidate: Candidate) -> Chunks:
        """The blocks of each virtual stage."""
        return Chunks.of(self.order, candidate.parallel.pipeline, candidate.virtual_stages)

    def local_kinds(self, parallel: ModelParallel, virtual_stages: int) -> list[int]:
        """How many parts of each distinct kind one device has; in a pipeline, the stage with the most blocks."""
        order: Sequence[int] = self.order
        if parallel.pipeline > 1:
            order = Chunks.of(self.order, parallel.pipeline, virtual_stages).fullest
        return [1, *(order.count(kind) for kind in range(len(self.states.distinct.model.blocks))), 1]

    def send(self, candidate: Candidate, flows_bytes: int) -> Collective:
        """One hop between stages of `flows_bytes` a microbatch."""
        return model_axes.send(flows_bytes, candidate.parallel, self.states.stages(candidate.parallel))

    def timeline(self, candidate: Candidate, parts: Sequence[PartTimes], once: OnceTimes, flows_bytes: int) -> Timeline:
        """The step of the slowest stage.

        Args:
          candidate: with several stages.
          parts: times of each distinct part.
          once: seconds of once a step.
          flows_bytes: what flows between stages, of a microbatch.
        """
        send_s = model_axes.seconds(self.states.network, self.send(candidate, flows_bytes))
        slowdown = self.states.rates.overlap_slowdown
        return pipeline_timeline(self.schedule(candidate), self.chunks(candidate), parts, once, send_s, slowdown)

    def once(self, candidate: Candidate) -> OnceTimes:
        """Seconds of once a step, of the stage with the most blocks and of both ends, which every stage has."""
        key = candidate.degrees, candidate.parallel, candidate.virtual_stages
        if (found := self._once.get(key)) is None:
            found = self._once[key] = self._once_times(*key)
        return found

    def _once_times(self, degrees: Degrees, parallel: ModelParallel, virtual_stages: int) -> OnceTimes:
        cost = self.states.cost(degrees, parallel)
        kinds = self.local_kinds(parallel, virtual_stages)
        seconds = {
            phase: sum(
                n * sum(s for m, s in costs if m.phase is phase) for n, costs in zip(kinds, cost.messages, strict=True)
            )
            for phase in ONCE
        }
        return OnceTimes(seconds[Phase.START], seconds[Phase.END], cost.optimizer_s)
