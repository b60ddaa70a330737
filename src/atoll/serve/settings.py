"""What whoever serves a model sets: `atoll serve DIR --set batch=32`."""

from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field

from atoll.base.config import Config, set_value
from atoll.model.generation import Residency


class ServeSettings(Config):
    """Bounds of a server. Nothing here changes a picture."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback should have keys."""
    hosts: tuple[str, ...] = ()
    """Names under which a server without keys is reached, such as a proxy's. Addresses, `localhost` and the
    machine's own name always are."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""
    batch: int = Field(default=32, ge=1, le=4096)
    """Most rows of a model that take a step together; halved when memory runs out."""
    queue: int = Field(default=64, ge=1, le=1_000_000)
    """Most work that is accepted and not done, in pictures of the model's own steps."""
    pictures: int = Field(default=10, ge=1, le=1000)
    """Most pictures of a request."""
    steps: int = Field(default=250, ge=1, le=100_000)
    """Most steps that a request may ask for."""
    deadline: float = Field(default=600.0, gt=0, le=86_400)
    """Seconds after which a request that is not done is given up."""
    drain: float = Field(default=30.0, ge=0, le=86_400)
    """Seconds that requests in work are given after SIGTERM."""
    body_bytes: int = Field(default=262_144, ge=1_024)
    """Longest body of a request."""
    kept: int = Field(default=256, ge=0, le=100_000)
    """Pictures that `response_format: url` keeps in memory, the latest ones."""
    threads: int = Field(default=1, ge=0, le=1024)
    """Threads that torch computes with on a CPU; 0 takes every core. With one, no picture depends to the bit
    on what shares its batch."""
    residency: Residency | None = None
    """How many experts stay on the device; by default the campaign's `sampling.residency`."""

    @classmethod
    def of(cls, assignments: Sequence[str]) -> Self:
        """From `a.b=value` overrides; `ConfigError` names the first that is wrong."""
        tree: dict[str, Any] = {}
        for assignment in assignments:
            set_value(tree, assignment)
        return cls.parse(tree, "--set")
