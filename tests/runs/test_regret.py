"""The arithmetic of `benchmarks/regret.py`: what is measured next, and what the report says of it."""

import math
import pathlib
import sys

import pytest

from amsp_jax.strategy import DataRanks, all_degrees, parse

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

from regret_report import Compared, mixes_levels, picks, repeats  # noqa: E402
from regret_settings import NAMED, NUM_BEST, NUM_REPEATED, Setting, fastest, next_setting, schedule  # noqa: E402
from rows import append_row, read_rows  # noqa: E402

RANKS = DataRanks(2, 2)
STRATEGIES = [str(degrees) for degrees in all_degrees(RANKS)]


def row(setting, step_s=1.0):
    return {**vars(setting), "step_s": step_s}


def measured_all(step_s):
    """The first two rounds, each strategy at the time that `step_s` gives for its number."""
    return [
        row(Setting("wide", accumulation, strategy), step_s(i) * accumulation)
        for accumulation in (1, 4)
        for i, strategy in enumerate(STRATEGIES)
    ]


def test_every_strategy_comes_first_those_that_fill_nodes_before_the_others():
    settings = list(schedule([], RANKS, ["wide", "narrow"], {}))
    assert [s.accumulation for s in settings] == [1] * 16 + [4] * 16
    assert {s.strategy for s in settings[:16]} == set(STRATEGIES)
    assert ["1x2" in s.strategy for s in settings[:16]] == [False] * 10 + [True] * 6


def test_the_fastest_go_on():
    rows = measured_all(lambda i: 1.0 + i)
    best = STRATEGIES[:NUM_BEST]
    assert fastest(rows, "wide", (1, 4))[:NUM_BEST] == best
    repeated, late = (found := list(schedule(rows, RANKS, ["wide", "narrow"], {}))[32:])[:4], found[4:]
    assert repeated == [Setting("wide", n, strategy, repeat=1) for n in (1, 4) for strategy in best[:NUM_REPEATED]]
    for size, n, others in (("wide", 8, NAMED), ("wide", 2, NAMED), ("narrow", 4, ()), ("narrow", 1, ())):
        wanted = dict.fromkeys([*best, *(str(parse(name).resolve(RANKS)) for name in others)])
        assert [s.strategy for s in late if (s.size, s.accumulation) == (size, n)] == list(wanted)


def test_the_planner_s_choice_goes_on_with_the_fastest():
    rows, slow = measured_all(lambda i: 1.0 + i), STRATEGIES[-2]
    late = list(schedule(rows, RANKS, ["wide", "narrow"], {"wide 2": slow, "narrow 4": slow}))[36:]
    chosen = [s for s in late if s.strategy == slow]
    assert chosen == [Setting("wide", 2, slow), Setting("narrow", 4, slow)]


def test_a_strategy_that_failed_is_not_among_the_fastest():
    rows = measured_all(lambda i: 1.0 + i)
    del rows[0]["step_s"]
    assert STRATEGIES[0] not in fastest(rows, "wide", (1, 4))


def test_measuring_resumes_after_the_last_whole_line(tmp_path):
    path = tmp_path / "measured.jsonl"
    assert read_rows(path) == []
    first = next_setting([], RANKS, ["wide"], {})
    append_row(path, row(first))
    with path.open("a") as file:
        file.write('{"size": "wi')
    assert read_rows(path) == [row(first)]
    second = next_setting(read_rows(path), RANKS, ["wide"], {})
    append_row(path, row(second))
    assert read_rows(path) == [row(first), row(second)]
    assert second != first and second == list(schedule([], RANKS, ["wide"], {}))[1]


def test_it_ends():
    rows = measured_all(lambda i: 1.0 + i)
    while setting := next_setting(rows, RANKS, ["wide"], {}):
        rows.append(row(setting))
    named = {str(parse(name).resolve(RANKS)) for name in NAMED}
    assert len(rows) == 32 + 2 * NUM_REPEATED + 2 * len(named | set(STRATEGIES[:NUM_BEST]))


def compared(strategy, step_s, predicted_s=1.0, accumulation=1):
    setting = Setting("wide", accumulation, strategy)
    return Compared(row(setting, step_s), setting, step_s, predicted_s, mixed=False)


def test_regret_is_what_the_pick_costs_more():
    first, second = picks(
        [
            compared("a", step_s=1.1),
            compared("b", step_s=1.0),
            compared("a", step_s=3.0, accumulation=4),
            compared("b", step_s=4.0, accumulation=4),
            # Alone, nothing competes.
            compared("a", step_s=9.0, accumulation=8),
        ],
        {"wide 1": "a", "wide 4": "c"},
    )
    assert (first.strategy, first.best.setting.strategy, first.num_measured) == ("a", "b", 2)
    assert math.isclose(first.regret, 0.1)
    # Its choice was not measured.
    assert second.case == ("wide", 4) and second.pick is None and second.regret is None


def test_error_and_noise():
    assert math.isclose(compared("a", step_s=2.0, predicted_s=1.5).error, -0.25)
    setting = Setting("wide", 4, "a")
    again = Setting("wide", 4, "a", repeat=1)
    [(found, change)] = repeats([row(setting, 2.0), row(again, 2.1)])
    assert found == again and change == pytest.approx(0.05)


def test_what_lies_inside_a_node_only_mixes_levels():
    mixed = {strategy for strategy in STRATEGIES if mixes_levels(Setting("wide", 1, strategy).degrees(RANKS))}
    assert mixed == {strategy for strategy in STRATEGIES if "2x1" in strategy} and len(mixed) == 6
