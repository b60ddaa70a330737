"""What a denoiser learns, as settings: schedule, prediction, times, dropout. Imports no torch."""

import math
import re
from contextlib import suppress
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError

Prediction = Literal["v", "eps", "x0", "score"]
ScheduleName = Literal["rectified-flow", "vp-cosine", "ddpm-linear", "ddpm-scaled-linear", "ddpm-cosine"]
SCHEDULES: tuple[str, ...] = ScheduleName.__args__  # type: ignore[attr-defined]


_FLUX = "0.5, 1.15, 256.0, 4096.0"
"""Of `calculate_shift` in diffusers: base_shift, max_shift, base_image_seq_len, max_image_seq_len."""


def shift_line(shift: str) -> tuple[float, float, float, float]:
    """Two values of a line in the number of tokens, and the two numbers at which it has them."""
    match = re.fullmatch(r"tokens(\(.*\))?", shift)
    low, high, few, many = map(float, (match[1] or _FLUX if match else "").strip("()").split(","))
    if not (few < many and math.isfinite(low + high + many)):
        raise ValueError(shift)
    return low, high, few, many


def shift_at(shift: float | str, tokens: float) -> float:
    """The time shift for latents of so many patches of 2x2; Flux's is the exp of a line in them."""
    if not isinstance(shift, str):
        return float(shift)
    low, high, few, many = shift_line(shift)
    line = low + (high - low) * (tokens - few) / (many - few)
    return math.exp(max(-9.2, min(9.2, line)))  # about 1e-4 to 1e4, as `checked_shift` has it


def checked_shift(value: float | str) -> float | str:
    """A time shift as it is; `ValueError` where it is none."""
    with suppress(ValueError):
        # Nearer to 0, float32 takes the last time, where 1 + (s - 1) t is s, for a division by 0.
        if shift_line(value) if isinstance(value, str) else 1e-4 <= value <= 1e4:
            return value
    raise ValueError(f"write a number from 0.0001 to 10000, tokens or tokens({_FLUX})")


Shift = Annotated[float | str, AfterValidator(checked_shift)]


class TimeConfig(Config):
    """Distribution of training times t."""

    distribution: Literal["uniform", "logit-normal"] = "uniform"
    """`uniform` on (0, 1), or `logit-normal`: logit(t) ~ N(mean, std^2) (SD3, arXiv 2403.03206)."""
    mean: float = 0.0
    """Mean of logit(t) for logit-normal; positive means more noise."""
    std: float = Field(default=1.0, gt=0)
    """Standard deviation of logit(t) for logit-normal."""
    shift: Shift = 1.0
    """Time shift of SD3: 1 is none, above 1 means more noise. A shift of s lowers log-SNR by 2 ln s. `tokens`
    is that of Flux, which rises with the image: 1.65 at 256 patches of 2x2 latent pixels, 3.16 at 4096."""


class ObjectiveConfig(Config):
    """Training objective of a denoiser."""

    schedule: str = "rectified-flow"
    """Noise schedule: rectified-flow, vp-cosine, ddpm-linear, ddpm-scaled-linear or ddpm-cosine. The DDPM
    ones take numbers, as in `ddpm-linear(1000, 0.0001, 0.02)`."""
    prediction: Prediction = "v"
    """Prediction type of the network: v (velocity), eps (noise), x0 (image) or score."""
    loss: Literal["prediction", "velocity"] = "prediction"
    """What the squared error is taken of: the prediction, or the rectified-flow velocity that follows from
    it. With `x0` the second is the objective of JiT (arXiv 2511.13720)."""
    time: TimeConfig = TimeConfig()
    """Distribution of training times."""
    condition_dropout: float = Field(default=0.1, ge=0, le=1)
    """Probability of training without the condition, for classifier-free guidance (arXiv 2207.12598)."""

    @field_validator("schedule")
    @classmethod
    def _known(cls, name: str) -> str:
        if name in SCHEDULES:
            return name
        # Its numbers are looked at, which takes torch.
        from atoll.flow.schedule import schedule, schedule_name

        try:
            return schedule_name(schedule(name))
        except ConfigError as error:
            raise ValueError(str(error)) from None  # so that the message names the setting
