"""Noise schedules: how data and noise are mixed at a time. The package's conventions are stated here, once.

    x_t = alpha(t) x0 + sigma(t) eps,  eps ~ N(0, I)
    t = 0 is data, t = 1 is noise
    v = d x_t / dt = alpha'(t) x0 + sigma'(t) eps        (rectified flow: eps - x0)
    log-SNR = log(alpha(t)^2 / sigma(t)^2), strictly falling in t

A time is a tensor `(B,)`, one per sample; `expand` is the only way it meets images `(B, C, H, W)`.
Times without a schedule's name beside them are rectified-flow times.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.errors import ConfigError, nearest

ScheduleName = Literal["rectified-flow", "vp-cosine", "ddpm-linear"]


def expand(t: Float[Tensor, "B"], x: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
    """Values per sample `(B,)` viewed as `(B, 1, 1, 1)`, to be multiplied with `x (B, C, H, W)`.

    Without it `(B,) * (B, C, H, W)` is an error, or silently wrong where B equals W.
    """
    assert t.shape == x.shape[:1], f"{tuple(t.shape)} values for a batch of shape {tuple(x.shape)}"
    return t.view(-1, *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class Schedule(ABC):
    """The curves alpha and sigma over t in `t_range`; every method maps `(B,)` to `(B,)`, dtype kept."""

    name: ClassVar[ScheduleName]

    @property
    def t_range(self) -> tuple[float, float]:
        """First and last time, in the schedule's own t, at which it is defined."""
        return 0.0, 1.0

    @abstractmethod
    def alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """How much data there is."""

    @abstractmethod
    def sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """How much noise there is (its standard deviation)."""

    @abstractmethod
    def d_alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Derivative of alpha."""

    @abstractmethod
    def d_sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Derivative of sigma."""

    @abstractmethod
    def log_snr(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """log(alpha^2 / sigma^2), in nats; infinite where alpha or sigma is 0."""

    @abstractmethod
    def time_of_log_snr(self, log_snr: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """The inverse of `log_snr`; outside the schedule's range, the nearer end of `t_range`."""


@dataclass(frozen=True)
class RectifiedFlow(Schedule):
    """alpha = 1 - t, sigma = t: straight paths (Liu et al. 2022, arXiv 2209.03003)."""

    name: ClassVar[ScheduleName] = "rectified-flow"

    def alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return 1 - t

    def sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return t

    def d_alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return -torch.ones_like(t)

    def d_sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return torch.ones_like(t)

    def log_snr(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return -2 * torch.logit(t)

    def time_of_log_snr(self, log_snr: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return torch.sigmoid(-log_snr / 2)


@dataclass(frozen=True)
class VPCosine(Schedule):
    """alpha = cos(pi t / 2), sigma = sin(pi t / 2) (cosine of arXiv 2102.09672, without its offset)."""

    name: ClassVar[ScheduleName] = "vp-cosine"

    def alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return torch.sin(math.pi / 2 * (1 - t))  # the cosine, but exact to the last digit near t = 1

    def sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return torch.sin(math.pi / 2 * t)

    def d_alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return -math.pi / 2 * self.sigma(t)

    def d_sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return math.pi / 2 * self.alpha(t)

    def log_snr(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return 2 * (self.alpha(t).log() - self.sigma(t).log())

    def time_of_log_snr(self, log_snr: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return (torch.atan(torch.exp(-log_snr / 2)) * (2 / math.pi)).clamp(max=1)


@dataclass(frozen=True)
class DDPMLinear(Schedule):
    """The discrete schedule with linear betas (Ho et al. 2020, arXiv 2006.11239), made continuous.

    Step n of N is the knot `t_n = n / (N - 1)` (so a network's timestep is `(N - 1) t`); between knots
    the log-SNR is linear in t, and alpha^2 + sigma^2 = 1. Everything is computed in float64 and
    returned in the dtype it came in; at a knot the derivatives are those of the right side.
    """

    name: ClassVar[ScheduleName] = "ddpm-linear"
    steps: int = 1000
    first_beta: float = 1e-4
    last_beta: float = 0.02

    def alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return torch.sigmoid(self._line(t)[0]).sqrt().to(t.dtype)

    def sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return torch.sigmoid(-self._line(t)[0]).sqrt().to(t.dtype)

    def d_alpha(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        log_snr, slope = self._line(t)
        return (slope / 2 * torch.sigmoid(log_snr).sqrt() * torch.sigmoid(-log_snr)).to(t.dtype)

    def d_sigma(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        log_snr, slope = self._line(t)
        return (-slope / 2 * torch.sigmoid(-log_snr).sqrt() * torch.sigmoid(log_snr)).to(t.dtype)

    def log_snr(self, t: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        return self._line(t)[0].to(t.dtype)

    def time_of_log_snr(self, log_snr: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        knots, value = _ddpm_knots(self, log_snr.device), log_snr.double()
        n = torch.searchsorted(-knots, (-value).contiguous(), right=True).sub(1).clamp(0, self.steps - 2)
        place = n + (value - knots[n]) / (knots[n + 1] - knots[n])
        return (place / (self.steps - 1)).clamp(0, 1).to(log_snr.dtype)

    def _line(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log-SNR and its derivative in t, float64."""
        knots, place = _ddpm_knots(self, t.device), t.double().clamp(0, 1) * (self.steps - 1)
        n = place.floor().clamp(max=self.steps - 2).long()
        rise = knots[n + 1] - knots[n]
        return knots[n] + (place - n) * rise, rise * (self.steps - 1)


@lru_cache(maxsize=64)
def _ddpm_knots(schedule: DDPMLinear, device: torch.device) -> Tensor:
    """log-SNR at every step, float64 `(N,)`, falling."""
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        beta = torch.linspace(schedule.first_beta, schedule.last_beta, schedule.steps, dtype=torch.float64)
        log_kept = torch.log1p(-beta).cumsum(0)  # log alpha^2
        return (log_kept - torch.log(-torch.expm1(log_kept))).to(device)


_SCHEDULES: dict[str, Schedule] = {s.name: s for s in (RectifiedFlow(), VPCosine(), DDPMLinear())}


def schedule(name: str) -> Schedule:
    """The schedule of this name: "rectified-flow", "vp-cosine" or "ddpm-linear"; else `ConfigError`."""
    if name not in _SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}", nearest(name, _SCHEDULES))
    return _SCHEDULES[name]
