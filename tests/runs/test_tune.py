"""`tune`: what is searched, how trials end, and what a study remembers. The trainer is a script, but for one test."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import optax
import pytest

from amsp_jax.__main__ import main, parse_args
from amsp_jax.cli.tune import report
from amsp_jax.cli.tune.forecast import Forecast, forecast, kept_calibration
from amsp_jax.cli.tune.point import Point
from amsp_jax.cli.tune.space import search_space
from amsp_jax.cli.tune.study import JOURNAL, Study, held
from amsp_jax.cli.tune.trial import RAN, Interrupted, Kind, Runner
from amsp_jax.cli.tune.trial_setup import TrialSetup
from amsp_jax.errors import UserError
from amsp_jax.models.registry import build_model
from amsp_jax.predict.cluster import Cluster, Link, Network, Rates, save_cluster
from amsp_jax.predict.planner import Workload
from amsp_jax.user_cache import user_cache

# Writes the rows of a run whose step time is a sum over its settings; some settings do it harm.
FAKE_TRAINER = """
    import json, os, pathlib, signal, subprocess, sys, time
    values = dict(word[6:].split("=", 1) for word in sys.argv[1:] if word.startswith("--gin."))
    run = pathlib.Path(values["RUN_DIR"])
    run.mkdir(parents=True)
    with open(run.parents[2] / "started.txt", "a") as file:
        file.write(f"{os.getpid()} {values['STRATEGY']} {values['MICROBATCH']} {values['REMAT']}\\n")
    harm = json.loads(os.environ.get("HARM", "{}")).get(values["MICROBATCH"])
    if harm == "crash":
        raise RuntimeError("planted")
    if harm == "refuse":
        print("error: GLOBAL_BATCH=8 is wrong", file=sys.stderr)
        sys.exit(2)
    if harm == "oom":
        print("jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")
        print("and more lines")
        sys.exit(1)
    if harm == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if harm in ("hang", "stubborn"):
        if harm == "stubborn":
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (run.parents[2] / "child.txt").write_text(str(child.pid))
        time.sleep(600)
    step_s = 0.1 * int(values["TENSOR"]) + {"1": 3, "2": 1, "4": 2, "8": 4}[values["MICROBATCH"]]
    step_s += {"full": 0.3, "projections": 0.1, "none": 0.2}[values["REMAT"]]
    step_s += 0.01 * ["zero3", "zero2", "zero1", "ddp"].index(values["STRATEGY"])
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 6):
            seconds = 100.0 if step == 1 else step_s
            row = {"step": step, "loss": 1.0, "step_time_s": seconds, "tokens_per_s": 1000 / seconds}
            file.write(json.dumps({**row, "mfu": 0.5 / seconds, "peak_memory_bytes": 2**30}) + "\\n")
    """

SIZES = {"num_layers": 4, "hidden": 16, "ffn": 32, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 258}
SETUP = TrialSetup(num_nodes=1, devices_per_node=4, model=build_model("llama-tiny", SIZES), global_batch=32, seq_len=64)
SPACE = search_space(["pipeline=1"], SETUP)
BEST = Point(
    strategy="zero3", tensor=1, pipeline=1, pipeline_schedule="1f1b", virtual_stages=1, context=1, microbatch=2,
    remat="projections",
)  # fmt: skip


@pytest.fixture
def trainer(tmp_path):
    path = tmp_path / "trainer.py"
    path.write_text(textwrap.dedent(FAKE_TRAINER))
    return [sys.executable, "-S", str(path)]


@contextlib.contextmanager
def harm(**by_microbatch):
    """What the trainer does at a microbatch."""
    os.environ["HARM"] = json.dumps({name.removeprefix("b"): word for name, word in by_microbatch.items()})
    try:
        yield
    finally:
        del os.environ["HARM"]


def runner(command, **changes):
    return Runner(**{"command": command, "num_steps": 5, "num_warmup": 2, "limit_s": 60.0, "grace_s": 0.5, **changes})


def study(folder, space=SPACE, identity=None, seed=0):
    folder.mkdir(exist_ok=True)
    return Study(folder, space, SETUP, identity or {"model": "m"}, seed)


def nothing(record):
    pass


def small(*texts):
    return search_space(["pipeline=1", "tensor=1", "strategy=zero3", *texts], SETUP)


def started(folder):
    return (folder / "started.txt").read_text().splitlines()


def is_alive(pid):
    """Whether the process runs; one that waits for its parent to notice its end does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# The space.


def test_values_are_those_of_the_flags_and_else_suit_the_devices():
    space = search_space(["microbatch=2,6", "strategy=zero1,params=1x1 grads=2x1 opt_state=full"], SETUP)
    assert space.values["microbatch"] == (2, 6)
    assert space.values["strategy"] == ("zero1", "params=1x1 grads=2x1 opt_state=full")
    assert space.values["tensor"] == space.values["pipeline"] == (1, 2, 4)
    assert space.values["context"] == (1,) and "context" not in space.searched


def test_what_is_not_searched_is_that_of_the_run():
    own = {"context": 2, "microbatch_group": 4}
    space = search_space(["pipeline=1"], SETUP, **own)
    assert {(point.context, point.microbatch_group) for point in space.points()} == {(2, 4)}
    searched = search_space(["microbatch_group=1,2"], SETUP, **own)
    assert (searched.values["context"], searched.values["microbatch_group"]) == ((2,), (1, 2))


def test_without_stages_there_is_one_schedule():
    space = search_space(
        ["pipeline=1,2", "pipeline_schedule=gpipe,1f1b", "tensor=1", "strategy=ddp", "remat=full", "microbatch=1"],
        SETUP,
    )
    points = list(space.points())
    assert len(points) == len(set(points)) == 1 + 2 * 2
    assert all(point in space for point in points)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensors=1", "did you mean tensor?"),
        ("tensor", "has no values"),
        ("tensor=a", "integer of at least 1"),
        ("tensor=0", "integer of at least 1"),
        ("remat=some", "there are none, projections, full"),
        ("strategy=zero9", "unknown preset"),
        ("pipeline=2", "given twice"),
        (f"microbatch={','.join(map(str, range(1, 9000)))}", "are more than"),
    ],
)
def test_a_wrong_flag_is_one_line(text, message):
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        search_space(["pipeline=1,2", text], SETUP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 8}, "take 8 devices"),
        ({"tensor": 2, "pipeline": 4}, "take 8 devices"),
        ({"microbatch": 3}, "not a multiple"),
        ({"pipeline": 4, "microbatch": 32}, "fewer than the pipeline=4"),
        ({"pipeline": 4, "virtual_stages": 2}, "8 virtual stages, and each needs a block"),
        ({"pipeline": 2, "virtual_stages": 2, "tensor": 2, "microbatch": 32}, "fewer than the pipeline=2"),
        ({"tensor": 4, "strategy": "ddp"}, "tensor=4 is more than the 2"),
        ({"strategy": "mics(3)"}, "does not fit"),
    ],
)
def test_what_cannot_run_says_why(changes, message):
    assert message in (SETUP.why_invalid(dataclasses.replace(BEST, **changes)) or "")


def test_presets_that_are_the_same_run_are_one_point():
    setup = dataclasses.replace(SETUP, devices_per_node=2)
    for tensor, num_runs in ((1, 2), (2, 1)):
        points = [dataclasses.replace(BEST, tensor=tensor, strategy=name) for name in ("ddp", "zero3")]
        assert len(set(map(setup.key, points))) == num_runs


# One trial.


def run_one(command, tmp_path, **changes):
    return runner(command, **changes).run(BEST, tmp_path / "study" / "trials" / "0000")


def test_a_trial_is_the_median_after_the_warm_up(trainer, tmp_path):
    outcome = run_one(trainer, tmp_path)
    assert outcome.kind is Kind.MEASURED and outcome.num_steps == 3
    assert outcome.step_s == pytest.approx(1.2) and outcome.tokens_per_s == pytest.approx(1000 / 1.2)
    assert outcome.mfu == pytest.approx(0.5 / 1.2) and outcome.peak_memory_bytes == 2**30


@pytest.mark.parametrize(
    ("word", "kind", "reason"),
    [
        ("crash", Kind.CRASHED, "exit code 1 after 0 steps: RuntimeError: planted"),
        ("refuse", Kind.REFUSED, "error: GLOBAL_BATCH=8 is wrong"),
        ("oom", Kind.OUT_OF_MEMORY, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes"),
        ("killed", Kind.OUT_OF_MEMORY, "SIGKILL"),
    ],
)
def test_a_failure_has_its_reason(trainer, tmp_path, word, kind, reason):
    with harm(b2=word):
        outcome = run_one(trainer, tmp_path)
    assert outcome.kind is kind and reason in outcome.reason and outcome.step_s is None


@pytest.mark.parametrize(
    "line",
    [
        "error: strategy 'ddp' needs 9.00 GiB on each device before activations (P 1 GiB), and a device has 8.00 GiB;",
        "error: the compiled step needs 9.00 GiB on each device (state and batch), and a device has 8.00 GiB; lower it",
    ],
)
def test_our_own_messages_on_memory_are_known(tmp_path, line):
    outcome = run_one([sys.executable, "-S", "-c", f"import sys; print({line!r}); sys.exit(2)"], tmp_path)
    assert outcome.kind is Kind.OUT_OF_MEMORY and outcome.reason == line


def test_a_trial_that_hangs_is_ended_with_its_children(trainer, tmp_path):
    with harm(b2="stubborn"):
        outcome = run_one(trainer, tmp_path, limit_s=3.0)
    assert outcome.kind is Kind.TIMED_OUT and "0 steps in 3 s" in outcome.reason
    child = int((tmp_path / "study" / "child.txt").read_text())
    wait_until(lambda: not is_alive(child))


def test_a_trial_ends_at_its_last_step(tmp_path):
    """A run that goes on would write a checkpoint."""
    script = textwrap.dedent(FAKE_TRAINER) + "\ntime.sleep(600)"
    outcome = run_one([sys.executable, "-S", "-c", script], tmp_path)
    assert outcome.kind is Kind.MEASURED and outcome.wall_s < 300


def test_a_launcher_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="correct --launcher"):
        run_one(["./no-such-launcher"], tmp_path)


# A study.


def test_the_planted_best_is_found_in_a_part_of_the_space(trainer, tmp_path):
    folder = tmp_path / "study"
    search = study(folder)
    assert search.search(30, runner(trainer).run, Forecast(), nothing)
    best = report.measured(search.records())[0]
    assert len(set(map(SETUP.key, (r.point for r in search.records() if ran(r))))) == 30
    assert (best.point.microbatch, best.point.remat) == (BEST.microbatch, BEST.remat)


def ran(record):
    return record.outcome.kind in RAN


def test_failures_are_learned_from_and_never_run_again(trainer, tmp_path):
    folder = tmp_path / "study"
    space = small("microbatch=1,2,4,8", "remat=none,full")
    with harm(b1="crash", b4="oom", b8="refuse"):
        search = study(folder, space)
        assert not search.search(100, runner(trainer).run, Forecast(), nothing)
    kinds = [record.outcome.kind for record in search.records()]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        Kind.CRASHED: 2, Kind.OUT_OF_MEMORY: 2, Kind.REFUSED: 2, Kind.MEASURED: 2,
    }  # fmt: skip
    assert len(started(folder)) == len(set(started(folder))) == 8
    pruned = search.optuna.get_trials(states=[type(search.optuna.trials[0].state).PRUNED])
    assert len(pruned) == 6


def test_points_that_cannot_run_or_would_not_fit_have_no_process(trainer, tmp_path):
    folder = tmp_path / "study"
    space = small("microbatch=2,4,16", "remat=none,full")
    large = {point: "needs 9 GiB more" for point in space.points() if point.microbatch == 4}
    search = study(folder, space)
    assert not search.search(100, runner(trainer).run, Forecast(too_large=large), nothing)
    assert search.num_run() == 2 and len(started(folder)) == 2
    assert {r.outcome.kind for r in search.records()} <= {Kind.MEASURED, Kind.INVALID, Kind.TOO_LARGE}


def test_the_search_begins_with_the_points_of_the_planner(trainer, tmp_path):
    order = [point for point in SPACE.points() if SETUP.why_invalid(point) is None][5:8]
    search = study(tmp_path / "study")
    search.begin_with(order)
    search.search(3, runner(trainer).run, Forecast(), nothing)
    assert [record.point for record in search.records()] == order


def test_a_study_goes_on_where_it_ended(trainer, tmp_path):
    folder = tmp_path / "study"
    study(folder).search(3, runner(trainer).run, Forecast(), nothing)
    # A search that was killed while it wrote.
    with (folder / JOURNAL).open("a") as file:
        file.write('{"op_code": 4, "wor')
    again = study(folder)
    assert not again.is_new and again.num_run() == 3
    again.search(5, runner(trainer).run, Forecast(), nothing)
    assert again.num_run() == 5 and len(set(started(folder))) == 5


def test_an_interrupted_trial_runs_again(trainer, tmp_path):
    folder, space = tmp_path / "study", small("microbatch=2", "remat=none,full")
    with harm(b2="hang"), pytest.raises(Interrupted):
        stop = runner(trainer, should_stop=lambda: (folder / "child.txt").exists())
        study(folder, space).search(2, stop.run, Forecast(), nothing)
    again = study(folder, space)
    assert again.records() == []
    again.search(1, runner(trainer).run, Forecast(), nothing)
    first, second = (line.split(" ", 1)[1] for line in started(folder))
    assert first == second


def test_another_job_is_refused(tmp_path):
    study(tmp_path / "study", identity={"model": "m", "steps": 8})
    with pytest.raises(UserError, match="steps=8, not 9"):
        study(tmp_path / "study", identity={"model": "m", "steps": 9})


def test_a_folder_has_one_search_and_nothing_else(tmp_path):
    with held(tmp_path / "study"), pytest.raises(UserError, match="in use"), held(tmp_path / "study"):
        pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="no study"), held(tmp_path / "other"):
        pass


# The planner.


def planned(memory_bytes):
    return Cluster(
        name="small", num_nodes=1, devices_per_node=4, device_kind="cpu", memory_bytes=memory_bytes, peak_flops=None,
        source="a test", network=Network(intra=Link(bytes_per_s=1e9, latency_s=1e-6), inter=None),
        rates=Rates(
            matmul={"float32": ((512, 512, 512, 1e10),)}, attention_flops_per_s=(1e10, 1e10), memory_bytes_per_s=1e10,
            overlap_slowdown=1.0,
        ),
    )  # fmt: skip


WORKLOAD = Workload(
    model=SETUP.model, optimizer=optax.adamw(1e-3), global_batch=32, seq_len=64, compute_dtype="float32"
)


def test_the_planner_says_where_to_begin_and_what_does_not_fit():
    points = list(
        search_space(["tensor=1,2", "pipeline=1,2", "virtual_stages=1", "microbatch=2", "remat=full"], SETUP).points()
    )
    all_fit = forecast(points, SETUP, WORKLOAD, planned(2**40))
    assert set(all_fit.step_s) == set(points) and not all_fit.too_large
    first, second = all_fit.best(2, SETUP)
    assert all_fit.step_s[first] == min(all_fit.step_s.values()) and SETUP.key(first) != SETUP.key(second)
    none_fits = forecast(points, SETUP, WORKLOAD, planned(1000))
    assert set(none_fits.too_large) == set(points) and "GiB more than" in none_fits.too_large[first]


def test_a_kept_calibration_of_the_same_devices_is_found(clean_environment):
    assert kept_calibration(SETUP, is_cpu=True) is None
    folder = user_cache() / "clusters"
    folder.mkdir(parents=True)
    for name, cluster in (("cpu_1x4_jax-1.json", planned(2**30)), ("cpu_1x8_jax-1.json", planned(2**30))):
        save_cluster(cluster, folder / name)
    assert kept_calibration(SETUP, is_cpu=True) == folder / "cpu_1x4_jax-1.json"
    assert kept_calibration(SETUP, is_cpu=False) is None


# What is told.


def test_the_report_has_what_was_measured_and_why_the_rest_was_not(trainer, tmp_path):
    with harm(b8="oom"):
        search = study(tmp_path / "study")
        search.search(20, runner(trainer).run, Forecast(), nothing)
    records, best = search.records(), report.measured(search.records())
    lines = report.table(records).splitlines()
    assert lines[0].split() == ["trial", "step", "ms", "tokens/s", "MFU", "%", "GiB", "point"]
    assert len(lines) == 1 + len(best) and str(best[0].point) in lines[1]
    assert f"{1e3 * best[0].outcome.step_s:.1f}" in lines[1]
    shares = report.importance(search.optuna)
    assert sum(shares.values()) == pytest.approx(1.0) and "pipeline" not in shares


def test_importance_needs_trials(tmp_path):
    assert report.importance(study(tmp_path / "study").optuna) == {}
    assert "needs 8" in report.importance_lines({}, 0)


# The command.

TINY = "{'num_layers':2,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}"
SETTINGS = [
    *("--gin.MODEL=llama-tiny", f"--gin.MODEL_OVERRIDES={TINY}", "--gin.STRATEGY=zero3", "--gin.SEQ_LEN=16"),
    *("--gin.SIMULATED_NODES=1", "--gin.SIMULATED_DEVICES_PER_NODE=2", "--gin.GLOBAL_BATCH=8"),
]
ONE_DEVICE_A_RANK = ["--search=tensor=1", "--search=pipeline=1", "--search=context=1"]


def arguments(tmp_path, *more):
    return ["tune", *SETTINGS, "--out", str(tmp_path / "study"), "--steps", "5", *ONE_DEVICE_A_RANK, *more]


def test_settings_pass_and_other_unknown_words_do_not():
    assert parse_args(["tune", "--gin.STEPS=5", "--trials", "2"]).settings == ["--gin.STEPS=5"]
    for words in (["tune", "--trails=2"], ["plan", "--gin.STEPS=5"]):
        with pytest.raises(UserError):
            parse_args(words)


def test_the_command_reports_and_goes_on(trainer, tmp_path, capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("HARM", '{"4": "crash"}')
    words = arguments(tmp_path, "--launcher", " ".join(trainer), "--search=remat=full,none", "--trials")
    assert main([*words, "10"]) == 0
    first = capsys.readouterr().out
    assert "no forecast" in first and "MICROBATCH = 2" in first and "RuntimeError: planted" in first
    assert "MICROBATCH = 2" in (tmp_path / "study" / "best.gin").read_text()
    monkeypatch.setenv("HARM", '{"1": "crash", "2": "crash", "4": "crash", "8": "crash"}')
    assert main([*words, "12"]) == 0
    assert "12/12" in capsys.readouterr().out
    assert main([*words, "13", "--gin.SEQ_LEN=32"]) == 2
    assert "holds a study with SEQ_LEN='16', not '32'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_and_keeps_the_study(trainer, tmp_path, number):
    words = arguments(tmp_path, "--launcher", " ".join(trainer), "--search=microbatch=2,4")
    environ = {**os.environ, "HARM": '{"2": "hang", "4": "hang"}', "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "amsp_jax", *words]
    with subprocess.Popen(
        command, env=environ, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: process.poll() is not None or (tmp_path / "study" / "child.txt").exists(), 120)
        process.send_signal(number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == (85 if number == signal.SIGTERM else 130), out + err
    assert "the same command goes on" in err and (tmp_path / "study" / JOURNAL).exists()
    left = [int(started(tmp_path / "study")[0].split()[0]), int((tmp_path / "study" / "child.txt").read_text())]
    assert not any(map(is_alive, left))


def test_the_search_itself_starts_no_device(trainer, tmp_path):
    """They are for the trials."""
    more = ("--cluster=h100", "--search=microbatch=2", "--trials=1", "--gin.COMPUTE_DTYPE=bfloat16")
    words = arguments(tmp_path, "--launcher", " ".join(trainer), *more)
    code = f"from amsp_jax.__main__ import main; from jax._src import xla_bridge; assert main({words!r}) == 0"
    command = [sys.executable, "-c", f"{code}; assert not xla_bridge.backends_are_initialized()"]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True)


@pytest.mark.slow
def test_real_trials(tmp_path, capsys, clean_environment):
    words = arguments(tmp_path, "--search=remat=full", "--search=microbatch=1,2", "--search=strategy=zero3")
    assert main([*words, "--trials", "3"]) == 0
    told = capsys.readouterr().out
    assert "every point that can run was tried: 2 trials" in told and "STRATEGY = 'zero3'" in told
    assert not list((tmp_path / "study").rglob("checkpoints/*"))


def test_trials_have_the_groups_of_the_gin_files(trainer, tmp_path, capsys, clean_environment):
    words = arguments(tmp_path, "--launcher", " ".join(trainer), "--search=strategy=ddp", "--trials", "1")
    assert main([*words, "--gin.MICROBATCH_GROUP=2"]) == 0
    assert "MICROBATCH_GROUP = 2\n" in capsys.readouterr().out
    assert main([*words, "--gin.MICROBATCH_GROUP=4"]) == 2
    assert "holds a study with --search microbatch_group=[2], not [4]" in capsys.readouterr().err


def test_no_measured_trial_is_an_error(trainer, tmp_path, capsys, clean_environment, monkeypatch):
    monkeypatch.setenv("HARM", '{"2": "crash"}')
    words = arguments(tmp_path, "--launcher", " ".join(trainer), "--search=microbatch=2", "--search=strategy=ddp")
    assert main([*words, "--trials", "2"]) == 2
    assert "none of 2 trials was measured" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seed", "-1"], "--seed -1: it is from 0"),
        (["--launcher", "'srun"], "--launcher 'srun: no closing quotation"),
        (["--launcher", "srun"], "SLURM_JOB_NUM_NODES='two': no number of nodes"),
    ],
)
def test_mistakes_of_the_command_are_one_line(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "two" if words[1] == "srun" else "1")
    assert main(["tune", "--out", str(tmp_path), "--search", "microbatch=1", *words]) == 2
    assert told in capsys.readouterr().err
