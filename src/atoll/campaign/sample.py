"""The sample stage: prompts in, one PNG out."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.base.console import say
from atoll.base.device import own_device, using_threads
from atoll.base.errors import AtollError
from atoll.base.pictures import grid, png
from atoll.campaign.folder import Campaign
from atoll.model.model import Model, Pictures


def sample_campaign(
    campaign: Campaign,
    prompts: Sequence[str],
    out: Path,
    name: str = "ensemble",
    count: int = 4,
    **generation: Any,
) -> Pictures:
    """Sample and write one PNG, a row of `count` pictures for each prompt.

    Prompts are texts, or class labels as numbers; none for an unconditional model. `name` is `ensemble`,
    `monolith`, `student` or `pretrain`; `generation` are values of `Generation` in place of the campaign's
    `sampling`, of which None leaves one as it is.
    """
    settings = campaign.config.sampling
    chosen = settings.with_(**generation)
    chosen.routing.check(campaign.config.partition.k)
    # Say before the work, not after it, that the result cannot be written.
    if out.is_dir():
        raise AtollError(f"{out} is a folder", "give a file name such as samples.png")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise AtollError(f"{out.parent} is no folder that can be written to", "give another --out")
    residency, encoders = settings.residency, campaign.config.encoders
    model = Model.load(campaign.store, name, residency, own_device(), settings, encoders)
    # A command has the machine to itself, where a training has the threads that make its bits the same.
    with using_threads(0):
        drawn = model(prompts, count, chosen)
    sheet = grid(
        drawn.images,
        columns=count,
        scale=max(1, 64 // drawn.images[0].width),
        labels=[text for text in prompts or ("",) for _ in range(count)],
    )
    try:
        out.write_bytes(png(sheet))
    except OSError as error:
        raise AtollError(f"cannot write {out}: {error.strerror}", "give another --out") from None
    say(
        f"wrote {out}: {len(drawn.images)} pictures, {chosen.steps} steps, guidance"
        f" {drawn.generation.guidance:g}, {name if drawn.routing is None else chosen.routing}"
    )
    return drawn
