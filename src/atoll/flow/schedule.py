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
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.errors import ConfigError, nearest
from atoll.flow.settings import ScheduleName


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

    @property
    def clock(self) -> float:
        """What a network is told at t = 1, in thousands: families take a time in [0, clock]."""
        return 1.0

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
class Discrete(Schedule):
    """A schedule of N noise levels as DDPM has it (Ho et al. 2020, arXiv 2006.11239), made continuous.

    Level n, whose alpha^2 is the product of the first n + 1 of `1 - beta`, is the knot `t_n = n / (N - 1)`. A
    network is told its number, `(N - 1) t`. Between knots the log-SNR is linear in t; alpha^2 + sigma^2 = 1.
    All is computed in float64 and returned in the dtype it came in; at a knot derivatives are right-hand.
    """

    steps: int = 1000

    def betas(self) -> Tensor:
        """Variance that each level adds, float64 `(N,)`, on the CPU."""
        raise NotImplementedError

    @property
    def clock(self) -> float:
        return (self.steps - 1) / 1000

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
        knots, value = _knots(self, log_snr.device), log_snr.double()
        n = torch.searchsorted(-knots, (-value).contiguous(), right=True).sub(1).clamp(0, self.steps - 2)
        place = n + (value - knots[n]) / (knots[n + 1] - knots[n])
        return (place / (self.steps - 1)).clamp(0, 1).to(log_snr.dtype)

    def _line(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log-SNR and its derivative in t, float64."""
        knots, place = _knots(self, t.device), t.double().clamp(0, 1) * (self.steps - 1)
        n = place.floor().clamp(max=self.steps - 2).long()
        rise = knots[n + 1] - knots[n]
        return knots[n] + (place - n) * rise, rise * (self.steps - 1)


@dataclass(frozen=True)
class DDPMLinear(Discrete):
    """Betas on a straight line, as DDPM, DiT and PixArt have them."""

    name: ClassVar[ScheduleName] = "ddpm-linear"
    first_beta: float = 1e-4
    last_beta: float = 0.02

    def betas(self) -> Tensor:
        return torch.linspace(self.first_beta, self.last_beta, self.steps, dtype=torch.float64)


@dataclass(frozen=True)
class DDPMScaledLinear(Discrete):
    """Square roots of the betas on a straight line, as Stable Diffusion has them (arXiv 2112.10752)."""

    name: ClassVar[ScheduleName] = "ddpm-scaled-linear"
    first_beta: float = 0.00085
    last_beta: float = 0.012

    def betas(self) -> Tensor:
        ends = math.sqrt(self.first_beta), math.sqrt(self.last_beta)
        return torch.linspace(*ends, self.steps, dtype=torch.float64).square()


@dataclass(frozen=True)
class DDPMCosine(Discrete):
    """alpha^2 on the cosine with its offset and a largest beta of 0.999 (arXiv 2102.09672)."""

    name: ClassVar[ScheduleName] = "ddpm-cosine"

    def betas(self) -> Tensor:
        places = torch.arange(self.steps + 1, dtype=torch.float64) / self.steps
        kept = torch.cos((places + 0.008) / 1.008 * math.pi / 2).square()
        return (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


@lru_cache(maxsize=64)
def _knots(schedule: Discrete, device: torch.device) -> Tensor:
    """log-SNR at every level, float64 `(N,)`, falling."""
    with torch.inference_mode(False):  # a cached inference tensor could not be used in training
        log_kept = torch.log1p(-schedule.betas().cpu()).cumsum(0)  # log alpha^2
        return (log_kept - torch.log(-torch.expm1(log_kept))).to(device)


_SCHEDULES: dict[str, Schedule] = {
    s.name: s for s in (RectifiedFlow(), VPCosine(), DDPMLinear(), DDPMScaledLinear(), DDPMCosine())
}
MOST_LEVELS = 1_000_000


@lru_cache(maxsize=64)
def schedule(name: str) -> Schedule:
    """The schedule of this name, such as "vp-cosine", "ddpm-linear" or "ddpm-linear(1000, 0.0001, 0.02)".

    Discrete schedules may be followed by their number of levels, first and last beta (what has betas).
    """
    base, bracket, numbers = name.partition("(")
    if base not in _SCHEDULES:
        raise ConfigError(f"there is no schedule {name!r}", nearest(base, _SCHEDULES))
    if not bracket:
        return _SCHEDULES[base]
    plain = _SCHEDULES[base]
    names = [field.name for field in fields(plain)]
    try:
        values = dict(zip(names, [float(part) for part in numbers[:-1].split(",")], strict=True))
        if numbers[-1:] != ")" or values["steps"] > MOST_LEVELS or values["steps"] % 1:  # NaN has a remainder
            raise ValueError
        discrete = replace(plain, **{**values, "steps": int(values["steps"])})
        assert isinstance(discrete, Discrete)
        betas = discrete.betas()
    except (ValueError, KeyError, TypeError, RuntimeError):
        wanted = f"{base}({', '.join(names)})" if names else base
        raise ConfigError(f"{name!r} is no schedule", f"write {wanted}") from None
    if discrete.steps < 2 or not bool(((betas > 0) & (betas < 1)).all()):
        raise ConfigError(f"{name!r} has no noise to tell apart", "use 2 levels or more and betas in (0, 1)")
    return discrete


def schedule_name(curve: Schedule) -> str:
    """What `schedule` makes this very schedule of: its name, and its numbers where they are not the usual."""
    if curve == _SCHEDULES[curve.name]:
        return curve.name
    return f"{curve.name}({', '.join(str(getattr(curve, field.name)) for field in fields(curve))})"
