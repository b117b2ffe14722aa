"""AMSP's own cost model (arXiv 2311.00257, section IV): its memory formula, its four communication terms, its space.

Its conventions are not this engine's: 2 bytes for every gradient whether microbatches accumulate or not, whole tensors
a rank (so that a reduction is an all-reduce of which most is dropped, and updated parameters are broadcast), all terms
added up as if nothing overlapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from amsp_jax.strategy import DataRanks, Degree, Degrees, all_degrees

Seconds = Callable[[str, float, Degree], float]
"""`(kind, bytes of the message, group) -> seconds`: t(op, v, p0 x p1) of the paper, as `Network.seconds`."""

WIRE_BYTES = 2
"""Of a value on the wire."""
BUCKET_BYTES = 512 * 2**20
"""U, the bucket that gradients are reduced in; the paper does not say its size, this is an assumption."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """Seconds of a step: parameters, gradients of all microbatches but the last, of the last, updated parameters."""

    params_s: float
    grads_s: float
    last_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        """The objective, T_p + T_g + T_os0 + T_os1."""
        return self.params_s + self.grads_s + self.last_s + self.update_s


def terms(
    seconds: Seconds,
    degrees: Degrees,
    modules: Sequence[int],
    num_microbatches: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> Terms:
    """The four terms of the objective.

        T_p   = M sum_i [2 t(AG, 2 Phi_i, p) + t(RS, 2 Phi_i, p)]            if s_p > 1
        T_g   = (M - 1) (2 Phi / (U s_p)) t(AR, U, g/p)                      if s_g > s_p
        T_os0 = (2 Phi / (U s_p)) t(AR, U, dp/p)
        T_os1 = (s_os / s_p) t(BC, 2 Phi / s_os, os/p)

    Args:
      seconds: of a collective.
      degrees: of the strategy.
      modules: parameters of every module that is gathered alone, Phi_i.
      num_microbatches: M.
      bucket_bytes: U.
    """
    p, data = degrees.params, Degree(degrees.ranks.per_node, degrees.ranks.num_nodes)
    num_params = sum(modules)
    num_buckets = WIRE_BYTES * num_params / (bucket_bytes * p.total)
    params_s = 0.0
    if p.total > 1:
        sizes = [WIRE_BYTES * size for size in modules]
        one = sum(2 * seconds("all-gather", size, p) + seconds("reduce-scatter", size, p) for size in sizes)
        params_s = num_microbatches * one
    grads_s = (num_microbatches - 1) * num_buckets * seconds("all-reduce", bucket_bytes, _over(degrees.grads, p))
    last_s = num_buckets * seconds("all-reduce", bucket_bytes, _over(data, p))
    shards = degrees.opt_state.total / p.total
    shard_bytes = WIRE_BYTES * num_params / degrees.opt_state.total
    update_s = shards * seconds("broadcast", shard_bytes, _over(degrees.opt_state, p)) if shards > 1 else 0.0
    return Terms(params_s, grads_s, last_s, update_s)


def _over(large: Degree, small: Degree) -> Degree:
    """The group of the ranks that hold `small`'s shards within `large`'s."""
    return Degree(large.intra // small.intra, large.inter // small.inter)


def state_bytes(num_params: int, degrees: Degrees) -> float:
    """Of one device: 2 Phi / s_p + 2 Phi / s_g + 12 Phi / s_os."""
    return num_params * (2 / degrees.params.total + 2 / degrees.grads.total + 12 / degrees.opt_state.total)


def in_space(degrees: Degrees) -> bool:
    """Whether the paper's search looks at it: nodes filled first, gradients as parameters or as optimizer states."""
    return not degrees.warnings and degrees.grads in (degrees.params, degrees.opt_state)


def space(ranks: DataRanks) -> list[Degrees]:
    """Every strategy that the paper's search looks at: 121 for 128 nodes of 8."""
    return [degrees for degrees in all_degrees(ranks) if in_space(degrees)]


def mfu(num_params: int, num_layers: int, hidden: int, seq_len: int, tokens_per_s: float, peak_flops: float) -> float:
    """Of one GPU: (6 N + 12 L h s) FLOPs a token, no causal discount.

    Args:
      num_params: N, the embedding included.
      num_layers, hidden, seq_len: L, h, s.
      tokens_per_s: of one GPU.
      peak_flops: of one GPU; 312e12 for A800.
    """
    return (6 * num_params + 12 * num_layers * hidden * seq_len) * tokens_per_s / peak_flops
