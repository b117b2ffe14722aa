"""AMSP's formulas against the numbers of its paper (arXiv 2311.00257)."""

import pytest

from amsp_jax.cost.papers import amsp
from amsp_jax.strategy import DataRanks, parse
from models.registry import build_model

RANKS = DataRanks(8, 128)


@pytest.mark.parametrize(("nodes", "count"), [(128, 121), (64, 100), (16, 64), (4, 36)])
def test_the_count_of_the_space(nodes, count):
    assert len(amsp.space(DataRanks(8, nodes))) == count


def test_memory_of_7b_unsharded():
    degrees = parse("ddp").resolve(RANKS)
    assert amsp.state_bytes(7_000_000_000, degrees) == 112e9


def test_memory_of_the_chosen_strategies_falls_with_each_degree():
    chosen = parse("params=8x1 grads=8x1 opt_state=8x4").resolve(RANKS)
    assert amsp.state_bytes(32, chosen) == 2 * 32 / 8 + 2 * 32 / 8 + 12 * 32 / 32


def seconds(kind, num_bytes, group):
    """One second for every group of two or more: terms are then counts."""
    return float(group.total > 1)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # M (2 + 1) a module; one bucket for the last reduction; nothing to broadcast.
        ("params=8x1 grads=8x1 opt_state=8x1", (4 * 3 * 10, 0, 1 / 8, 0)),
        ("params=1x1 grads=1x1 opt_state=8x1", (0, 0, 1, 8)),
        ("params=1x1 grads=8x1 opt_state=8x1", (0, 3, 1, 8)),
        ("params=4x1 grads=8x1 opt_state=8x4", (4 * 3 * 10, 3 / 4, 1 / 4, 8)),
        ("ddp", (0, 0, 1, 0)),
    ],
)
def test_terms_are_the_formulas(strategy, expected):
    """Ten modules whose 2-byte values fill one bucket together, four microbatches."""
    degrees = parse(strategy).resolve(RANKS)
    terms = amsp.terms(seconds, degrees, [5] * 10, num_microbatches=4, bucket_bytes=100)
    assert (terms.params_s, terms.grads_s, terms.last_s, terms.update_s) == expected
    assert terms.total_s == sum(expected)


@pytest.mark.parametrize("model", ["llama-7b", "llama-13b", "llama-30b"])
def test_mfu_as_the_paper_counts(model):
    numbers = build_model(model).numbers
    found = amsp.mfu(numbers.num_params, numbers.num_layers, numbers.attention_width, 4096, 4503, 312e12)
    assert found == pytest.approx(numbers.flops_per_token_paper(4096) * 4503 / 312e12)
