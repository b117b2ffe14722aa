"""What a candidate's step time and memory do not fall below, at a small part of the cost of predicting them.

A bound has the same terms as the prediction, of a model with one leaf a part: its large leaves without their padding.
What is left out, small leaves and padding, only adds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.plan import LARGE_LEAF, MASTER_BYTES, LeafPlan, plan_parameters
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.cost import compute, model_axes
from amsp_jax.predict.cost.communication import ONCE, Collective, PartPlan, Phase, messages, on_its_stage
from amsp_jax.predict.cost.memory import ALLOCATOR_MARGIN, GRAD_BYTES
from amsp_jax.predict.cost.pipeline_timeline import OnceTimes, num_slots, pipeline_timeline
from amsp_jax.predict.cost.storage import StateBytes
from amsp_jax.predict.cost.timeline import PartTimes
from amsp_jax.predict.cost.trace import ModelTrace, extrapolated
from amsp_jax.predict.planner.scorer import Scorer, by_phase
from amsp_jax.predict.planner.types import Candidate, strategy_of
from amsp_jax.strategy import DataRanks, Degrees, parse


@dataclasses.dataclass(frozen=True)
class _Coarse:
    """Of a strategy and a way to cut the model, for each distinct part; and of the update."""

    messages: list[list[tuple[Collective, float]]]
    accumulate_s: list[float]
    optimizer_s: float


class Bounds:
    """Of the candidates of one scorer."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.quick = scorer, _Extrapolating(scorer)
        whole = scorer.plan(parse("ddp").resolve(DataRanks(1)))
        self.states = StateBytes.of(scorer.distinct, whole, scorer.workload.optimizer)

    def least_s(self, point: Candidate) -> float:
        """Seconds of any candidate that differs from `point` in its strategy alone: computing, and what cutting a
        model costs."""
        parts = self.quick.computed(point.microbatch, point.kept, point.inner)
        return self._step_s(point, parts, OnceTimes(0.0, 0.0, 0.0))

    def step_s(self, candidate: Candidate) -> float:
        """Seconds of its step."""
        coarse = self._coarse(candidate.degrees, candidate.parallel)
        computed = self.quick.computed(candidate.microbatch, candidate.kept, candidate.inner)
        parts = [
            dataclasses.replace(part, messages_s=by_phase(costs), accumulate_s=accumulate_s)
            for part, costs, accumulate_s in zip(computed, coarse.messages, coarse.accumulate_s, strict=True)
        ]
        counts = self.scorer.local_kinds(candidate.parallel, candidate.virtual_stages)
        start_s, end_s = (sum(n * part.phase_s(phase) for n, part in zip(counts, parts, strict=True)) for phase in ONCE)
        return self._step_s(candidate, parts, OnceTimes(start_s, end_s, coarse.optimizer_s))

    def _step_s(self, candidate: Candidate, parts: list[PartTimes], once: OnceTimes) -> float:
        """Without stages the two streams at their best: the longer of both, and the update after them."""
        scorer = self.scorer
        if candidate.parallel.pipeline > 1:
            send_s = model_axes.seconds(scorer.network, self.quick.send(candidate))
            schedule, chunks = scorer.schedule(candidate), scorer.chunks(candidate)
            return pipeline_timeline(schedule, chunks, parts, once, send_s, scorer.rates.overlap_slowdown).step_s
        m = candidate.accumulation(scorer.workload.global_batch)
        rounds = candidate.rounds(scorer.workload.global_batch)
        counts = scorer.local_kinds(candidate.parallel, 1)
        computes = sum(
            n * (m * (part.forward_s + part.backward_s) + (rounds - 1) * part.accumulate_s)
            for n, part in zip(counts, parts, strict=True)
        )
        each = (Phase.FORWARD, Phase.BACKWARD, Phase.REDUCE)
        sends = sum(n * sum(map(part.phase_s, each)) for n, part in zip(counts, parts, strict=True))
        return max(computes, rounds * sends + once.start_s + once.end_s) + once.optimizer_s

    @functools.cache  # noqa: B019  bounds live as long as one search
    def _coarse(self, degrees: Degrees, parallel: ModelParallel) -> _Coarse:
        scorer, stages = self.scorer, self.scorer.stages(parallel)
        leaves, found = self._leaves(degrees, parallel), []
        for place, leaf in enumerate(leaves):
            is_block = 0 < place < len(leaves) - 1
            own = on_its_stage(leaf) if is_block else leaf
            sent = messages(PartPlan((own,), is_block, stages), scorer.wire)
            if is_block and parallel.pipeline > 1 and own.dim is not None:
                sent += model_axes.exchanges(own.num_opt_shard, scorer.wire.gather.itemsize, stages)
            found.append([(message, model_axes.seconds(scorer.network, message)) for message in sent])
        adding = [compute.accumulation_seconds([leaf], scorer.rates) for leaf in leaves]
        return _Coarse(found, adding, self._optimizer_s(degrees, parallel))

    def _leaves(self, degrees: Degrees, parallel: ModelParallel) -> list[LeafPlan]:
        """One for each distinct part, with as many values as divide."""
        shards = degrees.opt_state.total * parallel.pipeline
        sizes = [values // shards * shards for values in self._large_values(parallel.tensor)]
        params = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in sizes]
        outer, dtype = dataclasses.replace(parallel, tensor=1), self.scorer.workload.compute_dtype
        plan = plan_parameters(strategy_of(degrees), params, degrees.ranks, None, dtype, parallel=outer)
        leaves: list[LeafPlan] = jax.tree.leaves(plan.leaves)
        return leaves

    @functools.cache  # noqa: B019
    def _large_values(self, tensor: int) -> list[int]:
        """Values of each distinct part's large leaves on a tensor rank: those that are always sharded."""
        plan = self.scorer.plan(parse("ddp").resolve(DataRanks(1)), ModelParallel(tensor=tensor))
        embed, blocks, head = self.scorer.distinct.model.split(plan.leaves)
        sizes = [[math.prod(leaf.rank_shape) for leaf in jax.tree.leaves(part)] for part in (embed, *blocks, head)]
        return [sum(size for size in part if size >= LARGE_LEAF) for part in sizes]

    def _optimizer_s(self, degrees: Degrees, parallel: ModelParallel) -> float:
        """As `compute.update_bytes`, of whole parameters evenly shared."""
        states, shards = self.states, parallel.tensor * parallel.pipeline * degrees.opt_state.total
        moved = 2 * (states.stored_bytes - MASTER_BYTES * states.num_values)
        moved += (2 * GRAD_BYTES + 2 * MASTER_BYTES) * states.num_values
        return moved / shards / self.scorer.rates.memory_bytes_per_s

    def fits(self, point: Candidate, degrees: Sequence[Degrees], limit: int) -> list[Degrees]:
        """The strategies with which `point` may fit: states, activations, and the margin on what is temporary, as in
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
        trace = self.quick.rank_trace(candidate.microbatch, candidate.kept, candidate.inner)
        if candidate.parallel.pipeline == 1:
            saved = sum(trace.blocks[kind].saved_bytes for kind in self.scorer.distinct.order)
            return candidate.microbatch_group * saved + trace.head.backward_bytes
        chunks = self.scorer.chunks(candidate)
        saved = max(sum(trace.blocks[kind].saved_bytes for kind in kinds) for _, kinds in chunks.virtual)
        return saved + num_slots(self.scorer.schedule(candidate)) * trace.blocks[0].output_bytes


class _Extrapolating(Scorer):
    """A scorer that traces up to four sequences, and knows more from two and four."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__(scorer.workload, scorer.cluster, scorer.objective)
        self._scorer = scorer

    @functools.cache  # noqa: B019
    def trace(self, microbatch: int, remat: Remat) -> ModelTrace:
        """The model at this microbatch, whole."""
        steps, odd = divmod(microbatch - 2, 2)
        if microbatch <= 4 or odd:
            return self._scorer.trace(microbatch, remat)
        return extrapolated(self._scorer.trace(2, remat), self._scorer.trace(4, remat), steps)
