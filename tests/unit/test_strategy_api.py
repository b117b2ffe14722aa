"""Strategies in Python: `over`, rules by leaf, and strategies of one's own by name."""

import pytest

from amsp_jax.errors import UserError
from amsp_jax.strategy import (
    PRESETS,
    DataRanks,
    FullReplica,
    FullSharding,
    NodeSharding,
    PartialSharding,
    RankSharding,
    Strategy,
    numbers_of,
    over,
    parse,
    register_strategy,
    zero1,
    zero3,
)


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [
        ("replica", FullReplica()),
        ("Node", NodeSharding()),
        ("all", FullSharding()),
        (" FULL ", FullSharding()),
        ("4x2", PartialSharding(4, 2)),
        ("4X2", PartialSharding(4, 2)),
        ("4×2", PartialSharding(4, 2)),
        ("8", RankSharding(8)),
        (8, RankSharding(8)),
    ],
)
def test_over(ranks, sharding):
    assert over(ranks) == sharding


@pytest.mark.parametrize("ranks", ["half", 0, -1, True, 2.0, None, "0x2", ""])
def test_over_what_is_no_sharding(ranks):
    with pytest.raises(UserError, match=r"over\("):
        over(ranks)


def test_text_reads_words_without_regard_to_case():
    wanted = Strategy(params=FullReplica(), grads=PartialSharding(4, 2), opt_state=FullSharding())
    assert parse("params=Replica grads=4×2 opt_state=ALL") == wanted
    assert Strategy(params="replica", grads="4x2", opt_state="all") == wanted


def test_a_strategy_broken_in_two_places_reports_both():
    with pytest.raises(UserError) as caught:
        parse("params=4x1 grads=2x1 opt_state=3x1").resolve(DataRanks(4, 2))
    said = str(caught.value)
    assert "params=4x1 breaks" in said and "grads=2x1 breaks" in said and "opt_state=3x1 breaks" in said
    with pytest.raises(UserError, match=r"inside a node, 4 does not divide.*; between nodes, 2 does not divide"):
        parse("params=4x2 grads=2x1 opt_state=2x1").resolve(DataRanks(4, 2))


def test_rules():
    strategy = Strategy(params="all", grads="all", opt_state="all", rules=[(r"embed\..*", "zero1"), (r".*", zero3())])
    assert parse("zero3", {r"embed\..*": "zero1", r".*": "zero3"}) == strategy
    assert parse("zero3", [(r"embed\..*", "zero1"), (r".*", "zero3")]) == strategy
    assert (strategy.rule_of("embed.table"), strategy.rule_of("head"), zero3().rule_of("head")) == (0, 1, None)
    assert strategy.rules[0] == (r"embed\..*", zero1())
    assert str(strategy) == f"{zero3()}, embed\\..*: {zero1()}, .*: {zero3()}"
    first, _ = strategy.resolve_rules(DataRanks(4, 2))
    assert (first.params.total, first.opt_state.total) == (1, 8)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"embed(": "zero1"}, r"'embed\(' is no regular expression"),
        ({"embed": "zero9"}, "rules: 'embed': 'zero9': unknown preset"),
        ({"embed": parse("zero1", {"x": "ddp"})}, "the strategy of 'embed' has rules itself"),
    ],
)
def test_rules_that_are_none(rules, message):
    with pytest.raises(UserError, match=message):
        parse("zero3", rules)


@pytest.mark.parametrize("rules", [["embed"], [("embed", "zero1", "zero2")], [3]])
def test_rules_are_pairs(rules):
    with pytest.raises(UserError, match="they are pairs of a pattern and a strategy"):
        Strategy(params="full", grads="full", opt_state="full", rules=rules)
    assert Strategy(params="full", grads="full", opt_state="full", rules={"a": "zero1"}).rules == (("a", zero1()),)
    with pytest.raises(UserError, match=r"over\(None\)"):
        Strategy(params="full", grads=None, opt_state="full")


def test_each_rule_keeps_the_dependency_rule():
    strategy = parse("zero3", {"embed": "params=4x1 grads=2x1 opt_state=4x1"})
    with pytest.raises(UserError, match=r"rules: 'embed': '.*': params=4x1 breaks the dependency rule"):
        strategy.resolve_rules(DataRanks(4, 2))
    with pytest.raises(UserError, match="has rules of its own"):
        parse(strategy, {"head": "zero1"})


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr("amsp_jax.strategy.PRESETS", dict(PRESETS))


@pytest.mark.usefixtures("registered")
def test_a_registered_strategy_is_understood_as_text():
    @register_strategy("Mine")
    def mine(k: int = 8, g: int = 8):
        return Strategy(params=over(k), grads=over(g), opt_state=over("all"))

    assert numbers_of("mine") == ("k", "g")
    for text in ("mine", "mine()", "mine(8)", "MINE(k=8)", "mine( g = 8, k=8 )", "mine(8, 8)", "mine(8, g=8)"):
        assert parse(text) == mine()
    assert parse("mine(2, g=4)") == mine(2, 4)
    for text in ("mine(x=8)", "mine(8, k=8)", "mine(1, 2, 3)", "mine(k=)", "mine(k=two)", "mine(-1)", "mine(,)"):
        with pytest.raises(UserError, match=r"is no number of mine; write 'mine' or 'mine\(k=8, g=8\)'"):
            parse(text)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["zero3", "ZERO3", "auto", "two words", "", "8", 3])
def test_names_that_cannot_be_registered(name):
    with pytest.raises(UserError, match="register_strategy"):
        register_strategy(name)


@pytest.mark.usefixtures("registered")
def test_functions_that_cannot_be_registered():
    for function in (lambda k: zero1(), lambda k="8": zero1(), lambda *ks: zero1(), lambda k=True: zero1()):
        with pytest.raises(UserError, match="needs an integer as its default"):
            register_strategy("mine")(function)
    register_strategy("nothing")(lambda: None)
    with pytest.raises(UserError, match="the function of nothing returned None"):
        parse("nothing")
