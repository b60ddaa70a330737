"""What a user sets of an ensemble in use."""

from pydantic import Field

from atoll.base.config import Config
from atoll.base.errors import ConfigError


class Residency(Config):
    """How much memory experts may take while an ensemble samples. With nothing set all stay on the device."""

    experts: int | None = Field(default=None, ge=1)
    """Most experts on the device. With `prefetch` there is one place more, which the next is brought into."""
    bytes: int | None = Field(default=None, ge=1)
    """Most device memory for the experts' weights, in bytes, that place included."""
    host_experts: int | None = Field(default=None, ge=1)
    """Most experts in pinned host memory, where the device is a GPU; the others stay on disk."""
    host_bytes: int | None = Field(default=None, ge=1)
    """The same in bytes."""
    prefetch: bool = True
    """Whether the next expert is brought while one runs."""

    @property
    def limited(self) -> bool:
        """Whether anything bounds the experts on the device."""
        return self.experts is not None or self.bytes is not None

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
        raise ConfigError(
            f"residency.{name} is {budget}, and an expert takes {size}",
            f"give {size} or more, or leave it out",
        )
    return min(places, budget // size)
