"""Models that are measured, how they draw, and the pictures that they draw at conditions of a data set."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.hashing import digest
from atoll.base.rng import generator
from atoll.campaign.folder import Campaign
from atoll.campaign.sample import campaign_model
from atoll.campaign.settings.measure import CompareConfig, DiagnoseConfig
from atoll.campaign.token_encoder import token_encoder
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.measure.pictures import Batch, measured_rows
from atoll.model.card import Card
from atoll.model.folder import PRETRAIN_PART, read_manifest
from atoll.model.generate import Conditions
from atoll.model.generation import Generation, Residency
from atoll.model.model import ENSEMBLE, Model
from atoll.model.routing import PRETRAIN, Routing

TO_8_BITS = "nearest of 256 levels of [-1, 1]"
WIDE = 26
"""Columns of a model's name where it is printed: `once null sample-1 every 5` fits."""


# How models draw.


def generation_of(campaign: Campaign) -> Generation:
    """What the campaign samples with, under its own seed, at the size nearest to a square."""
    values = {**dict(campaign.config.sampling), "seed": campaign.config.seed, "size": None}
    return Generation(**{name: values[name] for name in Generation.model_fields})


@dataclass(frozen=True)
class SamplingOverride:
    """How samples are drawn to be measured: as `sampling` says, but for the stage's own settings."""

    generation: Generation
    changes: dict[str, list[Any]]
    """The stage's settings, and what `sampling` says instead, where they differ."""

    @classmethod
    def of(cls, campaign: Campaign, config: CompareConfig | DiagnoseConfig) -> "SamplingOverride":
        """Of a stage. Noise and draws are those of the campaign's seed."""
        sampled, kind = generation_of(campaign), campaign.config.condition
        generation = sampled.with_(steps=config.steps, guidance=config.guidance).for_condition(kind)
        sampled = sampled.for_condition(kind)
        pairs = {name: [getattr(generation, name), getattr(sampled, name)] for name in ("steps", "guidance")}
        return cls(generation, {name: pair for name, pair in pairs.items() if pair[0] != pair[1]})

    @property
    def text(self) -> str:
        """The steps and guidance, and what the campaign samples with where that is something else."""
        beside = {name: f" (sampling: {pair[1]:g})" for name, pair in self.changes.items()}
        steps = f"{self.generation.steps} steps{beside.get('steps', '')}"
        return f"{steps}, guidance {self.generation.guidance:g}{beside.get('guidance', '')}"


def strategies_for(campaign: Campaign, names: Sequence[str] | None, usual: Sequence[str]) -> list[str]:
    """Strategies that a stage asks for: those named, or the campaign's own and then the usual ones."""
    default = str(campaign.config.sampling.routing)
    return list(names) if names is not None else list(dict.fromkeys([default, *usual]))


def supported(names: Sequence[str], experts: int, missing: Sequence[int], pretrained: bool) -> list[str]:
    """The strategies that an ensemble of these networks can follow; others are told, or `ConfigError`."""
    able = []
    for name in names:
        routing = Routing.named(name)
        if routing.needs_labels and missing:
            say(f"  warning: {name} is left out: the clusters of missing experts have nobody to go to")
        elif not routing.possible(experts):
            say(f"  warning: {name} is left out: there are {experts} experts")
        elif routing.null == PRETRAIN and not pretrained:
            say(f"  warning: {name} is left out: no network of shared pretraining is assembled")
        else:
            able.append(name)
    if names and not able:
        raise ConfigError(f"of the strategies {', '.join(names)} none is possible here", "name another one")
    return able


# What draws.


@dataclass(frozen=True)
class Candidate:
    """A model: `ensemble`, or a single network."""

    name: str
    weights: Mapping[str, str]  # digests, by part
    model: Model
    missing: Sequence[int] = ()  # numbers of the clusters without an expert
    stored: Mapping[str, str] = field(default_factory=dict)  # how its weights are stored, if not as usual

    @property
    def routed(self) -> bool:
        """Whether it is an ensemble; no routing concerns a single network."""
        return self.name == ENSEMBLE


def stored_as(residency: Residency) -> dict[str, str]:
    """The type of weights that `sampling.residency` asks for, where it is not that of the device."""
    if residency.dtype == "auto":
        return {}
    return {"stored": " but ".join([residency.dtype, *(residency.keep if residency.stored else ())])}


def published(campaign: Campaign, name: str, device: torch.device) -> Candidate:
    """A model of a campaign as it was published; its weights are loaded when it first draws."""
    model = campaign_model(campaign, name, device)
    stored = stored_as(campaign.config.sampling.residency)
    if name != ENSEMBLE:
        return Candidate(name, {name: model.card.weights_sha256}, model, stored=stored)
    content = read_manifest(campaign.store)
    missing = sorted(set(range(content.k)) - set(content.experts))
    return Candidate(name, content.parts, model, missing, stored)


# At which conditions.


def samples_of(campaign: Campaign, dataset: DataSet, split: str, like: Card) -> Samples:
    """Rows of a split, with the columns that a model of this card is conditioned on; `DataError` for none."""
    rows, condition = measured_rows(dataset, split), campaign.config.condition
    return Samples(dataset, rows, condition, like.shape, token_encoder(campaign, dataset))


@dataclass(frozen=True)
class RowConditions:
    """Conditions of rows of a split, one for each picture: its number within the samples, and its cluster."""

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
        """Those of `count` rows in a seeded order, repeated when there are fewer."""
        # One stream for every stage: a shorter list is the beginning of a longer one, and pictures of compare
        # and diagnose are of the same rows.
        order = torch.randperm(len(samples), generator=generator(seed, "compare")).numpy()
        index = np.resize(order, count)
        return cls(samples, index, campaign.clustered()[1].clusters[samples.rows[index]], split)

    def first(self, count: int) -> "RowConditions":
        """Those of the first pictures."""
        return RowConditions(self.samples, self.index[:count], self.clusters[:count], self.split)

    @property
    def of_model(self) -> Conditions:
        """As a model takes them."""
        return Conditions(
            lambda numbers: self.samples.conditions(self.index[list(numbers)]), self.samples.null, len(self)
        )

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


# What is drawn.


@dataclass
class Drawn:
    """Pictures that a model draws at conditions of a data set, if `captioned` with captions: a `Source`."""

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
        # Without `null pretrain` that network draws nothing: a point holds whether it is assembled or not.
        unused = {PRETRAIN_PART} if self.generation.routing.null != PRETRAIN else set()
        weights = {part: value for part, value in self.candidate.weights.items() if part not in unused}
        return {"name": self.candidate.name, "weights": weights, **self.candidate.stored}

    @property
    def about(self) -> dict[str, Any]:
        """How the pictures are drawn, for the protocol."""
        # A user's function may be called as a strategy is.
        named = self.generation.routing.named_only
        routing = str(self.generation.routing) if named else f"function {self.generation.routing}"
        return {
            "rounding": TO_8_BITS,
            "conditions": self.conditions.split,
            "conditions_hash": self.conditions.digest,
            "sampler": "Euler",
            "steps": self.generation.steps,
            "guidance": self.generation.guidance,
            "shift": None if self.generation.shift == 1 else self.generation.shift,
            "routing": routing if self.candidate.routed else None,
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
        """Pictures in batches; `DataError` for one with values that are no numbers."""
        model, start = self.candidate.model, time.monotonic()
        captions = self.conditions.captions() if self.captioned else None
        how = {"first": part.start, "batch": batch, "labels": self.conditions.labels}
        for drawn in model.generate(self.conditions.of_model, self.generation, len(part), **how):
            pictures = model.pictures(drawn.latents, drawn.rows)
            texts = [captions[row] for row in drawn.rows] if captions is not None else None
            yield Batch(drawn.rows, pictures, texts, drawn.trace, time.monotonic() - start)
            start = time.monotonic()
