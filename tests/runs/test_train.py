"""`python train.py` and `python -m amsp_jax generate`, from the command line to the files they leave."""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from amsp_jax import __main__ as tools
from amsp_jax.run import trainer
from amsp_jax.run.hooks import Hook
from amsp_jax.run.metrics import read_rows
from amsp_jax.run.run import Run

ROOT = Path(__file__).parents[2]
MICRO = [
    "--gin.MODEL=llama-tiny",
    "--gin.MODEL_OVERRIDES={'num_layers':1,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}",
    *("--gin.SEQ_LEN=16", "--gin.GLOBAL_BATCH=16", "--gin.MICROBATCH=2", "--gin.STEPS=10", "--gin.WARMUP_STEPS=2"),
    *("--gin.COMPUTE_DTYPE=float32", "--gin.EVAL_BATCHES=2", "--gin.LEARNING_RATE=0.01"),
]
LOSS_IN_CHUNKS = f"{MICRO[1].removeprefix('--gin.').removesuffix('}')},'loss_chunks':4}}"


class NoLoop:
    """A loop that is at its last step at once."""

    def __init__(self, run: Run, step: None, last: int, **hooks: Sequence[Hook]) -> None:
        self._run, self._last = run, last

    def train(self, directory: Path) -> None:
        self._run.stepped(self._last, self._run.next_state)

    def end(self, error: BaseException | None) -> None:
        pass


STRATEGY = "params=replica grads=node opt_state=full"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(4):
        (folder / f"{i}.txt").write_text(f"text {i}: the quick brown fox jumps over the lazy dog {i * 7} times.\n" * 40)
    return folder


@pytest.fixture(scope="module", autouse=True)
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of tokens of this module's own."""
    # Before a test asks for another number of them.
    assert len(jax.devices()) == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(corpus: Path, run_dir: str | Path, *flags: str, strategy: str = STRATEGY) -> list[dict[str, Any]]:
    """Trains the micro model on 2 x 4 devices and returns the rows of its metrics."""
    argv = [*MICRO, f"--gin.DATA={corpus}", f"--gin.RUN_DIR={run_dir}", f"--gin.STRATEGY={strategy}", *flags]
    assert train.main(argv) == 0
    return read_rows(Path(run_dir) / "metrics.jsonl")


def losses(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]


@dataclasses.dataclass(frozen=True)
class Finished:
    path: Path
    rows: list[dict[str, Any]]
    output: str
    traced: list[str]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A whole run of 10 steps, and the functions that jax traced in it."""
    path = tmp_path_factory.mktemp("finished") / "run"
    traced: list[str] = []

    def listen(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(details["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        rows = run(corpus, path, "--gin.EVAL_EVERY=5", "--gin.CHECKPOINT_EVERY=5")
    jax.monitoring.unregister_event_duration_listener(listen)
    return Finished(path, rows, out.getvalue(), traced)


def test_the_step_is_traced_once(finished: Finished) -> None:
    assert finished.traced.count("step") == 1


def test_a_run_leaves_what_it_should(finished: Finished) -> None:
    assert [row["step"] for row in finished.rows] == list(range(1, 11))
    assert [row["learning_rate"] for row in finished.rows[:3]] == pytest.approx([0.005, 0.0075, 0.01])
    for row in finished.rows:
        assert 0 < row["num_tokens"] <= 16 * 16 and row["grad_norm"] > 0
        assert row["tokens_per_s"] == pytest.approx(16 * 16 / row["step_time_s"])
        assert row["tokens_per_s_per_device"] == pytest.approx(row["tokens_per_s"] / 8)
        assert row["mfu"] is None and row["peak_memory_bytes"] is None and row["tflops_per_device"] > 0
    validation = read_rows(finished.path / "validation.jsonl")
    assert [row["step"] for row in validation] == [0, 5, 10]
    assert validation[-1]["loss"] < validation[0]["loss"]
    files = ("config.gin", "plan.txt", "environment.json", "tokenizer.json", "loss.png")
    assert all((finished.path / name).stat().st_size > 0 for name in files)
    assert sorted(p.name for p in (finished.path / "checkpoints").iterdir()) == ["10", "5"]
    assert json.loads((finished.path / "environment.json").read_text())["num_devices"] == 8
    for text in (
        (finished.path / "plan.txt").read_text(),
        "16 sequences of 16 = 256 tokens a step: 8 ranks x microbatch 2 x accumulation 1\n",
        "XLA attention",
        f"validation loss: {validation[-1]['loss']:.4f}; before training it was {validation[0]['loss']:.4f}",
        "sample",
        f"run folder: {finished.path}",
        f"loss curve: {finished.path / 'loss.png'}",
    ):
        assert text in finished.output


@pytest.mark.parametrize(("strategy", "microbatch"), [("zero3", 2), ("hfsdp(2)", 1)])
def test_strategies_give_equal_numbers(strategy: str, microbatch: int, corpus: Path, finished: Finished) -> None:
    rows = run(corpus, "run", f"--gin.MICROBATCH={microbatch}", strategy=strategy)
    for name in ("loss", "grad_norm", "num_tokens"):
        np.testing.assert_allclose([row[name] for row in rows], [row[name] for row in finished.rows], rtol=1e-5)


def test_a_resumed_run_is_the_same_run(corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    first = run(corpus, "run", "--gin.EVAL_EVERY=5", "--gin.STOP_AFTER=5")
    assert losses(first) == losses(finished.rows[:5])
    assert "stopped and saved at step 5 of 10" in capsys.readouterr().out
    shutil.copytree("run", "other")

    rows = run(corpus, "run", "--gin.EVAL_EVERY=5")
    assert f"goes on from {Path('run/checkpoints/5').absolute()}, saved under '{STRATEGY}'" in capsys.readouterr().out
    for name in ("step", "loss", "grad_norm", "learning_rate", "num_tokens"):
        assert [row[name] for row in rows] == [row[name] for row in finished.rows]
    assert read_rows("run/validation.jsonl") == read_rows(finished.path / "validation.jsonl")

    rows = run(corpus, "other", "--gin.EVAL_EVERY=5", strategy="zero3")
    assert [row["step"] for row in rows] == list(range(1, 11))
    np.testing.assert_allclose(losses(rows), losses(finished.rows), rtol=1e-5)


def test_a_finished_run_has_nothing_to_do(corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    before = (finished.path / "metrics.jsonl").read_text()
    run(corpus, finished.path)
    assert "is at step 10 already: nothing to do; raise STEPS=10 to train on" in capsys.readouterr().out
    assert (finished.path / "metrics.jsonl").read_text() == before


def test_other_steps_are_a_note(
    corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.path, "run")
    monkeypatch.setattr(trainer, "compile_step", lambda job: None)
    monkeypatch.setattr(trainer, "Loop", NoLoop)
    run(corpus, "run", "--gin.STEPS=12", strategy="zero1")
    out = capsys.readouterr().out
    assert "STEPS=10 before, STEPS=12 now: the learning rate follows the new schedule" in out
    assert f"saved under '{STRATEGY}' on 2 nodes x 4 data ranks" in out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], []),
        (["REDUCE_DTYPE=bfloat16"], ["REDUCE_DTYPE=float32 before, REDUCE_DTYPE=bfloat16 now"]),
        ([LOSS_IN_CHUNKS], ["MODEL_OVERRIDES['loss_chunks']=None before, MODEL_OVERRIDES['loss_chunks']=4 now"]),
        (
            ["INTER_NODE_DTYPE=bfloat16", "MICROBATCH=1", "MICROBATCH_GROUP=2"],
            [
                "INTER_NODE_DTYPE=None before, INTER_NODE_DTYPE=bfloat16 now",
                "MICROBATCH_GROUP=1 before, MICROBATCH_GROUP=2 now",
            ],
        ),
    ],
)
def test_other_rounding_is_a_note(
    flags: list[str],
    told: list[str],
    corpus: Path,
    finished: Finished,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(finished.path, "run")
    monkeypatch.setattr(trainer, "compile_step", lambda job: None)
    monkeypatch.setattr(trainer, "Loop", NoLoop)
    run(corpus, "run", "--gin.STEPS=12", *(f"--gin.{flag}" for flag in flags))
    lines = [line for line in capsys.readouterr().out.splitlines() if "but for rounding" in line]
    assert lines == [f"{line}: the same run but for rounding" for line in told]


def test_a_run_whose_checkpoints_are_gone(
    corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished.path, "run")
    for step in Path("run/checkpoints").iterdir():
        shutil.rmtree(step)
    monkeypatch.setattr(trainer, "compile_step", lambda job: None)
    monkeypatch.setattr(trainer, "Loop", NoLoop)
    run(corpus, "run")
    assert "run has no complete checkpoint: starts from the beginning" in capsys.readouterr().out


def test_a_dry_run_writes_nothing(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*MICRO, f"--gin.DATA={corpus}", f"--gin.STRATEGY={STRATEGY}", "--gin.RUN_DIR=run", "--dry-run"]
    assert train.main(argv) == 0
    out = capsys.readouterr().out
    assert "2 nodes x 4 devices" in out and "0: 0, 1, 2, 3; 1: 0, 1, 2, 3" in out
    assert "dry run: it would train steps 1 to 10 in run; nothing is written" in out
    assert not Path("run").exists()


@pytest.mark.parametrize(("strategy", "is_told"), [("mics", True), (STRATEGY, False)])
def test_a_dtype_between_nodes_without_effect_is_told(
    strategy: str, is_told: bool, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--gin.DATA={corpus}", f"--gin.STRATEGY={strategy}", "--gin.INTER_NODE_DTYPE=bfloat16", "--dry-run"]
    assert train.main([*MICRO, *flags]) == 0
    assert ("INTER_NODE_DTYPE=bfloat16 has no effect: " in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("tensor", [1, 2])
def test_groups_and_what_they_lose_beside_tensor_ranks_are_told(
    tensor: int, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--gin.DATA={corpus}", "--gin.STRATEGY=zero1", "--gin.MICROBATCH=1", f"--gin.TENSOR={tensor}"]
    assert train.main([*MICRO, *flags, "--gin.GLOBAL_BATCH=16", "--gin.MICROBATCH_GROUP=2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert ("MICROBATCH_GROUP=2 with TENSOR=2, CONTEXT=1: " in out) == (tensor == 2)
    assert f" x accumulation {2 * tensor}, in groups of 2 microbatches\n" in out


@pytest.mark.parametrize(
    ("flags", "last", "message"),
    [
        (["--gin.ON_NONFINITE=stop"], 2, "ON_NONFINITE='skip' passes over such batches"),
        (["--gin.ON_NONFINITE=skip", "--gin.MAX_SKIPPED=2"], 4, "more in a row than MAX_SKIPPED=2 allows"),
    ],
)
def test_numbers_that_went_bad_end_the_run(
    flags: list[str], last: int, message: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [*MICRO, f"--gin.DATA={corpus}", f"--gin.STRATEGY={STRATEGY}", "--gin.RUN_DIR=run", *flags]
    assert train.main([*argv, "--gin.LEARNING_RATE=1e30", "--gin.OPTIMIZER=sgd", "--gin.CHECKPOINT_EVERY=1"]) == 87
    error = capsys.readouterr().err
    assert "are not both finite; not finite: " in error and message in error and error.count("\n") == 1
    rows = read_rows("run/metrics.jsonl")
    assert rows[last - 1]["num_skipped"] > 0 and max(row["step"] for row in rows) <= last
    # Nothing bad was saved but what a policy of skipping allows.
    assert all(int(path.name) < last for path in Path("run/checkpoints").iterdir())


def test_on_damaged_goes_back(corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished.path, "run")
    shutil.rmtree("run/checkpoints/10/meta")
    argv = [*MICRO, f"--gin.DATA={corpus}", "--gin.RUN_DIR=run", f"--gin.STRATEGY={STRATEGY}", "--gin.STEPS=11"]
    assert train.main(argv) == 2
    assert "ON_DAMAGED='previous'" in capsys.readouterr().err
    assert train.main([*argv, "--gin.STEPS=10", "--gin.ON_DAMAGED=previous", "--gin.EVAL_EVERY=5"]) == 0
    out = capsys.readouterr().out
    assert "goes on from run/checkpoints/5" in out.replace(f"{Path.cwd()}/", "") and "10.damaged" in out
    assert losses(read_rows("run/metrics.jsonl")) == losses(finished.rows)
    assert sorted(p.name for p in Path("run/checkpoints").iterdir()) == ["10", "10.damaged", "5"]


def test_data_go_by_their_content(
    corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A corpus that lies elsewhere, or whose path is spelled in another way, is the same; changed text is not."""
    shutil.copytree(finished.path, "run")
    shutil.copytree(corpus, "other")
    monkeypatch.setattr(trainer, "compile_step", lambda job: None)
    monkeypatch.setattr(trainer, "Loop", NoLoop)
    argv = [*MICRO, "--gin.RUN_DIR=run", f"--gin.STRATEGY={STRATEGY}", "--gin.STEPS=12"]
    for path in ("other", "./other/", str(Path("other").absolute())):
        assert train.main([*argv, f"--gin.DATA={path}"]) == 0
    Path("other/0.txt").write_text("something else\n" * 300)
    assert_mistake([*argv, "--gin.DATA=other"], ["DATA='other' is not what the run began with: another text"], capsys)
    shutil.rmtree("run/checkpoints")
    assert_mistake([*argv, "--gin.DATA=other"], ["DATA='other' is not what the run began with: another text"], capsys)
    # A run of before records of content.
    record = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(json.dumps({**record, "data_fingerprint": {}}))
    assert_mistake([*argv, "--gin.DATA=./other"], ["holds a different run", "DATA='./other' here"], capsys)


def test_replicas_are_compared(corpus: Path, finished: Finished) -> None:
    rows = run(corpus, "run", "--gin.CHECK_REPLICAS_EVERY=4", "--gin.KEEP_EVERY=4", "--gin.CHECKPOINT_EVERY=2")
    assert losses(rows) == losses(finished.rows)
    assert sorted(int(p.name) for p in Path("run/checkpoints").iterdir()) == [4, 8, 10]


def test_generate_on_other_devices(finished: Finished) -> None:
    """One device, where the run had eight."""
    process = program("-m", "amsp_jax", "generate", str(finished.path), "--prompt", "the quick", "--max-tokens", "8")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "WARNING:absl" not in err
    assert out.startswith("the quick") and len(out) > len("the quick\n")


def test_init_from_takes_the_weights_alone(
    corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = finished.path / "checkpoints" / "5"
    run(corpus, "run", f"--gin.INIT_FROM={saved}", "--gin.STOP_AFTER=1", "--gin.OPTIMIZER=sgd")
    assert f"the weights are those of {saved}" in capsys.readouterr().out
    validation = read_rows("run/validation.jsonl")
    assert validation == [{**read_rows(finished.path / "validation.jsonl")[1], "step": 0}]


def test_fresh_runs_are_numbered(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "compile_step", lambda job: None)
    monkeypatch.setattr(trainer, "Loop", NoLoop)
    for name in ("0001", "0002"):
        assert train.main([*MICRO, f"--gin.DATA={corpus}", f"--gin.STRATEGY={STRATEGY}"]) == 0
        assert sorted(p.name for p in Path("runs").iterdir())[-1] == name


MISTAKES = {
    "broken rule": (["STRATEGY=params=8 grads=2 opt_state=8"], ["params=4x2", "dependency rule", "Nearest"]),
    "not a divisor": (["STRATEGY=params=3x1 grads=3x1 opt_state=3x1"], ["3 does not divide 4", "Nearest"]),
    "unknown preset": (["STRATEGY=zreo3"], ["zreo3", "'zero3'"]),
    "unknown setting": (["STRATGY=zero3"], ["STRATGY", "did you mean STRATEGY?"]),
    "wrong type": (["STEPS=ten"], ["STEPS='ten'", "write STEPS=100"]),
    "batch": (["GLOBAL_BATCH=20"], ["GLOBAL_BATCH=20", "MICROBATCH=2 x 8", "16 or 32"]),
    "small batch": (["GLOBAL_BATCH=4"], ["GLOBAL_BATCH=4", "GLOBAL_BATCH=16 would do"]),
    "no data": (["DATA=nowhere"], ["DATA='nowhere'", "no such file or folder"]),
    "empty data": (["DATA=empty"], ["empty", "no text"]),
    "binary data": (["DATA=binary.txt"], ["binary.txt", "not UTF-8"]),
    "long sequence": (["SEQ_LEN=1000000"], ["1000000", "longer than"]),
    "unknown model": (["MODEL=lama-tiny"], ["lama-tiny", "llama-tiny"]),
    "unknown override": (["MODEL_OVERRIDES={'layers': 1}"], ["layers", "num_layers"]),
    "wrong override": (["MODEL_OVERRIDES={'num_layers': '1'}"], ["num_layers='1'", "int"]),
    "unknown optimizer": (["OPTIMIZER=adam"], ["adam", "adamw"]),
    "memory": (["MODEL=gpt-1t", "MODEL_OVERRIDES={}", "STRATEGY=ddp"], ["GiB", "master", "moments", "zero3"]),
    "not a run": (["RUN_DIR=notes"], ["notes", "run.json"]),
    "a file": (["RUN_DIR=binary.txt"], ["binary.txt", "is a file"]),
    "nowhere": (["INIT_FROM=nope"], ["INIT_FROM=nope", "no such folder"]),
    "no weights": (["INIT_FROM=empty"], ["INIT_FROM=empty", "no complete checkpoint"]),
    "more stages than devices": (["PIPELINE=64"], ["PIPELINE=64", "8 devices", "; 1 would"]),
    "other devices": (["SIMULATED_NODES=3"], ["12 simulated devices", "8"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(
    name: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, parts = MISTAKES[name]
    Path("empty").mkdir()
    Path("notes").mkdir()
    Path("notes/todo.txt").write_text("buy milk")
    Path("binary.txt").write_bytes(bytes(range(256)))
    before = sorted(tmp_path.rglob("*"))
    argv = [*MICRO, f"--gin.DATA={corpus}", f"--gin.STRATEGY={STRATEGY}", *(f"--gin.{flag}" for flag in flags)]
    assert_mistake(argv, parts, capsys)
    assert sorted(tmp_path.rglob("*")) == before


def assert_mistake(argv: Sequence[str], parts: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert train.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for part in parts:
        assert part in error


def test_a_folder_with_a_different_run(corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")}
    same = [*MICRO, f"--gin.DATA={corpus}", f"--gin.RUN_DIR={finished.path}", f"--gin.STRATEGY={STRATEGY}"]
    for flag, parts in {
        "SEED=1": ["SEED=0 there and SEED=1 here"],
        "GLOBAL_BATCH=32": ["GLOBAL_BATCH=16 there and GLOBAL_BATCH=32 here"],
        "SEQ_LEN=8": ["SEQ_LEN=16 there and SEQ_LEN=8 here"],
        "OPTIMIZER=sgd": ["OPTIMIZER='adamw' there and OPTIMIZER='sgd' here"],
        "MODEL_OVERRIDES={'num_layers': 2}": ["MODEL_OVERRIDES", "{'num_layers': 2} here"],
    }.items():
        assert_mistake([*same, f"--gin.{flag}"], ["holds a different run", *parts], capsys)
    assert {path: path.stat().st_mtime_ns for path in finished.path.rglob("*")} == before


def test_a_checkpoint_of_another_model(
    corpus: Path, finished: Finished, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "compile_step", lambda job: None)
    argv = [*MICRO, f"--gin.DATA={corpus}", f"--gin.STRATEGY={STRATEGY}", f"--gin.INIT_FROM={finished.path}"]
    sizes = "{'num_layers':2,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}"
    assert_mistake([*argv, f"--gin.MODEL_OVERRIDES={sizes}"], ["another model", "lacks"], capsys)
    sizes = "{'num_layers':1,'hidden':16,'ffn':64,'num_heads':2,'num_kv_heads':2,'vocab_size':258}"
    assert_mistake([*argv, f"--gin.MODEL_OVERRIDES={sizes}"], ["does not fit", "64"], capsys)
    assert not Path("runs").exists()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--help"]) == 0
    assert "STRATEGY" in capsys.readouterr().out


def test_mistakes_of_generate(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, part in (
        (["generate", "nowhere", "--prompt", "x"], "nowhere is no run folder"),
        (["generate", str(finished.path)], "--prompt"),
        (["generate", str(finished.path), "--prompt", ""], "--prompt is empty"),
        (["generate", str(finished.path), "--prompt", "x", "--top-p", "2"], "top-p 2.0"),
        (["sample"], "sample"),
        ([], "COMMAND"),
    ):
        assert tools.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1 and part in error


def program(*command: str, **environment: str) -> subprocess.Popen[str]:
    """A process of its own, which sees none of this one's devices."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", **environment}
    return subprocess.Popen(
        [sys.executable, *command], env=own, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(corpus: Path, finished: Finished) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    argv = [str(ROOT / "train.py"), *MICRO, f"--gin.DATA={corpus}", "--gin.EVAL_EVERY=3"]
    argv += ["--gin.RUN_DIR=run", f"--gin.STRATEGY={STRATEGY}"]
    both = [
        program(*argv, "--coordinator", f"127.0.0.1:{port}", "--num_processes", "2", "--process_id", str(i))
        for i in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "loss" not in outputs[1][0]
    rows = read_rows("run/metrics.jsonl")
    for name in ("step", "loss", "grad_norm", "num_tokens"):
        np.testing.assert_allclose([row[name] for row in rows], [row[name] for row in finished.rows], rtol=1e-5)


@pytest.mark.slow
def test_the_exit_code_of_the_program() -> None:
    process = program(str(ROOT / "train.py"), "--gin.STEPS=ten")
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: STEPS='ten'") and "Traceback" not in err
