"""configs/runs: every file names its model, divides on its cluster, and fits where it says."""

import re
from pathlib import Path

import pytest

from amsp_jax import __main__ as tools
from amsp_jax import cli
from amsp_jax.checks import batch_shape
from amsp_jax.commands import workload
from amsp_jax.planner import Space, search
from amsp_jax.stack import Remat
from models import MODELS

FILES = sorted((Path(__file__).parent.parent / "configs" / "runs").glob("*.gin"))


def load(path):
    return cli.load_config([path]).config


def test_every_model_has_a_file():
    assert {path.stem.replace("_", "-") for path in FILES} == set(MODELS) - {"llama-tiny"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_says_what_it_is_and_how_to_run_it(path):
    assert load(path).model == path.stem.replace("_", "-")
    assert f"\n#   python train.py --gin_file=configs/runs/{path.name}\n" in path.read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_fits_where_it_says(path):
    """Its `plan` command is that of its own settings, and finds a strategy."""
    config, text = load(path), path.read_text()
    assert config.is_auto
    nodes, device = re.search(r"# Fits:   (\d+) nodes? of 8 (H\d00)", text).groups()
    command = re.search(r"python -m amsp_jax (plan .*?)\n# Tokens", text, re.DOTALL).group(1)
    args = tools.parse_args(re.sub(r"[\\#]", " ", command).split())
    assert (args.model, args.nodes, args.cluster) == (config.model, int(nodes), device.lower())
    for name in ("global_batch", "seq_len", "microbatch", "remat", "reduce_dtype"):
        assert getattr(args, name) == getattr(config, name)
    cluster = workload.cluster_of(args.cluster, args.nodes)
    space = Space(microbatches=(args.microbatch,), remats=(Remat(args.remat),))
    best = search(workload.workload_of(args, cluster), cluster, space).best
    batch = batch_shape(config.global_batch, config.microbatch, cluster.num_devices, config.seq_len)
    assert best.accumulation == batch.accumulation
    assert f"Tokens: {batch.tokens / 1e6:.2f}M a step" in text


def test_the_small_run_divides_on_any_part_of_a_node():
    config = load(next(path for path in FILES if path.stem == "llama_125m"))
    for num_devices in (1, 2, 4, 8):
        batch_shape(config.global_batch, config.microbatch, num_devices, config.seq_len)
