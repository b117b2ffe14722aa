"""Trains a language model: `python train.py` runs the quickstart, `python train.py --help` says what else there is.

The same as `amsp-jax train`, for a checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from amsp_jax import __main__ as program


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code, one of `runtime.exit_codes`."""
    return program.main([program.TRAIN, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    program.end_with([program.TRAIN, *sys.argv[1:]])
