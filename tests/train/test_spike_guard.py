"""Which steps are skipped."""

import math

import pytest

from atoll.campaign.settings.train import GuardConfig
from atoll.train.state import Guard


def settled(loss: float = 1.0, noise: float = 0.05) -> Guard:
    guard = Guard(GuardConfig(window=32, factor=10.0, patience=3))
    for step in range(32):
        assert guard.admits(loss + noise * math.sin(step), 1.0)
    return guard


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite_is_left_out_from_the_first_step(loss: float, norm: float) -> None:
    guard = Guard(GuardConfig())
    assert not guard.admits(loss, norm)
    assert (guard.skipped, guard.in_a_row, list(guard.window)) == (1, 1, [])


def test_a_spike_is_left_out_once_the_bound_has_settled() -> None:
    fresh = Guard(GuardConfig(window=32))
    for _ in range(7):
        assert fresh.admits(1.0, 1.0)
    assert fresh.bound() == math.inf and fresh.admits(50.0, 1.0)
    guard = settled()
    assert guard.admits(1.5, 1.0)
    assert 1.9 < guard.bound() < 2.2
    assert not guard.admits(50.0, 1.0) and not guard.admits(2.3, 1.0)
    assert guard.bound() < 2.2  # what was skipped does not move the bound


def test_the_bound_follows_a_loss_that_rises_slowly() -> None:
    guard = settled()
    for step in range(400):
        assert guard.admits(1.0 + step / 100, 1.0)
    assert guard.skipped == 0


def test_a_wide_spread_is_no_spike() -> None:
    assert settled(noise=0.5).admits(2.5, 1.0)


def test_it_gives_up_when_steps_in_a_row_are_left_out() -> None:
    guard = settled()
    for _ in range(2):
        assert not guard.admits(math.nan, 1.0)
    assert guard.in_a_row == 2
    assert guard.admits(1.0, 1.0) and guard.in_a_row == 0 and guard.skipped == 2
    for _ in range(3):
        assert not guard.admits(99.0, 1.0)
    assert guard.in_a_row == 3


def test_it_goes_on_from_its_counters() -> None:
    guard = settled()
    assert not guard.admits(math.nan, 1.0)
    other = Guard(guard.config)
    other.restore(guard.counters())
    assert other.bound() == guard.bound() and other.counters() == guard.counters()
    for loss in (1.0, 40.0, 1.1):
        assert other.admits(loss, 1.0) == guard.admits(loss, 1.0)
    assert other.counters() == guard.counters()
