"""What computing costs: traces of the model, the seconds of its parts, and what its passes send inside a stage."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from amsp_jax.engine.parallel import ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.cost import compute, model_axes, ranks
from amsp_jax.predict.cost.ranks import Share, shares
from amsp_jax.predict.cost.timeline import PartTimes
from amsp_jax.predict.cost.trace import ModelTrace, trace_model
from amsp_jax.predict.planner.state_costs import StateCosts
from amsp_jax.predict.planner.types import Candidate
from amsp_jax.strategy import DataRanks, parse

Trace = Callable[[int, Remat], ModelTrace]
"""The model at a microbatch and a rematerialisation, not cut."""
_Key = tuple[int, Remat, ModelParallel]


class ComputeCosts:
    """Traces and times of a model's parts, each computed once.

    Args:
      states: of the same workload and cluster; splits of leaves are read off its plans.
      trace: makes a trace; None traces the model.
    """

    def __init__(self, states: StateCosts, trace: Trace | None = None) -> None:
        self.states, self.workload, self.distinct = states, states.workload, states.distinct
        self.network, self.rates = states.network, states.rates
        self._make_trace = trace or self._traced
        self._traces: dict[tuple[int, Remat], ModelTrace] = {}
        self._rank_traces: dict[_Key, ModelTrace] = {}
        self._inner: dict[_Key, list[list[model_axes.Repeated]]] = {}
        self._part_times: dict[_Key, list[PartTimes]] = {}
        self._shares: dict[ModelParallel, tuple[Share, ...]] = {}
        self._flops: dict[tuple[int, Remat], compute.Flops] = {}

    def trace(self, microbatch: int, remat: Remat) -> ModelTrace:
        """The model at this microbatch, not cut."""
        key = microbatch, remat
        if (trace := self._traces.get(key)) is None:
            trace = self._traces[key] = self._make_trace(microbatch, remat)
        return trace

    def _traced(self, microbatch: int, remat: Remat) -> ModelTrace:
        return trace_model(self.distinct, microbatch, self.workload.seq_len, remat, self.workload.compute_dtype)

    def rank_trace(self, candidate: Candidate) -> ModelTrace:
        """The model at a candidate's microbatch, with the bytes of one tensor and context rank."""
        key = candidate.microbatch, candidate.kept, candidate.inner
        if (trace := self._rank_traces.get(key)) is None:
            microbatch, remat, inner = key
            trace = self._rank_traces[key] = ranks.rank_trace(self.trace(microbatch, remat), inner, remat)
        return trace

    def flows_bytes(self, candidate: Candidate) -> int:
        """Bytes that flow from part to part, of a whole microbatch."""
        return self.trace(candidate.microbatch, candidate.kept).embed.output_bytes

    def inner_messages(self, candidate: Candidate) -> list[list[model_axes.Repeated]]:
        """For each distinct part, what its passes send over tensor and context."""
        key = candidate.microbatch, candidate.kept, candidate.inner
        if (found := self._inner.get(key)) is None:
            _, remat, inner = key
            flows, blocks = self.flows_bytes(candidate), self.rank_trace(candidate).blocks
            found = self._inner[key] = [
                model_axes.embed_messages(flows, inner),
                *(model_axes.block_messages(flows, block.attended_bytes, inner, remat) for block in blocks),
                model_axes.head_messages(flows, inner),
            ]
        return found

    def part_times(self, candidate: Candidate) -> list[PartTimes]:
        """For each distinct part, the seconds of its passes over a microbatch, without what its states cause."""
        key = candidate.microbatch, candidate.kept, candidate.inner
        if (found := self._part_times.get(key)) is None:
            found = self._part_times[key] = self._timed(candidate)
        return found

    def _timed(self, candidate: Candidate) -> list[PartTimes]:
        trace, dtype = self.trace(candidate.microbatch, candidate.kept), jnp.dtype(self.workload.compute_dtype).name
        parts = trace.embed, *trace.blocks, trace.head
        found = []
        for part, share, sent in zip(parts, self.shares(candidate.inner), self.inner_messages(candidate), strict=True):
            ahead, back = (compute.seconds(work, self.rates, dtype, share) for work in (part.forward, part.backward))
            beside = [compute.attention_seconds(w, self.rates, dtype, share) for w in (part.forward, part.backward)]
            inline = model_axes.inline_seconds(self.network, sent, *beside)
            found.append(PartTimes(ahead + inline[0], back + inline[1], {}, 0.0, *inline))
        return found

    def shares(self, inner: ModelParallel) -> tuple[Share, ...]:
        """For each distinct part, one rank's share of its work.

        Raises:
          UserError: the model does not split over the tensor or context ranks.
        """
        if (found := self._shares.get(inner)) is None:
            leaves = self.states.plan(parse("ddp").resolve(DataRanks(1)), inner).leaves
            found = self._shares[inner] = shares(self.distinct.model, leaves, inner)
        return found

    def flops(self, candidate: Candidate) -> compute.Flops:
        """Operations of a microbatch, of the model and of the hardware."""
        key = candidate.microbatch, candidate.kept
        if (found := self._flops.get(key)) is None:
            found = self._flops[key] = compute.flops(self.distinct, self.trace(*key))
        return found

    def loop_bytes(self, candidate: Candidate) -> list[tuple[float, float]]:
        """For each distinct part, what its loops over a group move forward and backward (`compute.loop_bytes`)."""
        trace = self.rank_trace(candidate)
        flows = trace.embed.output_bytes
        moved = [(flows, 0), *((block.saved_bytes, flows) for block in trace.blocks), (0, flows)]
        parts = self.states.cost(candidate.degrees, candidate.parallel).parts.parts
        return [
            compute.loop_bytes(*num_bytes, part.leaves, candidate.microbatch_group)
            for num_bytes, part in zip(moved, parts, strict=True)
        ]
