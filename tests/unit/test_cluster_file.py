"""Cluster files: the round trip, what is said of a file that is not one, and how two clusters differ."""

import dataclasses
import json

import pytest

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import (
    CLUSTERS,
    Cluster,
    Link,
    Network,
    Rates,
    differences,
    from_json,
    load_cluster,
    save_cluster,
    to_json,
)
from amsp_jax.strategy import Degree

CLUSTER = Cluster(
    name="ours",
    num_nodes=2,
    devices_per_node=4,
    device_kind="NVIDIA H200",
    memory_bytes=100 * 2**30,
    peak_flops=989.4e12,
    source="measured",
    network=Network(
        measured={
            ("all-gather", Degree(4, 1)): ((2**20, 1e-5), (2**30, 3.25e-3)),
            ("all-gather", Degree(4, 2)): ((2**20, 1 / 3),),
        },
        intra=Link(bytes_per_s=3e11, latency_s=0.0, slowdown=((2, 1.0), (4, 1.5))),
    ),
    rates=Rates(
        matmul={"bfloat16": ((64, 64, 64, 1e12),), "float32": ((64, 64, 64, 1e11),)},
        attention_flops_per_s=(5e14, 4e14),
        memory_bytes_per_s=3.8e12,
        overlap_slowdown=1.08,
    ),
    assumptions=("groups of 2 inside a node: not measured",),
    versions={"jax": "0.10.2"},
    date="2026-01-31",
)


@pytest.mark.parametrize("cluster", [CLUSTER, *CLUSTERS.values()], ids=lambda cluster: cluster.name)
def test_round_trip(cluster, tmp_path):
    save_cluster(cluster, tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == cluster
    assert from_json(to_json(cluster)) == cluster
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.json"]


def test_little_is_needed(tmp_path):
    bare = Cluster(
        name="c", num_nodes=1, devices_per_node=1, device_kind="cpu", memory_bytes=1, peak_flops=None, source="test"
    )
    save_cluster(bare, tmp_path / "cluster.json")
    assert load_cluster(str(tmp_path / "cluster.json")) == bare


def test_the_file_reads_well(tmp_path):
    save_cluster(CLUSTER, tmp_path / "cluster.json")
    lines = (tmp_path / "cluster.json").read_text().splitlines()
    assert lines[1] == '  "format": 1,'
    row = '{"kind": "all-gather", "intra": 4, "inter": 1, "points": [[1048576, 1e-05], [1073741824, 0.00325]]},'
    assert f"      {row}" in lines


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    save_cluster(CLUSTER, tmp_path / "cluster.json")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        save_cluster(CLUSTER.with_nodes(3), tmp_path / "cluster.json")
    assert load_cluster(tmp_path / "cluster.json") == CLUSTER
    assert len(list(tmp_path.iterdir())) == 1


def load_error(tmp_path, text):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        load_cluster(path)
    message = str(error.value)
    assert message.startswith(f"cluster file {path}: ") and "\n" not in message
    assert message.endswith("Make it anew: python -m amsp_jax calibrate --out FILE")
    return message


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_file_cut_off(share, tmp_path):
    text = to_json(CLUSTER)
    assert "not JSON, or was cut off" in load_error(tmp_path, text[: int(len(text) * share)])


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.json: it cannot be read: No such file"):
        load_cluster(tmp_path / "nothing.json")


def test_not_text(tmp_path):
    (tmp_path / "cluster.json").write_bytes(b"\xff\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_cluster(tmp_path / "cluster.json")


REMOVED = object()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 2, "format=2, but this version reads 1"),
        ("format", REMOVED, "no field 'format'"),
        ("memory_bytes", REMOVED, "it: missing: memory_bytes."),
        ("colour", "red", "it: unknown: colour."),
        ("network.intra.latency_s", REMOVED, "network.intra: missing: latency_s."),
        ("rates.speed", 1, "rates: unknown: speed."),
        ("name", 3, "name=3, but it is text."),
        ("num_nodes", 0, "num_nodes=0, but it is at least 1."),
        ("memory_bytes", 2**63, "but it is below 2**63."),
        ("peak_flops", 1e-300, "peak_flops=1e-300, but it is 0, or between 1e-30 and 1e30."),
        ("peak_flops", 10**400, "between 1e-30 and 1e30."),
        ("num_nodes", 1.5, "num_nodes=1.5, but it is an integer."),
        ("num_nodes", True, "num_nodes=True, but it is an integer."),
        ("peak_flops", -1.0, "peak_flops=-1.0"),
        ("peak_flops", "fast", "peak_flops='fast', but it is a number."),
        ("network", [], "network=[], but it is an object."),
        ("network.measured", {}, "network.measured={}, but it is a list."),
        ("network.measured.0.kind", "gather", "'gather' is no collective"),
        ("network.measured.0.points.1", [5], "network.measured[0].points[1]=[5], but it is a list of 2."),
        ("network.measured.0.points.1.1", float("nan"), "all-gather 4x1: seconds=nan"),
        ("network.measured.1.inter", 1, "network.measured: all-gather 4x1 twice."),
        ("network.intra.bytes_per_s", float("inf"), "bytes_per_s=inf"),
        ("network.intra.slowdown.0.0", 0, "network.intra.slowdown[0][0]=0, but it is at least 1."),
        ("rates.attention_flops_per_s", [1.0], "rates.attention_flops_per_s=[1.0], but it is a list of 2."),
        ("rates.matmul.bfloat16.0.3", 0, "matmul of bfloat16: 0"),
        ("rates.overlap_slowdown", 0.5, "overlap_slowdown=0.5"),
        ("versions.jax", None, "versions.jax=None, but it is text."),
        ("date", 2026, "date=2026, but it is text."),
    ],
)
def test_a_wrong_field_is_named(path, value, message, tmp_path):
    content = json.loads(to_json(CLUSTER))
    *parents, last = (int(part) if part.isdecimal() else part for part in path.split("."))
    target = content
    for part in parents:
        target = target[part]
    if value is REMOVED:
        del target[last]
    else:
        target[last] = value
    assert message in load_error(tmp_path, json.dumps(content))


@pytest.mark.parametrize("text", ["[]", "3", "null", '"cluster"'])
def test_json_of_another_kind(text, tmp_path):
    assert "no field 'format'" in load_error(tmp_path, text)


def test_differences():
    running = dataclasses.replace(
        CLUSTER,
        name="running",
        num_nodes=4,
        devices_per_node=8,
        device_kind="NVIDIA H100 80GB HBM3",
        memory_bytes=70 * 2**30,
        versions={"jax": "0.11.2", "jaxlib": "0.11.2"},
        network=None,
    )
    assert differences(CLUSTER, running) == [
        "device kind: NVIDIA H200 in the file, NVIDIA H100 80GB HBM3 running",
        "devices per node: 4 in the file, 8 running",
        "nodes: 2 in the file, 4 running",
        "jax: 0.10.2 in the file, 0.11.2 running",
        "usable memory: 100.0 GiB in the file, 70.0 GiB running",
    ]


def test_no_difference():
    """Neither the name nor a percent of memory is one, nor a version that only one of them names."""
    running = dataclasses.replace(CLUSTER, name="running", memory_bytes=99 * 2**30, versions={}, rates=None)
    assert differences(CLUSTER, running) == differences(running, CLUSTER) == []


def test_free_memory_of_a_host_is_no_difference():
    file = dataclasses.replace(CLUSTER, device_kind="cpu")
    assert differences(file, dataclasses.replace(file, memory_bytes=2 * file.memory_bytes)) == []
