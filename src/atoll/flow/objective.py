"""What a denoiser is trained on: times, noisy states, targets, and their loss (flow matching, DDM eq. 6).

All of it is a function of draws that the caller makes, so that a sample's noise, time and dropout
depend on nothing but its position in the run.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition
from atoll.flow.schedule import Schedule, expand
from atoll.flow.settings import Prediction, TimeConfig, shift_at

MARGIN = 1e-5
"""Times stay this far from 0 and 1: both t and 1 - t are then sound in float32."""


def training_times(
    config: TimeConfig, u: Float[Tensor, "B"], schedule: Schedule, tokens: float = 256.0
) -> Float[Tensor, "B"]:
    """Turn uniforms `u (B,)` in [0, 1) into training times `(B,)` in [MARGIN, 1 - MARGIN], by inverse CDF."""
    t, shift = u.double(), shift_at(config.shift, tokens)
    if config.distribution == "logit-normal":
        t = torch.sigmoid(config.mean + config.std * torch.special.ndtri(t))
    if shift != 1:  # at an end of a schedule the log-SNR may be infinite: it stays there
        t = schedule.time_of_log_snr(schedule.log_snr(t) - 2 * math.log(shift))
    return t.clamp(MARGIN, 1 - MARGIN).to(u.dtype)


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
