"""`amsp-jax train`: trains a language model with the settings of gin files and flags."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from amsp_jax.cli import settings as cli
from amsp_jax.run import auto, trainer
from amsp_jax.run.job import compiler_options
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
