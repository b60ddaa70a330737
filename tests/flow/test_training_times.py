"""Training times: quantiles, the shift, and safety at the ends."""

import math

import pytest
import torch

from atoll.flow.objective import MARGIN, training_times
from atoll.flow.schedule import RectifiedFlow, schedule
from atoll.flow.settings import TimeConfig


def test_uniform_times_are_the_uniforms() -> None:
    u = torch.linspace(0.01, 0.99, 33)
    assert torch.equal(training_times(TimeConfig(), u, RectifiedFlow()), u)


def test_logit_normal_quantiles() -> None:
    normal = torch.distributions.Normal(0.0, 1.0)
    z = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    config = TimeConfig(distribution="logit-normal", mean=0.5, std=0.8)
    times = training_times(config, normal.cdf(z), RectifiedFlow())
    torch.testing.assert_close(torch.logit(times), 0.5 + 0.8 * z, rtol=1e-6, atol=1e-6)


CURVES = ["rectified-flow", "vp-cosine", "ddpm-linear", "ddpm-scaled-linear", "ddpm-cosine"]


@pytest.mark.parametrize("distribution", ["uniform", "logit-normal"])
@pytest.mark.parametrize("name", CURVES)
def test_shift_takes_away_log_snr_of_every_schedule(name: str, distribution: str) -> None:
    u, curve = torch.linspace(0.1, 0.7, 9, dtype=torch.float64), schedule(name)
    plain = training_times(TimeConfig.parse({"distribution": distribution}, "test"), u, curve)
    shifted = TimeConfig.parse({"distribution": distribution, "shift": math.e}, "test")
    moved = training_times(shifted, u, curve)
    torch.testing.assert_close(curve.log_snr(moved), curve.log_snr(plain) - 2, rtol=1e-9, atol=1e-9)
    assert (moved > plain).all()  # positive = more noise


def test_shift_is_the_one_of_sd3() -> None:
    """Equal to the bit as float32, also where a time is nearer to an end than the margin."""
    ends = torch.logspace(-9, -5, 400)
    t, s = torch.cat([ends, torch.linspace(0.001, 0.999, 4001), 1 - ends]), 3.0
    moved = training_times(TimeConfig(shift=s), t, RectifiedFlow())
    assert torch.equal(moved, (s * t.double() / (1 + (s - 1) * t.double())).clamp(MARGIN, 1 - MARGIN).float())


@pytest.mark.parametrize("distribution", ["uniform", "logit-normal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CURVES)
def test_times_stay_inside(name: str, distribution: str, dtype: torch.dtype) -> None:
    config = TimeConfig.parse({"distribution": distribution, "shift": math.exp(4), "std": 4}, "test")
    last = 1 - torch.finfo(dtype).eps / 2  # the largest uniform there is
    times = training_times(config, torch.tensor([0.0, 1e-9, 0.5, last], dtype=dtype), schedule(name))
    assert times.dtype == dtype
    assert (times > 0).all() and (1 - times > MARGIN / 2).all()
    assert (times.diff() >= 0).all()
    assert schedule(name).log_snr(times).isfinite().all()
