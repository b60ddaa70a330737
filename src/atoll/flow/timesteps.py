"""At which times a network is trained: a distribution over t, as a pure function of uniforms."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.flow.schedule import Schedule
from atoll.flow.settings import TimeConfig

MARGIN = 1e-5
"""Times stay this far from 0 and 1: both t and 1 - t are then sound in float32."""


def training_times(config: TimeConfig, u: Float[Tensor, "B"], schedule: Schedule) -> Float[Tensor, "B"]:
    """Turn uniforms `u (B,)` in [0, 1) into training times `(B,)` in [MARGIN, 1 - MARGIN], by inverse CDF."""
    t = u.double()
    if config.distribution == "logit-normal":
        t = torch.sigmoid(config.mean + config.std * torch.special.ndtri(t))
    if config.shift != 1:  # at an end of a schedule the log-SNR may be infinite: it stays there
        t = schedule.time_of_log_snr(schedule.log_snr(t) - 2 * math.log(config.shift))
    return t.clamp(MARGIN, 1 - MARGIN).to(u.dtype)
