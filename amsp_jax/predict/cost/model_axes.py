"""The collectives over `tensor`, `context` and `stage`: what travels because a model is cut, not its states.

b sequences of s tokens a microbatch, h wide, t tensor and c context ranks, p stages. Bytes are of the compute dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from amsp_jax.engine.parallel import CONTEXT, STAGE, TENSOR, ModelParallel
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.cluster import CollectiveKind, Network
from amsp_jax.predict.cost.communication import EXCHANGE, Collective, Phase
from amsp_jax.predict.cost.memory import GRAD_BYTES
from amsp_jax.predict.cost.ranks import HALVES
from amsp_jax.strategy import Degree

SEND = "collective-permute"
"""Like `EXCHANGE` a kind of which the network has no measurements: see `seconds`."""


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A message, and how often each pass over a part sends it; the backward pass with what it computes again."""

    message: Collective
    num_forward: int
    num_backward: int


def stage_group(parallel: ModelParallel, num_nodes: int, devices_per_node: int) -> Degree:
    """How many stages lie in one node, times how many nodes they span together."""
    per_stage = num_nodes * devices_per_node // parallel.pipeline
    intra = min(parallel.pipeline, max(1, devices_per_node // per_stage))
    return Degree(intra, parallel.pipeline // intra)


def embed_messages(output_bytes: int, parallel: ModelParallel) -> list[Repeated]:
    """Over tensor: a vocabulary's ranks add up their rows, each for its piece of the sequence. Bytes b s/c h."""
    if parallel.tensor == 1:
        return []
    gather, scatter = _over_tensor(output_bytes, parallel)
    return [Repeated(scatter, 1, 0), Repeated(gather, 0, 1)]


def head_messages(output_bytes: int, parallel: ModelParallel) -> list[Repeated]:
    """Over tensor: the whole sequence before the logits of a rank's vocabulary, and back. Bytes b s/c h."""
    if parallel.tensor == 1:
        return []
    gather, scatter = _over_tensor(output_bytes, parallel)
    return [Repeated(gather, 1, 0), Repeated(scatter, 0, 1)]


def block_messages(output_bytes: int, attended_bytes: int, parallel: ModelParallel, remat: Remat) -> list[Repeated]:
    """Over tensor and context, of one block.

    Each half gathers the sequence and scatters its result, and backward the other way around: 4 gathers and 4 scatters
    of b s/c h. Unless all is kept, what the gathers return is not, so backward there are 2 more; `full` computes the
    first half's result again, too, of which the second is made: 1 more scatter. The ring is a message a pass: see
    `ring_bytes`. In a pipeline keys and values are gathered instead, and their float32 gradients scattered: the bytes
    on the wire are those of the ring, but for the gradients' last hop.

    Args:
      output_bytes: b s h, of the whole sequence.
      attended_bytes: keys and values of one rank.
      parallel: the ranks.
      remat: what the block keeps.
    """
    found = []
    if parallel.tensor > 1:
        gather, scatter = _over_tensor(output_bytes, parallel)
        found += [
            Repeated(gather, HALVES, HALVES + (0 if remat is Remat.NONE else HALVES)),
            Repeated(scatter, HALVES, HALVES + (1 if remat is Remat.FULL else 0)),
        ]
    if parallel.context > 1 and parallel.pipeline > 1:
        group, whole = Degree(parallel.context, 1), parallel.context * attended_bytes
        gather = Collective("all-gather", (CONTEXT,), group, (), whole, Phase.CONTEXT)
        scatter = Collective("reduce-scatter", (CONTEXT,), group, (), 2 * whole, Phase.CONTEXT)
        found += [Repeated(gather, 1, 1), Repeated(scatter, 0, 1)]
    elif parallel.context > 1:
        ahead, back = ring_bytes(attended_bytes, parallel.context, remat)
        found += [Repeated(_ring(ahead, parallel.context), 1, 0), Repeated(_ring(back, parallel.context), 0, 1)]
    return found


def _over_tensor(output_bytes: int, parallel: ModelParallel) -> tuple[Collective, Collective]:
    """A gather and a scatter of one context rank's sequence."""
    group, num_bytes = Degree(parallel.tensor, 1), output_bytes // parallel.context
    return (
        Collective("all-gather", (TENSOR,), group, (), num_bytes, Phase.TENSOR),
        Collective("reduce-scatter", (TENSOR,), group, (), num_bytes, Phase.TENSOR),
    )


def ring_bytes(attended_bytes: int, context: int, remat: Remat) -> tuple[int, int]:
    """Bytes that a rank sends around the ring, forward and backward.

    Keys and values go c - 1 hops; backward again, and their float32 gradients c hops, home. `full` computes attention
    again, so keys and values travel once more.

        forward (c - 1) kv     backward (c - 1) kv + 2 c kv [+ (c - 1) kv]

    Args:
      attended_bytes: kv: keys and values of one rank, in a 16 bit dtype.
      context: c.
      remat: what blocks keep.
    """
    once = (context - 1) * attended_bytes
    return once, once + 2 * context * attended_bytes + (once if remat is Remat.FULL else 0)


def _ring(num_bytes: int, context: int) -> Collective:
    """All hops of a pass as one message."""
    return Collective(SEND, (CONTEXT,), Degree(context, 1), (), num_bytes, Phase.CONTEXT)


def send(output_bytes: int, parallel: ModelParallel, stages: Degree) -> Collective:
    """One hop of what flows between stages: b s h / (t c), to the next stage, or backward to the one before."""
    num_bytes = output_bytes // (parallel.tensor * parallel.context)
    return Collective(SEND, (STAGE,), stages, (), num_bytes, Phase.SEND)


def exchanges(num_values: int, gather_bytes: int, stages: Degree) -> Iterator[Collective]:
    """The all-to-alls of once a step that hand each stage its own blocks, and bring their gradients back.

        2 + 4 bytes x parameters of blocks / (p t s_os), (p - 1)/p of which leave the device

    Args:
      num_values: of all blocks' OS shards on one device.
      gather_bytes: of a parameter's value; a reduced gradient's is float32.
      stages: their group.
    """
    for item_bytes, phase in ((gather_bytes, Phase.START), (GRAD_BYTES, Phase.END)):
        yield Collective(EXCHANGE, (STAGE,), stages, (), num_values * item_bytes, phase)


def seconds(network: Network, message: Collective) -> float:
    """Of any collective; the two kinds that are never measured are made of a gather that moves the same bytes.

    - A hop of B bytes: a gather of 2 B over two ranks, between nodes wherever any pair of neighbours is. All devices of
      a node send at once, as a network's seconds suppose.
    - An all-to-all of B bytes on each device moves what a gather with a result of B does; but over a x b ranks, each
      link between nodes carries a times as much, for nothing is sent once and copied inside the node.
    """
    group = message.group
    if message.kind == SEND:
        pair = Degree(1, 2) if group.inter > 1 else Degree(2, 1)
        return network.seconds(CollectiveKind.ALL_GATHER, 2 * message.num_bytes, pair)
    if message.kind == EXCHANGE:
        copies = group.intra if group.inter > 1 else 1
        return network.seconds(CollectiveKind.ALL_GATHER, copies * message.num_bytes, group)
    return network.seconds(message.kind, message.num_bytes, group)


def inline_seconds(
    network: Network, sent: Sequence[Repeated], attention_forward_s: float, attention_backward_s: float
) -> tuple[float, float]:
    """What a part's passes wait for, forward and backward: all over tensor; of the ring what attention does not hide.

    Args:
      network: whose seconds.
      sent: the part's messages.
      attention_forward_s, attention_backward_s: computing that the ring runs beside.
    """
    return (
        _waited(network, [(one.message, one.num_forward) for one in sent], attention_forward_s),
        _waited(network, [(one.message, one.num_backward) for one in sent], attention_backward_s),
    )


def _waited(network: Network, sent: Sequence[tuple[Collective, int]], attention_s: float) -> float:
    tensor = sum(n * seconds(network, message) for message, n in sent if message.phase is Phase.TENSOR)
    context = [(message, n) for message, n in sent if message.phase is Phase.CONTEXT]
    gathers = sum(n * seconds(network, message) for message, n in context if message.kind != SEND)
    ring = sum(n * seconds(network, message) for message, n in context if message.kind == SEND)
    return tensor + gathers + max(0.0, ring - attention_s)


def basis(network: Network, message: Collective) -> str:
    """What the seconds are read off, as `Network.basis`."""
    if message.kind in (SEND, EXCHANGE):
        return "as all-gather"
    return network.basis(message.kind, message.group)
