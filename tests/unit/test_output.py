"""Printing: on any terminal, and of libraries' log lines only those that are not ours to report."""

import io
import subprocess
import sys

import pytest

from amsp_jax.cli import exits
from amsp_jax.runtime.launch import say


@pytest.mark.parametrize("encoding", ["iso-8859-1", "ascii"])
def test_a_terminal_that_lacks_characters_gets_escapes(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    assert exits.run(lambda: say("sample: 日 \N{EM DASH}")) == 0
    sys.stdout.flush()
    assert written.getvalue() == b"sample: \\u65e5 \\u2014\n"


def test_the_logger_of_absl_knows_who_logs() -> None:
    """One that is made before absl is imported takes absl itself for the caller, and orbax's errors pass our filter."""
    check = (
        "import logging; from amsp_jax.cli import exits; exits.run(lambda: None); import absl.logging\n"
        "assert isinstance(logging.getLogger('absl'), absl.logging.ABSLLogger)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
