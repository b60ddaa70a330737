"""A request as the engine knows it, and what the engine tells of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from atoll.model.generation import Generation


@dataclass(frozen=True)
class Partial:
    """What the model takes a picture to be at a step; `index` is the partial picture's."""

    number: int
    index: int
    image: Image.Image


@dataclass(frozen=True)
class Finished:
    """A picture that is done.

    Attributes:
        routing: where the router was asked or an expert changed, from then on; None for a single network.
    """

    number: int
    image: Image.Image
    routing: list[dict[str, Any]] | None


@dataclass(frozen=True)
class Failed:
    """A request that ends without its pictures.

    Attributes:
        code: what kind of failure, for programs.
        message: what happened and what to do.
        repeats: whether the same request would fail again.
    """

    code: str
    message: str
    repeats: bool = True


Event = Partial | Finished | Failed


@dataclass(eq=False)
class Job:
    """One request.

    Attributes:
        prompts: one text or label, or none for an unconditional model.
        tell: takes events, on the engine's thread; it must not wait.
        partial: partial pictures of each.
        deadline: when it is given up, by `time.monotonic`, as all its times.
        cancelled: set by whoever no longer wants it.
        work: pixels x steps.
        started: when its first step was about to be taken.
        waiting: pictures that are still to come.
    """

    model: str
    prompts: tuple[str, ...]
    generation: Generation
    tell: Callable[[Event], None]
    negative: str = ""
    count: int = 1
    partial: int = 0
    work: float = 0.0
    deadline: float = float("inf")
    cancelled: bool = False
    started: float | None = field(default=None, init=False)
    waiting: int = field(default=0, init=False)
    accepted: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        self.waiting = self.count


@dataclass(eq=False)
class Picture:
    """A picture of a request in flight, the owner of a sampler's row.

    Attributes:
        number: of the picture in its request, and its place in the random streams.
        partial: steps after which a partial picture is wanted.
        routing: what `Finished.routing` tells, so far.
    """

    job: Job
    number: int
    partial: tuple[int, ...]
    routing: list[dict[str, Any]] | None = None
