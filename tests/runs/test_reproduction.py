"""What docs/reproduction.md says of the Frontier study, and what the planner predicts now."""

import itertools
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import reproduction_frontier as reproduction  # noqa: E402
from papers import frontier, megatron  # noqa: E402
from reproduction_frontier import efficiency, utilization  # noqa: E402


def shares(cases, *keys):
    return [utilization(cases[key]) for key in keys]


def falls(values):
    return all(later < earlier for earlier, later in itertools.pairwise(values))


def test_the_three_recipes_come_in_the_published_order():
    sizes = sorted(frontier.UTILIZATION, key=frontier.UTILIZATION.get, reverse=True)
    assert falls([utilization(reproduction.recipe(size)) for size in sizes])


def test_larger_tensor_groups_are_slower():
    assert falls(shares(reproduction.more_tensor_ranks(), 1, 2, 4, 8))


def test_more_microbatches_shrink_the_bubble():
    """And nothing else grows: the bubble's formula explains the gain to a few percent."""
    few, more, most = shares(reproduction.more_microbatches(), 8, 64, 512)
    assert few < more < most
    bubbles = [1 + megatron.bubble_of_ideal(8, count) for count in (8, 512)]
    assert few / most == pytest.approx(bubbles[1] / bubbles[0], rel=0.1)


def test_more_stages_are_slower_at_a_fixed_batch_and_not_much_if_the_batch_grows():
    fixed = shares(reproduction.more_stages(None), 8, 16, 48)
    growing = shares(reproduction.more_stages(4), 8, 48)
    assert falls(fixed)
    assert growing[-1] / growing[0] > 0.85 > 0.65 > fixed[-1] / fixed[0]


@pytest.mark.parametrize("size", ["175b", "1t"])
def test_scaling(size):
    weak = reproduction.weak_scaling(size)
    strong = reproduction.strong_scaling(size, weak[-1].global_batch)
    assert efficiency([weak[0], weak[-1]])[1] == pytest.approx(1.0, abs=0.01)
    assert efficiency([strong[0], strong[-1]])[1] < 0.98


@pytest.mark.slow
def test_the_page_has_the_tables_that_the_script_prints(capsys):
    reproduction.print_tables()
    page = (reproduction.ROOT / "docs" / "reproduction.md").read_text()
    for table in capsys.readouterr().out.strip().split("\n\n"):
        assert table in page
