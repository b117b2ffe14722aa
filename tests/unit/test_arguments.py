"""The command line before a command runs: helps without heavy imports, and words that agree with the engine's."""

import importlib
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from amsp_jax import __main__ as program
from amsp_jax.cli import arguments, exits
from amsp_jax.cli.tune.point import DIMENSIONS
from amsp_jax.engine.optimizer import OPTIMIZERS
from amsp_jax.engine.pipeline import schedule
from amsp_jax.engine.rematerialization import Remat
from amsp_jax.predict.calibrate import DEFAULT_BUDGET_S
from amsp_jax.predict.planner import Objective
from amsp_jax.run.run_folder import DEFAULT_PARENT

ROOT = Path(__file__).parents[2]
# Prints the modules that a help needed and the processor time of the whole process.
HELPS = """
import contextlib, json, sys, time
from amsp_jax.__main__ import main
with contextlib.redirect_stdout(None):
    for words in json.loads(sys.argv[1]):
        try:
            main(words)
        except SystemExit as done:
            assert not done.code, words
print(json.dumps([time.process_time(), sorted(sys.modules)]))
"""


def test_words_are_those_of_the_modules_that_use_them() -> None:
    assert tuple(Remat) == arguments.REMATS
    assert tuple(OPTIMIZERS) == arguments.OPTIMIZERS
    assert schedule.NAMES == arguments.SCHEDULES
    assert tuple(Objective) == arguments.OBJECTIVES
    assert set(arguments.TUNE_SEARCH) == set(DIMENSIONS)
    assert arguments.CALIBRATE_BUDGET_S == DEFAULT_BUDGET_S
    assert arguments.RUNS_FOLDER == DEFAULT_PARENT


def test_helps_import_nothing_that_is_slow() -> None:
    words = [["--help"], ["--version"], *([command, "--help"] for command in arguments.COMMANDS)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HELPS, json.dumps(words)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    seconds, modules = json.loads(done.stdout)
    assert not {"jax", "numpy", "gin", "flax", "optax", "grain", "matplotlib"} & set(modules)
    # All the helps together; one of them is to take less than a second.
    assert seconds < 1


def test_every_command_has_a_module_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    modules = {path.stem for path in (ROOT / "amsp_jax/cli/commands").glob("*.py")} - {"__init__", "workload"}
    assert modules == {program.TRAIN, *arguments.COMMANDS}
    with pytest.raises(SystemExit):
        program.main(["--help"])
    text = capsys.readouterr().out
    assert modules <= set(re.findall(r"^ {4}([a-z]+)\b", text, re.MULTILINE))


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2
    out, err = capsys.readouterr()
    assert "COMMAND" in out and err.startswith("error: no command; `amsp-jax train` runs the quickstart")


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["--version"])
    assert capsys.readouterr().out == f"amsp-jax {version('amsp-jax')}\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["plna"], "invalid choice: 'plna'"),
        (["plan", "--model", "llama-7b"], "the following arguments are required: --cluster, --global-batch"),
        (["plan", "--gin.STEPS=3"], "the following arguments are required"),
        (["doctor", "--gin.STEPS=3"], "unrecognized arguments: --gin.STEPS=3; `amsp-jax --help`"),
        (
            ["generate", "runs/1", "--prompt", "a", "--max-tokens", "-1"],
            "--max-tokens: -1 is no number above 0",
        ),
        (["generate", "runs/1", "--prompt", "a", "--max-tokens", "0"], "--max-tokens: 0 is no number above 0"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and told in err and err.count("\n") == 1


def test_a_package_that_is_missing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        importlib.import_module("a_package_that_nobody_has.part")

    assert exits.run(command) == 2
    assert capsys.readouterr().err.startswith("error: the module a_package_that_nobody_has is not installed; `amsp-jax")


def test_a_module_of_ours_that_is_missing_is_a_fault_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError):
        exits.run(lambda: importlib.import_module("amsp_jax.nothing") and None)
