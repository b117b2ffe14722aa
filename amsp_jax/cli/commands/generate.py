"""`amsp-jax generate RUN_DIR --prompt "def main("`: samples from a run that has trained."""

from __future__ import annotations

import argparse
import contextlib
from itertools import islice
from pathlib import Path

from amsp_jax.cli import settings as cli
from amsp_jax.engine.plan import make_plan
from amsp_jax.errors import UserError
from amsp_jax.run.checkpoint import Checkpointer
from amsp_jax.run.config import TrainConfig
from amsp_jax.run.data import Tokenizer
from amsp_jax.run.generate import Sampling, generate, make_next_logits
from amsp_jax.run.job import params_alone
from amsp_jax.run.resolved import step_settings
from amsp_jax.run.run_folder import CHECKPOINTS, CONFIG_FILE, TOKENIZER_FILE
from amsp_jax.runtime import launch
from amsp_jax.strategy import DataRanks

# Fits any number of devices, and needs the least memory on each.
_STRATEGY = "zero3"


def run(args: argparse.Namespace) -> None:
    """Prints the prompt and its continuation.

    Raises:
      UserError: no such run, no checkpoint, an empty prompt.
    """
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    config = _config_of(args.run_dir)
    tokenizer = _tokenizer_of(args.run_dir)
    prompt = tokenizer.encode(args.prompt)
    if not prompt:
        raise UserError("--prompt is empty; give at least one character to continue")
    checkpointer = Checkpointer(args.run_dir / CHECKPOINTS, keep=None)
    step = checkpointer.latest_step() if args.step is None else args.step
    if step is None:
        raise UserError(f"{args.run_dir} has no complete checkpoint yet; wait for its first one")

    layout = launch.setup()
    model = cli.build_model(config, layout.devices[0]).model
    if model.logits is None:
        raise UserError(f"model={config.model} gives no logits to draw from")
    ranks, devices = DataRanks(layout.devices_per_node, layout.num_nodes), layout.devices
    plan = make_plan(_STRATEGY, model, ranks=ranks, devices=devices, compute_dtype=config.compute_dtype)
    with contextlib.closing(checkpointer):
        params = checkpointer.restore(step, *params_alone(plan))["params"]

    next_logits = make_next_logits(plan, step_settings(config), config.seq_len)
    drawn = generate(next_logits, params, prompt, sampling, tokenizer.end_of_document, tokenizer.vocab_size)
    print(tokenizer.decode([*prompt, *islice(drawn, args.max_tokens)]))


def _config_of(run_dir: Path) -> TrainConfig:
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        raise UserError(f"{run_dir} is no run folder: it has no {CONFIG_FILE}; name one that train.py wrote")
    return cli.load_config([file])


def _tokenizer_of(run_dir: Path) -> Tokenizer:
    if not (run_dir / TOKENIZER_FILE).is_file():
        raise UserError(f"{run_dir} has no {TOKENIZER_FILE}: it was trained on token ids, so text means nothing to it")
    return Tokenizer.load(run_dir / TOKENIZER_FILE)
