"""The two streams against timelines worked out by hand."""

import pytest

from amsp_jax.predict.cost.communication import Phase
from amsp_jax.predict.cost.timeline import PartTimes, StepTimes, simulate


def part(forward_s=1.0, backward_s=2.0, **messages_s):
    return PartTimes(forward_s, backward_s, {Phase(name): (seconds,) for name, seconds in messages_s.items()})


def step(*parts, optimizer_s=0.0, window=None, slowdown=1.0, accumulation=1, peel=True):
    return simulate(StepTimes(parts, optimizer_s, window, slowdown), accumulation, peel, record=True)


EDGE = part(0.0, 0.0)


def test_without_communication_it_is_the_sum():
    timeline = step(EDGE, part(), part(), EDGE, optimizer_s=0.5, accumulation=3)
    assert timeline.step_s == timeline.compute_s == 3 * 2 * 3.0 + 0.5
    assert timeline.exposed_s == timeline.communication_s == 0


def test_the_first_gather_is_exposed_and_the_others_hide():
    """Forward: 0.5 is waited for, the second gather runs beside the first block."""
    timeline = step(EDGE, part(forward=0.5), part(forward=0.5), EDGE)
    assert timeline.exposed_s == pytest.approx(0.5)
    assert timeline.step_s == pytest.approx(6.5)


def test_slow_gathers_make_the_wire_the_limit():
    """Gathers of 3 s before blocks of 1 s: the wire never rests, and the last block comes after the last gather."""
    timeline = step(EDGE, *[part(1.0, 0.0, forward=3.0)] * 4, EDGE)
    assert timeline.step_s == pytest.approx(4 * 3.0 + 1.0)


def test_reductions_hide_behind_the_next_backward_but_the_last():
    timeline = step(EDGE, *[part(reduce=1.5)] * 4, EDGE)
    assert timeline.exposed_s == pytest.approx(1.5)


def test_a_window_holds_the_backward_pass_back():
    """With a window of two, the third block from the end waits for the reduction of the first."""
    slow = [part(0.0, 1.0, reduce=10.0)] * 3
    free, held = step(EDGE, *slow, EDGE), step(EDGE, *slow, EDGE, window=2)
    assert free.step_s == held.step_s == pytest.approx(31.0)
    compute = [e.start_s for e in held.events if e.name.startswith("backward") and e.stream == "compute"]
    assert compute == pytest.approx([0.0, 1.0, 11.0])


@pytest.mark.parametrize(("num_end_parts", "expected"), [(1, [3.0, 4.0, 14.0]), (2, [3.0, 14.0, 15.0])])
def test_a_window_of_what_is_reduced_once_holds_the_last_microbatch_back(num_end_parts, expected):
    """As the other, but not in the microbatch before. In twos the edge's message comes with the third block's."""
    parts = [EDGE, *[part(0.0, 1.0, end=10.0)] * 3, EDGE]
    held = StepTimes(parts, 0.0, None, 1.0, num_end_parts=num_end_parts, end_window=2)
    events = simulate(held, 2, peel=True, record=True).events
    compute = [e.start_s for e in events if e.name.startswith("backward") and e.stream == "compute"]
    assert compute == pytest.approx([0.0, 1.0, 2.0, *expected])


def test_what_is_done_once_overlaps_the_peeled_microbatches_alone():
    blocks = [EDGE, *[part(start=0.5, end=0.5)] * 4, EDGE]
    peeled, looped = step(*blocks, accumulation=4), step(*blocks, accumulation=4, peel=False)
    assert peeled.exposed_s == pytest.approx(0.5 + 0.5)
    assert looped.exposed_s == pytest.approx(4 * 0.5 + 4 * 0.5)
    assert peeled.num_loop_trips == 2 and looped.num_loop_trips == 4


def test_reductions_at_the_end_follow_those_of_the_last_microbatch():
    timeline = step(EDGE, part(0.0, 1.0, reduce=2.0, end=3.0), EDGE)
    spans = {e.name: (e.start_s, e.end_s) for e in timeline.events if e.stream == "communication"}
    assert spans == {"reduce 1": (1.0, 3.0), "reduce at the end 1": (3.0, 6.0)}


def test_a_gather_overtakes_reductions_that_wait():
    blocks = [part(0.0, 1.0, backward=0.1, end=5.0), part(0.0, 1.0, backward=0.1, end=5.0)]
    names = [e.name for e in step(EDGE, *blocks, EDGE).events if e.stream == "communication"]
    assert names == ["gather again 2", "gather again 1", "reduce at the end 2", "reduce at the end 1"]


def test_compute_is_slower_beside_a_collective():
    """A block of 4 s; beside it a reduction of 1.5 s in which 1 s worth of work is done."""
    timeline = step(EDGE, part(0.0, 4.0), part(0.0, 0.0, reduce=1.5), EDGE, slowdown=1.5)
    assert timeline.step_s == pytest.approx(4.5)
    assert timeline.exposed_s == 0


def test_a_loop_counts_as_often_as_it_runs():
    blocks = [EDGE, *[part(forward=0.3, backward=0.3, reduce=0.4)] * 3, EDGE]
    once, many = (step(*blocks, accumulation=n, peel=False) for n in (2, 10))
    for quantity in ("step_s", "compute_s", "communication_s", "exposed_s"):
        assert getattr(many, quantity) == pytest.approx(5 * getattr(once, quantity))


def test_busy_and_waiting_add_up():
    blocks = [EDGE, *[part(start=0.7, forward=0.6, backward=0.9, reduce=1.1, end=0.8)] * 5, part(0.5, 0.5, end=1.0)]
    for accumulation in (1, 2, 5):
        timeline = step(*blocks, optimizer_s=0.3, window=2, slowdown=1.1, accumulation=accumulation)
        assert timeline.compute_s + timeline.exposed_s == pytest.approx(timeline.step_s)
        assert timeline.step_s >= timeline.communication_s


def test_what_travels_together_waits_for_the_last_and_is_waited_for_by_the_first():
    """Alone, three of four messages run beside compute; in pairs, one of two."""
    late, early = [part(0.0, 1.0, end=1.0)] * 4, [part(1.0, 0.0, start=1.0)] * 4
    assert step(*late).step_s == step(*early).step_s == pytest.approx(5.0)
    pairs = [StepTimes(late, 0.0, None, 1.0, num_end_parts=2), StepTimes(early, 0.0, None, 1.0, num_start_parts=2)]
    for times in pairs:
        timeline = simulate(times, 1, peel=True)
        assert timeline.step_s == pytest.approx(6.0)
        assert timeline.communication_s == pytest.approx(4.0)
