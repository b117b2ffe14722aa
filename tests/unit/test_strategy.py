"""The strategy language: its text and Python forms, its presets on clusters, the dependency rule and its errors."""

import pytest

from amsp_jax.errors import UserError
from amsp_jax.strategy import (
    PRESETS,
    DataRanks,
    Degree,
    FullReplica,
    FullSharding,
    NodeSharding,
    PartialSharding,
    RankSharding,
    Strategy,
    all_degrees,
    ddp,
    hfsdp,
    hpz,
    mics,
    numbers_of,
    parse,
    zero1,
    zero2,
    zero3,
)

RANKS = DataRanks(per_node=4, num_nodes=2)


def degrees(text, ranks=RANKS):
    """`intra x inter` of params, grads and opt_state, as text."""
    resolved = parse(text).resolve(ranks)
    return f"{resolved.params} {resolved.grads} {resolved.opt_state}"


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("ddp", ddp()),
        ("zero1", zero1()),
        ("zero2", zero2()),
        ("zero3", zero3()),
        ("fsdp", zero3()),
        ("mics(4)", mics(4)),
        ("hsdp(4)", mics(4)),
        ("mics", mics()),
        ("mics()", mics()),
        ("hpz(2)", hpz(2)),
        ("hpz", hpz()),
        ("hfsdp(2)", hfsdp(2)),
        ("hfsdp", hfsdp()),
        (" ZeRO3 ", zero3()),
        ("mics( 4 )", mics(4)),
        (
            "params=4x1 grads=4x1 opt_state=8x4",
            Strategy(params=PartialSharding(4), grads=PartialSharding(4, 1), opt_state=PartialSharding(8, 4)),
        ),
        (
            "params=replica grads=node opt_state=full",
            Strategy(params=FullReplica(), grads=NodeSharding(), opt_state=FullSharding()),
        ),
        (
            "opt_state=full, grads=4x1, params=replica",
            Strategy(params=FullReplica(), grads=PartialSharding(4), opt_state=FullSharding()),
        ),
        (
            "params=2 grads=4 opt_state=8",
            Strategy(params=RankSharding(2), grads=RankSharding(4), opt_state=RankSharding(8)),
        ),
    ],
)
def test_text_and_python_are_equal(text, strategy):
    assert parse(text) == strategy
    assert parse(strategy) is strategy
    assert parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "node_of_4", "two_nodes_of_4", "four_nodes_of_8"),
    [
        ("ddp", "1x1 1x1 1x1", "1x1 1x1 1x1", "1x1 1x1 1x1"),
        ("zero1", "1x1 1x1 4x1", "1x1 1x1 4x2", "1x1 1x1 8x4"),
        ("zero2", "1x1 4x1 4x1", "1x1 4x2 4x2", "1x1 8x4 8x4"),
        ("zero3", "4x1 4x1 4x1", "4x2 4x2 4x2", "8x4 8x4 8x4"),
        ("fsdp", "4x1 4x1 4x1", "4x2 4x2 4x2", "8x4 8x4 8x4"),
        ("mics", "4x1 4x1 4x1", "4x1 4x1 4x1", "8x1 8x1 8x1"),
        ("mics(4)", "4x1 4x1 4x1", "4x1 4x1 4x1", "4x1 4x1 4x1"),
        ("hsdp(2)", "2x1 2x1 2x1", "2x1 2x1 2x1", "2x1 2x1 2x1"),
        ("hpz", "4x1 4x1 4x1", "4x1 4x2 4x2", "8x1 8x4 8x4"),
        ("hpz(2)", "2x1 4x1 4x1", "2x1 4x2 4x2", "2x1 8x4 8x4"),
        ("hfsdp", "4x1 4x1 4x1", "4x1 4x1 4x2", "8x1 8x1 8x4"),
        ("hfsdp(2)", "2x1 2x1 4x1", "2x1 2x1 4x2", "2x1 2x1 8x4"),
        ("params=replica grads=node opt_state=full", "1x1 4x1 4x1", "1x1 4x1 4x2", "1x1 8x1 8x4"),
    ],
)
def test_presets_and_words_follow_the_cluster(text, node_of_4, two_nodes_of_4, four_nodes_of_8):
    assert degrees(text, DataRanks(4)) == node_of_4
    assert degrees(text, RANKS) == two_nodes_of_4
    assert degrees(text, DataRanks(8, 4)) == four_nodes_of_8


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_on_one_rank_and_on_a_thousand(name):
    assert degrees(name, DataRanks(1)) == "1x1 1x1 1x1"
    parse(name).resolve(DataRanks(8, 128))


@pytest.mark.parametrize(
    ("count", "degree"), [(1, "1x1"), (2, "2x1"), (4, "4x1"), (8, "4x2"), (12, "4x3"), (24, "4x6")]
)
def test_a_count_fills_nodes_first(count, degree):
    assert str(RankSharding(count).degree(DataRanks(4, 6))) == degree


def test_degrees_know_their_size():
    assert Degree(8, 4).total == 32
    assert (RANKS.total, str(RANKS), str(DataRanks(4))) == (8, "2 nodes x 4 data ranks", "1 node x 4 data ranks")


def message(text, ranks=None):
    with pytest.raises(UserError) as caught:
        strategy = parse(text)
        if ranks:
            strategy.resolve(ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("zero4", ["strategy='zero4': unknown preset; did you mean 'zero", "Presets: ddp, zero1", "params=..."]),
        ("zerro3", ["strategy='zerro3'", "did you mean 'zero3'?"]),
        ("xyz", ["strategy='xyz': unknown preset. Presets: "]),
        ("", ["strategy='': unknown preset. Presets: "]),
        ("mics(4", ["strategy='mics(4': unknown preset"]),
        ("mics(-4)", ["strategy='mics(-4)': '-4' is no number of mics; write 'mics' or 'mics(k=8)'"]),
        ("zero3(4)", ["strategy='zero3(4)': zero3 takes no number of ranks; write 'zero3'"]),
        ("mics(0)", ["strategy='mics(0)': a degree is at least 1, not 0"]),
        ("params=full grads=full", ["opt_state missing", "each of params, grads, opt_state once"]),
        ("opt_state=full", ["params, grads missing"]),
        ("params=full params=full grads=full opt_state=full", ["'params=full' is given twice"]),
        ("params=full grads=full os=full", ["'os=full' is not a component with a value"]),
        ("params=full grads= opt_state=full", ["'grads=' is not a component with a value"]),
        (f"mics({'9' * 5000})", ["a degree has at most 9 digits, not 5000"]),
        ("params=0x1 grads=full opt_state=full", ["a degree is at least 1, not 0"]),
        ("params=1x0 grads=full opt_state=full", ["a degree is at least 1, not 0"]),
        ("params=0 grads=full opt_state=full", ["a degree is at least 1, not 0"]),
        ("params=half grads=full opt_state=full", ["'half' is no sharding; write replica, node, full, AxB"]),
        ("params=-2 grads=full opt_state=full", ["'-2' is no sharding"]),
    ],
)
def test_text_that_is_no_strategy(text, parts):
    said = message(text)
    assert f"strategy='{text}'" in said
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("text", "ranks", "parts"),
    [
        # Against the data ranks, inside a node and between nodes.
        (
            "params=1x1 grads=1x1 opt_state=3x1",
            RANKS,
            ["opt_state=3x1 breaks", "inside a node, 3 does not divide 4", "Nearest opt_state inside a node: 1, 2, 4"],
        ),
        (
            "params=1x1 grads=1x1 opt_state=4x4",
            DataRanks(4, 6),
            ["between nodes, 4 does not divide 6 (6 nodes x 4 data ranks)", "Nearest opt_state between nodes: 2, 3, 6"],
        ),
        # Between components, inside a node and between nodes.
        (
            "params=4x1 grads=2x1 opt_state=4x1",
            RANKS,
            ["params=4x1 breaks", "inside a node, 4 does not divide the 2 of grads=2x1", ": 1, 2; or change grads"],
        ),
        (
            "params=1x1 grads=4x2 opt_state=4x1",
            RANKS,
            ["grads=4x2 breaks", "between nodes, 2 does not divide the 1 of opt_state=4x1", ": 1; or change opt_state"],
        ),
        ("params=full grads=full opt_state=node", RANKS, ["grads=4x2 breaks", "between nodes"]),
        # What is suggested fits what comes before, too.
        ("params=2x1 grads=4x1 opt_state=8x1", RANKS, ["Nearest opt_state inside a node: 4"]),
        ("params=2x1 grads=4x1 opt_state=2x1", RANKS, ["Nearest grads inside a node: 2; or change opt_state"]),
        (
            "params=3x1 grads=3x1 opt_state=full",
            RANKS,
            ["Nearest grads inside a node: 1, 2, 4, where params divides it; or change opt_state"],
        ),
        # More than the cluster has, and counts that fill no whole nodes.
        (
            "mics(16)",
            RANKS,
            ["a sharding over 16 ranks, nodes filled first, does not fit 2 nodes x 4", "Nearest: 4, 8"],
        ),
        ("mics(3)", RANKS, ["the count must divide 4, or be 4 times a divisor of 2", "Nearest: 1, 2, 4"]),
        ("hpz(6)", DataRanks(4, 3), ["a sharding over 6 ranks", "Nearest: 2, 4, 12"]),
    ],
)
def test_degrees_that_do_not_fit(text, ranks, parts):
    said = message(text, ranks)
    for part in parts:
        assert part in said, said


def test_the_rule_is_in_the_message():
    said = message("params=4x1 grads=2x1 opt_state=4x1", RANKS)
    assert "strategy='params=4x1 grads=2x1 opt_state=4x1'" in said
    assert "dependency rule (params divides grads divides opt_state divides data)" in said


@pytest.mark.parametrize(
    "make", [lambda: PartialSharding(0), lambda: PartialSharding(4, -1), lambda: mics(0), lambda: DataRanks(0)]
)
def test_sizes_made_in_python_are_checked_at_once(make):
    with pytest.raises(UserError, match="must be an integer of at least 1"):
        make()


def test_a_node_left_unfilled_is_a_warning():
    resolved = parse("params=1x2 grads=2x2 opt_state=4x2").resolve(RANKS)
    assert resolved.warnings == [
        "params=1x2 leaves ranks of a node unused while it spans nodes; 4x2 fills the node first",
        "grads=2x2 leaves ranks of a node unused while it spans nodes; 4x2 fills the node first",
    ]
    for text in ("zero3", "mics(2)", "params=1x1 grads=2x1 opt_state=4x2"):
        assert parse(text).resolve(RANKS).warnings == []


def test_forty_triples_on_two_nodes_of_four():
    triples = all_degrees(RANKS)
    assert len({str(t) for t in triples}) == len(triples) == 40
    for triple in triples:
        assert parse(str(triple)).resolve(RANKS) == triple


@pytest.mark.parametrize(("nodes", "count"), [(4, 36), (16, 64), (64, 100), (128, 121)])
def test_triples_that_fill_the_node_first_are_as_many_as_in_the_paper(nodes, count):
    """AMSP, IV-B, for nodes of 8; the paper also holds grads equal to params or opt_state."""
    filled = [t for t in all_degrees(DataRanks(8, nodes)) if not t.warnings]
    as_in_paper = [t for t in filled if t.grads in (t.params, t.opt_state)]
    assert len(as_in_paper) == count


def test_presets_that_take_a_count_do():
    for name in filter(numbers_of, PRESETS):
        assert degrees(f"{name}(4)").startswith("4x1")


def test_the_nearest_of_huge_degrees_are_found_at_once():
    """Those that divide the data ranks, too; the divisors of the limit alone took years."""
    said = message("params=2x1 grads=999999937x1 opt_state=999999937x1", RANKS)
    assert "2 does not divide the 999999937 of grads" in said and "Nearest params inside a node: 1;" in said


@pytest.mark.parametrize("strategy", ["mics(3)", mics(3), parse("mics(3)", [("x", "ddp")])])
def test_errors_show_a_strategy_as_it_was_written_and_what_it_means(strategy):
    assert message(strategy, RANKS).startswith("strategy='mics(3)' (params=3 grads=3 opt_state=3): a sharding over 3")


def test_what_is_broken_inside_and_between_nodes_is_told_once():
    said = message("params=4x2 grads=2x1 opt_state=2x1", RANKS)
    assert said.count("breaks") == 1 and said.count("or change grads") == 1
    assert "Nearest params inside a node: 1, 2; between nodes: 1; or change grads" in said
