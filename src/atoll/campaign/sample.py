"""The sample stage: prompts in, one PNG out."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from atoll.base.condition import Condition
from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import AtollError, ConfigError
from atoll.base.pictures import grid, png
from atoll.campaign.assemble import load_ensemble, read_manifest
from atoll.campaign.baselines import dense, load_dense
from atoll.campaign.folder import Campaign
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder_of
from atoll.ensemble.batches import Sampling, sample_batches
from atoll.ensemble.card import Card
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.expert import Expert, read_card
from atoll.ensemble.routing import Routing

BATCH = 64


@dataclass(frozen=True)
class Request:
    """What to sample.

    Attributes:
        prompts: texts, or class labels as numbers; none for an unconditional model.
        out: PNG to write.
        model: `ensemble`, `monolith` or `student`.
        routing: strategy; the campaign's default if None.
        guidance: scale; the campaign's default if None.
        steps: Euler steps; the campaign's default if None.
        count: pictures of each prompt.
        seed: of noise and routing.
    """

    prompts: tuple[str, ...]
    out: Path
    model: str = "ensemble"
    routing: str | None = None
    guidance: float | None = None
    steps: int | None = None
    count: int = 4
    seed: int = 0


def sample_campaign(campaign: Campaign, request: Request) -> None:
    """Sample and write one PNG, a row of pictures for each prompt.

    Raises:
        ConfigError: prompts that do not fit the model's condition, an unknown strategy.
    """
    defaults = campaign.config.sampling
    routing = Routing.named(request.routing or defaults.routing)
    if routing.strategy == "oracle":
        raise ConfigError("routing 'oracle' needs known clusters", "use it in 'atoll compare'")
    _writable(request.out)
    guidance = defaults.guidance if request.guidance is None else request.guidance
    if not math.isfinite(guidance):
        raise ConfigError(f"--guidance {guidance}", "give a number")
    steps = request.steps or defaults.steps
    torch.set_num_threads(os.cpu_count() or 1)
    # Prompts are looked at before weights are read: a wrong one is told at once.
    if request.model == "ensemble":
        read_manifest(campaign.store)
    card = read_card(
        campaign.store, "ensemble/router" if request.model == "ensemble" else dense(campaign, request.model)
    )
    cond, null, labels = _conditions(card, request)
    model = _model(campaign, request.model)
    total = max(1, len(request.prompts)) * request.count
    shape = (card.shape["channels"], card.shape["size"], card.shape["size"])
    sampling = Sampling(routing, guidance, steps, request.seed, shape, BATCH, own_device())
    cond, null = cond.to(sampling.device), null.to(sampling.device)

    def conditions(rows: Sequence[int]) -> Condition:
        return cond.select(torch.tensor([row // request.count for row in rows], device=sampling.device))

    vae, drawn = autoencoder_of(card.latents, str(sampling.device)), dict[int, Image.Image]()
    for batch in sample_batches(model, conditions, null, total, sampling):
        drawn |= dict(zip(batch.rows, vae.pictures(batch.latents.cpu(), batch.rows), strict=True))
    pictures = [drawn[row] for row in range(total)]
    scale = max(1, 64 // pictures[0].width)
    sheet = grid(
        pictures,
        columns=request.count,
        scale=scale,
        labels=[labels[i // request.count] for i in range(total)],
    )
    try:
        request.out.write_bytes(png(sheet))
    except OSError as error:
        raise AtollError(f"cannot write {request.out}: {error.strerror}", "give another --out") from None
    say(
        f"wrote {request.out}: {total} pictures, {steps} steps, guidance {guidance:g}, "
        f"{routing if request.model == 'ensemble' else request.model}"
    )


def _model(campaign: Campaign, name: str) -> Ensemble | Expert:
    """The ensemble or a single model, on the device."""
    device = own_device()
    if name == "ensemble":
        return load_ensemble(campaign.store, campaign.config.sampling.residency, device)[0]
    return load_dense(campaign, name, device)


def _conditions(card: Card, request: Request) -> tuple[Condition, Condition, list[str]]:
    """Conditions of the prompts, the null condition, and what to write below the pictures."""
    prompts = list(request.prompts)
    if card.condition == "none":
        if prompts:
            raise ConfigError("this model is unconditional", "leave the prompts out")
        return Condition(), Condition(), [""]
    if not prompts:
        raise ConfigError(f"this model needs prompts ({card.condition})", "give one or more")
    if card.condition == "class":
        classes = card.shape["classes"]
        for prompt in prompts:
            if not prompt.isdecimal() or int(prompt) >= classes:
                raise ConfigError(f"{prompt!r} is no class label", f"give a number from 0 to {classes - 1}")
        return (
            Condition(labels=torch.tensor([int(p) for p in prompts])),
            Condition(labels=torch.tensor([classes])),
            prompts,
        )
    assert card.text is not None
    length = card.shape["text_length"]
    encoder = text_encoder(card.text["name"], min(card.text["max_length"], length))
    if encoder.producer()["hash"] != card.text["hash"]:
        raise ConfigError(
            f"the text encoder {encoder.name!r} is not the one of the training", "install that one"
        )
    encoder.refuse_long(prompts)
    states, mask = encoder.encode([*prompts, ""])
    full = Condition(text=states, mask=mask)
    return full.select(slice(0, len(prompts))), full.select(slice(len(prompts), None)), prompts


def _writable(path: Path) -> None:
    """Say before the work, not after it, that the result cannot be written."""
    if path.is_dir():
        raise AtollError(f"{path} is a folder", "give a file name such as samples.png")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise AtollError(f"{path.parent} is no folder that can be written to", "give another --out")
