"""AMSP's own cost model and strategy space (arXiv 2311.00257 v2).

Phi is the number of parameters, L of layers, M of microbatches in a step, U the bytes of a bucket; p, g, os and dp are
the degrees of parameters, gradients, optimizer states and data, each `s = intra x inter`, and g/p is the group over
which a shard of degree p is split further.

The paper shards optimizer states by whole tensors, hence all-reduces and broadcasts; values are 2 bytes on the wire,
gradients 2 bytes in memory, and nothing overlaps. This engine splits tensors evenly, so reduce-scatters and all-gathers
take their place; it reduces in `reduce_dtype`, adds up gradients in 4 bytes and predicts step time with overlap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from amsp_jax.strategy import DataRanks, Degree, Degrees, all_degrees

A800_PEAK_FLOPS = 312e12
"""FLOP/s that the paper's MFU refers to."""

Seconds = Callable[[str, float, Degree], float]
"""Time of a collective: kind, bytes of the whole message, group. `cluster.Network.seconds` is one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What the four terms are computed of.

    Attributes:
      num_params: Phi, of the whole model.
      module_params: Phi_i, the parameters of each module of a layer.
      num_layers: L.
      num_microbatches: M.
      bucket_bytes: U.
    """

    num_params: int
    module_params: Sequence[int]
    num_layers: int
    num_microbatches: int
    bucket_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terms:
    """Seconds of communication in a step: T_p, T_g, T_os0 and T_os1."""

    params_s: float
    grads_s: float
    opt_reduce_s: float
    opt_broadcast_s: float

    @property
    def total_s(self) -> float:
        """The objective: their sum."""
        return self.params_s + self.grads_s + self.opt_reduce_s + self.opt_broadcast_s


def terms(job: Job, degrees: Degrees, seconds: Seconds) -> Terms:
    """The four terms of a strategy."""
    return Terms(
        params_s=params_seconds(job, degrees, seconds),
        grads_s=grads_seconds(job, degrees, seconds),
        opt_reduce_s=opt_reduce_seconds(job, degrees, seconds),
        opt_broadcast_s=opt_broadcast_seconds(job, degrees, seconds),
    )


def params_seconds(job: Job, degrees: Degrees, seconds: Seconds) -> float:
    """T_p = M L sum_i [2 t(AG, 2 Phi_i, p) + t(RS, 2 Phi_i, p)], if s_p > 1: each microbatch, module by module."""
    group = degrees.params
    if group.total == 1:
        return 0.0
    layer = sum(
        2 * seconds("all-gather", 2 * params, group) + seconds("reduce-scatter", 2 * params, group)
        for params in job.module_params
    )
    return job.num_microbatches * job.num_layers * layer


def grads_seconds(job: Job, degrees: Degrees, seconds: Seconds) -> float:
    """T_g = (M - 1) (2 Phi / (U s_p)) t(AR, U, g/p), if s_g > s_p: each microbatch but the last."""
    buckets = _num_buckets(job, degrees)
    return (job.num_microbatches - 1) * buckets * _all_reduce_bucket(job, degrees.grads, degrees.params, seconds)


def opt_reduce_seconds(job: Job, degrees: Degrees, seconds: Seconds) -> float:
    """T_os0 = (2 Phi / (U s_p)) t(AR, U, dp/p): gradients of the last microbatch, over all that hold a shard of p."""
    data = Degree(degrees.ranks.per_node, degrees.ranks.num_nodes)
    return _num_buckets(job, degrees) * _all_reduce_bucket(job, data, degrees.params, seconds)


def opt_broadcast_seconds(job: Job, degrees: Degrees, seconds: Seconds) -> float:
    """T_os1 = (s_os/s_p) t(BC, 2 Phi / s_os, os/p), if s_os > s_p: each rank of os/p sends what it updated."""
    group = _within(degrees.opt_state, degrees.params)
    if group.total == 1:
        return 0.0
    return group.total * seconds("broadcast", 2 * job.num_params / degrees.opt_state.total, group)


def _num_buckets(job: Job, degrees: Degrees) -> float:
    """2 Phi / (U s_p), a fraction of one included, as the paper writes it."""
    return 2 * job.num_params / (job.bucket_bytes * degrees.params.total)


def _all_reduce_bucket(job: Job, outer: Degree, inner: Degree, seconds: Seconds) -> float:
    group = _within(outer, inner)
    return 0.0 if group.total == 1 else seconds("all-reduce", job.bucket_bytes, group)


def _within(outer: Degree, inner: Degree) -> Degree:
    """The group outer/inner, on both levels."""
    return Degree(outer.intra // inner.intra, outer.inter // inner.inter)


def state_bytes(num_params: float, degrees: Degrees) -> float:
    """2 Phi / s_p + 2 Phi / s_g + 12 Phi / s_os: model states of one device, without activations.

    Here a gradient has 4 bytes while microbatches accumulate, and a parameter needs no 16-bit copy where s_p = s_os.
    """
    return num_params * (2 / degrees.params.total + 2 / degrees.grads.total + 12 / degrees.opt_state.total)


def space(ranks: DataRanks) -> list[Degrees]:
    """The strategies that the paper's solver looks at (IV-B): 121 for 128 nodes of 8, by three filters.

    1. Dependency rule, on each level every degree divides the next: `strategy.all_degrees`.
    2. A node is filled first: intra = all of the node's ranks wherever inter > 1.
    3. s_g is s_p or s_os. This engine's planner allows every s_g between (286 for the same cluster).
    """
    return [degrees for degrees in all_degrees(ranks) if in_space(degrees)]


def in_space(degrees: Degrees) -> bool:
    """Whether the second and the third filter let a strategy through."""
    return not degrees.warnings and degrees.grads in (degrees.params, degrees.opt_state)


def flops_per_token(num_params: float, num_layers: int, hidden: int, seq_len: int) -> float:
    """6 N + 12 L h s: forward and backward, embedding table in N, all of the attention matrix counted (as in PaLM).

    The engine's MFU leaves the table out and counts the half of the matrix that a causal mask leaves.
    """
    return 6 * num_params + 12 * num_layers * hidden * seq_len


def mfu(tokens_per_s_per_device: float, flops_per_token: float, peak_flops: float = A800_PEAK_FLOPS) -> float:
    """Share of the peak, 0 to 1: tokens/s of a device x FLOPs a token / peak."""
    return tokens_per_s_per_device * flops_per_token / peak_flops
