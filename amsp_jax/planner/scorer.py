"""From a candidate to its memory and step time: the cost modules put together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp

from amsp_jax.cluster import Cluster, Network, Rates
from amsp_jax.cost import compute, memory
from amsp_jax.cost.communication import ONCE, Collective, PartPlans, Phase, WireDtypes, messages, part_plans
from amsp_jax.cost.memory import MemoryEstimate
from amsp_jax.cost.papers import amsp
from amsp_jax.cost.sketch import Sketch
from amsp_jax.cost.storage import leaf_counts
from amsp_jax.cost.timeline import PartTimes, StepTimes, Timeline, simulate
from amsp_jax.cost.trace import ModelTrace, trace_model
from amsp_jax.errors import UserError
from amsp_jax.plan import LeafPlan, Plan, make_plan
from amsp_jax.planner.types import Candidate, Estimate, Objective, Workload, strategy_of
from amsp_jax.stack import Remat, reduction_window
from amsp_jax.step import StepSettings
from amsp_jax.strategy import Degrees, parse

MEASURED = "measured"
# The paper does not say its size; its choice for 7B is the same from 64 MiB to 1 GiB (tests/test_papers.py).
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
        self.sketch = Sketch.of(workload.model)
        self._abstract_params = self.sketch.model.abstract_params()

    @functools.cached_property
    def wire(self) -> WireDtypes:
        """Dtypes that travel."""
        return WireDtypes(jnp.dtype(self.workload.compute_dtype), jnp.dtype(self.workload.reduce_dtype))

    @functools.cache  # noqa: B019  a scorer lives as long as one search
    def trace(self, microbatch: int, remat: Remat) -> ModelTrace:
        """The model at this microbatch."""
        return trace_model(self.sketch, microbatch, self.workload.seq_len, remat, self.workload.compute_dtype)

    @functools.cache  # noqa: B019
    def plan(self, degrees: Degrees) -> Plan:
        """Of the sketch: each distinct block once."""
        return make_plan(strategy_of(degrees), self._abstract_params, degrees.ranks, None, self.workload.compute_dtype)

    @functools.cache  # noqa: B019
    def parts(self, degrees: Degrees) -> PartPlans:
        """The model's parts under these degrees."""
        return part_plans(self.sketch.model, self.plan(degrees).leaves, self.sketch.order)

    @functools.cache  # noqa: B019
    def _messages(self, degrees: Degrees) -> list[list[tuple[Collective, float]]]:
        """For each distinct part its messages, with their seconds."""
        return [
            [(m, self.network.seconds(m.kind, m.num_bytes, m.group)) for m in messages(part, self.wire)]
            for part in self.parts(degrees).parts
        ]

    @functools.cache  # noqa: B019
    def _compute_seconds(self, microbatch: int, remat: Remat) -> list[tuple[float, float]]:
        """For each distinct part the seconds of its forward and its backward pass."""
        trace, dtype = self.trace(microbatch, remat), jnp.dtype(self.workload.compute_dtype).name
        return [
            (compute.seconds(part.forward, self.rates, dtype), compute.seconds(part.backward, self.rates, dtype))
            for part in (trace.embed, *trace.blocks, trace.head)
        ]

    @functools.cache  # noqa: B019
    def _flops(self, microbatch: int, remat: Remat) -> compute.Flops:
        return compute.flops(self.sketch, self.trace(microbatch, remat))

    def settings(self, candidate: Candidate) -> StepSettings:
        """Of the step that would run."""
        return StepSettings(reduce_dtype=self.workload.reduce_dtype, remat=candidate.remat, peel=self.workload.peel)

    @functools.cache  # noqa: B019
    def memory(self, candidate: Candidate) -> MemoryEstimate:
        """Bytes of one device, by part."""
        return memory.estimate(
            self.sketch,
            self.plan(candidate.degrees),
            self.trace(candidate.microbatch, candidate.remat),
            self.workload.optimizer,
            self.settings(candidate),
            candidate.accumulation(self.workload.global_batch),
        )

    def estimate(self, candidate: Candidate, record: bool = False) -> Estimate:
        """Everything that is predicted of a candidate; with the events of its timeline if `record`."""
        accumulation = candidate.accumulation(self.workload.global_batch)
        timeline = simulate(self._step_times(candidate), accumulation, self._peels(candidate.degrees), record)
        costs = self.message_costs(candidate)
        tokens = self.workload.global_batch * self.workload.seq_len / candidate.degrees.ranks.total
        rate = tokens / timeline.step_s
        mfu, hfu = self._utilisation(candidate, rate)
        terms = {phase: sum(c.count * c.seconds for c in costs if c.message.phase is phase) for phase in Phase}
        return Estimate(
            candidate=candidate,
            accumulation=accumulation,
            memory=self.memory(candidate),
            timeline=timeline,
            terms_s=terms,
            objective_s=self._objective_s(candidate, timeline),
            tokens_per_s_per_device=rate,
            mfu=mfu,
            hfu=hfu,
            unmeasured=tuple(sorted({f"{c.message.kind} {c.message.group}" for c in costs if c.basis != MEASURED})),
        )

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
        return leaf_counts(self.sketch, self.plan(parse("ddp").resolve(self.cluster.ranks)))

    def needed_bytes(self, candidate: Candidate) -> int:
        """Of one device: the peak with a margin; for the paper's objective, its formula and the saved activations."""
        if self.objective is Objective.STEP_TIME:
            memory = self.memory(candidate)
            return memory.total + memory.margin_bytes
        trace = self.trace(candidate.microbatch, candidate.remat)
        saved = sum(trace.blocks[kind].saved_bytes for kind in self.sketch.order) + trace.head.saved_bytes
        return round(amsp.state_bytes(self.paper_job(1).num_params, candidate.degrees)) + saved

    def compute_s(self, candidate: Candidate) -> float:
        """Seconds of a step's computation on one device with nothing beside it."""
        times = self._step_times(candidate)
        accumulation = candidate.accumulation(self.workload.global_batch)
        once = sum(part.forward_s + part.backward_s for part in times.parts)
        adding = sum(part.accumulate_s for part in times.parts)
        return accumulation * once + (accumulation - 1) * adding + times.optimizer_s

    def message_costs(self, candidate: Candidate) -> list[MessageCost]:
        """Every message of a step, equal blocks together."""
        accumulation = candidate.accumulation(self.workload.global_batch)
        parts = self.parts(candidate.degrees)
        names = ["embedding", *(f"block {i}" for i in range(len(parts.parts) - 2)), "head"]
        if len(names) == 3:
            names[1] = "each block"
        return [
            MessageCost(
                part=names[kind],
                message=message,
                count=parts.order.count(kind) * (1 if message.phase in ONCE else accumulation),
                seconds=seconds,
                basis=self.network.basis(message.kind, message.group),
            )
            for kind, part in enumerate(self._messages(candidate.degrees))
            for message, seconds in part
        ]

    def _step_times(self, candidate: Candidate) -> StepTimes:
        plan, parts = self.plan(candidate.degrees), self.parts(candidate.degrees)
        computed = self._compute_seconds(candidate.microbatch, candidate.remat)
        accumulate_s = [compute.accumulation_seconds(part.leaves, self.rates) for part in parts.parts]
        times = [
            _part_times(*one) for one in zip(computed, self._messages(candidate.degrees), accumulate_s, strict=True)
        ]
        _, blocks, _ = self.sketch.model.split(plan.leaves)
        return StepTimes(
            parts=[times[kind] for kind in parts.order],
            optimizer_s=compute.optimizer_seconds(self.sketch, plan, self.workload.optimizer, self.rates),
            window=reduction_window(blocks),
            overlap_slowdown=self.rates.overlap_slowdown,
            # A result of the thresholds in `xla_flags.combine_thresholds`: a whole block gathered, a block's G shard.
            num_start_parts=candidate.degrees.params.total,
            num_end_parts=candidate.degrees.opt_state.total // candidate.degrees.grads.total,
        )

    def _peels(self, degrees: Degrees) -> bool:
        axes = self.plan(degrees).axes
        return self.workload.peel and bool(axes.grad or axes.opt or axes.replica)

    def _utilisation(self, candidate: Candidate, tokens_per_s: float) -> tuple[float | None, float | None]:
        """Model FLOP/s over the peak, without and with recomputation."""
        peak = self.cluster.peak_flops
        if peak is None:
            return None, None
        flops = self._flops(candidate.microbatch, candidate.remat)
        per_token = tokens_per_s / (candidate.microbatch * self.workload.seq_len) / peak
        return flops.model * per_token, flops.hardware * per_token


def _part_times(
    compute_s: tuple[float, float], costs: Sequence[tuple[Collective, float]], accumulate_s: float
) -> PartTimes:
    seconds: dict[Phase, tuple[float, ...]] = {}
    for message, time in costs:
        seconds[message.phase] = (*seconds.get(message.phase, ()), time)
    return PartTimes(*compute_s, messages_s=seconds, accumulate_s=accumulate_s)
