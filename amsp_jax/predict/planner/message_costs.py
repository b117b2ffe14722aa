"""Every message of a step as a table: of which part, how often, and how long."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from amsp_jax.predict.cost import model_axes
from amsp_jax.predict.cost.communication import Collective, Phase
from amsp_jax.predict.cost.pipeline_timeline import tick_counts
from amsp_jax.predict.planner.compute_costs import ComputeCosts
from amsp_jax.predict.planner.pipeline_costs import PipelineCosts
from amsp_jax.predict.planner.types import Candidate

MEASURED = "measured"
_Row = tuple[str, Collective, float, int]
"""Part, message, its seconds, and how often the message is sent in a step."""


@dataclasses.dataclass(frozen=True)
class MessageCost:
    """A message of the step.

    Attributes:
      part: the part of the model that sends the message.
      message: kind, axes, group and bytes.
      count: how often the message is sent in a step.
      seconds: of one such message.
      basis: `measured`, or what stands in for a measurement (`Network.basis`).
    """

    part: str
    message: Collective
    count: int
    seconds: float
    basis: str


def message_costs(computing: ComputeCosts, pipelines: PipelineCosts, candidate: Candidate) -> list[MessageCost]:
    """Every message of a step, equal messages of equal blocks together.

    In a pipeline the messages are those of the stage with the most blocks, and of embedding and head.
    """
    network = computing.network
    counts: Counter[tuple[str, Collective, float]] = Counter()
    # Exchanges of leaves of one size are equal, and are one row.
    for part, message, seconds, count in _rows(computing, pipelines, candidate):
        counts[part, message, seconds] += count
    return [
        MessageCost(part, message, count, seconds, model_axes.basis(network, message))
        for (part, message, seconds), count in counts.items()
    ]


def _rows(computing: ComputeCosts, pipelines: PipelineCosts, candidate: Candidate) -> Iterator[_Row]:
    states = computing.states.cost(candidate.degrees, candidate.parallel)
    inner = computing.inner_messages(candidate)
    uses = pipelines.local_kinds(candidate.parallel, candidate.virtual_stages)
    names = _part_names(len(computing.distinct.model.blocks))
    network, global_batch = computing.network, computing.workload.global_batch
    for name, sent, inside, num_parts in zip(names, states.messages, inner, uses, strict=True):
        # A stage goes forward twice, the second time for its backward pass; the head's only pass is that one.
        passes = 2 if candidate.parallel.pipeline > 1 and name != "head" else 1
        often = _state_message_counts(candidate.rounds(global_batch), passes)
        for message, seconds in sent:
            yield name, message, seconds, num_parts * often[message.phase]
        for one in inside:
            times = candidate.accumulation(global_batch) * (passes * one.num_forward + one.num_backward)
            yield name, one.message, model_axes.seconds(network, one.message), num_parts * times
    if candidate.parallel.pipeline > 1:
        ticks = tick_counts(pipelines.schedule(candidate)).num_ticks
        send = pipelines.send(candidate, computing.flows_bytes(candidate))
        yield "stage", send, model_axes.seconds(network, send), 2 * ticks


def _part_names(num_blocks: int) -> Sequence[str]:
    """The names of the distinct parts: embedding, blocks, head."""
    blocks = ["each block"] if num_blocks == 1 else [f"block {i}" for i in range(num_blocks)]
    return ["embedding", *blocks, "head"]


def _state_message_counts(rounds: int, passes: int) -> dict[Phase, int]:
    """How often a part sends the message of each phase in a step of so many rounds and forward passes."""
    return {
        Phase.START: 1,
        Phase.FORWARD: rounds * passes,
        Phase.BACKWARD: rounds,
        Phase.REDUCE: rounds,
        Phase.END: 1,
    }
