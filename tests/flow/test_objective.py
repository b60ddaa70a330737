"""States, targets, losses and dropout of the condition."""

import pytest
import torch

from atoll.base.condition import Condition
from atoll.flow.objective import drop_condition, noisy, per_sample_loss, target
from atoll.flow.schedule import DDPMLinear, RectifiedFlow, Schedule, VPCosine

SCHEDULES = [RectifiedFlow(), VPCosine(), DDPMLinear()]


@pytest.mark.parametrize("curve", SCHEDULES, ids=lambda s: s.name)
def test_v_is_the_derivative_of_the_state_in_time(curve: Schedule) -> None:
    x0, eps = torch.randn(2, 5, 1, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], dtype=torch.float64)
    ahead, behind = (noisy(x0, eps, t + step, curve) for step in (1e-6, -1e-6))  # no DDPM knot in between
    torch.testing.assert_close(target(x0, eps, t, curve, "v"), (ahead - behind) / 2e-6, rtol=0, atol=1e-8)


def test_rectified_flow_by_hand() -> None:
    x0, eps = torch.full((2, 1, 2, 2), 3.0), torch.full((2, 1, 2, 2), -1.0)
    t = torch.tensor([0.25, 0.5])
    assert noisy(x0, eps, t, RectifiedFlow())[:, 0, 0, 0].tolist() == [2.0, 1.0]
    goals = {"v": [-4.0, -4.0], "eps": [-1.0, -1.0], "x0": [3.0, 3.0], "score": [4.0, 2.0]}
    for prediction, expected in goals.items():
        assert target(x0, eps, t, RectifiedFlow(), prediction)[:, 0, 0, 0].tolist() == expected


def test_loss_is_per_sample_and_at_least_float32() -> None:
    goal = torch.ones(3, 2, 4, 3) * torch.tensor([1.0, 2, 3]).view(3, 1, 1, 1)
    output = torch.zeros_like(goal)
    assert per_sample_loss(output, goal).tolist() == [1.0, 4.0, 9.0]
    low = per_sample_loss(output.bfloat16(), goal + 1e-3)  # bfloat16 would round 1.001 to 1
    assert low.dtype == torch.float32 and float(low[0]) == pytest.approx(1.002, abs=1e-5)
    assert per_sample_loss(output.double(), goal).dtype == torch.float64


def test_dropped_conditions_are_the_null_one() -> None:
    cond = Condition(labels=torch.arange(4), text=torch.ones(4, 3, 2), mask=torch.ones(4, 3).bool())
    null = Condition(
        labels=torch.tensor([9]), text=torch.zeros(1, 1, 2), mask=torch.ones(1, 1, dtype=torch.bool)
    )
    dropped = drop_condition(cond, null, torch.tensor([0.0, 0.099, 0.1, 0.9]), 0.1)
    assert dropped.labels is not None and dropped.text is not None and dropped.mask is not None
    assert dropped.labels.tolist() == [9, 9, 2, 3]
    assert dropped.text[:, 0, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert dropped.mask.sum(1).tolist() == [1, 1, 3, 3]
