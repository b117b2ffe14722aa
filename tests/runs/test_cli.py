"""The command line: what a value means, who wins, and one clear line for every mistake."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from amsp_jax.__main__ import parse_args
from amsp_jax.cli import exits, parsing
from amsp_jax.cli import settings as cli
from amsp_jax.errors import UserError
from amsp_jax.run.checks import batch_shape
from amsp_jax.run.config import FIELDS, TrainConfig
from amsp_jax.runtime import launch


def load(*argv: str) -> TrainConfig:
    line = cli.parse_command_line(argv)
    return cli.load_config(line.gin_files, line.bindings)


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("STRATEGY=zero3", "strategy", "zero3"),
        ("STRATEGY='zero3'", "strategy", "zero3"),
        ('STRATEGY="zero3"', "strategy", "zero3"),
        ("STRATEGY=8x1", "strategy", "8x1"),
        ("STRATEGY=mics(4)", "strategy", "mics(4)"),
        ("STRATEGY=params=4x1 grads=4x1 opt_state=8x4", "strategy", "params=4x1 grads=4x1 opt_state=8x4"),
        ("RUN_DIR=/a/b=c/d e.f#g", "run_dir", "/a/b=c/d e.f#g"),
        ("RUN_DIR=runs/x", "run_dir", "runs/x"),
        ("RUN_DIR='7'", "run_dir", "7"),
        ("RUN_DIR=7", "run_dir", "7"),
        ("RUN_DIR=[1]", "run_dir", "[1]"),
        ("RUN_DIR=None", "run_dir", None),
        ("STEPS=7", "steps", 7),
        ("STEPS= 7", "steps", 7),
        ("STEPS=1_000", "steps", 1000),
        ("STEPS=%WARMUP_STEPS", "steps", 100),
        ("LEARNING_RATE=1e-3", "learning_rate", 1e-3),
        ("LEARNING_RATE=1", "learning_rate", 1),
        ("CLIP_NORM=None", "clip_norm", None),
        ("PEEL=False", "peel", False),
        ("MODEL_OVERRIDES={'num_layers': 8}", "model_overrides", {"num_layers": 8}),
    ],
)
def test_values(flag: str, field: str, value: object) -> None:
    assert getattr(load(f"--gin.{flag}"), field) == value


def test_the_last_of_two_equal_flags_wins() -> None:
    assert load("--gin.STEPS=300", "--gin.STEPS=200").steps == 200


def test_flags_win_over_files_and_later_files_over_earlier(tmp_path: Path) -> None:
    first, second = tmp_path / "first.gin", tmp_path / "second.gin"
    first.write_text("STEPS = 300\nSEED = 3\nSEQ_LEN = 33\n")
    second.write_text("SEED = 4\nSEQ_LEN = 44\n")
    config = load("--gin.SEQ_LEN=55", f"--gin_file={first}", "--gin_file", str(second))
    assert (config.steps, config.seed, config.seq_len) == (300, 4, 55)


def test_files_are_found_from_the_working_directory_then_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.find_gin_file("configs/quickstart.gin") == cli.PACKAGE / "configs/quickstart.gin"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/quickstart.gin").write_text("")
    assert cli.find_gin_file("configs/quickstart.gin") == Path("configs/quickstart.gin")


def test_a_file_may_have_macros_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "own.gin"
    file.write_text("WIDTH = 64\nGLOBAL_BATCH = %WIDTH\n")
    assert load(f"--gin_file={file}").global_batch == 64
    assert load(f"--gin_file={file}", "--gin.WIDTH=32").global_batch == 32


def test_a_saved_config_is_the_same_config(tmp_path: Path) -> None:
    line = cli.parse_command_line(["--gin.STEPS=123", "--gin.STRATEGY=params=replica grads=node opt_state=full"])
    config = cli.load_config(line.gin_files, line.bindings)
    (tmp_path / "config.gin").write_text(config.to_gin())
    assert load(f"--gin_file={tmp_path / 'config.gin'}") == config


def test_without_a_file_the_defaults_are_those_of_the_dataclass() -> None:
    assert load() == TrainConfig()


def test_every_setting_has_a_line_of_help_with_its_default() -> None:
    help_text, defaults = cli.help_text(), TrainConfig().settings()
    for name, (_, about) in FIELDS.items():
        (line,) = [line for line in help_text.splitlines() if line.split()[:1] == [name.upper()]]
        assert defaults[name] in line and exits.spell(about) in line
    for word in ("mics(k)", "llama-7b", "adamw", "params=... grads=... opt_state=..."):
        assert word in help_text


@pytest.mark.parametrize("command", ["profile", "tune"])
def test_commands_that_take_settings_say_so(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args([command, "--help"])
    assert "--gin.NAME=VALUE" in capsys.readouterr().out


MISTAKES = [
    (["--gin.STEPS=ten"], ["STEPS='ten' is a str", "an int", "write STEPS=100"]),
    (["--gin.STEPS=1e3"], ["STEPS=1000.0", "write STEPS=1000"]),
    (["--gin.STEPS=True"], ["STEPS=True", "int"]),
    (["--gin.STEPS=[1,"], ["STEPS='[1,'", "int"]),
    (["--gin.STEPS=0"], ["STEPS=0", "at least 1"]),
    (["--gin.DATA="], ["DATA='' is empty"]),
    (["--gin.STEPS=-3"], ["STEPS=-3", "at least 1"]),
    (["--gin.SEED=4294967296"], ["SEED=4294967296", "at most 4294967295"]),
    (["--gin.STEPS=100000001"], ["STEPS=100000001", "at most 100,000,000"]),
    (["--gin.SIMULATED_NODES=1000", "--gin.SIMULATED_DEVICES_PER_NODE=8"], ["8,000 simulated devices", "1,024"]),
    (["--gin.CLUSTER=c.json", "--gin.STRATEGY=zero1"], ["CLUSTER=c.json", "STRATEGY=zero1", "STRATEGY=auto"]),
    (["--gin.SEED=-1"], ["SEED=-1", "at least 0"]),
    (["--gin.SIMULATED_NODES=0"], ["SIMULATED_NODES=0", "at least 1"]),
    (["--gin.LEARNING_RATE=1e999"], ["LEARNING_RATE='1e999'", "float"]),
    (["--gin.CLIP_NORM=0"], ["CLIP_NORM=0", "None"]),
    (["--gin.STEPS=10", "--gin.STOP_AFTER=11"], ["STOP_AFTER=11", "STEPS=10"]),
    (["--gin.LEARNING_RATE=-1"], ["LEARNING_RATE=-1", "at least 0"]),
    (["--gin.LEARNING_RATE=high"], ["LEARNING_RATE='high'", "float", "write LEARNING_RATE=0.1"]),
    (["--gin.PEEL=true"], ["PEEL='true'", "write PEEL=True"]),
    (["--gin.PEEL=0"], ["PEEL=0", "write PEEL=False"]),
    (["--gin.CLIP_NORM=none"], ["CLIP_NORM='none'", "write CLIP_NORM=None"]),
    (["--gin.MODEL_OVERRIDES=8"], ["MODEL_OVERRIDES=8", "{'num_layers': 8}"]),
    (["--gin.REMAT=projection"], ["REMAT='projection'", "did you mean projections?"]),
    (["--gin.COMPUTE_DTYPE=bf16"], ["COMPUTE_DTYPE='bf16'", "float32, bfloat16"]),
    (["--gin.INTER_NODE_DTYPE=bf16"], ["INTER_NODE_DTYPE='bf16'", "float32, bfloat16 or None"]),
    (
        ["--gin.INTER_NODE_DTYPE=float32", "--gin.REDUCE_DTYPE=bfloat16"],
        ["INTER_NODE_DTYPE='float32'", "REDUCE_DTYPE='bfloat16'", "leave it at None"],
    ),
    (["--gin.STRATGY=zero3"], ["STRATGY", "did you mean STRATEGY?"]),
    (["--gin.steps=3"], ["steps", "did you mean STEPS?"]),
    (["--gin.TrainConfig.steps=3"], ["TrainConfig.steps", "did you mean STEPS?"]),
    (["--gin.STEPS"], ["--gin.STEPS", "no value"]),
    (["--gin.STEPS=%STEPZ"], ["%STEPZ", "did you mean STEPS?"]),
    (["--gin_file=configs/quickstar.gin"], ["no such file", "did you mean configs/quickstart.gin?"]),
    (["--gin_flie=x.gin"], ["--gin_flie=x.gin", "did you mean --gin_file?"]),
    (["--gin_file=nope.gin"], ["no such file", "; the nearest names are configs/"]),
    (["--steps", "5"], ["unknown argument '--steps'", "settings are written --gin.STEPS=5"]),
    (["--global-batch=8"], ["'--global-batch=8'", "settings are written --gin.GLOBAL_BATCH=8"]),
    (["--steps"], ["settings are written --gin.STEPS=VALUE"]),
    (["--data", "a b.txt"], ["settings are written '--gin.DATA=a b.txt'"]),
    (["--gin_file"], ["--gin_file", "expected one argument"]),
    (["--num_processes=two"], ["--num_processes", "two"]),
    (["quickstart"], ["quickstart"]),
]


@pytest.mark.parametrize(("argv", "parts"), MISTAKES, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_mistakes_on_the_command_line(
    argv: Sequence[str], parts: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.run(lambda: load(*argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


BAD_FILES = [
    ("STRATEGY = zero3\n", ["bad.gin, line 1", "'zero3'", "quotes"]),
    ("LEARNING_RATE = 1e999\n", ["LEARNING_RATE=inf", "finite"]),
    ("\nPEEL = true\n", ["bad.gin, line 2", "'true'", "True, False, None"]),
    ("STEPS 3\n", ["bad.gin, line 1"]),
    ("STRATGY = 'zero3'\n", ["STRATGY", "did you mean STRATEGY?"]),
    ("STEPS = %STEPZ\n", ["%STEPZ", "did you mean STEPS?"]),
    ("optimizer.rate = 3\n", ["optimizer", "line 1"]),
    ("include 'nowhere.gin'\n", ["nowhere.gin", "line 1"]),
    ("from nowhere import something\n", ["nowhere", "line 1"]),
    ("RUN_DIR = 7\n", ["RUN_DIR=7 is an int", "write RUN_DIR='7'"]),
    ("config.TrainConfig.steps = 3\n", ["config.TrainConfig.steps", "a config binds settings alone"]),
    ("other/STEPS = 3\n", ["other/STEPS", "no setting uses it"]),
]


@pytest.mark.parametrize(("text", "parts"), BAD_FILES, ids=[text.strip() for text, _ in BAD_FILES])
def test_mistakes_in_a_file(
    text: str, parts: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.gin").write_text(text)
    assert exits.run(lambda: load(f"--gin_file={tmp_path / 'bad.gin'}")) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    for part in parts:
        assert part in captured.err


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "bad.gin").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match=r"bad\.gin cannot be read as text"):
        load(f"--gin_file={tmp_path / 'bad.gin'}")


def test_every_config_file_loads_and_says_how_to_run_it() -> None:
    files = sorted((cli.PACKAGE / "configs").rglob("*.gin"))
    assert cli.PACKAGE / cli.QUICKSTART in files
    for file in files:
        text = file.read_text()
        header = text.split("\n\n")[0]
        assert header.startswith("#") and ("python train.py" in header or "sbatch " in header), file
        cli.load_config([file])


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
def test_the_quickstart_runs_on_this_many_devices(num_devices: int) -> None:
    config = load(f"--gin_file={cli.QUICKSTART}")
    batch_shape(config.global_batch, config.microbatch, num_devices, config.seq_len)
    assert config.seq_len % 8 == 0 and cli.build_model(config).model.vocab_size % 8 == 0


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert exits.run(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_user_errors_name_the_thing() -> None:
    with pytest.raises(UserError, match="seq_len=0"):
        load("--gin.SEQ_LEN=0")


GRID = {"simulated_nodes": 2, "simulated_devices_per_node": 3, "devices_per_node": 1}
PLACE = {"coordinator": "host:61500", "num_processes": 4, "process_id": 1}


def test_devices_are_those_of_the_command_or_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command has them in its arguments, a run in its settings; the processes are arguments of both."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(launch, "setup", lambda **asked: calls.append(asked))
    parser = parsing.Parser()
    parsing.add_device_arguments(parser)
    place = [f"--{name.replace('_', '-')}={value}" for name, value in PLACE.items()]
    grid = [f"--{name.replace('_', '-')}={value}" for name, value in GRID.items()]
    cli.set_up(parser.parse_args([*place, *grid]))
    line = cli.parse_command_line([f"--{name}={value}" for name, value in PLACE.items()])
    config = load(*(f"--gin.{name.upper()}={value}" for name, value in GRID.items()))
    cli.set_up(line, config, same={"STEPS": "3"})
    assert calls == [{**GRID, **PLACE, "same": None}, {**GRID, **PLACE, "same": {"STEPS": "3"}}]
