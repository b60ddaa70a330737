"""Schedules: the ends, derivatives, inverse, and broadcasting over images."""

import math

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.flow.schedule import DDPMLinear, RectifiedFlow, Schedule, VPCosine, expand, schedule

SCHEDULES = [RectifiedFlow(), VPCosine(), DDPMLinear()]
each = pytest.mark.parametrize("curve", SCHEDULES, ids=lambda s: s.name)


@each
def test_name_leads_back(curve: Schedule) -> None:
    assert schedule(curve.name) == curve


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vp-cosine'"):
        schedule("vp_cosine")


@each
def test_time_zero_is_data_and_time_one_is_noise(curve: Schedule) -> None:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    room = 0.011 if curve.name == "ddpm-linear" else 0.0
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


@each
def test_float32_agrees_with_float64(curve: Schedule) -> None:
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float32)
    for method in ("alpha", "sigma", "d_alpha", "d_sigma", "log_snr"):
        low, high = getattr(curve, method)(t), getattr(curve, method)(t.double())
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=3e-6, atol=3e-6)


def test_ddpm_knots_are_the_product_of_the_betas() -> None:
    kept, curve = 1.0, DDPMLinear()
    t = torch.arange(1000, dtype=torch.float64) / 999
    alpha = curve.alpha(t)
    for n in range(1000):
        kept *= 1 - (1e-4 + (0.02 - 1e-4) * n / 999)
        assert abs(float(alpha[n]) - math.sqrt(kept)) < 1e-12


def test_ddpm_log_snr_is_linear_between_knots() -> None:
    t = torch.tensor([500.0, 500.25, 500.5, 500.75, 501.0], dtype=torch.float64) / 999
    log_snr = DDPMLinear().log_snr(t)
    torch.testing.assert_close(log_snr.diff(), log_snr.diff().mean().expand(4), rtol=1e-9, atol=0)


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


def test_expand_refuses_another_batch() -> None:
    with pytest.raises((AssertionError, TypeError)):  # jaxtyping, where it is on, is first
        expand(torch.ones(3), torch.ones(4, 1, 2, 2))
