"""The sample stage: prompts in, one PNG out."""

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import AtollError
from atoll.base.pictures import grid, png
from atoll.base.threads import using_threads
from atoll.campaign.folder import Campaign
from atoll.model.model import Model, Pictures


@dataclass(frozen=True)
class Request:
    """What to sample; None takes the campaign's own `sampling`.

    Attributes:
        prompts: texts, or class labels as numbers; none for an unconditional model.
        out: PNG to write.
        model: `ensemble`, `monolith`, `student` or `pretrain`.
        routing: strategy.
        guidance: scale.
        steps: of the scheduler.
        count: pictures of each prompt.
        seed: of noise and routing.
        size: width x height in pixels.
    """

    prompts: tuple[str, ...]
    out: Path
    model: str = "ensemble"
    routing: str | None = None
    guidance: float | None = None
    steps: int | None = None
    count: int = 4
    seed: int | None = None
    size: str | None = None


def sample_campaign(campaign: Campaign, request: Request) -> Pictures:
    """Sample and write one PNG, a row of pictures for each prompt.

    Raises:
        ConfigError: prompts that do not fit the model's condition, an unknown strategy.
    """
    settings = campaign.config.sampling
    asked = ("routing", "guidance", "steps", "seed", "size")
    generation = settings.with_(**{name: getattr(request, name) for name in asked})
    generation.routing.check(campaign.config.partition.k)
    _writable(request.out)
    place = settings.residency, own_device()
    model = Model.load(campaign.store, request.model, *place, settings, campaign.config.encoders)
    with using_threads(0):
        drawn = model(request.prompts, request.count, generation)
    sheet = grid(
        drawn.images,
        columns=request.count,
        scale=max(1, 64 // drawn.images[0].width),
        labels=[text for text in request.prompts or ("",) for _ in range(request.count)],
    )
    try:
        request.out.write_bytes(png(sheet))
    except OSError as error:
        raise AtollError(f"cannot write {request.out}: {error.strerror}", "give another --out") from None
    say(
        f"wrote {request.out}: {len(drawn.images)} pictures, {generation.steps} steps, guidance"
        f" {drawn.generation.guidance:g}, {request.model if drawn.routing is None else generation.routing}"
    )
    return drawn


def _writable(path: Path) -> None:
    """Say before the work, not after it, that the result cannot be written."""
    if path.is_dir():
        raise AtollError(f"{path} is a folder", "give a file name such as samples.png")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise AtollError(f"{path.parent} is no folder that can be written to", "give another --out")
