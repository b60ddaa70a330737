"""What a denoiser is trained on: noisy states, targets, and their loss (flow matching, DDM eq. 6).

All of it is a function of draws that the caller makes, so that a sample's noise, time and dropout
depend on nothing but its position in the run.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition
from atoll.flow.schedule import Schedule, expand
from atoll.flow.settings import Prediction


def noisy(
    x0: Float[Tensor, "B C H W"], eps: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], schedule: Schedule
) -> Float[Tensor, "B C H W"]:
    """The state `x_t = alpha(t) x0 + sigma(t) eps`."""
    return expand(schedule.alpha(t), x0) * x0 + expand(schedule.sigma(t), eps) * eps


def target(
    x0: Float[Tensor, "B C H W"],
    eps: Float[Tensor, "B C H W"],
    t: Float[Tensor, "B"],
    schedule: Schedule,
    prediction: Prediction,
) -> Float[Tensor, "B C H W"]:
    """What the network should give at `noisy(x0, eps, t)`; its mean over x0 given x_t is the exact network.

    The score, `-eps / sigma`, is infinite where sigma = 0.
    """
    if prediction == "v":
        return expand(schedule.d_alpha(t), x0) * x0 + expand(schedule.d_sigma(t), eps) * eps
    if prediction == "score":
        return -eps / expand(schedule.sigma(t), eps)
    return eps if prediction == "eps" else x0


def per_sample_loss(output: Float[Tensor, "B C H W"], target: Float[Tensor, "B C H W"]) -> Float[Tensor, "B"]:
    """Mean squared error of every sample, in float32 (float64 if an input is)."""
    dtype = torch.promote_types(torch.promote_types(output.dtype, target.dtype), torch.float32)
    return (output.to(dtype) - target.to(dtype)).square().flatten(1).mean(1)


def drop_condition(cond: Condition, null: Condition, u: Float[Tensor, "B"], probability: float) -> Condition:
    """The null condition where `u (B,)`, uniform on [0, 1), is below `probability`; else the sample's own."""
    return cond.where(u >= probability, null)
