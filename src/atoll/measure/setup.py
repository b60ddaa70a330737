"""What all points of one comparison share: conditions, judge and models."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from atoll.base.device import own_device
from atoll.base.errors import ConfigError, DataError
from atoll.base.processes import ProcessGroup
from atoll.base.rng import generator
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import ComparedModel, Comparison
from atoll.encoders.vision import VisionEncoder, extractor
from atoll.measure.metrics.metric import How
from atoll.measure.metrics.precision_recall import DENSITY_K
from atoll.measure.metrics.projection import Axes, Projection
from atoll.measure.models import Candidate, Drawn, RowConditions, published, samples_of
from atoll.measure.override import SamplingOverride, strategies_for, supported
from atoll.measure.pictures import Rows, of_usual_size
from atoll.measure.points import FOLDER as POINTS
from atoll.measure.points import Judge
from atoll.measure.reference import Reference
from atoll.measure.same_noise import SavedSamples
from atoll.model.card import Card
from atoll.model.folder import PRETRAIN_PART, Manifest
from atoll.model.model import ENSEMBLE
from atoll.model.routing import Routing

USUAL = ("once", "top-1", "top-2", "full", "oracle")
"""Strategies beside the campaign's own, if none are named."""
SPLITS = {"heldout": "held-out", "test": "test"}
NUMBERS = {"distance": "frechet", "precision": "precision", "recall": "recall"}
COSTS = ("gflops_per_step", "experts_per_step", "router_calls_per_step", "router_share")
"""Columns of a row, of a point's metrics and of its cost."""


@dataclass(frozen=True)
class Request:
    """What is to be compared: strategies that this ensemble can follow, how samples are drawn, and what the
    guidance sweep and the training curve were asked for, as the result names it; None for none."""

    strategies: list[str]
    override: SamplingOverride
    sweep: dict[str, Any] | None = None
    curve: dict[str, Any] | None = None

    @classmethod
    def of(cls, campaign: Campaign, content: Manifest, dense: Mapping[str, Card]) -> "Request":
        """Out of the settings."""
        config, override = campaign.config.compare, SamplingOverride.of(campaign, campaign.config.compare)
        missing = sorted(set(range(content.k)) - set(content.experts))
        able = content.k, missing, PRETRAIN_PART in content.parts
        strategies = supported(strategies_for(campaign, config.strategies, USUAL), *able)
        if not config.guidances and not config.curve:
            return cls(strategies, override)
        names = supported(strategies_for(campaign, config.sweep, ["top-1"]), *able)
        names = list({str(Routing.named(name)): name for name in names}.values())
        if not names:
            raise ConfigError("compare.sweep: none of these strategies is possible here", "name another one")
        own, kind = override.generation, campaign.config.condition
        swept = [own.with_(guidance=scale).for_condition(kind) for scale in config.guidances]
        scales = sorted({float(generation.guidance) for generation in (own, *swept)})
        samples = config.curve_samples or config.samples
        sweep = {"models": [*dense, *names], "guidances": scales}
        curve = {"strategies": names, "samples": samples, "guidance": own.guidance}
        return cls(strategies, override, sweep if config.guidances else None, curve if config.curve else None)

    def missing(self, result: Comparison | None) -> list[str]:
        """What a result of the same table does not hold, `sweep` or `curve`."""
        extra = {"sweep": self.sweep, "curve": self.curve}
        return [n for n, part in extra.items() if part is not None and getattr(result, n, None) != part]


class CommonSetup:
    """Conditions, judge and models, all loaded when they are first needed.

    Args:
        campaign: with an ensemble.
        request: what is compared.
        router: the router's card.
        dense: cards of the single networks.

    Raises:
        DataError: there are too few rows to judge by.
    """

    def __init__(self, campaign: Campaign, request: Request, router: Card, dense: Mapping[str, Card]) -> None:
        self.campaign, self.request, self.router, self.dense = campaign, request, router, dense
        self.config, self.seed, self.device = campaign.config.compare, campaign.config.seed, own_device()
        self.dataset, self.partition = campaign.clustered()
        self.split = "test" if self.config.conditions == "test" else "heldout"
        self.train, judging = (samples_of(campaign, self.dataset, s, router) for s in ("train", self.split))
        self.references = len(judging)
        if not self.references:
            what = f"the data set has no {SPLITS[self.split]} rows"
            raise DataError(what, f"ingest with data.ingest.{self.split} above 0")
        rows = self.train if self.config.conditions == "train" else judging
        # Conditions of a shorter list are the first of a longer one, so a curve of fewer samples than the
        # table sees the same ones.
        most = max(self.config.samples, self.config.curve_samples or 0)
        self.conditions = RowConditions.drawn(campaign, rows, self.config.conditions, most, self.seed)
        self.published = cache(lambda name: published(campaign, name, self.device))
        self.judge = cache(self._judge)

    @cached_property
    def encoder(self) -> VisionEncoder:
        """Whose features are compared."""
        return extractor(self.config.extractor, self.config.extractor_size, str(self.device))

    @cached_property
    def reference(self) -> Reference:
        """Every held-out picture, or every test picture."""
        pictures = Rows(self.dataset, self.split)
        return Reference.of_pictures(pictures, "the campaign's data", self.encoder, self.campaign.store)

    @cached_property
    def _fit(self) -> Rows:
        return self.training("judge", self.config.fit_rows)

    def training(self, stream: str, count: int) -> Rows:
        """So many training pictures, drawn by the campaign's seed."""
        train = of_usual_size(self.dataset, self.dataset.split("train"))
        order = torch.randperm(len(train), generator=generator(self.seed, stream)).numpy()
        return Rows(self.dataset, "train", np.sort(train[order[:count]]))

    @property
    def components(self) -> int:
        """Most components, however many pictures there are: half of those at hand."""
        components = min(self.config.components, min(self.references, len(self._fit)) // 2)
        if components < 1:
            what = f"{self.references} {SPLITS[self.split]} rows cannot judge"
            raise DataError(what, f"hold out more: data.ingest.{self.split}")
        return components

    def _judge(self, samples: int) -> Judge:
        def projection() -> Projection:
            name = "training pictures of the campaign"
            fit = Reference.of_pictures(self._fit, name, self.encoder, self.campaign.store)
            features = fit.features(self.encoder, self.config.batch, ProcessGroup())
            assert features is not None
            return Projection.fit(features.rows, self.components)

        # The components are those of training pictures: of the reference's own they would fit its noise, and
        # of half as many as there are pictures, since a covariance of more is singular or nearly so.
        about = {"axes": "of training pictures", "axes_hash": self._fit.digest, "most": self.components}
        components, held = min(self.components, samples // 2), self.references
        encoder, axes = self.encoder, Axes(about, cache(projection))
        how = How(encoder.name, encoder.kind, encoder.width, samples, held, components, axes)
        metrics = ["frechet", *(["precision", "recall"] if min(samples, held) > DENSITY_K else [])]
        return Judge(self.campaign.store, encoder, self.reference, metrics, how, self.config.batch)

    def drawn(self, candidate: Candidate, name: str, guidance: float | None, samples: int) -> Drawn:
        """Samples of a model, under a routing strategy of this name if it is an ensemble."""
        routing = name if candidate.routed else None
        generation = self.request.override.generation.with_(routing=routing, guidance=guidance)
        return Drawn(candidate, generation, self.conditions.first(samples))

    def model(self, name: str) -> Candidate:
        """A single network as it was published, or the ensemble, by the name of a strategy."""
        return self.published(name if name in (*self.dense, "pretrain") else ENSEMBLE)

    def row(
        self,
        name: str,
        candidate: Candidate | None = None,
        guidance: float | None = None,
        samples: int | None = None,
        keep: bool = False,
    ) -> tuple[ComparedModel, SavedSamples | None, bool]:
        """Measure a model, unless it is known.

        Args:
            name: of a single network or of a strategy.
            candidate: other weights than the published ones.
            guidance: by default the comparison's own, like `samples`.
            samples: pictures.
            keep: whether its first samples are wanted too.

        Returns:
            The numbers, the first samples, and whether they were drawn now.
        """
        samples = samples or self.config.samples
        drawn = self.drawn(candidate or self.model(name), name, guidance, samples)
        point, saved, new = self.judge(samples).measure(drawn, keep)
        assert point is not None
        numbers = {column: point.number(metric) for column, metric in NUMBERS.items()}
        cost = {column: point.cost.get(column) for column in COSTS}
        cost["seconds"] = point.cost.get("draw_seconds")
        if None in (numbers["distance"], *cost.values()):
            file = f"{self.campaign.store.location}/{POINTS}/{point.key}.json"
            raise DataError(f"{file} lacks its distance or what it cost", "remove it, and compare again")
        return ComparedModel(name=name, **numbers, **cost), saved, new
