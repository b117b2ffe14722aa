"""Tick tables keep every dependency, need no more places than they say, and idle as long as the formulas say."""

import numpy as np
import pytest

from amsp_jax.engine.pipeline.schedule import Kind, PipelineSchedule, assign_blocks, forward_alone
from amsp_jax.errors import UserError

SCHEDULES = [
    PipelineSchedule(name, p, v, m)
    for name in ("gpipe", "1f1b")
    for p, v, m in [(2, 1, 2), (2, 1, 5), (3, 1, 3), (4, 1, 7), (8, 1, 20), (2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 4, 16)]
]


def simulate(half, num_stages, direction):
    """Runs one half's table: what is sent is there in the next tick, and only then. Returns (stage, unit) -> tick."""
    ends = (0, num_stages - 1)[::direction]
    inbox, done = {}, {}
    for tick in range(len(half.kind)):
        outbox = {}
        for stage in range(num_stages):
            kind, chunk, microbatch = (int(x[tick, stage]) for x in (half.kind, half.chunk, half.microbatch))
            if kind == Kind.IDLE:
                assert stage not in inbox
                continue
            begins = kind == (Kind.FIRST if direction == 1 else Kind.LAST)
            # What stage p-1 sends to stage 0 belongs to the next chunk.
            wanted = (chunk - direction if stage == ends[0] else chunk, microbatch)
            assert begins or inbox[stage] == wanted
            assert (stage, chunk, microbatch) not in done
            done[stage, chunk, microbatch] = tick
            if kind != (Kind.LAST if direction == 1 else Kind.FIRST):
                outbox[(stage + direction) % num_stages] = (chunk, microbatch)
        inbox = outbox
    return done


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_input_was_sent_the_tick_before(schedule):
    p = schedule.num_stages
    forward, backward = simulate(schedule.forward, p, 1), simulate(schedule.backward, p, -1)
    assert len(forward) == p * schedule.virtual_stages * schedule.num_microbatches
    assert forward.keys() == backward.keys()
    # The forward half comes first, so the same tick will do.
    assert all(forward[unit] <= backward[unit] for unit in forward)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_inputs_are_kept_until_they_are_used(schedule):
    kept = {}
    used = set()
    for tick in range(schedule.num_ticks):
        for half, slots in ((schedule.forward, schedule.slots.write), (schedule.backward, schedule.slots.read)):
            for stage in range(schedule.num_stages):
                slot, unit = int(slots[tick, stage]), (int(half.chunk[tick, stage]), int(half.microbatch[tick, stage]))
                assert (slot >= 0) == bool(half.is_kept[tick, stage])
                if slot < 0:
                    continue
                used.add(slot)
                if half is schedule.forward:
                    assert (stage, slot) not in kept
                    kept[stage, slot] = unit
                else:
                    assert kept.pop((stage, slot)) == unit
    assert not kept and used == set(range(schedule.num_slots))


def test_number_of_slots():
    for p in (2, 3, 4, 8, 16):
        # 2p - 1 on the first stage, which needs none: it has the tokens. The next one has two fewer.
        assert PipelineSchedule("1f1b", p, 1, 4 * p).num_slots == 2 * p - 3
        assert PipelineSchedule("1f1b", p, 1, p).num_slots == min(p, 2 * p - 3)
        for v in (1, 2):
            assert PipelineSchedule("gpipe", p, v, 4 * p).num_slots == 4 * p * v
    assert PipelineSchedule("1f1b", 4, 2, 64).num_slots < 2 * 2 * 4


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_bubble_as_executed(schedule):
    p, v, m = schedule.num_stages, schedule.virtual_stages, schedule.num_microbatches
    for times in ((1, 2), (1, 3), (2.5, 1)):
        assert schedule.bubble(*times) == pytest.approx((p - 1) / (v * m), abs=1e-12)


def test_bubbles_of_the_frontier_runs():
    assert PipelineSchedule("1f1b", 16, 1, 320).bubble() == pytest.approx(0.046875)
    assert PipelineSchedule("1f1b", 64, 1, 800).bubble() == pytest.approx(0.07875)
    assert PipelineSchedule("1f1b", 1, 1, 3).bubble() == 0


@pytest.mark.parametrize("p, v, m", [(2, 1, 1), (4, 1, 3), (4, 2, 3), (4, 2, 6), (3, 3, 7)])
def test_forward_alone_takes_any_number_of_microbatches(p, v, m):
    done = simulate(forward_alone(p, v, m), p, 1)
    assert {unit[1:] for unit in done} == {(chunk, i) for chunk in range(v) for i in range(m)}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("1F1B", 2, 1, 2), "gpipe, 1f1b"),
        (("1f1b", 0, 1, 2), "pipeline=0"),
        (("1f1b", 4, 1, 3), "use pipeline=3, or at least 4 microbatches"),
        (("1f1b", 4, 2, 10), "8 or 12 microbatches"),
        (("gpipe", 4, 2, 10), "8 or 12 microbatches"),
        (("1f1b", 1, 2, 10), "virtual_stages=1, or pipeline=2"),
    ],
)
def test_what_does_not_fit(arguments, words):
    with pytest.raises(UserError, match=words):
        PipelineSchedule(*arguments)


def test_blocks_are_dealt_evenly():
    assert assign_blocks(4, 2).owner.tolist() == [[0, 1], [2, 3]]
    assert assign_blocks(4, 2, 2).owner.tolist() == [[0, 2], [1, 3]]
    # The ends, which also have the embedding and the head, are the shorter ones.
    assert assign_blocks(6, 4).owner.tolist() == [[0, -1], [1, 2], [3, 4], [5, -1]]
    assert assign_blocks(7, 4).owner.tolist() == [[0, -1], [1, 2], [3, 4], [5, 6]]
    # The first chunk is as long on every stage, so it has no empty slot.
    assert assign_blocks(5, 2, 2).chunk_slots == (range(1), range(1, 3))


@pytest.mark.parametrize("num_blocks, p, v", [(4, 4, 1), (9, 4, 1), (11, 2, 3), (96, 16, 1), (97, 8, 4), (23, 3, 5)])
def test_every_block_once_in_order(num_blocks, p, v):
    dealt = assign_blocks(num_blocks, p, v)
    order, lengths = [], []
    for slots in dealt.chunk_slots:
        for stage in range(p):
            own = [int(block) for block in dealt.owner[stage, slots.start : slots.stop] if block >= 0]
            order += own
            lengths.append(len(own))
    assert order == list(range(num_blocks)) and max(lengths) - min(lengths) <= 1
    assert lengths[0] == min(lengths) and np.all(dealt.owner.max(0) >= 0)


@pytest.mark.parametrize(
    ("p", "v", "words"), [(4, 2, "at most virtual_stages=1 or pipeline=2"), (8, 1, "at most pipeline=5")]
)
def test_more_virtual_stages_than_blocks(p, v, words):
    with pytest.raises(UserError, match=words):
        assign_blocks(5, p, v)
