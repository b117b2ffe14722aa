"""For tests that compile for GPUs that are not there."""

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs the cuda extra: pip install -e '.[cuda]'"
)


def apart(check):
    """The test in a process of its own: XLA reads its flags once, and the tests' are for the CPU alone."""

    @functools.wraps(check)
    def test():
        code = f"import {check.__module__} as tests; tests.{check.__name__}.check()"
        here = Path(sys.modules[check.__module__].__file__).parent
        paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", here)))
        environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]

    test.check = check
    return test
