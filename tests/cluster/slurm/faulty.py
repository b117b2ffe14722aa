"""train.py in which a fault happens: `python faulty.py FOLDER path/to/train.py [ARGUMENT]...`

FOLDER/faults.json lists the faults, each of which happens once, though the run starts again: {"step": 7, "saved": 5,
"process": 1, "what": "kill"}. What: "raise" an exception, "kill" or "stop" the process by a signal, "hang" its main
thread; "pause" makes all processes wait until FOLDER/go.STEP exists, for a fault that comes from outside. In
FOLDER/steps.jsonl process 0 says which step it dispatched, when and in which start of the job; FOLDER/at.STEP exists
from a fault, or from a pause, on.

Checkpoints are written in the background, and a disk may be slow: each fault and each pause waits until that of its
step "saved" is complete, so that what is lost is known.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(sys.argv[1])
START, PROCESS = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])


def _await_checkpoint(step: int) -> None:
    """Until the checkpoint of `step` is complete."""
    while not (FOLDER / "run/checkpoints" / str(step)).is_dir():
        time.sleep(0.05)


def _happen(fault: dict[str, Any]) -> None:
    step, what = fault["step"], fault["what"]
    at, go = FOLDER / f"at.{step}", FOLDER / f"go.{step}"
    if (go if what == "pause" else at).exists():
        return
    _await_checkpoint(fault["saved"])
    if what != "pause" and fault["process"] != PROCESS:
        return
    at.touch()
    if what == "pause":
        while not go.exists():
            time.sleep(0.05)
        return
    if what == "raise":
        raise RuntimeError(f"injected at step {step}")
    if what == "hang":
        time.sleep(600)
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


def _make_faulty() -> None:
    from amsp_jax.run.reporter import Reporter

    dispatched = Reporter.dispatched
    faults = {fault["step"]: fault for fault in json.loads((FOLDER / "faults.json").read_text())}

    def dispatched_and_more(self: Reporter, step: int, *rest: Any) -> None:
        dispatched(self, step, *rest)
        if PROCESS == 0:
            with (FOLDER / "steps.jsonl").open("a") as file:
                file.write(json.dumps({"start": START, "step": step, "time": time.time()}) + "\n")
        if step in faults:
            _happen(faults[step])

    Reporter.dispatched = dispatched_and_more  # type: ignore[method-assign]


# As `python train.py` would find its modules and arguments.
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
_make_faulty()
runpy.run_path(sys.argv[0], run_name="__main__")
