"""For tests that compile for absent GPUs: one process with XLA's flags for GPUs, which serves a whole test session.

XLA reads its flags once a process, and the tests' own process has flags for the CPU.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
GIB = 2**30
SMALL_BYTES = 1 << 20
"""Norms of one block and the like are no message that matters."""
_NEEDS = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the cuda extra: pip install -e '.[cuda]'"
)


def needs_gpu_compiler(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that asks the compiler in the tests' own process."""
    return pytest.mark.cuda(_NEEDS(test))


def compiles_for_gpus(check: Callable[[], None]) -> Callable[[], None]:
    """Marks a test that runs in the process of the GPU compiler; its function takes no fixtures."""

    @functools.wraps(check)
    def test() -> None:
        problem = _ask(check.__module__, check.__name__)
        assert not problem, problem

    test.check = check  # type: ignore[attr-defined]
    return needs_gpu_compiler(test)


def without_products(spans: Iterable[Any]) -> list[str]:
    """The collectives with no matrix product between their start and end."""
    return [span.op for span in spans if not span.flops.matmul]


def _ask(module: str, name: str) -> str:
    """The traceback of a check in the compiler's process; empty where it passes."""
    process = _process()
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps([module, name]) + "\n")
    answer = process.stdout.readline()
    if not answer:
        _process.cache_clear()
        return f"{module}.{name} ended the compiler's process with exit code {process.wait()}: its last words are above"
    return json.loads(answer)


@functools.cache
def _process() -> subprocess.Popen[str]:
    """Started by the first test that needs it."""
    folders = [ROOT, TESTS, *(path for path in TESTS.iterdir() if path.is_dir())]
    environ = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.Popen(
        [sys.executable, __file__], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    atexit.register(process.kill)
    return process


def serve() -> None:
    """Runs the checks that come in, one a line, and answers with a line of JSON each."""
    # Whatever else is printed, by C++ too, goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        module, name = json.loads(line)
        problem = ""
        try:
            getattr(importlib.import_module(module), name).check()
        except BaseException:
            problem = traceback.format_exc()
        answers.write(json.dumps(problem) + "\n")


if __name__ == "__main__":
    serve()
