"""Argument parsers whose mistakes are one line, and the arguments that several commands share.

This module and `arguments` import neither jax nor gin, so that `--help` of a command answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import NoReturn

from amsp_jax.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        """Raises one line instead of printing the usage text."""
        raise UserError(f"{message}; `{self.prog} --help` lists what there is")


def positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    """Returns the type of an argument that is a number above 0."""

    def positive_number(text: str) -> float:
        with contextlib.suppress(ValueError):
            if (value := kind(text)) > 0:
                return value
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")

    return positive_number


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of a command that runs on the devices, for `settings.set_up`."""
    number = positive(int)
    parser.add_argument("--devices-per-node", type=number, metavar="N", help="split each node into logical ones")
    parser.add_argument("--simulated-nodes", type=number, metavar="N", help="on the CPU: nodes to simulate")
    parser.add_argument("--simulated-devices-per-node", type=number, metavar="N", help="on the CPU: devices of each")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of several processes that SLURM did not start")
    parser.add_argument("--num-processes", type=number, metavar="N", help="how many they are")
    parser.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")
