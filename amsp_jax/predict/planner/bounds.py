"""What a candidate's step time and memory do not fall below, at a small part of the cost of predicting them.

A bound has the same terms as the prediction, of a model with one leaf a part: its large leaves without their padding.
What is left out, small leaves and padding, only adds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from amsp_jax.engine.leaves import LARGE_LEAF, MASTER_BYTES, LeafPlan
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import plan_parameters
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.cost import compute, model_axes
from amsp_jax.predict.cost.communication import ONCE, PartPlan, Phase, messages, on_its_stage
from amsp_jax.predict.cost.distinct_blocks import trained
from amsp_jax.predict.cost.memory import ALLOCATOR_MARGIN, GRAD_BYTES
from amsp_jax.predict.cost.pipeline_timeline import OnceTimes, num_slots
from amsp_jax.predict.cost.storage import StateBytes
from amsp_jax.predict.cost.timeline import PartTimes
from amsp_jax.predict.cost.trace import ModelTrace, extrapolated
from amsp_jax.predict.planner.compute_costs import ComputeCosts
from amsp_jax.predict.planner.scorer import Scorer
from amsp_jax.predict.planner.state_costs import Timed, by_phase
from amsp_jax.predict.planner.types import Candidate, strategy_of
from amsp_jax.strategy import DataRanks, Degrees, parse


@dataclasses.dataclass(frozen=True)
class _Coarse:
    """Costs of a strategy and a way to cut the model: for each distinct part, and for the update."""

    messages: list[list[Timed]]
    accumulate_s: list[float]
    optimizer_s: float


class Bounds:
    """Lower bounds for the candidates of one scorer."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.pipelines = scorer, scorer.pipelines
        self.quick = ComputeCosts(scorer.states, self._extrapolated)
        self.states = StateBytes.of(scorer.distinct, scorer.states.one_device(), scorer.workload.optimizer)
        self._coarse_costs: dict[tuple[Degrees, ModelParallel], _Coarse] = {}
        self._large: dict[int, list[int]] = {}

    def _extrapolated(self, microbatch: int, remat: Remat) -> ModelTrace:
        """Traces of up to four sequences are exact; longer microbatches follow from the traces of two and four."""
        exact = self.scorer.computing.trace
        steps, odd = divmod(microbatch - 2, 2)
        if microbatch <= 4 or odd:
            return exact(microbatch, remat)
        return extrapolated(exact(2, remat), exact(4, remat), steps)

    def least_s(self, point: Candidate) -> float:
        """Seconds that no candidate falls below that differs from `point` in its strategy alone: the time to compute,
        and what cutting a model costs."""
        return self._step_s(point, self.quick.part_times(point), OnceTimes(0.0, 0.0, 0.0))

    def step_s(self, candidate: Candidate) -> float:
        """Seconds that the step of a candidate does not fall below."""
        coarse = self._coarse(candidate.degrees, candidate.parallel)
        parts = [
            dataclasses.replace(part, messages_s=by_phase(costs), accumulate_s=accumulate_s)
            for part, costs, accumulate_s in zip(
                self.quick.part_times(candidate), coarse.messages, coarse.accumulate_s, strict=True
            )
        ]
        counts = self.pipelines.local_kinds(candidate.parallel, candidate.virtual_stages)
        start_s, end_s = (sum(n * part.phase_s(phase) for n, part in zip(counts, parts, strict=True)) for phase in ONCE)
        return self._step_s(candidate, parts, OnceTimes(start_s, end_s, coarse.optimizer_s))

    def _step_s(self, candidate: Candidate, parts: list[PartTimes], once: OnceTimes) -> float:
        """Without stages: the longer of the two streams, and the update after them."""
        if candidate.parallel.pipeline > 1:
            return self.pipelines.timeline(candidate, parts, once, self.quick.flows_bytes(candidate)).step_s
        global_batch = self.scorer.workload.global_batch
        m, rounds = candidate.accumulation(global_batch), candidate.rounds(global_batch)
        counts = self.pipelines.local_kinds(candidate.parallel, 1)
        computes = sum(
            n * (m * (part.forward_s + part.backward_s) + (rounds - 1) * part.accumulate_s)
            for n, part in zip(counts, parts, strict=True)
        )
        each = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE)
        sends = sum(n * sum(map(part.phase_s, each)) for n, part in zip(counts, parts, strict=True))
        return max(computes, rounds * sends + once.start_s + once.end_s) + once.optimizer_s

    def _coarse(self, degrees: Degrees, parallel: ModelParallel) -> _Coarse:
        key = degrees, parallel
        if (found := self._coarse_costs.get(key)) is None:
            found = self._coarse_costs[key] = self._coarse_cost(degrees, parallel)
        return found

    def _coarse_cost(self, degrees: Degrees, parallel: ModelParallel) -> _Coarse:
        states = self.scorer.states
        stages, leaves, found = states.stages(parallel), self._leaves(degrees, parallel), []
        for place, leaf in enumerate(leaves):
            is_block = 0 < place < len(leaves) - 1
            own = on_its_stage(leaf) if is_block else leaf
            sent = messages(PartPlan((own,), is_block, stages), states.wire)
            if is_block and parallel.pipeline > 1 and own.dim is not None:
                sent += model_axes.exchanges(own.num_opt_shard, states.wire.gather.itemsize, stages)
            # A part without large trained leaves may send nothing, where a message of no bytes would have a latency.
            found.append(states.timed([message for message in sent if message.num_bytes]))
        adding = [compute.accumulation_seconds([leaf], states.rates) for leaf in leaves]
        return _Coarse(found, adding, self._optimizer_s(degrees, parallel))

    def _leaves(self, degrees: Degrees, parallel: ModelParallel) -> list[LeafPlan]:
        """One leaf for each distinct part, with as many values as divide."""
        shards = degrees.opt_state.total * parallel.pipeline
        sizes = [values // shards * shards for values in self._large_values(parallel.tensor)]
        params = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        outer, dtype = dataclasses.replace(parallel, tensor=1), self.scorer.workload.compute_dtype
        plan = plan_parameters(strategy_of(degrees), params, degrees.ranks, None, dtype, parallel=outer)
        leaves: list[LeafPlan] = jax.tree.leaves(plan.leaves)
        return leaves

    def _large_values(self, tensor: int) -> list[int]:
        """Values of each distinct part's large trained leaves on a tensor rank; large leaves are always sharded."""
        if (found := self._large.get(tensor)) is None:
            plan = self.scorer.states.plan(parse("ddp").resolve(DataRanks(1)), ModelParallel(tensor=tensor))
            embed, blocks, head = self.scorer.distinct.model.split(plan.leaves)
            sizes = [[math.prod(leaf.rank_shape) for leaf in trained(part)] for part in (embed, *blocks, head)]
            found = self._large[tensor] = [sum(size for size in part if size >= LARGE_LEAF) for part in sizes]
        return found

    def _optimizer_s(self, degrees: Degrees, parallel: ModelParallel) -> float:
        """Seconds of the update as `compute.update_bytes` counts it, for whole parameters shared evenly."""
        states, shards = self.states, parallel.tensor * parallel.pipeline * degrees.opt_state.total
        moved = 2 * (states.stored_bytes - MASTER_BYTES * states.num_values)
        moved += (2 * GRAD_BYTES + 2 * MASTER_BYTES) * states.num_trained
        return moved / shards / self.scorer.rates.memory_bytes_per_s

    def fits(self, point: Candidate, degrees: Sequence[Degrees], limit: int) -> list[Degrees]:
        """The strategies with which `point` may fit: states, activations, and the margin on temporary bytes, as in
        `Scorer.needed_bytes`."""
        accumulates = point.parallel.pipeline > 1 or point.rounds(self.scorer.workload.global_batch) > 1
        left = limit - (1 + ALLOCATOR_MARGIN) * self._activations(point)
        if left < 0:
            return []
        found = []
        for one in degrees:
            stored, temporary = self.states.least(one, point.parallel, accumulates)
            if stored + (1 + ALLOCATOR_MARGIN) * temporary <= left:
                found.append(one)
        return found

    def _activations(self, candidate: Candidate) -> int:
        """Bytes at the loss, which is one of the moments that may be the peak; in a pipeline, of inputs in flight and
        one virtual stage."""
        trace = self.quick.rank_trace(candidate)
        if candidate.parallel.pipeline == 1:
            saved = sum(trace.blocks[kind].saved_bytes for kind in self.scorer.distinct.order)
            return candidate.microbatch_group * saved + trace.head.backward_bytes
        chunks = self.pipelines.chunks(candidate)
        saved = max(sum(trace.blocks[kind].saved_bytes for kind in kinds) for _, kinds in chunks.virtual)
        return saved + num_slots(self.pipelines.schedule(candidate)) * trace.blocks[0].output_bytes
