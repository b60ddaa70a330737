"""A request as the engine knows it, and what the engine tells of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from atoll.model.generation import Generation


@dataclass(frozen=True)
class Partial:
    """A picture on its way: what the model takes it to be at a step.

    Attributes:
        number: of the picture in its request.
        index: of the partial picture.
        image: the estimate.
    """

    number: int
    index: int
    image: Image.Image


@dataclass(frozen=True)
class Finished:
    """A picture that is done.

    Attributes:
        number: of the picture in its request.
        image: the picture.
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
class Picture:
    """A picture of a request in flight.

    Attributes:
        job: the request.
        number: of the picture in it, and its place in the random streams.
        partial: steps after which a partial picture is wanted.
        routing: what `Finished.routing` tells, so far.
    """

    job: "Job"
    number: int
    partial: tuple[int, ...]
    routing: list[dict[str, Any]] | None = None


@dataclass(eq=False)
class Job:
    """One request.

    Attributes:
        model: name of the model that draws it.
        prompts: one text or label, or none for an unconditional model.
        negative: what guidance leads away from.
        generation: how it is drawn.
        count: pictures.
        partial: partial pictures of each.
        work: pixels x steps.
        tell: takes events, on the engine's thread; it must not wait.
        deadline: when it is given up, by `time.monotonic`.
        cancelled: set by whoever no longer wants it.
        started: when its first step was about to be taken, by `time.monotonic`.
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
        """All its pictures are waited for."""
        self.waiting = self.count
