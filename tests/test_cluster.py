"""The cluster's numbers, by the names that drivers report."""

import subprocess
import sys

import pytest

from amsp_jax.cluster import Cluster, device_peak, peak_flops
from amsp_jax.errors import UserError


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
    subprocess.run([sys.executable, "-c", "import amsp_jax.cluster, sys; assert 'jax' not in sys.modules"], check=True)
