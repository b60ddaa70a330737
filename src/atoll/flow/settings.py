"""What a denoiser learns, as settings: schedule, prediction, times, dropout. Imports no torch."""

from typing import Literal

from pydantic import Field, field_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError

Prediction = Literal["v", "eps", "x0", "score"]
ScheduleName = Literal["rectified-flow", "vp-cosine", "ddpm-linear", "ddpm-scaled-linear", "ddpm-cosine"]
SCHEDULES: tuple[str, ...] = ScheduleName.__args__  # type: ignore[attr-defined]


class TimeConfig(Config):
    """The distribution of training times; `flow.objective.training_times` draws from it."""

    distribution: Literal["uniform", "logit-normal"] = "uniform"
    """"uniform" on (0, 1), or "logit-normal": logit(t) ~ N(mean, std^2) (SD3, arXiv 2403.03206)."""
    mean: float = 0.0
    """Mean of logit(t), for logit-normal; positive = more noise."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t), for logit-normal."""
    shift: float = Field(default=1.0, gt=0, le=1e4)
    """SD3's time shift: s takes 2 ln s nats of log-SNR away; 1 is none, above 1 = more noise."""


class ObjectiveConfig(Config):
    """What a denoiser predicts, at which times, and how often without its condition."""

    schedule: str = "rectified-flow"
    """How data and noise are mixed: rectified-flow, vp-cosine, ddpm-linear, ddpm-scaled-linear, ddpm-cosine;
    the last three also with numbers of their own, as in `ddpm-linear(1000, 0.0001, 0.02)`."""
    prediction: Prediction = "v"
    """What the network gives."""
    time: TimeConfig = TimeConfig()
    """Distribution of the training times."""
    condition_dropout: float = Field(default=0.1, ge=0, le=1)
    """Probability of training on the null condition (classifier-free guidance, arXiv 2207.12598)."""

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
