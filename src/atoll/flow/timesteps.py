"""At which times a network is trained: a distribution over t, as a pure function of uniforms."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from atoll.base.config import Config

MARGIN = 1e-5
"""Times stay this far from 0 and 1: both t and 1 - t are then sound in float32."""


class TimeConfig(Config):
    """The distribution of training times."""

    distribution: Literal["uniform", "logit-normal"] = "uniform"
    """"uniform" on (0, 1), or "logit-normal": logit(t) ~ N(mean, std^2) (SD3, arXiv 2403.03206)."""
    mean: float = 0.0
    """Mean of logit(t), for logit-normal; positive = more noise."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t), for logit-normal."""
    log_snr_shift: float = 0.0
    """How much log-SNR (nats) is taken away; positive = more noise. SD3's shift s is 2 log s of it."""

    def times(self, u: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Training times `(B,)` in [MARGIN, 1 - MARGIN], by inverse CDF of uniforms `u (B,)` in [0, 1)."""
        t = u.double()
        if self.distribution == "logit-normal":
            t = torch.sigmoid(self.mean + self.std * torch.special.ndtri(t))
        return shift(t, self.log_snr_shift).clamp(MARGIN, 1 - MARGIN).to(u.dtype)


def shift(t: Float[Tensor, "B"], log_snr_shift: float) -> Float[Tensor, "B"]:
    """Rectified-flow times moved to a log-SNR lower by `log_snr_shift` (nats); 0 changes nothing.

    logit(t) grows by half of it: `t -> s t / (1 + (s - 1) t)` with `s = exp(log_snr_shift / 2)`, SD3's shift.
    """
    s = math.exp(log_snr_shift / 2)
    return s * t / (1 + (s - 1) * t)
