"""A run that is asked to stop, at each thing it does, ends with 85 and goes on as if nothing had been."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from amsp_jax.run.metrics import read_rows
from amsp_jax.runtime import exit_codes

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "--gin.MODEL_OVERRIDES={'num_layers':1,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}",
    *("--gin.SEQ_LEN=16", "--gin.GLOBAL_BATCH=8", "--gin.MICROBATCH=2", "--gin.STEPS=30", "--gin.WARMUP_STEPS=2"),
    *("--gin.COMPUTE_DTYPE=float32", "--gin.EVAL_BATCHES=3", "--gin.EVAL_EVERY=8", "--gin.CHECKPOINT_EVERY=12"),
    *("--gin.SIMULATED_DEVICES_PER_NODE=2", "--gin.STRATEGY=zero3", "--gin.DATA=corpus"),
]
# Sends itself a signal when a function is called for the nth time, before what the function does.
CHILD = """
import os, signal, sys
from amsp_jax.run import checkpoint
from amsp_jax.runtime import launch
from amsp_jax.run import actions, loop, trainer

names = {"start-up": (launch, "setup"), "data": (trainer, "prepare"), "compile": (trainer, "compile_step"),
         "step": (loop.Loop, "_advance"), "validation": (actions.Validation, "validate"),
         "save": (checkpoint.Checkpointer, "save")}
owner, name = names[sys.argv[1]]
left, call = [int(sys.argv[2])], getattr(owner, name)

def interrupted(*args, **kwargs):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    return call(*args, **kwargs)

setattr(owner, name, interrupted)
import train
launch.end_process(train.main(sys.argv[4:]))
"""


def run(folder: Path, environment: Mapping[str, str], *command: str, run_dir: str = "run") -> tuple[int, str]:
    own = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", **environment}
    argv = [sys.executable, *command, *SETTINGS, f"--gin.RUN_DIR={run_dir}"]
    done = subprocess.run(argv, cwd=folder, env=own, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_stop_at_anything_it_does_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 200)
    environment = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    train = str(ROOT / "train.py")
    assert run(tmp_path, environment, train, run_dir="whole")[0] == 0

    expected = [
        ("start-up", 1, "SIGTERM", "asked to stop (SIGTERM)", None),
        ("data", 1, "SIGUSR1", "asked to stop (SIGUSR1)", None),
        ("compile", 1, "SIGTERM", "there is no checkpoint yet", None),
        ("step", 5, "SIGTERM", "stopped by SIGTERM at step 5 of 30, which is saved", 5),
        ("validation", 1, "SIGINT", "stopped by SIGINT at step 8 of 30, which is saved", 8),
        ("save", 1, "SIGTERM", "stopped by SIGTERM at step 12 of 30, which is saved", 12),
        ("compile", 1, "SIGTERM", "checkpoints/12", 12),
    ]
    for what, nth, signal, message, newest in expected:
        code, error = run(tmp_path, environment, "-c", CHILD, what, str(nth), signal)
        assert (code, message in error) == (exit_codes.STOPPED, True), (what, code, error)
        saved = [int(path.name) for path in (tmp_path / "run").glob("checkpoints/*")]
        assert max(saved, default=None) == newest, what
    # Asked in its last validation, it has only to finish.
    assert run(tmp_path, environment, "-c", CHILD, "validation", "3", "SIGTERM")[0] == 0

    for file in ("metrics.jsonl", "validation.jsonl"):
        rows, whole = (read_rows(tmp_path / name / file) for name in ("run", "whole"))
        for key in ("step", "loss", "grad_norm", "learning_rate"):
            assert [row.get(key) for row in rows] == [row.get(key) for row in whole], (file, key)


@pytest.mark.parametrize("command", [["train.py"], ["-m", "amsp_jax", "train"]], ids=["train.py", "amsp-jax train"])
def test_a_stop_before_jax_is_there_ends_with_the_code_of_a_stop(command: list[str], tmp_path: Path) -> None:
    """A jax whose import asks for the stop takes the place of the real one."""
    (tmp_path / "jax.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    own = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (exit_codes.STOPPED, "")
    assert done.stderr == "asked to stop while starting: nothing to save\n"
