"""Schedules: the ends, derivatives, inverse, and broadcasting over images."""

import math

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.flow.schedule import (
    DDPMCosine,
    DDPMLinear,
    DDPMScaledLinear,
    Discrete,
    RectifiedFlow,
    Schedule,
    VPCosine,
    expand,
    schedule,
    schedule_name,
)

SCHEDULES = [RectifiedFlow(), VPCosine(), DDPMLinear(), DDPMScaledLinear(), DDPMCosine()]
each = pytest.mark.parametrize("curve", SCHEDULES, ids=lambda s: s.name)


@each
def test_time_zero_is_data_and_time_one_is_noise(curve: Schedule) -> None:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    room = {"ddpm-linear": 0.011, "ddpm-scaled-linear": 0.069, "ddpm-cosine": 0.007}.get(curve.name, 0.0)
    assert torch.allclose(curve.alpha(ends), 1 - ends, atol=room, rtol=0)
    assert torch.allclose(curve.sigma(ends), ends, atol=room, rtol=0)


@each
def test_derivatives_are_those_of_the_curves(curve: Schedule) -> None:
    t = torch.linspace(0.0101, 0.9897, 57, dtype=torch.float64, requires_grad=True)
    for value, derivative in ((curve.alpha, curve.d_alpha), (curve.sigma, curve.d_sigma)):
        (expected,) = torch.autograd.grad(value(t).sum(), t)
        torch.testing.assert_close(derivative(t), expected, rtol=1e-12, atol=1e-12)


@each
def test_log_snr_is_that_of_alpha_and_sigma_and_falls(curve: Schedule) -> None:
    t = torch.linspace(0.001, 0.999, 401, dtype=torch.float64)
    expected = 2 * (curve.alpha(t) / curve.sigma(t)).log()
    torch.testing.assert_close(curve.log_snr(t), expected, rtol=1e-12, atol=1e-12)
    assert (curve.log_snr(t).diff() < 0).all()


@each
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_time_of_log_snr_inverts(curve: Schedule, dtype: torch.dtype, error: float) -> None:
    t = torch.linspace(0.001, 0.999, 997, dtype=dtype)
    back = curve.time_of_log_snr(curve.log_snr(t))
    assert back.dtype == dtype
    torch.testing.assert_close(back, t, rtol=0, atol=error)


@each
def test_time_of_log_snr_is_clamped_to_the_range(curve: Schedule) -> None:
    extremes = torch.tensor([math.inf, 100.0, -100.0, -math.inf], dtype=torch.float64)
    lo, hi = curve.t_range
    expected = torch.tensor([lo, lo, hi, hi], dtype=torch.float64)
    torch.testing.assert_close(curve.time_of_log_snr(extremes), expected, rtol=0, atol=1e-15)


BETAS = {
    "ddpm-linear": {"beta_schedule": "linear"},
    "ddpm-linear(250, 0.0004, 0.08)": {
        "beta_schedule": "linear", "num_train_timesteps": 250, "beta_start": 0.0004, "beta_end": 0.08,
    },
    "ddpm-scaled-linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "ddpm-cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "ddpm-cosine(400)": {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 400},
}  # fmt: skip


@pytest.mark.parametrize("name", BETAS)
def test_at_every_level_alpha_is_that_of_diffusers(name: str) -> None:
    from diffusers import DDPMScheduler

    curve, theirs = schedule(name), DDPMScheduler(**BETAS[name])
    assert isinstance(curve, Discrete) and curve.steps == len(theirs.alphas_cumprod)
    t = torch.arange(curve.steps, dtype=torch.float64) / (curve.steps - 1)
    ours = curve.alpha(t).square()
    torch.testing.assert_close(ours, theirs.alphas_cumprod.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(curve.sigma(t).square(), 1 - ours, rtol=0, atol=1e-12)
    numbers = t * 1000 * curve.clock  # what a network of a family with time scale 1000 is told
    torch.testing.assert_close(numbers, torch.arange(curve.steps).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", [*BETAS, "rectified-flow", "vp-cosine"])
def test_a_name_with_numbers_leads_back(name: str) -> None:
    assert schedule_name(schedule(name)) == name and schedule(schedule_name(schedule(name))) == schedule(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddpm-linear(1000)", r"is no schedule: write ddpm-linear\(steps, first_beta, last_beta\)"),
        ("ddpm-linear(1000, a, b)", "is no schedule: write"),
        ("ddpm-linear(1000, 0.0001, 0.02", "is no schedule: write"),
        ("ddpm-cosine(1000, 0.1, 0.2)", r"write ddpm-cosine\(steps\)"),
        ("vp-cosine(3)", "is no schedule: write vp-cosine"),
        ("ddpm-linear(1000, 0.0, 0.02)", r"use 2 levels or more and betas in \(0, 1\)"),
        ("ddpm-linear(1, 0.1, 0.2)", "use 2 levels or more"),
        ("ddpm-linear(-5, 0.1, 0.2)", "is no schedule"),
        ("ddpm-cosine(1000.7)", "is no schedule"),
        ("ddpm-cosine(inf)", "is no schedule"),
        ("ddpm-cosine(4000000000)", "is no schedule"),  # nor is memory taken for it
        ("ddpm-liner(1000, 0.1, 0.2)", "did you mean 'ddpm-linear'"),
    ],
)
def test_names_that_make_no_schedule(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schedule(name)


def test_ddpm_table_made_in_inference_mode_serves_training() -> None:
    curve = DDPMLinear(steps=321)  # a schedule of its own: its table is not cached yet
    t = torch.tensor([0.3], requires_grad=True)
    with torch.inference_mode():
        curve.alpha(torch.tensor([0.3]))
    (slope,) = torch.autograd.grad(curve.alpha(t).sum(), t)
    torch.testing.assert_close(slope, curve.d_alpha(t.detach()), rtol=1e-5, atol=0)


def test_expand_where_the_batch_is_as_wide_as_the_image() -> None:
    x, t = torch.ones(5, 2, 3, 5), torch.arange(5.0)
    scaled = expand(t, x) * x
    for row in range(5):
        assert (scaled[row] == row).all()
    assert not torch.equal(scaled, t * x)  # what the trap would give
