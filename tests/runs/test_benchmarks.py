"""The benchmarks on simulated devices: what is measured once, what a row says, and the arithmetic of tables."""

import argparse
import ast
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from amsp_jax.engine.plan import make_plan
from amsp_jax.models.registry import model_config
from amsp_jax.runtime.launch import DeviceLayout
from amsp_jax.strategy import DataRanks, parse

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import ablation  # noqa: E402
import loss_curve  # noqa: E402
import plot  # noqa: E402
import strategies  # noqa: E402
from measure import SIZES, Size, gpu_share, measured  # noqa: E402
from rows import step_times, table  # noqa: E402

QUICKSTART = "params=replica grads=node opt_state=full"
ZERO1, ZERO3, MICS, DDP = (str(parse(name).resolve(DataRanks(2, 2))) for name in ("zero1", "zero3", "mics", "ddp"))
SMALL = Size(
    model="llama-tiny",
    overrides={"num_layers": 1, "hidden": 16, "ffn": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 64},
    seq_len=8,
    microbatch=1,
)


def layout(platform="cpu"):
    return DeviceLayout(
        platform=platform, num_nodes=2, devices_per_node=1, devices=tuple(jax.devices()[:2]), device_kind="cpu",
        memory_bytes=1 << 30, process_index=0, process_count=1, hosts=("here",), notes=(),
    )  # fmt: skip


@pytest.fixture
def bfloat16():
    """jax's own attention mixes dtypes in bfloat16."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def timed(strategy, step_s, **others):
    return {
        "strategy": strategy, "accumulation": 4, "names": [strategy], "is_choice": False, "step_s": step_s,
        "min_s": step_s, "max_s": step_s, "compiled_bytes": {"total": 2**30}, "num_nodes": 2, "devices_per_node": 1,
        "device_kind": "H200", **others,
    }  # fmt: skip


def test_a_row_says_how_long_and_how_much(bfloat16):
    row = measured(layout(), SMALL, "zero1", 2, num_warmup=1, num_steps=3, most_s=60.0)
    assert row["accumulation"] == 2 and row["model"] == "llama-tiny" and row["mfu"] is None
    assert len(row["times_s"]) == 3 and len(row["warmup_s"]) == 1 and len(row["losses"]) == 2
    assert 0 < row["min_s"] <= row["step_s"] <= row["max_s"] < row["wall_s"]
    assert row["compiled_bytes"]["total"] > 0 and row["compile_s"] > 0
    json.dumps(row)


def test_a_device_may_be_a_part_of_a_gpu(monkeypatch):
    size, row = SIZES["wide"], {"accumulation": 4, "step_s": 1.0, "device_kind": "NVIDIA H200"}
    whole = size.mfu(row | {"gpu_share": gpu_share()})
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert size.mfu(row | {"gpu_share": gpu_share()}) == pytest.approx(4 * whole)
    assert plot.place(timed("a", 1.0, gpu_share=0.25)) == "2 nodes of 1 H200 (25% of one each)"
    assert plot.place(timed("a", 1.0)) == "2 nodes of 1 H200"


def test_steps_that_take_long_are_fewer(bfloat16):
    row = measured(layout(), SMALL, "ddp", 1, num_warmup=1, num_steps=9, most_s=0.0)
    assert len(row["times_s"]) == 4


def test_names_of_one_placement_are_measured_once():
    found = strategies.named(strategies.NAMED, DataRanks(1, 2))
    assert [sorted(names) for names in found.values()] == [
        [QUICKSTART, "zero1"],
        ["ddp", "mics"],
        ["hpz", "zero2"],
        ["zero3"],
    ]
    assert len(strategies.named(strategies.NAMED, DataRanks(2, 2))) == 7


def test_a_name_that_does_not_fit_is_left_out(capsys):
    assert list(strategies.named(["zero3", "mics(3)"], DataRanks(1, 2)).values()) == [["zero3"]]
    # Printed by a command the argument is a macro.
    assert "left out: strategy='mics(3)'" in capsys.readouterr().out.lower()


def test_the_planner_s_choice_comes_first_and_what_has_a_row_does_not():
    args = argparse.Namespace(accumulation=[4, 1], inter_node_dtype=None, microbatch_group=[1])
    wanted = list(strategies.settings({ZERO1: [], ZERO3: []}, {"4": [ZERO3, 1], "1": [MICS, 1]}, args))
    order = [(4, ZERO3), (4, ZERO1), (1, MICS), (1, ZERO1), (1, ZERO3)]
    assert [(s.accumulation, s.strategy) for s in wanted] == order
    rest = strategies.left([timed(ZERO3, 1.0), timed(MICS, 1.0, accumulation=1)], iter(wanted))
    assert [(s.accumulation, s.strategy) for s in rest] == [(4, ZERO1), (1, ZERO1), (1, ZERO3)]


def test_a_dtype_between_nodes_is_a_setting_of_its_own():
    args = argparse.Namespace(accumulation=[4], inter_node_dtype="bfloat16", microbatch_group=[1])
    rows = [timed(ZERO1, 1.0), timed(ZERO3, 1.0, inter_node_dtype="bfloat16")]
    wanted = strategies.settings({ZERO1: [], ZERO3: []}, {}, args)
    assert [s.strategy for s in strategies.left(rows, wanted)] == [ZERO1]
    assert [strategies.strategy_cell(row) for row in rows] == [ZERO1, f"{ZERO3}, bfloat16 between nodes"]


def test_a_dtype_between_nodes_is_of_strategies_that_shard_over_nodes():
    args = argparse.Namespace(accumulation=[4], inter_node_dtype="bfloat16", microbatch_group=[1])
    wanted = list(strategies.settings({ZERO1: [], MICS: [], DDP: []}, {}, args))
    assert [setting.inter_node_dtype for setting in wanted] == ["bfloat16", None, None]
    # What was measured without a dtype is not measured again.
    assert strategies.left([timed(MICS, 1.0), timed(DDP, 1.0)], iter(wanted)) == wanted[:1]


def test_groups_are_settings_of_their_own_where_they_divide():
    args = argparse.Namespace(accumulation=[4, 6], inter_node_dtype=None, microbatch_group=[1, 4])
    rows = [timed(ZERO1, 1.0), timed(ZERO1, 1.0, microbatch_group=4)]
    wanted = list(strategies.settings({ZERO1: []}, {}, args))
    assert [(s.accumulation, s.microbatch_group) for s in wanted] == [(4, 1), (4, 4), (6, 1)]
    assert strategies.left(rows, iter(wanted)) == wanted[2:]
    assert [strategies.strategy_cell(row) for row in rows] == [ZERO1, f"{ZERO1}, groups of 4"]
    chosen = {"4": [ZERO1, 4], "6": [ZERO3, 1]}
    wanted = list(strategies.settings({ZERO1: []}, chosen, args))
    assert [(s.strategy, s.microbatch_group) for s in wanted] == [(ZERO1, 4), (ZERO1, 1), (ZERO3, 1), (ZERO1, 1)]


def test_ratios_are_to_the_choice_or_else_to_the_fastest():
    rows = [timed("a", 3.0), timed("b", 2.0, is_choice=True), timed("c", 1.0)]
    assert [strategies.ratio(row, rows) for row in rows] == ["1.50x", "1.00x (the choice)", "0.50x"]
    assert strategies.ratio(rows[0], [rows[0], rows[2]]) == "3.00x"
    failed = {"error": "needs more memory"}
    rows.append({**{k: v for k, v in timed("d", 0.0).items() if k != "step_s"}, **failed})
    lines = strategies.report(rows).splitlines()
    assert [line.split(" | ")[1] for line in lines[2:]] == ["c", "b", "a", "d"] and "needs more memory" in lines[-1]


def test_the_planner_is_asked_for_every_number_of_microbatches():
    cluster = BENCHMARKS / "regret" / "h200-2x2" / "cluster.json"
    chosen = strategies.planned(str(cluster), SIZES["wide"], [1, 4], [1, 4])
    # Where nodes are joined by a slow network, a group of all microbatches is faster.
    assert [chosen[n][1] for n in ("1", "4")] == [1, 4]
    assert strategies.planned(str(cluster), SIZES["wide"], [4], [1])["4"][1] == 1
    assert strategies.planned(None, SIZES["tiny"], [1], [1]) == {}


def plan_of(strategy):
    model = SMALL.build("xla")
    return model, make_plan(strategy, model, ranks=DataRanks(1, 2), devices=jax.devices()[:2])


def test_only_what_is_gathered_or_reduced_once_a_step_has_all_parts():
    assert list(ablation.parts_of(plan_of("ddp")[1], 1)) == list(ablation.PARTS)
    # Those that shard gradients over nodes may send them in a narrower dtype.
    assert list(ablation.parts_of(plan_of("zero1")[1], 1)) == [*ablation.PARTS, ablation.NARROWER]
    parts = [*ablation.PARTS[:2], ablation.GROUPED, ablation.NARROWER]
    assert list(ablation.parts_of(plan_of("zero3")[1], 4)) == parts
    assert [part.settings(4).microbatch_group for part in parts] == [1, 1, 4, 4]


def test_parts_add_overlap_up_to_the_default_step():
    model, plan = plan_of("zero1")
    peeled = [(part.settings(1).peel_last, part.settings(1).peel_first) for part in ablation.PARTS]
    assert peeled == [(False, False), (False, False), (True, False), (True, True)]
    options = [part.options(layout("cuda"), model, plan) for part in ablation.PARTS]
    assert options[0] == options[1] | ablation.SYNCHRONOUS and options[1] == options[2] == options[3]
    assert ablation.PARTS[0].options(layout("cpu"), model, plan) == {}


def test_parts_take_turns(bfloat16):
    args = argparse.Namespace(accumulation=3, steps=8, most_s=0.0)
    rows = ablation.measured(layout(), DataRanks(1, 2), SMALL, "zero3", args)
    assert [row["part"] for row in rows] == [part.name for part in ablation.parts_of(plan_of("zero3")[1], 3)]
    assert all(len(row["times_s"]) == ablation.NUM_TURNS * ablation.NUM_LEAST for row in rows)
    assert len(rows[0]["warmup_s"]) == ablation.NUM_WARMUP


def test_gains_are_over_the_part_before_and_over_no_overlap():
    names = [part.name for part in ablation.PARTS]
    rows = [timed("a", s, part=part) for s, part in zip((2.0, 1.6, 1.0), names, strict=False)]
    rows.append(timed("b", 5.0, part=names[0]))
    cells = [line.split(" | ")[4:] for line in ablation.report(rows).splitlines()[2:]]
    assert cells == [
        ["1.000x", "1.000x |"], ["1.250x", "1.250x |"], ["1.600x", "2.000x |"], ["1.000x", "1.000x |"],
    ]  # fmt: skip


def test_a_change_of_the_loss_stands_beside_the_noise():
    found = loss_curve.compare({"overlap": [2.0, 1.0], "overlap again": [2.0, 1.001], "no overlap": [2.2, 1.0]})
    assert found == pytest.approx(
        {"largest_difference": 0.1, "median_difference": 0.05, "largest_noise": 0.001, "median_noise": 0.0005}
    )


def test_cells():
    assert step_times(timed("a", 0.5, min_s=0.25, max_s=1.0)) == "500.0 (250.0, 1000.0)"
    assert step_times({"error": "no"}) == "no"
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_pictures(tmp_path):
    peer = [
        {"name": f"llama-1b: {run}", "mfu": 0.5} for run in ("ours_bf16", "peer_bf16", "peer_bf16_mb8", "ours_fp32")
    ]
    assert plot.peer_bar(peer[2]) == ("llama-1b\nbf16 reduction", plot.PEER, 0.5)
    curve = {"overlap": [2.0, 1.0], "overlap again": [2.0, 1.1], "no overlap": [2.1, 1.0]}
    sources = {
        "results.jsonl": peer,
        "strategies.jsonl": [timed("a", 1.0, is_choice=True), timed("b", 2.0), timed("b", 2.0, accumulation=1)],
        "groups.jsonl": [timed("a", 1.0), timed("a", 2.0, microbatch_group=4)],
        "ablation.jsonl": [timed("a", 2.0, part="none"), timed("a", 1.0, part="all")],
        "loss_curve.json": [{"losses": curve, "model": "a", "strategy": "b"}],
    }
    for name, draw in plot.PICTURES.items():
        draw(sources[name], tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000


@pytest.mark.parametrize("name", ["llama-1b", "llama-7b"])
def test_the_peer_has_our_shapes(name):
    source = ast.parse((BENCHMARKS / "peer_fsdp2.py").read_text())
    [presets] = [node.value for node in source.body if isinstance(node, ast.Assign) and node.targets[0].id == "PRESETS"]
    c = model_config(name)
    shapes = c.num_layers, c.hidden, c.ffn, c.num_heads, c.num_kv_heads, c.vocab_size
    assert ast.literal_eval(presets)[name][:6] == shapes and not c.tied


@pytest.fixture
def shell(tmp_path):
    """Runs a script of benchmarks/ with a `python3` that prints its arguments."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\necho noise\necho "{\\"args\\": \\"$*\\"}"\n')
    fake.chmod(0o755)

    def run(script, *args, **variables):
        path = f"{fake.parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "HOME": str(tmp_path), "OUT": str(tmp_path / "out"), "GPUS": "2", **variables}
        return subprocess.run([BENCHMARKS / script, *args], env=environment, capture_output=True, text=True, timeout=60)

    return run


def test_a_run_s_name_says_what_it_is(shell, tmp_path):
    names = ["ours_fp32_zero2_mb4_all_acc2", "peer_bf16_zero2_every2_auto", "ours_bf16_again"]
    done = shell("gpu_peer.sh", *names, MODEL="llama-1b", LAYERS="8", MICROBATCH="3")
    assert done.returncode == 0, done.stderr
    ours, peer, again = map(json.loads, (tmp_path / "out" / "results.jsonl").read_text().splitlines())
    assert ours["name"] == f"llama-1b 8 layers: {names[0]}"
    for words in ("--strategy zero2", "--microbatch 4", "--accumulation 2", "--reduce_dtype float32", "--remat none"):
        assert words in ours["args"]
    for words in (
        "--preset llama-1b --layers 8",
        "--reshard false",
        "--sac-mm-every 2",
        "--reduce bf16",
        "--sdpa auto",
    ):
        assert words in peer["args"]
    for words in ("--strategy zero3", "--microbatch 3", "--reduce_dtype bfloat16", "{'num_layers': 8}"):
        assert words in again["args"]
    assert shell("gpu_peer.sh", *names, MODEL="llama-1b", LAYERS="8").stdout == ""


def test_a_command_without_figures_leaves_no_line(shell, tmp_path):
    file = tmp_path / "file.jsonl"
    failed = shell("record.sh", str(file), "a", "5", "sh", "-c", "echo no figures; echo reason >&2")
    assert failed.returncode == 1 and "reason" in failed.stdout and not file.exists()
    late = shell("record.sh", str(file), "a", "1", "sh", "-c", "sleep 20; echo '{}'")
    assert late.returncode == 1 and not file.exists()
    assert shell("record.sh", str(file), "a", "5", "echo", '{"x": 1}').returncode == 0
    assert json.loads(file.read_text()) == {"name": "a", "x": 1}


def test_all_parts_in_order(shell):
    done = shell("run_all.sh")
    assert done.returncode == 0, done.stderr
    parts = [line.split()[1].strip(",") for line in done.stdout.splitlines() if line.startswith("== ")]
    assert parts == [
        "peer_7b", "peer_1b", "compile", "calibrate", "strategies", "groups", "ablation", "loss_curve", "equivalence",
        "plot",
    ]  # fmt: skip
    # All that has figures; the fake program writes none of the files of the others.
    again = shell("run_all.sh", "peer_7b", "peer_1b", "compile", "equivalence")
    assert all(line.startswith("== ") for line in again.stdout.splitlines())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["strategies.py", "--size=tiny", "--cluster=nowhere.json", "--out=rows.jsonl"], "nowhere.json"),
        (["train_step.py", "--devices=2", "--model=llama-tiny", "--strategy=zero9"], "zero9"),
    ],
    ids=lambda value: value[0],
)
def test_a_mistake_is_one_line(command, message, tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, BENCHMARKS / command[0], *command[1:]]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stdout == ""
    # Before it jax's CUDA plugin, where it is installed, may say that it found no GPU.
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ") and message in line and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_second_start_finds_the_step_in_the_cache(tmp_path):
    sizes = str(dict(SMALL.overrides))
    command = [
        sys.executable, BENCHMARKS / "train_step.py", "--devices", "2", "--model", "llama-tiny", "--overrides", sizes,
        "--seq_len", "8", "--microbatch", "1", "--attention", "xla", "--steps", "2", "--cache", tmp_path / "cache",
    ]  # fmt: skip
    rows = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = rows
    assert second["compile_s"] < first["compile_s"] and first["trace_s"] > 0
    assert second["losses"] == first["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["strategies.py", "--size", "tiny", "--accumulation", "2", "--strategy", "zero1", "--out", "rows.jsonl"],
        ["ablation.py", "--size", "tiny", "--strategy", "zero3", "--out", "rows.jsonl"],
        ["loss_curve.py", "--gin_file", "configs/quickstart.gin", "--out", ".", "--set", "DATA=text.txt"],
    ],
    ids=lambda command: command[0],
)
def test_it_runs(command, tmp_path):
    grid = ["--simulated-nodes", "2", "--simulated-devices-per-node", "1", "--steps", "4"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(5000)))
    program = [sys.executable, BENCHMARKS / command[0], *command[1:], *grid]
    done = subprocess.run(program, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.json*"))
