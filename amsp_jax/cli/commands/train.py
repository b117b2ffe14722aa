"""`amsp-jax train`: trains a language model with the settings of gin files and flags."""

from __future__ import annotations

from collections.abc import Sequence

from amsp_jax.cli import settings as cli
from amsp_jax.run.trainer import Trainer
from amsp_jax.runtime import launch
from amsp_jax.strategy import parse


def run(argv: Sequence[str]) -> None:
    """Trains, from the arguments to the end of the run.

    Raises:
      UserError: a mistake in the arguments.
    """
    line = cli.parse_command_line(argv, starts_from_quickstart=True)
    if line.wants_help:
        print(cli.help_text())
        return
    with launch.own_watch().catch_signals():
        _run(line)


def _run(line: cli.CommandLine) -> None:
    # What can be wrong without looking at a device.
    config = cli.load_config(line.gin_files, line.bindings)
    if not config.is_auto:
        parse(config.strategy, config.rules)
    cli.build_model(config)

    # Devices, in order; from here on jax runs.
    layout = cli.set_up(line, config, same=config.settings())
    built = cli.build_model(config, layout.devices[0])
    trainer = Trainer(built.model, config=config, layout=layout, notes=[built.attention])
    if line.is_dry_run:
        trainer.check()
    else:
        trainer.fit()
