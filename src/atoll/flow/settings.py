"""What a denoiser learns, as settings: schedule, prediction, times, dropout. Imports no torch."""

from typing import Literal

from pydantic import Field, field_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError

Prediction = Literal["v", "eps", "x0", "score"]
ScheduleName = Literal["rectified-flow", "vp-cosine", "ddpm-linear", "ddpm-scaled-linear", "ddpm-cosine"]
SCHEDULES: tuple[str, ...] = ScheduleName.__args__  # type: ignore[attr-defined]


class TimeConfig(Config):
    """Distribution of training times t."""

    distribution: Literal["uniform", "logit-normal"] = "uniform"
    """`uniform` on (0, 1), or `logit-normal`: logit(t) ~ N(mean, std^2) (SD3, arXiv 2403.03206)."""
    mean: float = 0.0
    """Mean of logit(t) for logit-normal; positive means more noise."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t) for logit-normal."""
    shift: float = Field(default=1.0, gt=0, le=1e4)
    """Time shift of SD3: 1 is none, above 1 means more noise. A shift of s lowers log-SNR by 2 ln s."""


class ObjectiveConfig(Config):
    """Training objective of a denoiser."""

    schedule: str = "rectified-flow"
    """Noise schedule: rectified-flow, vp-cosine, ddpm-linear, ddpm-scaled-linear or ddpm-cosine. The DDPM
    ones take numbers, as in `ddpm-linear(1000, 0.0001, 0.02)`."""
    prediction: Prediction = "v"
    """Prediction type of the network: v (velocity), eps (noise), x0 (image) or score."""
    time: TimeConfig = TimeConfig()
    """Distribution of training times."""
    condition_dropout: float = Field(default=0.1, ge=0, le=1)
    """Probability of training without the condition, for classifier-free guidance (arXiv 2207.12598)."""

    @field_validator("schedule")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in SCHEDULES:
            return name
        from atoll.flow.schedule import (  # its numbers are looked at, which takes torch
            schedule,
            schedule_name,
        )

        try:
            return schedule_name(schedule(name))
        except ConfigError as error:
            raise ValueError(str(error)) from None  # so that the message names the setting
