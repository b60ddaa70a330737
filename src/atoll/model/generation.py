"""What a user sets of drawing: what decides a picture beside the model, and where experts lie meanwhile.

Imports no torch: settings hold both.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator

from atoll.base.config import Config
from atoll.base.errors import ConfigError
from atoll.base.text import parse_size
from atoll.flow.settings import Shift, shift_at
from atoll.model.routing import Routing, RoutingField


class Generation(Config):
    """Sampling settings: everything that decides an image beside the model and the prompt."""

    steps: int = Field(default=50, ge=1, le=100_000)
    """Sampling steps. Heun evaluates the experts twice per step."""
    guidance: float = Field(default=2.0, ge=0, le=1e6)
    """Classifier-free guidance scale; 1 is no guidance, and 0 ignores the prompt. Unconditional models ignore
    it."""
    routing: RoutingField = Routing()
    """Routing strategy, such as `top-1`. `once null sample-1` routes the unconditional branch separately."""
    shift: Shift = 1.0
    """Time shift of the sampling steps (SD3): s moves t to s t / (1 + (s - 1) t). Above 1, more steps are at
    high noise; `tokens` rises with the image's size. Of a campaign by default that of `objective.time`."""
    size: Annotated[str, AfterValidator(lambda text: parse_size(text) and text)] | None = None
    """Width x height in pixels, such as 336x192; by default the training size nearest to a square."""
    seed: int = 0
    """Random seed of noise and routing. Image i depends on the seed and i only, not on its batch."""

    def with_(self, **changes: Any) -> Self:
        """A copy with some values replaced; None leaves one as it is, and a wrong one is a `ConfigError`."""
        given = {name: value for name, value in changes.items() if value is not None}
        return self.parse({**dict(self), **given}, "the generation")

    def at(self, height: int, width: int) -> Self:
        """The same with the number that the shift is for latents of these sides."""
        return self.model_copy(update={"shift": shift_at(self.shift, height * width / 4)})

    def for_condition(self, kind: str) -> Self:
        """As a model of this kind of condition (`text`, `class`, `none`) draws: without one, unguided."""
        # Both branches would be one network at one input: guidance would cost twice and change nothing.
        return self.with_(guidance=1.0) if kind == "none" else self


class Residency(Config):
    """Memory limits for the experts while sampling. By default all stay on the device."""

    experts: int | None = Field(default=None, ge=1)
    """Maximum experts on the device; `prefetch` needs room for one more."""
    bytes: int | None = Field(default=None, ge=1)
    """Maximum device memory for the experts' weights in bytes, with that of `prefetch`."""
    host_experts: int | None = Field(default=None, ge=1)
    """Maximum experts in pinned host memory, with a GPU; the others stay on disk."""
    host_bytes: int | None = Field(default=None, ge=1)
    """Maximum host memory for experts, in bytes."""
    prefetch: bool = True
    """Load the next expert while one runs."""
    dtype: Literal["auto", "float32", "bf16", "fp8", "int8"] = "auto"
    """Data type of the weights while sampling. `auto` is bf16 on a GPU, and on a CPU as published. `fp8` and
    `int8` store the large layers' weights in one byte a number, and compute as `auto`."""
    keep: tuple[str, ...] = ()
    """Layers that `fp8` and `int8` leave as they are, as patterns of their names, such as `proj_out`."""
    bound: float = Field(default=0.05, ge=0, le=1)
    """Maximum perceptual distance (1 - SSIM) of images by `fp8` or `int8` from those of the same noise with
    whole weights; 1 compares none."""

    @field_validator("keep")
    @classmethod
    def _compiles(cls, keep: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in keep:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no pattern ({error}): write proj_out or attn.*") from None
        return keep

    @property
    def stored(self) -> bool:
        """Whether experts' weights are stored in a type that they are not computed in."""
        return self.dtype in ("fp8", "int8")

    @property
    def limited(self) -> bool:
        """Whether experts share one network, which takes their weights in turn."""
        return self.experts is not None or self.bytes is not None or self.stored

    def places(self, count: int, size: int) -> tuple[int, int]:
        """How many of `count` experts stay, and in how many places of `size` bytes each."""
        places = count if self.experts is None else min(count, self.experts + self.prefetch)
        places = _fitting(places, self.bytes, size, "bytes")
        # One place is for the expert on its way, unless all fit, or there is only one.
        return places - (self.prefetch and 1 < places < count), places

    def host_places(self, count: int, size: int) -> int:
        """How many of `count` experts of `size` bytes are kept in host memory, for a GPU."""
        return _fitting(min(count, self.host_experts or count), self.host_bytes, size, "host_bytes")


def _fitting(places: int, budget: int | None, size: int, name: str) -> int:
    if budget is None:
        return places
    if budget < size:
        what = f"residency.{name} is {budget}, and an expert takes {size}"
        raise ConfigError(what, f"give {size} or more, or leave it out")
    return min(places, budget // size)
