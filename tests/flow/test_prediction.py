"""Conversions between predictions and schedules, the edge where a network becomes a velocity, guidance."""

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from atoll.flow.objective import noisy, target
from atoll.flow.prediction import (
    DATA_EDGE,
    MOST_WEIGHT,
    NOISE_EDGE,
    exact_range,
    flow_velocity,
    guide,
    same_snr_time,
    velocity_weight,
)
from atoll.flow.schedule import DDPMCosine, DDPMLinear, RectifiedFlow, Schedule, VPCosine, expand
from atoll.flow.settings import Prediction

SCHEDULES = [RectifiedFlow(), VPCosine(), DDPMLinear(), DDPMCosine()]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)
each_schedule = pytest.mark.parametrize("curve", SCHEDULES, ids=lambda s: s.name)
each_prediction = pytest.mark.parametrize("prediction", PREDICTIONS)
SHAPE = (4, 2, 3, 4)  # B == W on purpose


def draw(seed: int, shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(shape, generator=source, dtype=torch.float64) for _ in range(2))
    return one, other


def error(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the size of the second."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1))


@pytest.mark.parametrize(("first", "second"), [*itertools.product(SCHEDULES, repeat=2)], ids=lambda s: s.name)
def test_the_time_of_the_same_snr_on_another_schedule(first: Schedule, second: Schedule) -> None:
    t = same_snr_time(torch.linspace(0.01, 0.99, 12, dtype=torch.float64), RectifiedFlow(), first)
    tau = same_snr_time(t, first, second)
    torch.testing.assert_close(second.log_snr(tau), first.log_snr(t), rtol=1e-12, atol=1e-11)
    assert error(same_snr_time(tau, second, first), t) < 1e-12


def test_exact_range_is_the_documented_one() -> None:
    assert exact_range(VPCosine(), "v") == (0.0, 1.0)
    assert exact_range(RectifiedFlow(), "x0") == (DATA_EDGE, 1.0)
    assert exact_range(VPCosine(), "eps") == (0.0, NOISE_EDGE)
    assert exact_range(DDPMLinear(), "eps") == pytest.approx((0.0099, 0.9937), abs=5e-5)


def test_a_rectified_flow_network_is_passed_through_untouched() -> None:
    x_t, answer = draw(5)
    t = torch.rand(4, dtype=torch.float64)
    seen = []

    def network(x: Tensor, tau: Tensor) -> Tensor:
        seen.append((x, tau))
        return answer

    assert flow_velocity(network, "v", RectifiedFlow(), x_t, t) is answer
    assert seen[0][0] is x_t and seen[0][1] is t


@each_schedule
@each_prediction
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 3e-4)])
def test_velocity_of_one_known_image(
    curve: Schedule, prediction: Prediction, dtype: torch.dtype, bound: float
) -> None:
    """A network that knows x0 gives the straight path to it, at the right time and scale."""
    x0, eps = (part.to(dtype) for part in draw(6, (9, 2, 3, 9)))
    t = torch.linspace(0.01, 0.99, 9, dtype=dtype)

    def network(x: Tensor, tau: Tensor) -> Tensor:
        noise = (x - expand(curve.alpha(tau), x) * x0) / expand(curve.sigma(tau), x)
        return target(x0, noise, tau, curve, prediction)

    x_t = noisy(x0, eps, t, RectifiedFlow())
    kept = x_t.clone()
    v = flow_velocity(network, prediction, curve, x_t, t)
    assert v.dtype == dtype
    assert torch.equal(x_t, kept)
    assert error(v, eps - x0) < bound


@each_schedule
@each_prediction
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_velocity_is_finite_up_to_both_ends(
    curve: Schedule, prediction: Prediction, dtype: torch.dtype
) -> None:
    x_t = draw(7, (8, 2, 3, 8))[0].to(dtype)
    t = torch.tensor([0.0, 1e-6, 1e-4, 0.005, 0.5, 0.9945, 0.9999, 1.0], dtype=dtype)
    v = flow_velocity(lambda x, tau: torch.tanh(x) + expand(tau, x), prediction, curve, x_t, t)
    assert v.isfinite().all()
    assert float(v.abs().max()) < 5 / DATA_EDGE


@each_schedule
@each_prediction
def test_velocity_is_continuous_across_the_edges(curve: Schedule, prediction: Prediction) -> None:
    x_t = draw(8)[0]
    for edge in exact_range(curve, prediction):
        if not 0 < edge < 1:
            continue
        values = []
        for step in (-1e-10, 1e-10):
            t = torch.full((4,), edge + step, dtype=torch.float64)
            values.append(flow_velocity(lambda x, tau: torch.tanh(x), prediction, curve, x_t, t))
        assert error(*values) < 1e-5  # slopes reach 1 / edge^2, so 1e-10 of time moves v by a little


@pytest.mark.parametrize("prediction", ["eps", "x0", "v"])
def test_a_step_from_below_the_range_lands_on_the_predicted_image(prediction: Prediction) -> None:
    x0, eps = draw(9)
    curve, t = DDPMLinear(), torch.full((4,), 0.003, dtype=torch.float64)

    def network(x: Tensor, tau: Tensor) -> Tensor:
        noise = (x - expand(curve.alpha(tau), x) * x0) / expand(curve.sigma(tau), x)
        return target(x0, noise, tau, curve, prediction)

    x_t = noisy(x0, eps, t, RectifiedFlow())
    assert error(x_t - 0.003 * flow_velocity(network, prediction, curve, x_t, t), x0) < 1e-13


@each_schedule
@each_prediction
def test_a_bound_leaves_an_exact_network_alone(curve: Schedule, prediction: Prediction) -> None:
    """Of two images within the box; where the posterior mean is far inside, and where it is at a corner."""
    images = torch.tensor([-1.0, 1.0], dtype=torch.float64).view(2, 1, 1, 1)

    def network(x: Tensor, tau: Tensor) -> Tensor:
        alpha, sigma = (expand(part, x) for part in (curve.alpha(tau), curve.sigma(tau)))
        x0 = torch.tanh(x.sum((1, 2, 3), keepdim=True) * alpha / sigma**2).expand_as(x)
        return target(x0, (x - alpha * x0) / sigma, tau, curve, prediction)

    t = torch.linspace(*exact_range(curve, prediction), 10, dtype=torch.float64)[1:9]
    eps = draw(10, (8, 1, 3, 8))[0]
    x_t = noisy(images[torch.arange(8) % 2].expand_as(eps), eps, t, RectifiedFlow())
    plain, held = (flow_velocity(network, prediction, curve, x_t, t, b) for b in (None, 1.0))
    assert error(held, plain) < 1e-11


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_with_a_bound_no_error_of_the_noise_is_magnified(dtype: torch.dtype) -> None:
    x0, eps = (part.to(dtype) for part in draw(11, (8, 2, 3, 8)))
    x0 = x0.clamp(-1, 1)
    t = torch.tensor([1e-4, 0.1, 0.5, 0.9, 0.97, 0.994, 0.999, 1.0], dtype=dtype)
    x_t = noisy(x0, eps, t, RectifiedFlow())
    wrong = torch.roll(eps, 1, 0)
    plain, held = (
        flow_velocity(lambda x, tau: 0.9 * eps + 0.1 * wrong, "eps", VPCosine(), x_t, t, b)
        for b in (None, 1.0)
    )
    assert float((x_t - expand(t, x_t) * held).abs().max()) <= 1 + 1e-5
    off = [((v - (eps - x0)) ** 2).mean((1, 2, 3)) for v in (plain, held)]
    assert (off[1] <= off[0] * (1 + 1e-4)).all()
    assert float(off[0][-1]) > 100 and float(off[1].max()) < 4


@each_schedule
@each_prediction
def test_an_error_weighs_what_it_does_to_the_velocity(curve: Schedule, prediction: Prediction) -> None:
    t = torch.tensor([0.06, 0.3, 0.5, 0.8, 0.94], dtype=torch.float64)
    tau, x_t = same_snr_time(t, RectifiedFlow(), curve), torch.randn(5, 1, 2, 2).double()
    one, nil = (
        flow_velocity(lambda x, _, make=make: make(x), prediction, curve, x_t, t)  # type: ignore[misc]
        for make in (torch.ones_like, torch.zeros_like)
    )
    found = (one - nil).square().mean((1, 2, 3))
    torch.testing.assert_close(velocity_weight(tau, curve, prediction), found.clamp(max=MOST_WEIGHT))


def test_weights_by_hand() -> None:
    t = torch.tensor([0.01, 0.25, 0.5])
    assert velocity_weight(t, RectifiedFlow(), "x0").tolist() == [MOST_WEIGHT, 16.0, 4.0]
    assert velocity_weight(t, RectifiedFlow(), "v").tolist() == [1.0, 1.0, 1.0]


def test_scale_one_is_the_conditional_velocity_exactly() -> None:
    cond, null = torch.randn(2, 3, 1, 2, 3, generator=torch.Generator().manual_seed(0)) * 1e3
    assert not torch.equal(null + (cond - null), cond)  # the formula alone would round
    assert guide(cond, null, 1.0) is cond
    assert torch.equal(guide(cond, null, torch.ones(3)), cond)


def test_a_scale_per_sample_where_the_batch_is_as_wide_as_the_image() -> None:
    cond, null = torch.randn(2, 3, 1, 2, 3, generator=torch.Generator().manual_seed(1))
    scales = [0.0, 1.0, 4.0]
    mixed = guide(cond, null, torch.tensor(scales))
    for row, scale in enumerate(scales):
        assert torch.equal(mixed[row], guide(cond[row : row + 1], null[row : row + 1], scale)[0])
