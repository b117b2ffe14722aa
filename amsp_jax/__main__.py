"""`amsp-jax COMMAND`, also as `python -m amsp_jax COMMAND`: training, and the tools beside it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from amsp_jax.cli import exits
from amsp_jax.cli.arguments import COMMANDS
from amsp_jax.cli.parsing import Parser
from amsp_jax.errors import UserError
from amsp_jax.runtime.exit_codes import STOPPED

TRAIN = "train"
_PROGRAM = "amsp-jax"
_TRAIN_HELP = "train a model with the settings of gin files and flags"


def script() -> NoReturn:
    """The program `amsp-jax`: runs the command line of this process and ends the process with its code."""
    end_with(sys.argv[1:])


def end_with(argv: Sequence[str]) -> NoReturn:
    """Runs a command line and ends the process with its exit code."""
    if TRAIN in argv[:1]:
        _stop_at_once_on_signals()
    code = main(argv)
    if TRAIN in argv[:1]:
        # All is done: a stop has nothing left to stop.
        for late in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(late, signal.SIG_IGN)
    # Only a command that has started devices has imported this module, and may have other processes to tell.
    if processes := sys.modules.get("amsp_jax.runtime.launch.processes"):
        processes.end_process(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code, one of `runtime.exit_codes`."""
    return exits.run(lambda: _main(list(sys.argv[1:] if argv is None else argv)))


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command and its arguments, of every command but `train`.

    Raises:
      UserError: a mistake in them.
    """
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if args.command in COMMANDS and COMMANDS[args.command].takes_settings:
        # The settings of `train`, whose names are the config's.
        args.settings = [word for word in unknown if word.startswith("--gin.")]
        unknown = [word for word in unknown if word not in args.settings]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _parser() -> Parser:
    parser = Parser(prog=_PROGRAM, description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands.add_parser(TRAIN, help=_TRAIN_HELP, add_help=False)
    for name, command in COMMANDS.items():
        command.add_arguments(commands.add_parser(name, help=command.help, description=command.description))
    return parser


def _main(argv: list[str]) -> None:
    if TRAIN in argv[:1]:
        _module(TRAIN).run(argv[1:])
        return
    args = parse_args(argv)
    if args.command is None:
        _parser().print_help()
        raise UserError(f"no command; `{_PROGRAM} train` runs the quickstart, `{_PROGRAM} COMMAND --help` explains one")
    _module(args.command).run(args)


def _module(command: str) -> Any:
    return importlib.import_module(f"amsp_jax.cli.commands.{command}")


def _version() -> str:
    try:
        return importlib.metadata.version(_PROGRAM)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: a checkout)"


def _stop_at_once_on_signals() -> None:
    """Ends the process with the code of a stop: until the watch takes over, imports run and nothing is to be saved."""

    def stop(number: int, frame: FrameType | None) -> None:
        os.write(2, b"asked to stop while starting: nothing to save\n")
        os._exit(STOPPED)

    for asks_to_stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(asks_to_stop, stop)


if __name__ == "__main__":
    script()
