"""Clusters by name, from data sheets, published measurements and stated assumptions.

A preset is for planning before the machines are at hand; a file of `calibrate` replaces every assumption.
"""

from __future__ import annotations

import dataclasses
import difflib

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster.cluster import Cluster
from amsp_jax.predict.cluster.device import device_peak
from amsp_jax.predict.cluster.network import Link, Network, Points
from amsp_jax.predict.cluster.rates import Rates
from amsp_jax.strategy import Degree

_MIB = 2**20
_GIB = 2**30

# What train.py lets a process take of a device.
_MEMORY_FRACTION = 0.92
_MEMORY = f"memory: {_MEMORY_FRACTION} of the device's, what train.py allows a process"

# Measured on H200: the products of a LLaMA-7B training step of 8192 tokens, on average, entered at the MLP's size; an
# 8192^3 product alone; causal attention; elementwise passes. Beside a running collective the products of that step ran
# at 666 TFLOP/s instead of 719.
_H200_PEAK = 989.4e12
_H200_MATMUL = ((8192, 4096, 11008, 719e12), (8192, 8192, 8192, 790e12))
_H200_ATTENTION = (520e12, 430e12)
_MEMORY_REACHED = 3.8 / 4.8
OVERLAP_SLOWDOWN = 719 / 666
"""Compute time beside a collective over compute time alone, in those training steps."""
_OVERLAP = f"compute beside a collective: {OVERLAP_SLOWDOWN:.2f} times as long, as measured on H200"
_INTER_REACHED = 0.9

# InfiniBand by the number of GPUs of a group: the closed form of the first author of AMSP, for A800 nodes.
_SLOWDOWN = ((16, 1.0), (32, 1.1), (64, 1.2), (256, 1.3), (512, 1.4), (1024, 1.5))

# Seconds x 1000 of whole messages of 1, 4, 64, 256, 1024 and 4096 MiB; all groups at once, nodes of 8 A800.
_A800_SIZES_MIB = (1, 4, 64, 256, 1024, 4096)
_A800_MS = {
    ("all-gather", 2): (0.036, 0.055, 0.376, 1.318, 4.90, 18.9),
    ("all-gather", 4): (0.036, 0.057, 0.429, 1.571, 5.94, 22.5),
    ("all-gather", 8): (0.040, 0.063, 0.446, 1.689, 6.46, 25.2),
    ("all-gather", 16): (0.093, 0.122, 0.720, 2.665, 10.5, 41.3),
    ("all-gather", 32): (0.147, 0.164, 0.833, 2.738, 11.2, 43.4),
    ("all-gather", 64): (0.152, 0.348, 0.981, 3.058, 11.9, 46.2),
    ("all-gather", 128): (0.323, 0.895, 1.418, 3.785, 12.4, 46.5),
    ("reduce-scatter", 8): (0.052, 0.069, 0.432, 1.607, 6.30, 24.4),
    ("reduce-scatter", 128): (0.274, 0.868, 1.376, 3.647, 12.9, 46.7),
    ("all-reduce", 8): (0.067, 0.092, 0.805, 3.089, 12.1, 48.4),
    ("all-reduce", 16): (0.104, 0.174, 1.638, 5.975, 21.4, 83.9),
    ("all-reduce", 64): (0.165, 0.326, 1.845, 5.911, 22.2, 93.2),
    ("all-reduce", 128): (0.257, 0.692, 3.173, 7.099, 25.1, 93.3),
    ("broadcast", 8): (0.053, 0.083, 0.519, 1.802, 6.90, 27.4),
    ("broadcast", 64): (0.263, 0.543, 1.302, 3.915, 14.3, 49.0),
    ("broadcast", 128): (0.416, 0.967, 1.914, 5.587, 14.0, 51.3),
}

# A step of a ring, from that table's gathers of 1 MiB taken whole as latency: 8 GPUs have 7 steps; 16 nodes have 15
# more, between nodes.
_INTRA_LATENCY_S = _A800_MS["all-gather", 8][0] / 1000 / 7
_INTER_LATENCY_S = (_A800_MS["all-gather", 128][0] - _A800_MS["all-gather", 8][0]) / 1000 / 15
_LATENCY = (
    f"latency of a ring's step: {_INTRA_LATENCY_S * 1e6:.1f} us inside a node, {_INTER_LATENCY_S * 1e6:.1f} us between "
    "nodes, from gathers of 1 MiB on A800 nodes"
)


def _a800_measured() -> dict[tuple[str, Degree], Points]:
    def points(times_ms: tuple[float, ...]) -> Points:
        return tuple((mib * _MIB, ms / 1000) for mib, ms in zip(_A800_SIZES_MIB, times_ms, strict=True))

    return {
        (kind, Degree(min(num_gpus, 8), max(num_gpus // 8, 1))): points(times_ms)
        for (kind, num_gpus), times_ms in _A800_MS.items()
    }


def _reached_as_h200(device_kind: str, memory_bytes_per_s: float, float32_peak: float) -> Rates:
    """The fractions of the peaks that H200 reached."""
    peak = device_peak(device_kind)
    assert peak is not None
    share = peak.flops / _H200_PEAK
    forward, backward = _H200_ATTENTION
    return Rates(
        matmul={
            "bfloat16": tuple((m, k, n, rate * share) for m, k, n, rate in _H200_MATMUL),
            "float32": tuple((m, k, n, rate / _H200_PEAK * float32_peak) for m, k, n, rate in _H200_MATMUL),
        },
        attention_flops_per_s=(forward * share, backward * share),
        memory_bytes_per_s=memory_bytes_per_s * _MEMORY_REACHED,
        overlap_slowdown=OVERLAP_SLOWDOWN,
    )


def _preset(
    name: str,
    devices_per_node: int,
    device_kind: str,
    links: str,
    *,
    network: Network,
    rates: Rates,
    assumptions: tuple[str, ...],
) -> Cluster:
    """One node of a cluster whose memory and peak are the device's."""
    peak = device_peak(device_kind)
    assert peak is not None
    return Cluster(
        name=name,
        num_nodes=1,
        devices_per_node=devices_per_node,
        device_kind=device_kind,
        memory_bytes=int(peak.memory_bytes * _MEMORY_FRACTION),
        peak_flops=peak.flops,
        source=f"{peak.source}; {links}",
        network=network,
        rates=rates,
        assumptions=(*assumptions, _OVERLAP, _MEMORY),
    )


def _from_sheets(
    name: str,
    devices_per_node: int,
    device_kind: str,
    links: str,
    *,
    intra_bytes_per_s: float,
    node_bytes_per_s: float,
    memory_bytes_per_s: float,
    float32_peak: float,
    intra_slowdown: tuple[tuple[int, float], ...] = (),
    assumptions: tuple[str, ...],
) -> Cluster:
    """A cluster of which nothing was measured.

    Args:
      links: their data sheets.
      intra_bytes_per_s: each way of one device inside the node, as far as it is assumed to be reached.
      node_bytes_per_s: each way of all NICs of a node, by the sheet.
      memory_bytes_per_s: of one device, by the sheet.
      float32_peak: FLOP/s of one device at jax's default precision, by the sheet.
    """
    network = Network(
        intra=Link(bytes_per_s=intra_bytes_per_s, latency_s=_INTRA_LATENCY_S, slowdown=intra_slowdown),
        inter=Link(
            bytes_per_s=node_bytes_per_s / devices_per_node * _INTER_REACHED,
            latency_s=_INTER_LATENCY_S,
            slowdown=_SLOWDOWN,
        ),
    )
    assumed = (
        f"links between nodes: {_INTER_REACHED} of the sheet's bandwidth, divided for large groups as the first author "
        "of AMSP does for A800 nodes, by 1.1 at 32 devices up to 1.5 at 1024",
        _LATENCY,
        "matrix products, attention and memory: the fractions of the sheet's peaks that H200 reached on LLaMA-7B's "
        "shapes (0.73 to 0.80; 0.53 forward, 0.43 backward; 0.79); smaller products are taken to be as fast",
    )
    rates = _reached_as_h200(device_kind, memory_bytes_per_s, float32_peak)
    return _preset(
        name, devices_per_node, device_kind, links, network=network, rates=rates, assumptions=assumptions + assumed
    )


def _a800() -> Cluster:
    kind = "NVIDIA A800-SXM4-80GB"
    rates = _reached_as_h200(kind, memory_bytes_per_s=2.039e12, float32_peak=156e12)
    # Sizes of these products were not published, so one rate stands for all.
    matmul = {**rates.matmul, "bfloat16": ((4096, 4096, 4096, 228.5e12),)}
    return _preset(
        "a800",
        8,
        kind,
        "collectives of 2 to 128 GPUs: measured, published by the first author of AMSP (arXiv 2311.00257), as is the "
        "closed form for other groups (NVLink 150 GiB/s; 4 x 200 Gb/s InfiniBand a node, 100 GiB/s, divided by 1.1 at "
        "32 GPUs up to 1.5 at 1024)",
        network=Network(
            measured=_a800_measured(),
            intra=Link(bytes_per_s=150 * _GIB, latency_s=_INTRA_LATENCY_S),
            inter=Link(bytes_per_s=100 * _GIB / 8, latency_s=_INTER_LATENCY_S, slowdown=_SLOWDOWN),
        ),
        rates=dataclasses.replace(rates, matmul=matmul),
        assumptions=(
            "matrix products in bf16: 228.5 TFLOP/s whatever their size, the middle of the 220 to 237 that the first "
            "author of AMSP published",
            "attention, memory and float32 products: the fractions of the sheet's peaks that H200 reached",
            f"for groups that were not measured, {_LATENCY}",
        ),
    )


_NVLINK_AS_A800 = "NVLink: 0.75 of the sheet's bandwidth, as gathers of 4 GiB over 8 A800 reach of theirs"


def _a100() -> Cluster:
    return _from_sheets(
        "a100",
        8,
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA DGX A100 data sheet: NVLink 600 GB/s, 300 each way; 8 x 200 Gb/s InfiniBand a node",
        intra_bytes_per_s=300e9 * 0.75,
        node_bytes_per_s=8 * 200e9 / 8,
        memory_bytes_per_s=2.039e12,
        float32_peak=156e12,
        assumptions=(_NVLINK_AS_A800,),
    )


def _hopper(name: str, device_kind: str, memory_bytes_per_s: float) -> Cluster:
    return _from_sheets(
        name,
        8,
        device_kind,
        f"NVIDIA DGX {name.upper()} data sheet: NVLink 900 GB/s, 450 each way; 8 x 400 Gb/s InfiniBand a node",
        intra_bytes_per_s=300e9,
        node_bytes_per_s=8 * 400e9 / 8,
        memory_bytes_per_s=memory_bytes_per_s,
        float32_peak=494.7e12,
        assumptions=("NVLink: 300 of the sheet's 450 GB/s, assumed: gathers over 4 H200 reach about 250 to 360",),
    )


def _v100_dgx2() -> Cluster:
    return _from_sheets(
        "v100-dgx2",
        16,
        "Tesla V100-SXM3-32GB",
        "NVIDIA DGX-2 data sheet: NVSwitch 300 GB/s a GPU, 150 each way; 8 x 100 Gb/s InfiniBand a node",
        intra_bytes_per_s=150e9 * 0.75,
        node_bytes_per_s=8 * 100e9 / 8,
        memory_bytes_per_s=900e9,
        float32_peak=15.7e12,
        assumptions=(_NVLINK_AS_A800, "bfloat16 stands for float16: V100 has no bfloat16 tensor cores"),
    )


def _frontier() -> Cluster:
    return _from_sheets(
        "frontier",
        8,
        "AMD Instinct MI250X",
        "OLCF Frontier user guide: 8 GCDs a node, 200 GB/s inside a card, 50 to 100 GB/s between cards, "
        "4 x 25 GB/s Slingshot a node",
        intra_bytes_per_s=200e9 * 0.75,
        # The two GCDs of a card; a ring over more crosses cards, at the slower pairs' 50 GB/s.
        intra_slowdown=((2, 1.0), (8, 4.0)),
        node_bytes_per_s=4 * 25e9,
        memory_bytes_per_s=1.6e12,
        float32_peak=47.85e12,
        assumptions=(
            "links inside a node: 0.75 of the guide's bandwidth, over more than 2 GCDs of the slower pairs' 50 GB/s",
        ),
    )


def _mi300x() -> Cluster:
    return _from_sheets(
        "mi300x",
        8,
        "AMD Instinct MI300X",
        "AMD Instinct MI300X platform data sheet: 7 Infinity Fabric links of 64 GB/s each way a GPU, one to each "
        "other; 400 Gb/s a GPU between nodes",
        intra_bytes_per_s=7 * 64e9 * 0.75,
        # A group of n GPUs uses n - 1 of the 7 links.
        intra_slowdown=((2, 7.0), (4, 7 / 3), (8, 1.0)),
        node_bytes_per_s=8 * 400e9 / 8,
        memory_bytes_per_s=5.3e12,
        float32_peak=163.4e12,
        assumptions=(
            "links inside a node: 0.75 of the sheet's bandwidth; a group of n GPUs uses n - 1 of the 7 links",
        ),
    )


CLUSTERS: dict[str, Cluster] = {
    cluster.name: cluster
    for cluster in (
        _a800(),
        _a100(),
        _hopper("h100", "NVIDIA H100 80GB HBM3", memory_bytes_per_s=3.35e12),
        _hopper("h200", "NVIDIA H200", memory_bytes_per_s=4.8e12),
        _v100_dgx2(),
        _frontier(),
        _mi300x(),
    )
}
"""One node of each, by name."""


def named_cluster(name: str, num_nodes: int) -> Cluster:
    """The preset of that name with `num_nodes` nodes.

    Raises:
      UserError: an unknown name, or fewer than one node.
    """
    if name.lower() not in CLUSTERS:
        hint = difflib.get_close_matches(name.lower(), CLUSTERS, 1)
        raise UserError(
            f"cluster {name!r}: unknown{f'; did you mean {hint[0]!r}?' if hint else '.'} "
            f"Known: {', '.join(CLUSTERS)}. Or give a file of: python -m amsp_jax calibrate --out FILE"
        )
    return CLUSTERS[name.lower()].with_nodes(num_nodes)
