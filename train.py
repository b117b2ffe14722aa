"""Trains a language model: `python train.py` runs the quickstart, `python train.py --help` says what else there is."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    # The next imports take seconds. Until the watch is there a stop has nothing to save, and ends with its own code.
    def stop(number: int, frame: object) -> None:
        """Ends the process; nothing else runs yet."""
        os.write(2, b"asked to stop while starting: nothing to save\n")
        os._exit(85)

    for asks_to_stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(asks_to_stop, stop)

from amsp_jax.cli import settings as cli
from amsp_jax.run import auto, trainer
from amsp_jax.run.job import compiler_options
from amsp_jax.runtime import launch
from amsp_jax.strategy import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code, one of `runtime.exit_codes`."""
    return cli.run(lambda: train(sys.argv[1:] if argv is None else argv))


def train(argv: Sequence[str]) -> None:
    """From the arguments to the end of the run.

    Raises:
      UserError: a mistake in them.
    """
    line = cli.parse_command_line(argv, default_file=cli.QUICKSTART)
    if line.wants_help:
        print(cli.help_text())
        return
    with launch.own_watch().catch_signals():
        _run(line)


def _run(line: cli.CommandLine) -> None:
    # What can be wrong without looking at a device.
    config = cli.load_config(line.gin_files, line.bindings)
    if not config.is_auto:
        parse(config.strategy)
    cli.build_model(config)

    # Devices, in order; from here on jax runs.
    layout = cli.set_up(line, config, same=config.settings())
    built = cli.build_model(config, layout.devices[0])
    launch.own_watch().doing("choosing the strategy")
    chosen = auto.choose(config, built.model, layout) if config.is_auto else None
    given = config
    if chosen:
        config = dataclasses.replace(config, strategy=chosen.strategy, cluster=None)
    environment = {**launch.environment(), "compiler_options": compiler_options(config, built.model, layout)}

    trainer.train(
        config,
        built.model,
        built.vocab_size,
        layout,
        notes=(*(chosen.lines if chosen else ()), built.attention, *layout.notes),
        closing=chosen.comparison if chosen else None,
        is_dry_run=line.is_dry_run,
        files={
            "config.gin": cli.gin_text(given),
            "environment.json": json.dumps(environment, indent=2) + "\n",
            **({"prediction.json": chosen.to_json()} if chosen else {}),
        },
    )


if __name__ == "__main__":
    code = main()
    # All is done: a stop has nothing left to stop.
    for late in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(late, signal.SIG_IGN)
    launch.end_process(code)
