"""The sample stage: prompts in, pictures out."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from atoll.base.console import say
from atoll.base.device import named_device, using_threads
from atoll.base.errors import ConfigError, nearest
from atoll.base.pictures import picture_place
from atoll.campaign.assemble import assembled_manifest
from atoll.campaign.folder import FROZEN, Campaign, single_network
from atoll.campaign.roles import SINGLE
from atoll.model.model import ENSEMBLE, Model
from atoll.model.opened import is_hub_name
from atoll.model.pictures import Pictures
from atoll.store.store import Store


def campaign_model(
    campaign: Campaign,
    name: str = "ensemble",
    device: torch.device | str = "cpu",
    trusted: Collection[str] | None = None,
    **options: Any,
) -> Model:
    """`Model.load` by a campaign's settings: of `sampling`, `encoders`, and `trusted` beside those given."""
    config, names = campaign.config, [ENSEMBLE, *SINGLE]
    if name not in names:
        raise ConfigError(f"there is no model {name!r}", nearest(name, names))
    if name == ENSEMBLE:
        assembled_manifest(campaign)
    else:
        single_network(campaign, name)
    if config.trusted:
        trusted = {*config.trusted, *(trusted or ())}
    options = {"residency": config.sampling.residency, "encoders": config.encoders, **options}
    how = {"device": device, "generation": config.sampling, "trusted": trusted, **options}
    return Model.load(campaign.store, name, **how)


def load_model(source: str, name: str = "ensemble", **options: Any) -> Model:
    """A model of a campaign, by its settings, or of an exported folder or hub name."""
    if is_hub_name(source) or not Store.open(source).exists(FROZEN):
        return Model.load(source, name, **options)
    return campaign_model(Campaign.open(source), name, **options)


def sample_campaign(
    campaign: Campaign,
    prompts: Sequence[str],
    out: Sequence[str | Path] = ("samples.png",),
    name: str = "ensemble",
    count: int = 4,
    device: str | None = None,
    **changes: Any,
) -> Pictures:
    """Sample `count` pictures of each prompt as `sampling` says, and write them as `Pictures.save` does.

    A network that was trained for few steps, or with guidance, has its own; `changes` come before these too.
    Prompts are texts, or class labels as numbers; none for an unconditional model.
    """
    for place in out:  # said before the work, not after it
        picture_place(place)
    model = campaign_model(campaign, name, named_device(device))
    # A command has the machine to itself, where a training has the threads that make its bits the same.
    with using_threads(0):
        drawn = model(prompts, count, **changes)
    for place in out:
        drawn.save(place)
        routing = "" if drawn.routing is None else f", {drawn.generation.routing}"
        say(f"wrote {place}: {drawn}, {name}{routing}")
    return drawn
