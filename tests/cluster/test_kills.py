"""Kills at random moments: whatever they hit, the run goes on and ends with the numbers of one that nobody disturbed.

A start of Python and jax takes longer than what is to be killed. So a server imports the program once, starts
no device and no thread, and forks a child for each start of `train.py`.
"""

import collections
import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from amsp_jax.run.metrics import TRAIN_FILE, VALIDATION_FILE, read_rows

ROOT = Path(__file__).parents[2]
SEED = 5
# The soak repeats at random; what is hit once, a pass of each aim hits.
PASS, SOAK = pytest.mark.slow, pytest.mark.soak
AIMS = ("start-up", "save", "anywhere")
STEPS, EVERY = 300, 7
# A life trains for up to this long before it is killed; some lives are stopped by SIGTERM first.
LONGEST_S, SHARE_OF_STOPS = 0.8, 0.2
# About how long a save takes.
SAVE_S = 0.1
# What takes longer hangs.
PATIENCE_S = 60.0
STOPPED, PEER_LOST = 85, 86
OTHER_ENDS_WITHIN_S = 30.0
MICRO = [
    "--gin.MODEL=llama-tiny",
    "--gin.MODEL_OVERRIDES={'num_layers':1,'hidden':16,'ffn':32,'num_heads':2,'num_kv_heads':2,'vocab_size':258}",
    *("--gin.SEQ_LEN=16", "--gin.GLOBAL_BATCH=4", "--gin.MICROBATCH=2", "--gin.COMPUTE_DTYPE=float32"),
    *("--gin.STRATEGY=zero3", "--gin.SIMULATED_NODES=1", "--gin.SIMULATED_DEVICES_PER_NODE=2"),
    *(f"--gin.STEPS={STEPS}", "--gin.WARMUP_STEPS=5", "--gin.LEARNING_RATE=0.01", "--gin.KEEP_CHECKPOINTS=2"),
    *(f"--gin.CHECKPOINT_EVERY={EVERY}", "--gin.EVAL_EVERY=40", "--gin.EVAL_BATCHES=1"),
]
"""Saves take longer than the steps between them, so that both are hit."""

SERVER = """
import json, os, sys
import train
from amsp_jax.runtime import launch
assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose threads"
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        launch.end_process(train.main(request["argv"]))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Server:
    """Starts `train.py` again and again, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "OPENBLAS_NUM_THREADS": "1",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        command = [sys.executable, "-c", SERVER]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def start(self, *argv: str) -> "Life":
        assert self.process.stdin
        log = self.folder / "log"
        self.process.stdin.write(json.dumps({"argv": argv, "log": str(log)}) + "\n")
        return Life(int(self._answer()), log, lambda: int(self._answer()))

    def close(self) -> None:
        # Closes its stdin, at whose end it ends, and waits.
        with self.process:
            pass


class Life:
    """One process that trains, from its start to its end."""

    def __init__(self, pid: int, log: Path, wait: Callable[[], int]) -> None:
        self.pid, self.log, self.begun = pid, log, time.time()
        self._wait = wait

    def kill(self, number: signal.Signals) -> None:
        # It may have ended already; its number is not given away within a second.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def is_over(self) -> bool:
        return not Path(f"/proc/{self.pid}").exists()

    def exit_code(self) -> int:
        return self._wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with contextlib.closing(Server(tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 258, 4000).astype(np.uint16))
    return path


Rows = list[tuple[float, ...]]


def rows(run_dir: Path, file: str, *names: str) -> Rows:
    return [tuple(row[name] for name in names) for row in read_rows(run_dir / file)]


def numbers(run_dir: Path) -> tuple[Rows, Rows]:
    """What must not depend on kills: the rows of steps and of validations, without their times."""
    steps = rows(run_dir, TRAIN_FILE, "step", "loss", "grad_norm", "learning_rate")
    return steps, rows(run_dir, VALIDATION_FILE, "step", "loss")


def checkpoints(run_dir: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(FileNotFoundError), os.scandir(run_dir / "checkpoints") as entries:
        return [entry for entry in entries if entry.is_dir()]
    return []


def unfinished(run_dir: Path) -> set[tuple[str, int]]:
    """The folders of saves that are being written, or were when their process was killed."""
    return {(entry.name, entry.inode()) for entry in checkpoints(run_dir) if not entry.name.isdecimal()}


def has_begun(life: Life, run_dir: Path) -> bool:
    """Whether this life has written a row."""
    with contextlib.suppress(FileNotFoundError):
        return (run_dir / TRAIN_FILE).stat().st_mtime > life.begun
    return False


def what_was_hit(life: Life, run_dir: Path, unfinished_before: set[tuple[str, int]]) -> str:
    if unfinished(run_dir) - unfinished_before:
        return "save"
    if not has_begun(life, run_dir):
        return "start-up"
    return "end" if any(entry.name == str(STEPS) for entry in checkpoints(run_dir)) else "step"


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.002)


def kill_at_random(life: Life, run_dir: Path, rng: random.Random, start_s: float, aim: str) -> float:
    """Kills during the start, during a save, or anywhere after the start. Returns how long a start takes."""
    before = unfinished(run_dir)
    if aim == "start-up":
        wait_until(life.is_over, rng.uniform(0, start_s))
    else:
        wait_until(lambda: life.is_over() or has_begun(life, run_dir), PATIENCE_S)
        start_s = time.time() - life.begun
        wait_until(life.is_over, rng.uniform(0, LONGEST_S))
    if aim == "save":
        before |= unfinished(run_dir)
        wait_until(lambda: life.is_over() or bool(unfinished(run_dir) - before), PATIENCE_S)
        wait_until(life.is_over, rng.uniform(0, SAVE_S))
    if rng.random() < SHARE_OF_STOPS:
        life.kill(signal.SIGTERM)
        # As a scheduler does that loses patience; or it does not.
        wait_until(life.is_over, rng.choice([rng.uniform(0, 0.5), PATIENCE_S]))
    life.kill(signal.SIGKILL)
    return start_s


def assert_tidy(run_dir: Path) -> None:
    assert {entry.name for entry in checkpoints(run_dir)} == {str(STEPS), str(STEPS // EVERY * EVERY)}
    assert [path.name for path in run_dir.rglob("*") if path.suffix in (".part", ".tmp")] == []


def train_undisturbed(server: Server, argv: list[str], run_dir: Path) -> tuple[Rows, Rows]:
    life = server.start(*argv, f"--gin.RUN_DIR={run_dir}")
    assert life.exit_code() == 0, life.log.read_text()
    found = numbers(run_dir)
    assert [row[0] for row in found[0]] == list(range(1, STEPS + 1))
    return found


@pytest.mark.parametrize("num_kills", [pytest.param(6, marks=PASS), pytest.param(50, marks=SOAK)])
def test_kills_change_no_number(
    server: Server, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_kills: int
) -> None:
    argv, rng, hits = [*MICRO, f"--gin.DATA={data}"], random.Random(SEED), Hits(num_kills)
    expected = train_undisturbed(server, argv, tmp_path / "undisturbed")
    begin = time.monotonic()
    while hits.num_kills < num_kills:
        run_dir = tmp_path / f"run{hits.num_runs}"
        while train_and_kill(server, [*argv, f"--gin.RUN_DIR={run_dir}"], run_dir, rng, hits) != 0:
            pass
        hits.num_runs += 1
        assert numbers(run_dir) == expected
        assert_tidy(run_dir)
    with capsys.disabled():
        print(f"\n{hits} in {time.monotonic() - begin:.0f} s")
    assert min(hits.kills[what] for what in ("save", "step", "start-up")) >= num_kills // 16
    assert hits.kills["save"] and hits.kills["start-up"]


@dataclasses.dataclass
class Hits:
    """How many kills there were of those wanted, by what they hit; and how many runs ended."""

    num_wanted: int
    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    stops: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    num_runs: int = 0
    num_lives: int = 0
    start_s: float = 5.0

    @property
    def num_kills(self) -> int:
        return self.kills.total()

    def __str__(self) -> str:
        stops = f"{self.stops.total()} stops by SIGTERM {dict(self.stops)}"
        return f"{self.num_kills} kills {dict(self.kills)} and {stops} over {self.num_runs} runs of {STEPS} steps"


def train_and_kill(server: Server, argv: list[str], run_dir: Path, rng: random.Random, hits: Hits) -> int:
    """The exit code of one life, which is left alone once there were enough kills."""
    before = unfinished(run_dir)
    life = server.start(*argv)
    if hits.num_kills < hits.num_wanted:
        aim = AIMS[hits.num_lives % len(AIMS)]
        hits.num_lives += 1
        hits.start_s = kill_at_random(life, run_dir, rng, hits.start_s, aim)
    code = life.exit_code()
    what = what_was_hit(life, run_dir, before)
    if code == -signal.SIGKILL:
        hits.kills[what] += 1
    # A SIGTERM of the first milliseconds meets a process that has not asked for it yet.
    elif code == STOPPED or (code == -signal.SIGTERM and what == "start-up"):
        hits.stops[what] += 1
    else:
        assert code == 0, life.log.read_text()
    return code


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        folders = [tmp_path_factory.mktemp(f"server{i}") for i in range(2)]
        yield [stack.enter_context(contextlib.closing(Server(folder))) for folder in folders]


def start_pair(pair: list[Server], argv: list[str]) -> list[Life]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    place = [f"--coordinator={address}", "--num_processes=2"]
    return [server.start(*argv, *place, f"--process_id={index}") for index, server in enumerate(pair)]


@pytest.mark.parametrize("num_kills", [pytest.param(2, marks=PASS), pytest.param(6, marks=SOAK)])
def test_the_kill_of_one_process_ends_the_other(
    pair: list[Server], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_kills: int
) -> None:
    argv, rng = [*MICRO, f"--gin.DATA={data}"], random.Random(SEED)
    lives = start_pair(pair, [*argv, f"--gin.RUN_DIR={tmp_path / 'undisturbed'}"])
    assert [life.exit_code() for life in lives] == [0, 0], lives[0].log.read_text()

    run_dir, waits = tmp_path / "run", []
    while True:
        lives = start_pair(pair, [*argv, f"--gin.RUN_DIR={run_dir}"])
        if len(waits) == num_kills:
            break
        # Each of the two in turn.
        victim, other = lives if len(waits) % 2 else reversed(lives)
        wait_until(lambda lives=lives: has_begun(lives[0], run_dir), PATIENCE_S)
        time.sleep(rng.uniform(0, LONGEST_S))
        victim.kill(signal.SIGKILL)
        killed_at = time.monotonic()
        wait_until(other.is_over, OTHER_ENDS_WITHIN_S)
        waits.append(time.monotonic() - killed_at)
        assert other.is_over(), other.log.read_text()
        # jax's service is in process 0: where that dies jax may abort the other before the watch can end it.
        expected = {PEER_LOST, -signal.SIGABRT} if victim is lives[0] else {PEER_LOST}
        assert victim.exit_code() == -signal.SIGKILL and other.exit_code() in expected, other.log.read_text()
    assert [life.exit_code() for life in lives] == [0, 0], lives[0].log.read_text()
    assert numbers(run_dir) == numbers(tmp_path / "undisturbed")
    assert_tidy(run_dir)
    with capsys.disabled():
        print(f"\nthe other process ended after {', '.join(f'{wait:.1f}' for wait in waits)} s")
