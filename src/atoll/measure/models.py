"""Models that are measured, and the pictures that they draw at conditions of a data set."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.hashing import digest
from atoll.base.rng import generator
from atoll.campaign.folder import Campaign
from atoll.campaign.roles import SINGLE
from atoll.campaign.token_encoder import token_encoder
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.measure.pictures import Batch, of_usual_size
from atoll.model.card import Card
from atoll.model.folder import PRETRAIN_PART, read_manifest
from atoll.model.generate import Conditions
from atoll.model.generation import Generation
from atoll.model.model import ENSEMBLE, Model
from atoll.model.routing import PRETRAIN

"""Networks beside the ensemble, where they are published."""
TO_8_BITS = "nearest of 256 levels of [-1, 1]"


@dataclass(frozen=True)
class Candidate:
    """A model with what its weights are known by.

    Attributes:
        name: `ensemble`, or of a single network.
        weights: digests, part by part.
        model: draws.
        missing: numbers of the clusters without an expert.
    """

    name: str
    weights: Mapping[str, str]
    model: Model
    missing: Sequence[int] = ()

    @property
    def routed(self) -> bool:
        """Whether it is an ensemble; no routing concerns a single network."""
        return self.name == ENSEMBLE


def published(campaign: Campaign, name: str, device: torch.device) -> Candidate:
    """A model of a campaign as it was published; its weights are loaded when it first draws.

    Raises:
        ConfigError: no such model.
        StoreError: it is not published, or not assembled.
    """
    if name != ENSEMBLE and name not in SINGLE:
        raise ConfigError(f"unknown model {name!r}", nearest(name, [ENSEMBLE, *SINGLE]))
    sampling = campaign.config.sampling
    model = Model.load(campaign.store, name, sampling.residency, device, sampling, campaign.config.encoders)
    if name != ENSEMBLE:
        return Candidate(name, {name: model.card.weights_sha256}, model)
    content = read_manifest(campaign.store)
    missing = sorted(set(range(content.k)) - set(content.experts))
    return Candidate(name, content.parts, model, missing)


@dataclass(frozen=True)
class RowConditions:
    """Conditions of rows of a data set, one for each picture, with the rows' clusters.

    Attributes:
        samples: the rows' columns.
        index: numbers within `samples`, one per picture.
        clusters: cluster of each picture.
        split: what the rows are called.
    """

    samples: Samples
    index: NDArray[np.int64]
    clusters: NDArray[np.int64]
    split: str

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def drawn(
        cls, campaign: Campaign, samples: Samples, split: str, count: int, seed: int
    ) -> "RowConditions":
        """Those of `count` rows in a seeded order, repeated when there are fewer; `DataError` for none."""
        if not len(samples):
            raise DataError(f"the data set has no {split} rows", "choose others: evaluate.conditions")
        order = torch.randperm(len(samples), generator=generator(seed, "compare")).numpy()
        return cls.of(campaign, samples, np.resize(order, count), split)

    @classmethod
    def of(
        cls, campaign: Campaign, samples: Samples, index: NDArray[np.int64], split: str
    ) -> "RowConditions":
        """Those of chosen rows, with their clusters."""
        clusters = campaign.clustered()[1].clusters
        return cls(samples, index, clusters[samples.rows[index]], split)

    def first(self, count: int) -> "RowConditions":
        """Those of the first pictures."""
        return RowConditions(self.samples, self.index[:count], self.clusters[:count], self.split)

    @property
    def of_model(self) -> Conditions:
        """As a model takes them."""
        return Conditions(self._of, self.samples.null(), len(self))

    def _of(self, rows: Sequence[int]) -> Any:
        return self.samples.conditions(self.index[list(rows)])

    @property
    def labels(self) -> torch.Tensor:
        """Clusters of the pictures, for `oracle`."""
        return torch.from_numpy(self.clusters)

    @cached_property
    def digest(self) -> str:
        """Of everything that conditions and clusters depend on."""
        rows = self.samples.rows[self.index].tolist()
        content = {"data": self.samples.dataset.content, "rows": rows, "clusters": self.clusters.tolist()}
        return digest(content)

    def captions(self) -> list[str]:
        """Caption of each picture."""
        rows = self.samples.rows[self.index]
        return [str(c) for c in self.samples.dataset.take(rows).column("caption").to_pylist()]


@dataclass
class Drawn:
    """Pictures that a model draws at conditions of a data set.

    Attributes:
        candidate: the model.
        generation: how it draws, as its condition allows.
        conditions: one for each picture.
        captioned: whether pictures bring their captions.

    Raises:
        ConfigError: `oracle` where an expert is missing.
    """

    candidate: Candidate
    generation: Generation
    conditions: RowConditions
    captioned: bool = False

    def __post_init__(self) -> None:
        self.generation = self.generation.for_condition(self.candidate.model.card.condition)
        if self.candidate.routed and self.generation.routing.needs_labels and self.candidate.missing:
            what = "routing 'oracle': clusters of missing experts have nobody to go to"
            raise ConfigError(what, "use another")

    def __len__(self) -> int:
        return len(self.conditions)

    @property
    def reusable(self) -> bool:
        """Unless a function routes, whose name says nothing."""
        return not self.candidate.routed or self.generation.routing.named_only

    @property
    def subject(self) -> dict[str, Any]:
        """Name of the model and digests of the weights that it may draw with."""
        unused = {PRETRAIN_PART} if self.generation.routing.null != PRETRAIN else set()
        weights = {part: one for part, one in self.candidate.weights.items() if part not in unused}
        return {"name": self.candidate.name, "weights": weights}

    @property
    def about(self) -> dict[str, Any]:
        """How the pictures are drawn, for the protocol."""
        return {
            "rounding": TO_8_BITS,
            "conditions": self.conditions.split,
            "conditions_hash": self.conditions.digest,
            "sampler": "Euler",
            "steps": self.generation.steps,
            "guidance": self.generation.guidance,
            "shift": None if self.generation.shift == 1 else self.generation.shift,
            "routing": str(self.generation.routing) if self.candidate.routed else None,
            "seed": self.generation.seed,
            "ema": True,  # what is published is the average
        }

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        model = self.candidate.model
        height, width = model.vae.decode(torch.zeros(1, *model.shape)).shape[2:]
        return width, height

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches.

        Raises:
            DataError: a picture with values that are no numbers.
        """
        model, start = self.candidate.model, time.monotonic()
        captions = self.conditions.captions() if self.captioned else None
        how = {"first": part.start, "batch": batch, "labels": self.conditions.labels}
        for drawn in model.generate(self.conditions.of_model, self.generation, len(part), **how):
            pictures = model.pictures(drawn.latents, drawn.rows)
            texts = [captions[row] for row in drawn.rows] if captions is not None else None
            yield Batch(drawn.rows, pictures, texts, drawn.trace, time.monotonic() - start)
            start = time.monotonic()


def samples_of(campaign: Campaign, dataset: DataSet, split: str, like: Card) -> Samples:
    """Rows of a split, with the columns that a model of this card is conditioned on."""
    rows, config = of_usual_size(dataset, dataset.split(split)), campaign.config
    return Samples(dataset, rows, config.condition, like.shape, token_encoder(campaign, dataset))
