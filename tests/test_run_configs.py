"""configs/runs: every file names its model, divides on its cluster, and promises the memory that the plan computes."""

import re
from pathlib import Path

import pytest

from amsp_jax import cli
from amsp_jax.checks import batch_shape
from amsp_jax.plan import make_plan
from amsp_jax.strategy import DataRanks
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
def test_the_file_promises_the_memory_of_the_plan(path):
    config, text = load(path), path.read_text()
    promised, num_nodes, per_node = re.search(
        r"# Memory: ([\d.]+) GiB a device on (\d+) nodes? of (\d+)", text
    ).groups()
    ranks = DataRanks(int(per_node), int(num_nodes))
    plan = make_plan(config.strategy, cli.build_model(config).model.abstract_params(), ranks)
    assert f"{plan.bytes_per_device().total / 2**30:.2f}" == promised
    assert not plan.degrees.warnings
    batch = batch_shape(config.global_batch, config.microbatch, ranks.total, config.seq_len)
    assert f"Tokens: {batch.tokens / 1e6:.2f}M a step" in text


def test_the_small_run_divides_on_any_part_of_a_node():
    config = load(next(path for path in FILES if path.stem == "llama_125m"))
    for num_devices in (1, 2, 4, 8):
        batch_shape(config.global_batch, config.microbatch, num_devices, config.seq_len)
