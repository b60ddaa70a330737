"""The sample stage: prompts in, pictures out."""

from collections.abc import Sequence
from pathlib import Path

from atoll.base.console import say
from atoll.base.device import named_device, using_threads
from atoll.base.pictures import picture_place
from atoll.campaign.folder import Campaign
from atoll.model.model import Model
from atoll.model.pictures import Pictures


def sample_campaign(
    campaign: Campaign,
    prompts: Sequence[str],
    out: Sequence[str | Path] = ("samples.png",),
    name: str = "ensemble",
    count: int = 4,
    device: str | None = None,
) -> Pictures:
    """Sample `count` pictures of each prompt as `sampling` says, and write them as `Pictures.save` does.

    Prompts are texts, or class labels as numbers; none for an unconditional model. `name` is `ensemble`,
    `monolith`, `student` or `pretrain`.
    """
    settings, encoders = campaign.config.sampling, campaign.config.encoders
    settings.routing.check(campaign.config.partition.k)
    for place in out:  # said before the work, not after it
        picture_place(place)
    model = Model.load(campaign.store, name, settings.residency, named_device(device), settings, encoders)
    # A command has the machine to itself, where a training has the threads that make its bits the same.
    with using_threads(0):
        drawn = model(prompts, count)
    for place in out:
        drawn.save(place)
        routing = "" if drawn.routing is None else f", {drawn.generation.routing}"
        say(f"wrote {place}: {drawn}, {name}{routing}")
    return drawn
