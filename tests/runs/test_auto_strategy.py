"""STRATEGY=auto: what is chosen, from which numbers, and what the run says of the prediction."""

import dataclasses
import json
from pathlib import Path

import pytest

import train
from amsp_jax.cli import settings as cli
from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import Cluster, Link, Network, Rates, save_cluster
from amsp_jax.run import auto
from amsp_jax.run.metrics import read_rows
from amsp_jax.run.resolved import resolve
from amsp_jax.strategy import DataRanks, parse

MICRO = [
    "--gin.MODEL=llama-tiny", "--gin.STRATEGY=auto",
    "--gin.MODEL_OVERRIDES={'num_layers':1,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}",
    *("--gin.SEQ_LEN=16", "--gin.GLOBAL_BATCH=16", "--gin.MICROBATCH=2", "--gin.STEPS=5", "--gin.WARMUP_STEPS=2"),
    *("--gin.COMPUTE_DTYPE=float32", "--gin.EVAL_EVERY=0", "--gin.EVAL_BATCHES=1"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class FakeLayout:
    """Devices that are not there."""

    num_nodes: int = 2
    devices_per_node: int = 4
    process_index: int = 0
    platform: str = "cpu"
    devices: tuple = ()
    memory_bytes: int = 2**34

    def cluster(self):
        return cluster(num_nodes=self.num_nodes, devices_per_node=self.devices_per_node, network=None, rates=None)


def cluster(**changes):
    fields = {
        "name": "small", "num_nodes": 2, "devices_per_node": 4, "device_kind": "cpu", "memory_bytes": 2**34,
        "peak_flops": None, "source": "a test",
        "network": Network(intra=Link(bytes_per_s=1e11, latency_s=1e-6), inter=Link(bytes_per_s=1e9, latency_s=1e-5)),
        "rates": Rates(
            matmul={"float32": ((512, 512, 512, 1e12),)}, attention_flops_per_s=(1e12, 1e12), memory_bytes_per_s=1e11,
            overlap_slowdown=1.1,
        ),
    }  # fmt: skip
    return Cluster(**{**fields, **changes})


@pytest.fixture
def cluster_file(tmp_path):
    path = tmp_path / "cluster.json"
    save_cluster(cluster(), path)
    return path


def config(*flags):
    line = cli.parse_command_line([*MICRO, *flags], starts_from_quickstart=True)
    return cli.load_config(line.gin_files, line.bindings)


def test_a_batch_that_does_not_divide_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(auto, "calibrated", None)
    settings = config("--gin.MICROBATCH=1", "--gin.MICROBATCH_GROUP=4")
    with pytest.raises(UserError, match="microbatch_group=4 does not divide the 2 microbatches"):
        auto.choose(resolve(settings, cli.build_model(settings).model, FakeLayout()))


def test_the_choice_is_a_strategy_of_the_devices_with_its_prediction(cluster_file):
    settings = config(f"--gin.CLUSTER={cluster_file}")
    choice = auto.choose(resolve(settings, cli.build_model(settings).model, FakeLayout()))
    parse(choice.strategy).resolve(DataRanks(4, 2))
    assert choice.prediction["strategy"] == choice.strategy and choice.prediction["step_s"] > 0
    assert json.loads(choice.to_json())["strategy"] == choice.strategy
    assert any("1  " + choice.strategy in line for line in choice.lines)


def test_one_device_has_nothing_to_choose():
    settings = config()
    choice = auto.choose(
        resolve(settings, cli.build_model(settings).model, FakeLayout(num_nodes=1, devices_per_node=1))
    )
    assert choice.strategy == "ddp" and choice.prediction is None and choice.comparison(Path("nowhere"), 0) == ""


def test_a_file_of_other_devices_is_announced(tmp_path):
    save_cluster(cluster(device_kind="NVIDIA H100", num_nodes=16), tmp_path / "other.json")
    settings = config(f"--gin.CLUSTER={tmp_path / 'other.json'}")
    choice = auto.choose(resolve(settings, cli.build_model(settings).model, FakeLayout()))
    told = "\n".join(choice.lines)
    assert "is of other devices" in told and "NVIDIA H100" in told and "16" in told
    parse(choice.strategy).resolve(DataRanks(4, 2))


def test_a_file_that_is_not_there():
    settings = config("--gin.CLUSTER=nowhere.json")
    with pytest.raises(UserError, match="nowhere.json"):
        auto.choose(resolve(settings, cli.build_model(settings).model, FakeLayout()))


def test_prediction_and_measurement_are_compared_after_the_warm_up(tmp_path):
    rows = [{"step": i, "step_time_s": t, "peak_memory_bytes": 2**30} for i, t in enumerate([9.0, 9.0, 0.2, 0.2], 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"loss": 1.0, **row}) + "\n" for row in rows))
    prediction = {"step_s": 0.25, "memory_bytes": {"peak": 2**29}}
    choice = auto.Choice(strategy="zero1", lines=(), prediction=prediction)
    line = choice.comparison(tmp_path, 0)
    assert line == (
        "step time: predicted 250.0 ms, measured 200.0 ms (median of 2 steps), +25.0%; "
        "peak memory: predicted 0.50 GiB, measured 1.00 GiB"
    )
    assert choice.comparison(tmp_path, 2) == ""


def test_a_run_uses_the_choice_and_says_how_right_it_was(tmp_path, monkeypatch, capsys, cluster_file):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    assert train.main([*MICRO, "--gin.DATA=text", "--gin.RUN_DIR=run", f"--gin.CLUSTER={cluster_file}"]) == 0
    out = capsys.readouterr().out
    chosen = json.loads(Path("run/prediction.json").read_text())["strategy"]
    assert f"strategy  {chosen}" in Path("run/plan.txt").read_text()
    assert "step time: predicted" in out and chosen in out
    assert len(read_rows("run/metrics.jsonl")) == 5


def test_a_preset_is_no_file_of_these_devices():
    settings = config("--gin.CLUSTER=h100")
    with pytest.raises(UserError, match="cluster=h100 is a preset"):
        auto.choose(resolve(settings, cli.build_model(settings).model, FakeLayout()))
