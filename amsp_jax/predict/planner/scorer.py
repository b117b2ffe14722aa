"""From a candidate to its memory and step time: the costs of states, computing and pipelines put together."""

from __future__ import annotations

import dataclasses
import functools
import math

from amsp_jax.engine.block_backward import reduction_window
from amsp_jax.engine.microbatch_groups import WINDOW
from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.pipeline.schedule import PipelineSchedule
from amsp_jax.engine.step_settings import StepSettings
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import Cluster
from amsp_jax.predict.cost import amsp, memory, microbatch_group_memory, pipeline_memory
from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.cost.distinct_blocks import DistinctBlocks
from amsp_jax.predict.cost.memory import MemoryEstimate
from amsp_jax.predict.cost.timeline import BESIDE_A_LOOP, PartTimes, StepTimes, Timeline, simulate
from amsp_jax.predict.planner.compute_costs import ComputeCosts
from amsp_jax.predict.planner.message_costs import MEASURED, MessageCost, message_costs
from amsp_jax.predict.planner.pipeline_costs import PipelineCosts
from amsp_jax.predict.planner.state_costs import StateCosts, by_phase
from amsp_jax.predict.planner.types import Candidate, Estimate, Objective, Workload
from amsp_jax.strategy import Degrees

# The paper does not say its size; its choice for 7B is the same from 64 MiB to 1 GiB (tests/unit/test_papers.py).
_PAPER_BUCKET_BYTES = 512 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicrobatchGroupCost:
    """What groups of microbatches cost beside their messages.

    Attributes:
      ungrouped: memory of the same candidate with groups of 1.
      forward_bytes, backward_bytes: what the loops of a step move on a device beside their kernels.
      seconds: time of these bytes in a step; a part of the time to compute.
    """

    ungrouped: MemoryEstimate
    forward_bytes: int
    backward_bytes: int
    seconds: float


class Scorer:
    """Predicts candidates of one workload on one cluster.

    Attributes:
      states, computing, pipelines: costs that candidates share; each is computed once.

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
        self.distinct = DistinctBlocks.of(workload.model, workload.frozen)
        self.states = StateCosts(workload, cluster, self.distinct, cluster.rates)
        self.computing = ComputeCosts(self.states)
        self.pipelines = PipelineCosts(self.states)
        self.network, self.rates = self.states.network, self.states.rates
        self._memory: dict[Candidate, MemoryEstimate] = {}

    def settings(self, candidate: Candidate) -> StepSettings:
        """The settings of the step that would run."""
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
        """The schedule of a candidate's pipeline.

        Raises:
          UserError: the microbatches of a step do not fill the schedule.
        """
        return self.pipelines.schedule(candidate)

    def check_split(self, parallel: ModelParallel) -> None:
        """Raises UserError if the model does not split over the tensor or context ranks."""
        self.computing.shares(dataclasses.replace(parallel, pipeline=1))

    def memory(self, candidate: Candidate) -> MemoryEstimate:
        """Bytes of one device, by part."""
        if (found := self._memory.get(candidate)) is None:
            found = self._memory[candidate] = self._estimated_memory(candidate)
        return found

    def _estimated_memory(self, candidate: Candidate) -> MemoryEstimate:
        plan = self.states.plan(candidate.degrees, candidate.parallel)
        trace, settings = self.computing.rank_trace(candidate), self.settings(candidate)
        args = self.distinct, plan, trace, self.workload.optimizer, settings
        if candidate.parallel.pipeline > 1:
            return pipeline_memory.estimate(*args, self.schedule(candidate))
        if candidate.microbatch_group > 1:
            return microbatch_group_memory.estimate(*args, candidate.rounds(self.workload.global_batch))
        return memory.estimate(*args, candidate.accumulation(self.workload.global_batch))

    def needed_bytes(self, candidate: Candidate) -> int:
        """Bytes a device must have: the peak with a margin; for the paper's objective, its formula and activations."""
        if self.objective is Objective.STEP_TIME:
            estimate = self.memory(candidate)
            return estimate.total + estimate.margin_bytes
        trace = self.computing.trace(candidate.microbatch, candidate.remat)
        saved = sum(trace.blocks[kind].saved_bytes for kind in self.distinct.order) + trace.head.saved_bytes
        return round(amsp.state_bytes(self.paper_job(1).num_params, candidate.degrees)) + saved

    def estimate(self, candidate: Candidate, record: bool = False) -> Estimate:
        """Predicts everything of a candidate; with the events of its timeline if `record`.

        A pipeline's timeline has no events: its ticks are counted, not simulated.
        """
        timeline = self._timeline(candidate, record)
        costs = self.message_costs(candidate)
        rate = self.workload.global_batch * self.workload.seq_len / candidate.num_devices / timeline.step_s
        mfu, hfu = self._utilisation(candidate, rate)
        return Estimate(
            candidate=candidate,
            accumulation=candidate.accumulation(self.workload.global_batch),
            rounds=candidate.rounds(self.workload.global_batch),
            memory=self.memory(candidate),
            timeline=timeline,
            terms_s={phase: sum(c.count * c.seconds for c in costs if c.message.phase is phase) for phase in Phase},
            objective_s=self._objective_s(candidate, timeline),
            tokens_per_s_per_device=rate,
            mfu=mfu,
            hfu=hfu,
            unmeasured=tuple(sorted({f"{c.message.kind} {c.message.group}" for c in costs if c.basis != MEASURED})),
        )

    def message_costs(self, candidate: Candidate) -> list[MessageCost]:
        """Every message of a step (`message_costs.message_costs`)."""
        return message_costs(self.computing, self.pipelines, candidate)

    def _timeline(self, candidate: Candidate, record: bool) -> Timeline:
        if candidate.parallel.pipeline > 1:
            return self._pipelined(candidate)
        times = self._step_times(candidate)
        rounds = candidate.rounds(self.workload.global_batch)
        timeline = simulate(times, rounds, self._peels(candidate), record)
        inline = sum(part.inline_forward_s + part.inline_backward_s for part in times.parts)
        return timeline.with_inline(rounds * inline) if inline else timeline

    def _pipelined(self, candidate: Candidate) -> Timeline:
        flows, once = self.computing.flows_bytes(candidate), self.pipelines.once(candidate)
        return self.pipelines.timeline(candidate, self._part_times(candidate), once, flows)

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

    def _step_times(self, candidate: Candidate) -> StepTimes:
        degrees, parallel = candidate.degrees, candidate.parallel
        plan, cost = self.states.plan(degrees, parallel), self.states.cost(degrees, parallel)
        times = self._part_times(candidate)
        _, blocks, _ = self.distinct.model.split(plan.leaves)
        # The order of a group leaves nothing of several parts to be combined.
        is_grouped = candidate.microbatch_group > 1
        return StepTimes(
            parts=[times[kind] for kind in cost.parts.order],
            optimizer_s=cost.optimizer_s,
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
        """For each distinct part, the seconds of its passes, its messages, and the addition of its gradients."""
        cost = self.states.cost(candidate.degrees, candidate.parallel)
        computed = self.computing.part_times(candidate)
        if candidate.microbatch_group > 1:
            rate, size = self.rates.memory_bytes_per_s, candidate.microbatch_group
            loops = [(ahead / rate, back / rate) for ahead, back in self.computing.loop_bytes(candidate)]
            computed = [_repeated(one, size, *more) for one, more in zip(computed, loops, strict=True)]
        return [
            dataclasses.replace(one, messages_s=by_phase(sent), accumulate_s=accumulate_s)
            for one, sent, accumulate_s in zip(computed, cost.messages, cost.accumulate_s, strict=True)
        ]

    def microbatch_group_cost(self, candidate: Candidate) -> MicrobatchGroupCost | None:
        """What groups of microbatches cost beside their messages; None without groups."""
        if candidate.microbatch_group == 1:
            return None
        rounds, loops = candidate.rounds(self.workload.global_batch), self.computing.loop_bytes(candidate)
        order = self.states.cost(candidate.degrees, candidate.parallel).parts.order
        ahead, back = (rounds * sum(loops[kind][way] for kind in order) for way in (0, 1))
        return MicrobatchGroupCost(
            ungrouped=self.memory(dataclasses.replace(candidate, microbatch_group=1)),
            forward_bytes=round(ahead),
            backward_bytes=round(back),
            seconds=(ahead + back) / self.rates.memory_bytes_per_s,
        )

    def _peels(self, candidate: Candidate) -> bool:
        axes = self.states.plan(candidate.degrees, candidate.parallel).axes
        return self.workload.peel and bool(axes.grad or axes.opt or axes.replica)

    def _objective_s(self, candidate: Candidate, timeline: Timeline) -> float:
        if self.objective is Objective.STEP_TIME:
            return timeline.step_s
        accumulation = candidate.accumulation(self.workload.global_batch)
        return amsp.terms(self.paper_job(accumulation), candidate.degrees, self.network.seconds).total_s

    def paper_job(self, accumulation: int) -> amsp.Job:
        """The model as the paper's terms see it: each leaf is a module that is gathered alone, in one layer."""
        return amsp.Job(
            num_params=sum(self._modules),
            module_params=self._modules,
            num_layers=1,
            num_microbatches=accumulation,
            bucket_bytes=_PAPER_BUCKET_BYTES,
        )

    @functools.cached_property
    def _modules(self) -> list[int]:
        """The number of parameters of each leaf of the whole model."""
        return [math.prod(leaf.shape) for leaf, count in self.states.whole_leaves() for _ in range(count)]

    def _utilisation(self, candidate: Candidate, tokens_per_s: float) -> tuple[float | None, float | None]:
        """Model FLOP/s over the peak, without and with recomputation; a stage computes its forward pass again."""
        peak = self.cluster.peak_flops
        if peak is None:
            return None, None
        flops = self.computing.flops(candidate)
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
