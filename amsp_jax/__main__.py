"""`python -m amsp_jax COMMAND`: what there is beside training."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from amsp_jax.cli import settings as cli
from amsp_jax.cli.commands import calibrate, compile, doctor, generate, plan, profile, tune
from amsp_jax.runtime import launch

COMMANDS = (plan, calibrate, compile, profile, generate, doctor, tune)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code: 0, or 2 for a mistake in it."""
    return cli.run(lambda: _main(sys.argv[1:] if argv is None else argv))


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """The command and its arguments; `run` is what to call with them.

    Raises:
      UserError: a mistake in them.
    """
    parser = cli.Parser(prog="python -m amsp_jax", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    args, unknown = parser.parse_known_args(argv)
    if "settings" in args:
        # Those of train.py, whose names are the config's.
        args.settings = [word for word in unknown if word.startswith("--gin.")]
        unknown = [word for word in unknown if word not in args.settings]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def _main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    launch.end_process(main())
