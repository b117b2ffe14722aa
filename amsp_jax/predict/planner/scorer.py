"""From a candidate to its memory and step time: the cost modules put together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Sequence

import jax.numpy as jnp

from amsp_jax.engine.block_backward import reduction_window
from amsp_jax.engine.microbatch_groups import WINDOW
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.plan import LeafPlan, Plan, plan_parameters
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.model import Params
from amsp_jax.predict.cluster import Cluster, Network, Rates
from amsp_jax.predict.cost import amsp, compute, memory, microbatch_group_memory, model_axes, pipeline_memory, ranks
from amsp_jax.predict.cost.communication import ONCE, Collective, PartPlans, Phase, WireDtypes, messages, part_plans
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.memory import MemoryEstimate
from amsp_jax.predict.cost.pipeline_timeline import Chunks, OnceTimes, pipeline_timeline, tick_counts
from amsp_jax.predict.cost.ranks import Share, shares
from amsp_jax.predict.cost.storage import leaf_counts
from amsp_jax.predict.cost.timeline import BESIDE_A_LOOP, PartTimes, StepTimes, Timeline, simulate
from amsp_jax.predict.cost.trace import ModelTrace, trace_model
from amsp_jax.predict.planner.types import Candidate, Estimate, Objective, Workload, strategy_of
from amsp_jax.strategy import DataRanks, Degree, Degrees, parse

MEASURED = "measured"
ALONE = ModelParallel()
"""A model that is not cut."""
# The paper does not say its size; its choice for 7B is the same from 64 MiB to 1 GiB (tests/unit/test_papers.py).
_PAPER_BUCKET_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True)
class MessageCost:
    """A message of the step: of which part, how often in a step, and seconds each time.

    Attributes:
      basis: `measured`, or what stands in for a measurement (`Network.basis`).
    """

    part: str
    message: Collective
    count: int
    seconds: float
    basis: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchGroupCost:
    """What groups of microbatches cost beside their messages.

    Attributes:
      ungrouped: memory of the same candidate with groups of 1.
      forward_bytes, backward_bytes: that the loops of a step move on a device beside their kernels.
      seconds: of those, a step; a part of what it computes.
    """

    ungrouped: MemoryEstimate
    forward_bytes: int
    backward_bytes: int
    seconds: float


class Scorer:
    """Predicts candidates of one workload on one cluster; what they share is computed once.

    Raises:
      UserError: the cluster has no network or rates.
    """

    def __init__(self, workload: Workload, cluster: Cluster, objective: Objective = Objective.STEP_TIME) -> None:
        if cluster.rates is None or (cluster.network is None and cluster.num_devices > 1):
            missing = "rates of a device" if cluster.rates is None else "network: it was measured on one device alone"
            raise UserError(
                f"cluster {cluster.name}, {cluster.num_devices} devices, has no {missing}; name one that has, or "
                "measure on all of them: python -m amsp_jax calibrate --out cluster.json"
            )
        self.workload, self.cluster, self.objective = workload, cluster, objective
        self.network = cluster.network or Network()
        self.rates: Rates = cluster.rates
        self.distinct = DistinctBlocks.of(workload.model)
        self._abstract_params = self.distinct.model.abstract_params()

    @functools.cached_property
    def wire(self) -> WireDtypes:
        """Dtypes that travel."""
        return WireDtypes(jnp.dtype(self.workload.compute_dtype), self.workload.reduction)

    @functools.cache  # noqa: B019  a scorer lives as long as one search
    def trace(self, microbatch: int, remat: Remat) -> ModelTrace:
        """The model at this microbatch, whole."""
        return trace_model(self.distinct, microbatch, self.workload.seq_len, remat, self.workload.compute_dtype)

    @functools.cache  # noqa: B019
    def rank_trace(self, microbatch: int, remat: Remat, inner: ModelParallel) -> ModelTrace:
        """The same with the bytes of one tensor and context rank."""
        return ranks.rank_trace(self.trace(microbatch, remat), inner, remat)

    @functools.cache  # noqa: B019
    def plan(self, degrees: Degrees, parallel: ModelParallel = ALONE) -> Plan:
        """The plan of the model with each distinct block once.

        Raises:
          UserError: the model does not split over the tensor or context ranks.
        """
        splits, dtype = self._splits(parallel), self.workload.compute_dtype
        return plan_parameters(
            strategy_of(degrees), self._abstract_params, degrees.ranks, None, dtype, parallel=parallel, splits=splits
        )

    def _splits(self, parallel: ModelParallel) -> Params | None:
        splits = self.distinct.model.splits()
        if splits is None and parallel.tensor * parallel.context > 1:
            raise UserError(
                f"{parallel}: {self.distinct.model.name} does not say how its parameters are split (Part.splits); use "
                "tensor=1 and context=1"
            )
        return splits

    @functools.cache  # noqa: B019
    def parts(self, degrees: Degrees, parallel: ModelParallel = ALONE) -> PartPlans:
        """The model's parts under these degrees."""
        leaves = self.plan(degrees, parallel).leaves
        return part_plans(self.distinct.model, leaves, self.distinct.order, self.stages(parallel))

    def stages(self, parallel: ModelParallel) -> Degree:
        """How many stages lie in a node, times how many nodes they span."""
        return model_axes.stage_group(parallel, self.cluster.num_nodes, self.cluster.devices_per_node)

    @functools.cache  # noqa: B019
    def _messages(self, degrees: Degrees, parallel: ModelParallel) -> list[list[tuple[Collective, float]]]:
        """For each distinct part the messages of its states, with their seconds."""
        parts, stages = self.parts(degrees, parallel).parts, self.stages(parallel)
        found = [messages(part, self.wire) for part in parts]
        if parallel.pipeline > 1:
            for some, part in zip(found[1:-1], parts[1:-1], strict=True):
                values = sum(leaf.num_opt_shard for leaf in part.leaves if leaf.dim is not None)
                some += model_axes.exchanges(values, self.wire.gather.itemsize, stages)
        return [[(message, model_axes.seconds(self.network, message)) for message in some] for some in found]

    @functools.cache  # noqa: B019
    def _inner_messages(self, microbatch: int, remat: Remat, inner: ModelParallel) -> list[list[model_axes.Repeated]]:
        """For each distinct part what its passes send over tensor and context."""
        whole, own = self.trace(microbatch, remat), self.rank_trace(microbatch, remat, inner)
        flows = whole.embed.output_bytes
        return [
            model_axes.embed_messages(flows, inner),
            *(model_axes.block_messages(flows, block.attended_bytes, inner, remat) for block in own.blocks),
            model_axes.head_messages(flows, inner),
        ]

    @functools.cache  # noqa: B019
    def computed(self, microbatch: int, remat: Remat, inner: ModelParallel) -> list[PartTimes]:
        """For each distinct part the seconds of its passes, without what its states cause."""
        trace, dtype = self.trace(microbatch, remat), jnp.dtype(self.workload.compute_dtype).name
        shares = self._shares(inner)
        found = []
        for part, share, sent in zip(
            (trace.embed, *trace.blocks, trace.head),
            shares,
            self._inner_messages(microbatch, remat, inner),
            strict=True,
        ):
            ahead, back = (compute.seconds(work, self.rates, dtype, share) for work in (part.forward, part.backward))
            beside = [compute.attention_seconds(w, self.rates, dtype, share) for w in (part.forward, part.backward)]
            inline = model_axes.inline_seconds(self.network, sent, *beside)
            found.append(PartTimes(ahead + inline[0], back + inline[1], {}, 0.0, *inline))
        return found

    @functools.cache  # noqa: B019
    def _shares(self, inner: ModelParallel) -> tuple[Share, ...]:
        leaves = self.plan(parse("ddp").resolve(DataRanks(1)), inner).leaves
        return shares(self.distinct.model, leaves, inner)

    @functools.cache  # noqa: B019
    def _flops(self, microbatch: int, remat: Remat) -> compute.Flops:
        return compute.flops(self.distinct, self.trace(microbatch, remat))

    def settings(self, candidate: Candidate) -> StepSettings:
        """Of the step that would run."""
        return StepSettings(
            reduce_dtype=self.workload.reduce_dtype,
            inter_node_dtype=self.workload.inter_node_dtype,
            remat=candidate.remat,
            peel_first=self.workload.peel,
            peel_last=self.workload.peel,
            pipeline_schedule=candidate.pipeline_schedule,
            virtual_stages=candidate.virtual_stages,
            microbatch_group=candidate.microbatch_group,
        )

    def schedule(self, candidate: Candidate) -> PipelineSchedule:
        """Of its pipeline.

        Raises:
          UserError: its microbatches do not fill it.
        """
        accumulation = candidate.accumulation(self.workload.global_batch)
        return PipelineSchedule(
            candidate.pipeline_schedule, candidate.parallel.pipeline, candidate.virtual_stages, accumulation
        )

    @functools.cache  # noqa: B019
    def memory(self, candidate: Candidate) -> MemoryEstimate:
        """Bytes of one device, by part."""
        plan, optimizer, settings = (
            self.plan(candidate.degrees, candidate.parallel), self.workload.optimizer, self.settings(candidate),
        )  # fmt: skip
        trace = self.rank_trace(candidate.microbatch, candidate.kept, candidate.inner)
        if candidate.parallel.pipeline > 1:
            return pipeline_memory.estimate(self.distinct, plan, trace, optimizer, settings, self.schedule(candidate))
        if candidate.microbatch_group > 1:
            rounds = candidate.rounds(self.workload.global_batch)
            return microbatch_group_memory.estimate(self.distinct, plan, trace, optimizer, settings, rounds)
        accumulation = candidate.accumulation(self.workload.global_batch)
        return memory.estimate(self.distinct, plan, trace, optimizer, settings, accumulation)

    def estimate(self, candidate: Candidate, record: bool = False) -> Estimate:
        """Everything that is predicted of a candidate; with the events of its timeline if `record`.

        A pipeline's timeline has no events: its ticks are counted, not simulated.
        """
        accumulation = candidate.accumulation(self.workload.global_batch)
        timeline = self._timeline(candidate, record)
        costs = self.message_costs(candidate)
        tokens = self.workload.global_batch * self.workload.seq_len / candidate.num_devices
        rate = tokens / timeline.step_s
        mfu, hfu = self._utilisation(candidate, rate)
        terms = {phase: sum(c.count * c.seconds for c in costs if c.message.phase is phase) for phase in Phase}
        return Estimate(
            candidate=candidate,
            accumulation=accumulation,
            rounds=candidate.rounds(self.workload.global_batch),
            memory=self.memory(candidate),
            timeline=timeline,
            terms_s=terms,
            objective_s=self._objective_s(candidate, timeline),
            tokens_per_s_per_device=rate,
            mfu=mfu,
            hfu=hfu,
            unmeasured=tuple(sorted({f"{c.message.kind} {c.message.group}" for c in costs if c.basis != MEASURED})),
        )

    def _timeline(self, candidate: Candidate, record: bool) -> Timeline:
        if candidate.parallel.pipeline > 1:
            return self._pipelined(candidate)
        times = self._step_times(candidate)
        rounds = candidate.rounds(self.workload.global_batch)
        timeline = simulate(times, rounds, self._peels(candidate), record)
        inline = sum(part.inline_forward_s + part.inline_backward_s for part in times.parts)
        return timeline.with_inline(rounds * inline) if inline else timeline

    def _pipelined(self, candidate: Candidate) -> Timeline:
        times = self._part_times(candidate)
        once = self._once_s(candidate.degrees, candidate.parallel, candidate.virtual_stages)
        send_s, slowdown = model_axes.seconds(self.network, self.send(candidate)), self.rates.overlap_slowdown
        return pipeline_timeline(self.schedule(candidate), self.chunks(candidate), times, once, send_s, slowdown)

    @functools.cache  # noqa: B019
    def _once_s(self, degrees: Degrees, parallel: ModelParallel, virtual_stages: int) -> OnceTimes:
        """Of the stage with the most blocks, and of both ends, which every stage gathers and reduces."""
        kinds = self.local_kinds(parallel, virtual_stages)
        seconds = {
            phase: sum(
                n * sum(s for m, s in costs if m.phase is phase)
                for n, costs in zip(kinds, self._messages(degrees, parallel), strict=True)
            )
            for phase in ONCE
        }
        return OnceTimes(seconds[Phase.START], seconds[Phase.END], self._optimizer_s(degrees, parallel))

    @functools.cache  # noqa: B019
    def _optimizer_s(self, degrees: Degrees, parallel: ModelParallel) -> float:
        plan = self.plan(degrees, parallel)
        return compute.optimizer_seconds(self.distinct, plan, self.workload.optimizer, self.rates)

    def chunks(self, candidate: Candidate) -> Chunks:
        """Of its pipeline."""
        return Chunks.of(self.distinct.order, candidate.parallel.pipeline, candidate.virtual_stages)

    def send(self, candidate: Candidate) -> Collective:
        """One hop between stages."""
        flows = self.trace(candidate.microbatch, candidate.kept).embed.output_bytes
        return model_axes.send(flows, candidate.parallel, self.stages(candidate.parallel))

    def check_split(self, parallel: ModelParallel) -> None:
        """Raises UserError if the model does not split over the tensor or context ranks."""
        self._shares(dataclasses.replace(parallel, pipeline=1))

    def _objective_s(self, candidate: Candidate, timeline: Timeline) -> float:
        if self.objective is Objective.STEP_TIME:
            return timeline.step_s
        accumulation = candidate.accumulation(self.workload.global_batch)
        return amsp.terms(self.paper_job(accumulation), candidate.degrees, self.network.seconds).total_s

    def paper_job(self, accumulation: int) -> amsp.Job:
        """The model as the paper's terms see it: every leaf is a module that is gathered alone, L is in the list."""
        modules = [math.prod(leaf.shape) for leaf, count in self._whole_leaves for _ in range(count)]
        return amsp.Job(
            num_params=sum(modules),
            module_params=modules,
            num_layers=1,
            num_microbatches=accumulation,
            bucket_bytes=_PAPER_BUCKET_BYTES,
        )

    @functools.cached_property
    def _whole_leaves(self) -> list[tuple[LeafPlan, int]]:
        return leaf_counts(self.distinct, self.plan(parse("ddp").resolve(self.cluster.ranks)))

    def needed_bytes(self, candidate: Candidate) -> int:
        """Of one device: the peak with a margin; for the paper's objective, its formula and the saved activations."""
        if self.objective is Objective.STEP_TIME:
            memory = self.memory(candidate)
            return memory.total + memory.margin_bytes
        trace = self.trace(candidate.microbatch, candidate.remat)
        saved = sum(trace.blocks[kind].saved_bytes for kind in self.distinct.order) + trace.head.saved_bytes
        return round(amsp.state_bytes(self.paper_job(1).num_params, candidate.degrees)) + saved

    def compute_s(self, candidate: Candidate) -> float:
        """Seconds of a step's computation on one device with nothing beside it."""
        if candidate.parallel.pipeline > 1:
            return self._pipelined(candidate).compute_s
        times = self._step_times(candidate)
        rounds = candidate.rounds(self.workload.global_batch)
        once = sum(
            part.forward_s - part.inline_forward_s + part.backward_s - part.inline_backward_s for part in times.parts
        )
        adding = sum(part.accumulate_s for part in times.parts)
        return rounds * once + (rounds - 1) * adding + times.optimizer_s

    def message_costs(self, candidate: Candidate) -> list[MessageCost]:
        """Every message of a step, equal blocks together; in a pipeline those of the stage with the most blocks, and of
        both ends."""
        names = ["embedding", *(f"block {i}" for i in range(len(self.distinct.model.blocks))), "head"]
        if len(names) == 3:
            names[1] = "each block"
        accumulation = candidate.accumulation(self.workload.global_batch)
        rounds = candidate.rounds(self.workload.global_batch)
        uses = self.local_kinds(candidate.parallel, candidate.virtual_stages)
        inner = self._inner_messages(candidate.microbatch, candidate.kept, candidate.inner)
        found = []
        for kind, (name, states) in enumerate(
            zip(names, self._messages(candidate.degrees, candidate.parallel), strict=True)
        ):
            # A stage goes forward twice, the second time for its backward pass; the head's pass is that one.
            passes = 2 if candidate.parallel.pipeline > 1 and name != "head" else 1
            for message, seconds in states:
                often = 1 if message.phase in ONCE else rounds * (passes if message.phase is Phase.FORWARD else 1)
                found.append((name, message, uses[kind] * often, seconds))
            for sent in inner[kind]:
                often = accumulation * (passes * sent.num_forward + sent.num_backward)
                found.append((name, sent.message, uses[kind] * often, model_axes.seconds(self.network, sent.message)))
        if candidate.parallel.pipeline > 1:
            message, ticks = self.send(candidate), tick_counts(self.schedule(candidate)).num_ticks
            found.append(("stage", message, 2 * ticks, model_axes.seconds(self.network, message)))
        # Exchanges of leaves of one size are equal.
        counts: Counter[tuple[str, Collective, float]] = Counter()
        for name, message, count, seconds in found:
            counts[name, message, seconds] += count
        return [
            MessageCost(name, message, count, seconds, model_axes.basis(self.network, message))
            for (name, message, seconds), count in counts.items()
        ]

    def local_kinds(self, parallel: ModelParallel, virtual_stages: int) -> list[int]:
        """How many parts of one device are of each distinct kind, where a stage has the most."""
        order = self.distinct.order
        if parallel.pipeline > 1:
            order = Chunks.of(order, parallel.pipeline, virtual_stages).fullest
        return [1, *(order.count(kind) for kind in range(len(self.distinct.model.blocks))), 1]

    def _step_times(self, candidate: Candidate) -> StepTimes:
        degrees, parallel = candidate.degrees, candidate.parallel
        plan, parts = self.plan(degrees, parallel), self.parts(degrees, parallel)
        times = self._part_times(candidate)
        _, blocks, _ = self.distinct.model.split(plan.leaves)
        # The order of a group leaves nothing of several parts to be combined.
        is_grouped = candidate.microbatch_group > 1
        return StepTimes(
            parts=[times[kind] for kind in parts.order],
            optimizer_s=self._optimizer_s(degrees, parallel),
            window=WINDOW if is_grouped else reduction_window(blocks),
            end_window=reduction_window(blocks, is_last=True),
            overlap_slowdown=self.rates.overlap_slowdown,
            num_start_parts=1 if is_grouped else degrees.params.total,
            num_end_parts=1 if is_grouped else self._num_end_parts(degrees),
            is_grouped=is_grouped,
            num_beside=_num_beside(candidate) if is_grouped else None,
        )

    def _num_end_parts(self, degrees: Degrees) -> int:
        """How many parts share a reduce-scatter of once a step, by the thresholds of `xla_flags.combine_thresholds`."""
        if degrees.grads.total == 1:
            return 1
        if self.workload.reduction.is_narrower_between_nodes:
            return degrees.opt_state.intra // degrees.grads.intra
        return degrees.opt_state.total // degrees.grads.total

    def _part_times(self, candidate: Candidate) -> list[PartTimes]:
        """Of each distinct part."""
        degrees, parallel = candidate.degrees, candidate.parallel
        computed = self.computed(candidate.microbatch, candidate.kept, candidate.inner)
        if candidate.microbatch_group > 1:
            rate = self.rates.memory_bytes_per_s
            loops = [(ahead / rate, back / rate) for ahead, back in self._loop_bytes(candidate)]
            computed = [
                _repeated(one, candidate.microbatch_group, *more) for one, more in zip(computed, loops, strict=True)
            ]
        states = zip(self._messages(degrees, parallel), self._accumulate_s(degrees, parallel), strict=True)
        return [
            dataclasses.replace(one, messages_s=by_phase(costs), accumulate_s=accumulate_s)
            for one, (costs, accumulate_s) in zip(computed, states, strict=True)
        ]

    def microbatch_group_cost(self, candidate: Candidate) -> MicrobatchGroupCost | None:
        """What groups of microbatches cost beside their messages; None without them."""
        if candidate.microbatch_group == 1:
            return None
        rounds = candidate.rounds(self.workload.global_batch)
        loops, order = self._loop_bytes(candidate), self.parts(candidate.degrees, candidate.parallel).order
        ahead, back = (rounds * sum(loops[kind][way] for kind in order) for way in (0, 1))
        return MicrobatchGroupCost(
            ungrouped=self.memory(dataclasses.replace(candidate, microbatch_group=1)),
            forward_bytes=round(ahead),
            backward_bytes=round(back),
            seconds=(ahead + back) / self.rates.memory_bytes_per_s,
        )

    def _loop_bytes(self, candidate: Candidate) -> list[tuple[float, float]]:
        """For each distinct part those of `compute.loop_bytes`."""
        trace = self.rank_trace(candidate.microbatch, candidate.kept, candidate.inner)
        flows = trace.embed.output_bytes
        moved = [(flows, 0), *((block.saved_bytes, flows) for block in trace.blocks), (0, flows)]
        parts = self.parts(candidate.degrees, candidate.parallel).parts
        return [
            compute.loop_bytes(*num_bytes, part.leaves, candidate.microbatch_group)
            for num_bytes, part in zip(moved, parts, strict=True)
        ]

    @functools.cache  # noqa: B019
    def _accumulate_s(self, degrees: Degrees, parallel: ModelParallel) -> list[float]:
        return [compute.accumulation_seconds(part.leaves, self.rates) for part in self.parts(degrees, parallel).parts]

    def _peels(self, candidate: Candidate) -> bool:
        axes = self.plan(candidate.degrees, candidate.parallel).axes
        return self.workload.peel and bool(axes.grad or axes.opt or axes.replica)

    def _utilisation(self, candidate: Candidate, tokens_per_s: float) -> tuple[float | None, float | None]:
        """Model FLOP/s over the peak, without and with recomputation; a stage computes its forward pass again."""
        peak = self.cluster.peak_flops
        if peak is None:
            return None, None
        flops = self._flops(candidate.microbatch, candidate.kept)
        per_token = tokens_per_s / (candidate.microbatch * self.workload.seq_len) / peak
        again = flops.model // 3 if candidate.parallel.pipeline > 1 else 0
        return flops.model * per_token, (flops.hardware + again) * per_token


def _repeated(part: PartTimes, times: int, forward_s: float, backward_s: float) -> PartTimes:
    """As often, and so many seconds more."""
    return dataclasses.replace(
        part,
        forward_s=times * part.forward_s + forward_s,
        backward_s=times * part.backward_s + backward_s,
        inline_forward_s=times * part.inline_forward_s,
        inline_backward_s=times * part.inline_backward_s,
    )


def _num_beside(candidate: Candidate) -> int:
    """Of a group: XLA lets no collective run beside a loop that has its own, over tensor or context ranks."""
    return BESIDE_A_LOOP if candidate.parallel.tensor * candidate.parallel.context == 1 else 0


def by_phase(costs: Sequence[tuple[Collective, float]]) -> dict[Phase, tuple[float, ...]]:
    """The seconds of messages, by phase."""
    seconds: dict[Phase, tuple[float, ...]] = {}
    for message, time in costs:
        seconds[message.phase] = (*seconds.get(message.phase, ()), time)
    return seconds
