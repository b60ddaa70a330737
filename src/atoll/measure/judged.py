"""What is judged and what it is held against: models of a campaign, folders, data sets, statistics."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from atoll.base.errors import ConfigError, DataError, nearest
from atoll.campaign.baselines import DENSE, load_dense
from atoll.campaign.folder import FROZEN, YAML, Campaign
from atoll.data.dataset import MANIFEST, DataSet
from atoll.data.samples import Samples
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.ensemble.card import Card
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.expert import Expert
from atoll.ensemble.folder import read_manifest
from atoll.ensemble.generate import Sampling, generate
from atoll.ensemble.model import Model
from atoll.ensemble.routing import WeightFunction
from atoll.measure.compare import Conditions, drawn_conditions
from atoll.measure.pictures import Batch, Folder, Rows
from atoll.store.location import is_url
from atoll.store.store import Store

SINGLE = (*DENSE, "pretrain")
"""Networks beside the ensemble that may be judged, where they are published."""
TO_8_BITS = "nearest of 256 levels of [-1, 1]"


@dataclass
class Drawn:
    """Pictures that a model draws.

    Attributes:
        model: ensemble or single network.
        conditions: one for each picture.
        sampling: how.
        vae: turns latents into pictures.
        captioned: whether pictures bring their captions.
    """

    model: Ensemble | Expert
    conditions: Conditions
    sampling: Sampling
    vae: Autoencoder
    captioned: bool

    def __len__(self) -> int:
        return len(self.conditions)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        height, width = self.vae.decode(torch.zeros(1, *self.sampling.shape)).shape[2:]
        return width, height

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches.

        Raises:
            DataError: a picture with values that are no numbers.
        """
        sampling = replace(self.sampling, batch=batch, first=part.start, count=len(part))
        captions = self.conditions.captions() if self.captioned else None
        for drawn in generate(self.model, sampling):
            own = [captions[row] for row in drawn.rows] if captions is not None else None
            yield Batch(drawn.rows, self.vae.pictures(drawn.latents.cpu(), drawn.rows), own)


@dataclass(frozen=True)
class Judged:
    """What is judged.

    Attributes:
        subject: its name and digests.
        source: of its pictures.
        about: fields of the protocol.
    """

    subject: dict[str, Any]
    source: Drawn | Folder
    about: dict[str, Any]


def folder(path: Path) -> Judged:
    """A folder of pictures."""
    source = Folder(path)
    return Judged(
        {"name": path.name or str(path), "pictures": source.digest}, source, {"rounding": "8-bit files"}
    )


@dataclass(frozen=True)
class Wanted:
    """A model of a campaign, and how it is sampled; None takes the campaign's default.

    Attributes:
        model: `ensemble`, or one of `SINGLE`.
        routing: strategy.
        guidance: scale.
        steps: Euler steps.
        seed: of noise, routing and the choice of conditions.
    """

    model: str = "ensemble"
    routing: str | WeightFunction | None = None
    guidance: float | None = None
    steps: int | None = None
    seed: int | None = None


def model(campaign: Campaign, wanted: Wanted, captioned: bool, device: torch.device) -> Judged:
    """A model of a campaign at conditions of its data set.

    Raises:
        ConfigError: no such model, or an unknown strategy.
        StoreError: it is not published, or not assembled.
    """
    defaults, evaluate = campaign.config.sampling, campaign.config.evaluate
    seed = campaign.config.seed if wanted.seed is None else wanted.seed
    generation = defaults.with_(
        routing=wanted.routing, guidance=wanted.guidance, steps=wanted.steps, seed=seed
    )
    network, card, parts = _network(campaign, wanted.model, device)
    conditions = _conditions(campaign, card, evaluate.conditions, evaluate.samples, seed)
    if generation.routing.needs_labels and isinstance(network, Ensemble) and network.missing:
        raise ConfigError("routing 'oracle': clusters of missing experts have nobody to go to", "use another")
    sampling = conditions.sampling(generation, len(conditions), evaluate.batch, device)
    about = {
        "rounding": TO_8_BITS,
        "conditions": evaluate.conditions,
        "sampler": "Euler",
        "steps": generation.steps,
        "guidance": generation.guidance,
        "routing": str(generation.routing) if isinstance(network, Ensemble) else None,
        "seed": seed,
        "ema": True,  # what is published is the average
    }
    source = Drawn(network, conditions, sampling, autoencoder_of(card.latents, str(device)), captioned)
    return Judged({"name": wanted.model, "weights": parts}, source, about)


def _network(
    campaign: Campaign, name: str, device: torch.device
) -> tuple[Ensemble | Expert, Card, dict[str, str]]:
    """The network on the device, a card that tells its shape, and the digests of its weights."""
    if name == "ensemble":
        parts = read_manifest(campaign.store).parts
        model = Model.load(campaign.store, residency=campaign.config.sampling.residency, device=device)
        return model.denoiser, model.card, parts
    if name not in SINGLE:
        raise ConfigError(f"unknown model {name!r}", nearest(name, ["ensemble", *SINGLE]))
    network = load_dense(campaign, name, device)
    assert network.card is not None
    return network, network.card, {name: network.card.weights_sha256}


def _conditions(
    campaign: Campaign, card: Card, split: Literal["heldout", "train"], count: int, seed: int
) -> Conditions:
    dataset, made = campaign.clustered()
    samples = Samples(dataset, dataset.split(split), campaign.config.condition, card.shape)
    if not len(samples):
        raise DataError(f"the data set has no {split} rows", "choose others: evaluate.conditions")
    return drawn_conditions(samples, made.clusters, count, seed)


# References.


@dataclass(frozen=True)
class Statistics:
    """Saved statistics.

    Attributes:
        store: where they lie.
        key: of their JSON.
    """

    store: Store
    key: str


def reference(named: str | None, split: str, campaign: Campaign | None) -> Folder | Rows | Statistics:
    """What pictures are held against.

    Args:
        named: a campaign, a data set, a folder of pictures, or saved statistics; None is the data of the
            campaign at hand.
        split: rows of a data set.
        campaign: the campaign at hand.

    Raises:
        ConfigError: nothing is named, or rows are asked of what has none.
        DataError: it is nothing of these.
    """
    if named is None:
        if campaign is None:
            fix = "give --reference CAMPAIGN, FOLDER or statistics"
            raise ConfigError("there is nothing to hold the pictures against", fix)
        return Rows(campaign.dataset(), split)
    if named.endswith((".json", ".safetensors")):
        _has_no_rows(named, split)
        place, _, file = named.rpartition("/")
        return Statistics(
            Store.open(place or "."), file.removesuffix(".safetensors").removesuffix(".json") + ".json"
        )
    store = Store.open(named)
    if store.exists(YAML) or store.exists(FROZEN):
        return Rows(Campaign.open(named).dataset(), split)
    if store.exists(MANIFEST):
        return Rows(DataSet.open(store), split)
    if is_url(named):
        raise DataError(
            f"{named} is no campaign and no data set", "give one of them, or a local folder of images"
        )
    _has_no_rows(named, split)
    return Folder(Path(named))


def _has_no_rows(named: str, split: str) -> None:
    if split != "heldout":  # which is the default, so it need not have been asked for
        raise ConfigError(f"--split {split} is for a data set, and {named} is none", "leave it out")
