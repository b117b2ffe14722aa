"""A loss that stands out is told once; noise, a falling loss and the first steps are not."""

import time

import numpy as np
import pytest

from amsp_jax.run import loss_spikes as spikes
from amsp_jax.run.loss_spikes import LossSpikes


def lines(losses, grad_norm=1.0):
    """The reports by step, counted from 1."""
    report = LossSpikes()
    told = {step: report.seen(step, float(loss), grad_norm) for step, loss in enumerate(losses, start=1)}
    found = {step: line for step, line in told.items() if line}
    assert report.num_spikes == len(found)
    return found


def noisy(num, seed=0, level=3.0, noise=0.05):
    return level + noise * np.random.default_rng(seed).standard_normal(num)


def test_a_spike_is_told_with_its_numbers():
    losses = noisy(200)
    losses[150] = 5.0
    report = LossSpikes()
    for step, loss in enumerate(losses[:150], start=1):
        assert report.seen(step, loss, 1.0) is None
    line = report.seen(151, losses[150], 14.2)
    median = np.median(losses[50:150])
    mad = 1.4826 * np.median(np.abs(losses[50:150] - median))
    assert line == (
        f"loss spike 1 at step 151: 5.0000, where the median of the last 100 steps is {median:.4f} with a deviation of "
        f"{mad:.4f}; gradient norm 14.2, usually 1"
    )


def test_one_spike_is_one_line_and_the_next_another():
    losses = noisy(300)
    losses[100:112] += [2, 3, 2.5, 2, 1.5, 1, 0.8, 0.6, 0.5, 0.4, 0.28, 0.32]
    losses[200] += 2
    assert list(lines(losses)) == [101, 201]


def test_a_loss_that_stays_high_is_told_once():
    losses = noisy(500)
    losses[150:] += 2
    assert list(lines(losses)) == [151]


def test_after_a_lasting_rise_spikes_are_found_again():
    losses = noisy(600)
    losses[150:] += 2
    losses[450] += 2
    assert list(lines(losses)) == [151, 451]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_spike(seed):
    assert not lines(noisy(2000, seed))


def test_a_falling_loss_is_no_spike():
    steps = np.arange(2000)
    assert not lines(noisy(2000, level=0, noise=0.03) + 3 + 8 * np.exp(-steps / 100))


def test_rounding_of_a_constant_loss_is_no_spike():
    losses = np.full(300, 2.0)
    losses[200] *= 1 + 1e-6
    assert not lines(losses)
    losses[200] = 2.1
    assert list(lines(losses)) == [201]


def test_the_first_steps_are_not_judged():
    losses = noisy(100)
    losses[spikes.MIN_STEPS - 1] = 9.0
    losses[spikes.MIN_STEPS] = 9.0
    assert list(lines(losses)) == [spikes.MIN_STEPS + 1]


def test_steps_that_are_not_finite_change_nothing():
    report, without = LossSpikes(), LossSpikes()
    losses = noisy(200)
    losses[150] = 5.0
    for step, loss in enumerate(losses):
        assert report.seen(step, np.nan, 1.0) is None
        assert report.seen(step, 3.0, np.inf) is None
        assert report.seen(step, loss, 1.0) == without.seen(step, loss, 1.0)
    assert report.num_spikes == without.num_spikes == 1


def test_a_drop_is_no_spike():
    losses = noisy(200)
    losses[150] = 0.5
    assert not lines(losses)


def test_it_costs_little():
    started = time.perf_counter()
    lines(noisy(1000))
    assert time.perf_counter() - started < 10
