"""Seconds of collectives: measured points, what stands beside them, the links; and the rates of a device."""

import math
import random

import pytest

from amsp_jax.errors import UserError
from amsp_jax.predict.cluster import CollectiveKind, Link, Network, Rates
from amsp_jax.strategy import Degree

MIB = 2**20
INTRA = Link(bytes_per_s=100e9, latency_s=1e-6)
INTER = Link(bytes_per_s=10e9, latency_s=10e-6)
LINKS = Network(intra=INTRA, inter=INTER)


def measured(*keys, points=((MIB, 1e-3), (16 * MIB, 4e-3)), **links):
    return Network(measured={(kind, Degree(*group)): points for kind, group in keys}, **links)


def test_between_points_the_time_is_a_line_in_logarithms():
    network = measured(("all-gather", (4, 1)))
    assert network.seconds("all-gather", MIB, Degree(4, 1)) == pytest.approx(1e-3)
    assert network.seconds("all-gather", 4 * MIB, Degree(4, 1)) == pytest.approx(2e-3)
    assert network.seconds(CollectiveKind.ALL_GATHER, 16 * MIB, Degree(4, 1)) == pytest.approx(4e-3)


def test_outside_the_points_latency_below_and_bandwidth_above():
    network = measured(("all-gather", (4, 1)))
    assert network.seconds("all-gather", 1, Degree(4, 1)) == 1e-3
    assert network.seconds("all-gather", 64 * MIB, Degree(4, 1)) == pytest.approx(16e-3)


def test_one_point_is_a_latency_and_a_bandwidth():
    network = measured(("all-gather", (4, 1)), points=((MIB, 1e-3),))
    assert network.seconds("all-gather", MIB // 2, Degree(4, 1)) == 1e-3
    assert network.seconds("all-gather", 3 * MIB, Degree(4, 1)) == pytest.approx(3e-3)


def test_a_group_of_one_takes_no_time():
    assert Network().seconds("all-reduce", MIB, Degree(1, 1)) == 0


@pytest.mark.parametrize(
    ("asked", "known", "ratio"),
    [
        ("reduce-scatter", "all-gather", 1),
        ("all-reduce", "all-gather", 2),
        ("all-gather", "all-reduce", 1 / 2),
        ("broadcast", "all-gather", 8 / 7),
    ],
)
def test_another_kind_of_the_same_group_stands_in_by_the_bytes_it_moves(asked, known, ratio):
    network = measured((known, (4, 2)), intra=INTRA, inter=INTER)
    assert not network.is_measured(asked, Degree(4, 2)) and network.is_measured(known, Degree(4, 2))
    assert network.seconds(asked, 4 * MIB, Degree(4, 2)) == pytest.approx(2e-3 * ratio)


def test_a_reduction_stands_in_for_a_gather_only_where_no_scatter_does():
    network = Network(
        measured={("all-reduce", Degree(4, 1)): ((1, 1.0),), ("reduce-scatter", Degree(4, 1)): ((1, 3.0),)}
    )
    assert network.seconds("all-gather", 1, Degree(4, 1)) == 3.0


@pytest.mark.parametrize(("small", "asked", "large"), [((2, 1), (4, 1), (8, 1)), ((8, 2), (8, 4), (8, 8))])
def test_between_two_groups_the_time_is_a_line_in_logarithms(small, asked, large):
    network = Network(
        measured={("all-gather", Degree(*small)): ((MIB, 1e-3),), ("all-gather", Degree(*large)): ((MIB, 4e-3),)}
    )
    assert network.seconds("all-gather", MIB, Degree(*asked)) == pytest.approx(2e-3)


def test_the_nearest_groups_count():
    times = {2: 1e-3, 4: 2e-3, 16: 8e-3, 32: 1.0}
    network = Network(measured={("all-gather", Degree(8, nodes)): ((MIB, t),) for nodes, t in times.items()})
    assert network.seconds("all-gather", MIB, Degree(8, 8)) == pytest.approx(4e-3)


def test_groups_of_another_structure_do_not_count():
    """Neither a group inside a node nor one with other devices in each says how long 8x2 takes."""
    network = measured(("all-gather", (8, 1)), ("all-gather", (4, 8)), intra=INTRA, inter=INTER)
    asked = "all-gather", 4 * MIB, Degree(8, 2)
    assert network.seconds(*asked) == network.link_seconds(*asked)


@pytest.mark.parametrize(
    ("kind", "group", "seconds"),
    [
        ("all-gather", (4, 1), 1e9 * 3 / 4 / 100e9 + 3e-6),
        ("reduce-scatter", (4, 1), 1e9 * 3 / 4 / 100e9 + 3e-6),
        ("all-reduce", (4, 1), 2e9 * 3 / 4 / 100e9 + 6e-6),
        ("broadcast", (4, 1), 1e9 / 100e9 + 3e-6),
        # One device of each node: its share of the NICs alone.
        ("all-gather", (1, 4), 1e9 * 3 / 4 / 10e9 + 30e-6),
        # Four of each node share the message: 40 GB/s between nodes, still the slower level.
        ("all-gather", (4, 4), 1e9 * 15 / 16 / 40e9 + 3e-6 + 30e-6),
        # Sixteen: 160 GB/s between nodes, so the node's own links set the time.
        ("all-gather", (16, 2), 1e9 * 31 / 32 / 100e9 + 15e-6 + 10e-6),
    ],
)
def test_links(kind, group, seconds):
    assert LINKS.seconds(kind, 1e9, Degree(*group)) == pytest.approx(seconds)
    assert not LINKS.is_measured(kind, Degree(*group))


def test_the_basis_says_where_a_time_comes_from():
    network = measured(("all-gather", (8, 2)), ("all-gather", (8, 8)), intra=INTRA, inter=INTER)
    assert network.basis("all-gather", Degree(8, 2)) == "measured"
    assert network.basis("all-reduce", Degree(8, 2)) == "as all-gather"
    assert network.basis("all-gather", Degree(8, 4)) == "from 8x2, 8x8"
    assert network.basis("all-reduce", Degree(8, 4)) == "links"


def test_large_groups_divide_the_bandwidth():
    link = Link(bytes_per_s=100.0, latency_s=0, slowdown=((16, 1.0), (32, 1.25), (64, 2.0)))
    assert [link.effective_bytes_per_s(n) for n in (2, 16, 17, 32, 64, 65, 4096)] == [100, 100, 80, 80, 50, 50, 50]
    network = Network(intra=Link(bytes_per_s=1e6, latency_s=0, slowdown=((2, 1.0), (4, 2.0))), inter=link)
    # Between nodes all 32 devices count, inside a node the 4 of it.
    assert network.seconds("broadcast", 1000, Degree(4, 8)) == pytest.approx(1000 / (4 * 80))
    assert network.seconds("broadcast", 1000, Degree(4, 1)) == pytest.approx(1000 / 500e3)


@pytest.mark.parametrize("seed", range(20))
def test_more_bytes_never_take_less_time(seed):
    """On noisy tables, for every kind and group, whichever of the rules gives the time."""
    rng = random.Random(seed)
    groups = [Degree(a, b) for a in (1, 2, 4) for b in (1, 2, 4, 8) if a * b > 1]
    table = {}
    for kind in CollectiveKind:
        for group in rng.sample(groups, 4):
            sizes = sorted(rng.sample(range(1, 2**30), rng.randint(1, 6)))
            table[kind, group] = tuple((size, 1e-4 * rng.lognormvariate(0, 1)) for size in sizes)
    network = Network(measured=table, intra=INTRA, inter=INTER)
    for kind in CollectiveKind:
        for group in groups:
            sizes = sorted(int(2 ** rng.uniform(0, 34)) for _ in range(60))
            times = [network.seconds(kind, size, group) for size in sizes]
            assert all(0 < a <= b * (1 + 1e-12) for a, b in zip(times, times[1:], strict=False)), (kind, group)


def test_noise_upwards_gives_way_to_the_larger_message():
    network = measured(("all-gather", (2, 1)), points=((1, 5.0), (2, 1.0), (4, 2.0)))
    assert [network.seconds("all-gather", n, Degree(2, 1)) for n in (1, 2, 4)] == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network().seconds("gather", 1, Degree(2, 1)), "'gather' is no collective; write one of all-gather"),
        (lambda: Network().seconds("all-gather", 1, Degree(2, 1)), "2x1 needs the links inside a node, but intra"),
        (lambda: Network(intra=INTRA).seconds("all-gather", 1, Degree(2, 2)), "between nodes, but inter is not known"),
        (lambda: measured(("gather", (2, 1))), "'gather' is no collective"),
        (lambda: measured(("all-gather", (1, 1))), "all-gather 1x1: 2 points, but a group has 2 devices"),
        (lambda: measured(("all-gather", (2, 1)), points=()), "0 points"),
        (lambda: measured(("all-gather", (2, 1)), points=((2, 1.0), (2, 1.0))), "bytes: 2 after 2"),
        (lambda: measured(("all-gather", (2, 1)), points=((2, math.nan),)), "2x1: seconds=nan"),
        (lambda: Link(bytes_per_s=0, latency_s=0), "bytes_per_s=0"),
        (lambda: Link(bytes_per_s=1, latency_s=-1), "latency_s=-1"),
        (lambda: Link(bytes_per_s=1, latency_s=0, slowdown=((8, 1.0), (4, 2.0))), "4 after 8"),
        (lambda: Link(bytes_per_s=1, latency_s=0, slowdown=((8, 0.0),)), "a factor of slowdown=0.0"),
    ],
)
def test_errors_name_the_number(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)


def rates(**changes):
    numbers = dict(
        matmul={"bfloat16": ((64, 64, 64, 1e12), (1024, 1024, 1024, 5e12))},
        attention_flops_per_s=(2e12, 1e12),
        memory_bytes_per_s=1e12,
        overlap_slowdown=1.1,
    )
    return Rates(**{**numbers, **changes})


def test_matmul_rate_follows_the_size():
    rate = rates().matmul_flops_per_s
    assert rate("bfloat16", 8, 8, 8) == rate("bfloat16", 64, 64, 64) == 1e12
    assert rate("bfloat16", 256, 256, 256) == pytest.approx(3e12)
    assert rate("bfloat16", 64, 256, 1024) == pytest.approx(3e12)
    assert rate("bfloat16", 4096, 4096, 4096) == 5e12


def test_shapes_of_one_size_average_their_seconds():
    points = ((64, 64, 64, 1e12), (16, 64, 256, 3e12))
    assert rates(matmul={"bfloat16": points}).matmul_flops_per_s("bfloat16", 1, 1, 1) == pytest.approx(1.5e12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rates().matmul_flops_per_s("float16", 1, 1, 1), "'float16' were measured; there are bfloat16"),
        (lambda: rates(matmul={"bfloat16": ()}), "matmul of bfloat16 has no points"),
        (lambda: rates(matmul={"bfloat16": ((8, 8, 8, math.inf),)}), "matmul of bfloat16: inf"),
        (lambda: rates(attention_flops_per_s=(1.0, 0.0)), "attention_flops_per_s: 0.0"),
        (lambda: rates(overlap_slowdown=0.9), "overlap_slowdown=0.9, but it is at least 1"),
    ],
)
def test_rates_are_checked(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert message in str(error.value)
