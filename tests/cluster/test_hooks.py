"""Hooks on two processes: one that raises in one of them ends both, at one step, which is saved."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from amsp_jax.run.metrics import read_rows

REPOSITORY = Path(__file__).resolve().parents[2]
CHILD = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import amsp_jax as amsp
from amsp_jax.runtime import launch

address, index, bad_step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

class Rows:
    fingerprint = "counting"
    def rows(self, step, rows):
        ids = (rows[:, None] + step + np.arange(5)) % 11
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}

def loss(params, batch, rng):
    logits = jax.nn.log_softmax(params["table"][batch["tokens"]].astype(jnp.float32))
    wrong = -jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return ((wrong * batch["weights"]).sum(), batch["weights"].sum()), {}

class Bad(amsp.hooks.Hook):
    def on_step(self, run, metrics):
        # In one process alone, as where only one of them writes files.
        if not run.is_process_0 and metrics.step == bad_step:
            raise OSError("planted")

layout = launch.setup(coordinator=address, num_processes=2, process_id=index, simulated_devices_per_node=2)
model = amsp.Model.from_loss(loss, lambda key: {"table": jax.random.normal(key, (11, 11))})
try:
    amsp.Trainer(
        model, optax.adam(0.05), strategy="zero3", data=Rows(), global_batch=8, seq_len=4, steps=60, run_dir="run",
        checkpoint_every=0, eval_every=0, layout=layout, hooks=[Bad()],
    ).fit()
except amsp.HookError as error:
    print("HookError:", error)
    launch.end_process(2)
launch.end_process(0)
"""


def two_processes(folder: Path, bad_step: int) -> list[tuple[int, str]]:
    """The exit code and the output of each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", CHILD, address]
    children = [
        subprocess.Popen([*command, str(i), str(bad_step)], cwd=folder, env=environ, stdout=-1, stderr=-2, text=True)
        for i in range(2)
    ]
    outputs = [child.communicate(timeout=240)[0] for child in children]
    return [(child.returncode, output) for child, output in zip(children, outputs, strict=True)]


def test_a_hook_that_raises_in_one_process_ends_both(tmp_path: Path) -> None:
    (code_0, told_0), (code_1, told_1) = two_processes(tmp_path, bad_step=3)
    assert (code_0, code_1) == (2, 2), told_0 + told_1
    assert "HookError: hook Bad failed in on_step at step 3: OSError: planted; step" in told_1
    assert "HookError: hook Bad of process 1 failed; this process stopped at step" in told_0
    (saved,) = (int(path.name) for path in (tmp_path / "run/checkpoints").iterdir())
    assert 3 < saved < 60 and [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")][-1] == saved
    # And both go on from there.
    for code, told in two_processes(tmp_path, bad_step=0):
        assert code == 0, told
    assert [row["step"] for row in read_rows(tmp_path / "run/metrics.jsonl")] == list(range(1, 61))
