"""`python -m amsp_jax plan`: what it prints, and one line for each mistake."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from amsp_jax import __main__ as tools
from amsp_jax.cli.commands import plan as command
from amsp_jax.cli.commands.plan import ALWAYS, PLAN_SEARCH
from amsp_jax.cli.tune.point import DIMENSIONS
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.planner import Objective, Space
from amsp_jax.predict.planner.pictures import best_by_size, plot_best
from amsp_jax.strategy import DataRanks, parse

ROOT = Path(__file__).parents[2]
JOB = {"model": "llama-1b", "cluster": "a800", "nodes": 2, "global-batch": 32, "seq-len": 2048}


def words(*flags, **changes):
    job = JOB | {name.replace("_", "-"): value for name, value in changes.items()}
    return ["plan", *(word for name, value in job.items() for word in (f"--{name}", str(value))), *flags]


def plan(capsys, *flags, **changes):
    code = tools.main(words(*flags, **changes))
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured


def refused(capsys, *flags, **changes):
    """The one line on stderr of a command that is refused."""
    assert tools.main(words(*flags, **changes)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_json_is_all_of_stdout():
    command = [sys.executable, "-m", "amsp_jax", *words("--json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=True)
    told = json.loads(done.stdout)
    assert list(told)[:3] == ["best", "ranked", "rejected"]
    best = parse(told["best"]).resolve(DataRanks(8, 2))
    assert str(best) == told["best"] == told["ranked"][0]["strategy"]
    assert told["gin"][0] == f"STRATEGY = '{best}'" and told["remat"] == "projections" and told["microbatch"] == 1
    assert told["objective"] == "step_time" and told["cluster"]["name"] == "a800" and told["assumptions"]
    assert str(best) in done.stderr


def test_the_text_has_the_table_the_reasons_and_the_winner(capsys):
    lines = plan(capsys, top=3).out.splitlines()
    assert max(map(len, lines)) <= 170
    table = next(i for i, line in enumerate(lines) if "memory of a device" in line)
    assert lines[table + 2].startswith(" 1 ") or lines[table + 2].startswith("1 ")
    text = "\n".join(lines)
    best = lines[table + 2].split("params=")[1].split("  ")[0]
    assert f"STRATEGY = 'params={best}'\nMICROBATCH = 1\nREMAT = 'projections'" in text
    for word in ("rejected: spans nodes", "The next, params=", "zero1 ", "zero2 ", "zero3 ", "mics ", "hpz "):
        assert word in text
    assert text.index("assumed:") > text.index("STRATEGY")


def test_columns_without_numbers_are_left_out(capsys):
    """Where parameters are whole nothing is gathered in a pass."""
    head, best = plan(capsys, top=1).out.splitlines()[4:6]
    assert "params=1x1" in best and "shards" in head and "gather" not in head and "again" not in head


def test_a_wide_table_names_strategies_in_short(capsys):
    text = plan(capsys, "--search", "microbatch,remat", "--any-nodes", top=100).out
    assert max(map(len, text.splitlines())) <= 170 and "micro " in text and "P 1x1, G" in text


def test_a_preset_that_does_not_fit_says_so(capsys):
    text = plan(capsys, model="llama-13b", nodes=2, global_batch=16, memory_limit=40).out
    line = next(line for line in text.splitlines() if line.startswith("zero1"))
    assert "GiB more than 40.00" in line


def test_the_papers_objective_says_that_it_is_one(capsys):
    text = " ".join(plan(capsys, objective="paper").out.split())
    assert "AMSP's objective" in text and "Predicted for it: a step of" in text


def test_explain_names_parts(capsys):
    text = plan(capsys, "--explain", "params=8x1 grads=8x1 opt_state=8x2").out
    assert "block 9 of 16" in text and "part 9" not in text
    for word in ("each block", "embedding", "head", "all-gather", "reduce-scatter", "limit", "fits", "2 microbatches"):
        assert word in text
    assert "first microbatch" in text and "last microbatch" in text


def test_explain_as_json(capsys):
    told = json.loads(plan(capsys, "--json", "--explain", "zero3").out)
    assert told["strategy"] == "params=8x2 grads=8x2 opt_state=8x2"
    assert sum(c["count"] * c["seconds"] for c in told["collectives"]) == pytest.approx(
        sum(told["communication_s"].values())
    )
    names = {event["name"] for event in told["events"]}
    assert {"forward, embedding", "backward, head", "gather, block 16 of 16", "optimizer"} <= names


def test_what_travels_together_is_named_together(capsys):
    told = json.loads(plan(capsys, "--json", "--explain", "params=8x1 grads=8x1 opt_state=8x2").out)
    names = {event["name"]: event["num_parts"] for event in told["events"]}
    assert names["P shard, embedding to block 7 of 16"] == names["P shard, blocks 8 to 15 of 16"] == 8
    assert names["reduce at the end, block 16 of 16 to head"] == 2 and names["gather, block 3 of 16"] == 1


def test_the_dtype_between_nodes_is_planned_and_told(capsys):
    between = {"inter_node_dtype": "bfloat16", "explain": "zero1"}
    assert "gradients reduced in float32, bfloat16 between nodes" in plan(capsys, **between).out
    told = json.loads(plan(capsys, "--json", **between).out)
    assert (told["reduce_dtype"], told["inter_node_dtype"]) == ("float32", "bfloat16")
    exchanged = {(c["group"], c["basis"]) for c in told["collectives"] if c["kind"] == "all-to-all"}
    assert exchanged == {("1x2", "as all-gather")}


def test_gin_lines_name_the_dtypes_that_were_planned(capsys):
    told = json.loads(plan(capsys, "--json", inter_node_dtype="bfloat16").out)
    assert told["gin"][3:] == ["INTER_NODE_DTYPE = 'bfloat16'"]
    text = plan(capsys, nodes=1, reduce_dtype="bfloat16").out
    assert "REMAT = 'projections'\nREDUCE_DTYPE = 'bfloat16'\n" in text
    wider = refused(capsys, inter_node_dtype="float32", reduce_dtype="bfloat16")
    assert "--inter-node-dtype float32 is wider than --reduce-dtype bfloat16" in wider


def test_a_group_of_microbatches_is_planned_and_told(capsys):
    text = plan(capsys, microbatch_group=2, top=1).out
    assert "microbatch 1, remat projections, microbatch group 2, adamw" in text
    assert "MICROBATCH = 1\nMICROBATCH_GROUP = 2\nREMAT = 'projections'" in text
    asked = {"microbatch_group": 2, "explain": "zero3", "global_batch": 64}
    captured = plan(capsys, "--json", **asked)
    told = json.loads(captured.out)
    assert told["microbatch_group"] == 2 and told["accumulation"] == 4
    assert {c["count"] for c in told["collectives"] if c["when"] == "gather" and c["part"] == "each block"} == {2 * 16}
    assert "microbatch 1 in groups of 2, remat projections, 4 microbatches a step" in captured.err
    assert "every group: " in captured.err or "first group: " in captured.err


def test_explain_tells_of_a_group_when_its_peak_is_and_what_its_loops_move(capsys):
    asked = {"explain": "zero3", "global_batch": 64}
    alone = json.loads(plan(capsys, "--json", **asked).out)
    captured = plan(capsys, "--json", microbatch_group=4, **asked)
    told = json.loads(captured.out)
    groups = told["microbatch_groups"]
    assert (groups["ungrouped_peak_bytes"], groups["ungrouped_peak_at"]) == (
        alone["memory_bytes"]["peak"], alone["memory_peak_at"],
    )  # fmt: skip
    peak = f"the peak is while {told['memory_peak_at']}; without groups it is "
    assert told["memory_peak_at"] != alone["memory_peak_at"]
    assert peak in captured.err and f"at another moment: while {alone['memory_peak_at']}\n" in captured.err
    moved = groups["loop_forward_bytes"] + groups["loop_backward_bytes"]
    assert f" of computing  {moved / 2**30:.2f}".split() == captured.err.split("as seen in programs")[0].split()[-3:]
    assert 0 < groups["loop_s"] < told["compute_s"]
    assert "groups" not in alone and "loops over groups" not in plan(capsys, **asked).out


def test_what_is_searched_is_named_as_tune_names_it():
    assert set(PLAN_SEARCH) <= set(DIMENSIONS) and ALWAYS in DIMENSIONS


def test_groups_are_searched_as_far_as_they_divide(capsys):
    captured = plan(capsys, "--search", "microbatch_group", "--json", global_batch=64, top=3)
    told = json.loads(captured.out)
    assert {entry["microbatch_group"] for entry in told["ranked"] + told["rejected"]} == {1, 2, 4}
    assert not any("do not divide" in entry["reason"] for entry in told["rejected"])
    head = next(line for line in captured.err.splitlines() if " strategy " in line)
    assert "group" in head and "micro" not in head


def test_explain_says_by_how_much_it_does_not_fit(capsys):
    assert "does not fit: " in plan(capsys, "--explain", "ddp", memory_limit=10).out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "lama-1b"}, "Did you mean 'llama-1b'? Choose one of: llama-tiny"),
        ({"cluster": "a80"}, "did you mean 'a800'? Known: a800, a100"),
        ({"explain": "zero9"}, "did you mean 'zero3'? Presets: ddp"),
        ({"explain": "params=16x1 grads=16x1 opt_state=16x1"}, "16 does not divide 8"),
        ({"explain": "zero3", "search": "remat"}, "--search has no effect"),
        ({"explain": "zero3", "objective": "paper"}, "leave one out"),
        ({"global_batch": 1000}, "16 = 1 (microbatch) x 16 devices; 992 or 1008 does"),
        ({"global_batch": 5}, "; 16 does"),
        ({"global_batch": 0}, "--global-batch 0: it counts from 1"),
        ({"microbatch": 0}, "--microbatch 0: it counts from 1"),
        ({"seq_len": -4}, "--seq-len -4: it counts from 1"),
        ({"nodes": 0}, "--nodes 0: nodes count from 1"),
        ({"top": 0}, "--top 0: it counts from 1"),
        ({"memory_limit": -1}, "--memory-limit -1: GiB of a device, from 0.001"),
        ({"search": "remat,stages"}, "'stages' is unknown; some of strategy,microbatch,remat,microbatch_group,tensor"),
        ({"microbatch_group": 0}, "--microbatch-group 0: it counts from 1"),
        (
            {"microbatch_group": 4},
            "does not divide the microbatches of a step, 2 = 32 / (1 (microbatch) x 16 data",
        ),
        ({"microbatch_group": 4, "explain": "zero3"}, "--microbatch-group 4 does not divide"),
        ({"microbatch_group": 2, "pipeline": 2}, "--microbatch-group 2 has no meaning with --pipeline 2: stages take"),
        ({"search": "microbatch_group", "pipeline": 2}, "--search microbatch_group has no meaning with --pipeline 2"),
        ({"model": "gpt-22b", "seq_len": 4096}, "gpt-22b has positions for 2048 tokens"),
        ({"model_overrides": "8"}, "is no dictionary"),
        ({"plot": "/nowhere/heat.png"}, "cannot be written to"),
        ({"plot": "heat.gif"}, "name it heat.png"),
    ],
)
def test_a_mistake_is_one_line(capsys, change, told):
    assert told in refused(capsys, **change)


@pytest.mark.parametrize(
    ("text", "told"),
    [('{"format": 1, "name": "mi', "cut off"), ('{"a": 1}', "no field 'format'"), ('{"format": 9}', "format=9")],
)
def test_a_cluster_file_that_is_none(capsys, tmp_path, text, told):
    path = tmp_path / "cluster.json"
    path.write_text(text)
    line = refused(capsys, cluster=path)
    assert told in line and "calibrate --out" in line


@pytest.mark.parametrize("seq_len", [4096, 8200])
def test_nothing_fits_names_what_does_and_it_does(seq_len, capsys):
    """Each remedy is tried: the command with it added succeeds. 8200 / 8 is odd, which cuDNN's attention refuses."""
    job = {"model": "llama-13b", "cluster": "h100", "nodes": 1, "global_batch": 8, "memory_limit": 30}
    job["seq_len"] = seq_len
    line = refused(capsys, **job)
    assert "GiB too much. It fits with " in line
    remedies = line.split("It fits with ")[1].strip().split(", or with ")
    for remedy in remedies:
        assert tools.main([*words(**job), *remedy.split()]) == 0, remedy
    assert any("--nodes" in remedy for remedy in remedies)
    capsys.readouterr()


def test_nothing_helps(capsys):
    line = refused(capsys, model="llama-65b", nodes=512, global_batch=4096, seq_len=1024, memory_limit=1)
    assert "on up to 1024 nodes" in line and "choose a smaller model" in line


def test_a_picture_has_a_cell_for_each_model_and_number_of_nodes(tmp_path):
    args = tools.parse_args(words())
    cluster = command.cluster_of("a800", 2)
    small, large = command.workload_of(args, cluster), command._sibling(args, "llama-30b", cluster)
    told = []
    grid = best_by_size(
        [small, large],
        cluster,
        (1, 2),
        Space(microbatches=(1,), remats=(Remat.FULL,)),
        Objective.STEP_TIME,
        40 * 2**30,
        lambda what, done: told.append((what, done)),
    )
    assert told[-1] == ("llama-30b on 2 nodes", 0.75)
    assert grid.best[1][0] is None and grid.best[0][0].candidate.degrees.ranks == DataRanks(8, 1)
    assert [e.accumulation for e in grid.best[0]] == [2, 2]
    path = plot_best(grid, tmp_path / "heat.png", ("llama-1b", 2), "caption")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_rows_of_the_picture_are_the_models_family():
    assert command._family("llama-7b") == ["llama-1b", "llama-7b", "llama-13b", "llama-30b", "llama-65b"]
    assert command._family("gpt-22b") == ["gpt-22b", "gpt-175b", "gpt-1t"]
    assert command._family("llama-125m")[0] == "llama-125m"


def test_a_plan_needs_no_device(capsys, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("a backend was asked for"))
    plan(capsys, top=1)
