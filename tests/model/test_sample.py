"""From noise to latents: the grid of times, and Euler's method by hand."""

import pytest
import torch
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.model.integrate import euler, sample, starting_noise


def curved(x: Tensor, t: float, step: int) -> Tensor:
    """A flow that is not straight, so that the grid matters."""
    return torch.sin(3 * x) + 2 * t * x + 0.1 * step


@pytest.mark.parametrize("steps", [1, 5, 50])
def test_times_are_even_and_end_at_one_nth(steps: int) -> None:
    expected = torch.tensor([(steps - i) / steps for i in range(steps)] + [0.0])
    torch.testing.assert_close(euler(steps).sigmas, expected, rtol=0, atol=1e-7)
    asked: list[float] = []
    seen: list[int] = []

    def flow(x: Tensor, t: float, step: int) -> Tensor:
        asked.append(t)
        return torch.zeros_like(x)

    sample(flow, torch.zeros(1, 1, 2, 2), steps, on_step=lambda step, x: seen.append(step))
    assert asked == pytest.approx(expected[:-1].tolist(), abs=1e-7) and seen == list(range(steps))
    with pytest.raises(ConfigError, match="0 sampling steps"):
        euler(0)


@pytest.mark.parametrize("steps", [1, 3, 20])
def test_it_is_eulers_method(steps: int) -> None:
    x = start = starting_noise(0, range(4), (3, 4, 4))
    for i in range(steps):
        x = x - curved(x, 1 - i / steps, i) / steps
    torch.testing.assert_close(sample(curved, start, steps), x, rtol=1e-5, atol=1e-6)


def test_the_time_shift_is_that_of_sd3() -> None:
    even = torch.tensor([1.0, 0.75, 0.5, 0.25])
    shifted = 3 * even / (1 + 2 * even)
    torch.testing.assert_close(euler(4, shift=3.0).sigmas[:-1], shifted)


def test_noise_of_a_sample_depends_on_seed_and_number_only() -> None:
    many = starting_noise(4, range(10), (2, 3, 3))
    assert torch.equal(starting_noise(4, [7, 2], (2, 3, 3)), many[[7, 2]])
    assert not torch.equal(starting_noise(5, [7], (2, 3, 3)), many[[7]])
    assert len(many.flatten(1).unique(dim=0)) == 10
    assert abs(float(starting_noise(0, range(200), (3, 8, 8)).std()) - 1) < 0.02
