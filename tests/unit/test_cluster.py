"""The cluster's numbers: devices by the names that drivers report, and the presets."""

import dataclasses
import subprocess
import sys

import pytest

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import CLUSTERS, Cluster, CollectiveKind, device_peak, named_cluster, peak_flops
from amsp_jax.strategy import DataRanks, Degree


@pytest.mark.parametrize(
    ("device_kind", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI250X / MI250", 191.5e12),
        ("AMD Instinct MI250", 181.05e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA RTX A1000", None),
        ("cpu", None),
    ],
)
def test_peak_of_the_names_that_jax_reports(device_kind, flops):
    assert peak_flops(device_kind) == flops


def test_memory_follows_the_name():
    assert device_peak("NVIDIA A100-SXM4-40GB").memory_bytes == 40 * 2**30
    assert device_peak("NVIDIA A100-SXM4-80GB").memory_bytes == 80 * 2**30
    assert device_peak("Tesla V100-SXM2-32GB").memory_bytes == 32 * 2**30


def test_counts_start_at_one():
    numbers = dict(name="c", devices_per_node=4, device_kind="cpu", memory_bytes=1, peak_flops=None, source="test")
    assert Cluster(num_nodes=2, **numbers).num_devices == 8
    with pytest.raises(UserError, match="num_nodes=0"):
        Cluster(num_nodes=0, **numbers)


def test_imports_no_jax():
    subprocess.run(
        [sys.executable, "-c", "import amsp_jax.predict.cluster, sys; assert 'jax' not in sys.modules"], check=True
    )


def test_clusters_grow_by_nodes():
    cluster = CLUSTERS["h100"].with_nodes(16)
    assert cluster.num_devices == 128 and cluster.ranks == DataRanks(8, 16)
    assert dataclasses.replace(cluster, num_nodes=1) == CLUSTERS["h100"]


@pytest.mark.parametrize("peak", [0, -1.0, float("nan"), float("inf")])
def test_a_peak_is_finite_and_positive(peak):
    with pytest.raises(UserError, match="peak_flops"):
        dataclasses.replace(CLUSTERS["h100"], peak_flops=peak)


def test_every_preset_is_known():
    assert set(CLUSTERS) == {"a800", "a100", "h100", "h200", "v100-dgx2", "frontier", "mi300x"}


@pytest.mark.parametrize("name", CLUSTERS)
def test_presets_are_complete(name):
    cluster = named_cluster(name.upper(), 128)
    assert (cluster.name, cluster.num_nodes) == (name, 128)
    assert cluster.num_devices == 128 * (16 if name == "v100-dgx2" else 8)
    assert "data sheet" in cluster.source and cluster.assumptions
    assert not cluster.versions and cluster.date is None
    assert cluster.memory_bytes < device_peak(cluster.device_kind).memory_bytes
    for dtype in ("bfloat16", "float32"):
        assert 0 < cluster.rates.matmul_flops_per_s(dtype, 8192, 8192, 8192) < cluster.peak_flops
    for kind in CollectiveKind:
        for ranks in (DataRanks(cluster.devices_per_node, nodes) for nodes in (1, 2, 32, 128)):
            assert 0 < cluster.network.seconds(kind, 2**30, Degree(ranks.per_node, ranks.num_nodes)) < 0.2


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_preset_is_faster_than_its_links(name):
    """The sheet's bandwidths, each way: of a device inside the node, and of a whole node between nodes."""
    sheet_gb_per_s = {
        "a800": (200, 107.4),  # 100 GiB/s a node in the closed form
        "a100": (300, 200),
        "h100": (450, 400),
        "h200": (450, 400),
        "v100-dgx2": (150, 100),
        "frontier": (200, 100),
        "mi300x": (448, 400),
    }
    cluster = CLUSTERS[name]
    intra, inter = sheet_gb_per_s[name]
    assert cluster.network.intra.bytes_per_s < intra * 1e9
    assert cluster.network.inter.bytes_per_s * cluster.devices_per_node < inter * 1e9


def test_a800_has_the_published_times():
    network = CLUSTERS["a800"].network
    for kind, group, mib, ms in [
        ("all-gather", Degree(2, 1), 1, 0.036),
        ("all-gather", Degree(8, 16), 4096, 46.5),
        ("reduce-scatter", Degree(8, 1), 64, 0.432),
        ("all-reduce", Degree(8, 8), 256, 5.911),
        ("broadcast", Degree(8, 16), 1024, 14.0),
    ]:
        assert network.is_measured(kind, group)
        assert network.seconds(kind, mib * 2**20, group) == pytest.approx(ms / 1000)


@pytest.mark.parametrize(
    ("num_nodes", "factor"), [(2, 1.0), (4, 1.1), (8, 1.2), (16, 1.3), (32, 1.3), (64, 1.4), (128, 1.5), (512, 1.5)]
)
def test_a800_beyond_the_table_is_the_closed_form(num_nodes, factor):
    network = CLUSTERS["a800"].network
    assert network.inter.effective_bytes_per_s(8 * num_nodes) == pytest.approx(100 * 2**30 / 8 / factor)
    group = Degree(8, num_nodes)
    assert network.is_measured("all-gather", group) == (num_nodes <= 16)
    if num_nodes > 16:
        moved = 2**36 * (group.total - 1) / group.total
        latency_s = network.seconds("all-gather", 0, group)
        assert network.seconds("all-gather", 2**36, group) == pytest.approx(moved / (100 * 2**30 / factor) + latency_s)


def test_unknown_cluster():
    with pytest.raises(UserError, match=r"'h10': unknown; did you mean 'h100'\? Known: a800, a100"):
        named_cluster("h10", 1)
    with pytest.raises(UserError, match="'tpu': unknown. Known: "):
        named_cluster("tpu", 1)
    with pytest.raises(UserError, match="num_nodes=0"):
        named_cluster("h100", 0)
