"""What all points of one comparison share: what was asked for, conditions, judge and models."""

from collections.abc import Iterator
from functools import cache, cached_property
from itertools import product
from typing import Any

from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.campaign.card_facts import single_cards
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import ComparedModel, Comparison
from atoll.encoders.vision import VisionEncoder, extractor
from atoll.measure.metrics.metric import How
from atoll.measure.metrics.precision_recall import DENSITY_K
from atoll.measure.metrics.projection import Axes, Projection
from atoll.measure.models import (
    Candidate,
    Drawn,
    RowConditions,
    SamplingOverride,
    published,
    samples_of,
    strategies_for,
    supported,
)
from atoll.measure.pictures import SPLITS, Rows, training_pictures
from atoll.measure.points import FOLDER as POINTS
from atoll.measure.points import Judge, Reference
from atoll.measure.same_noise import SavedSamples
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, read_manifest
from atoll.model.model import ENSEMBLE
from atoll.model.routing import Routing

USUAL = ("once", "top-1", "top-2", "full", "oracle")
"""Strategies beside the campaign's own, if none are named."""
NUMBERS = {"distance": "frechet", "precision": "precision", "recall": "recall"}
COSTS = ("gflops_per_step", "experts_per_step", "router_calls_per_step", "router_share")
"""Columns of a row, of a point's metrics and of its cost."""


class CommonSetup:
    """A comparison as it is asked for; data, judge and models are loaded when they are first needed.

    `strategies` are those that this ensemble can follow, `extras` what guidance sweep and training curve were
    asked for: `sweep` and `curve`, as the result names them. `ConfigError` where no strategy is possible.
    """

    def __init__(self, campaign: Campaign) -> None:
        store, config = campaign.store, campaign.config.compare
        self.campaign, self.config = campaign, config
        self.seed, self.device = campaign.config.seed, own_device()
        self.content, self.router = read_manifest(store), Checkpoint(store, "ensemble/router").card
        self.dense = single_cards(campaign, self.router)
        self.override = SamplingOverride.of(campaign, config)
        missing = sorted(set(range(self.content.k)) - set(self.content.experts))
        able = self.content.k, missing, PRETRAIN_PART in self.content.parts
        self.strategies = supported(strategies_for(campaign, config.strategies, USUAL), *able)
        self.extras: dict[str, dict[str, Any]] = {}
        if config.guidances or config.curve:
            names = supported(strategies_for(campaign, config.sweep, ["top-1"]), *able)
            names = list({str(Routing.named(name)): name for name in names}.values())
            own, kind = self.override.generation, campaign.config.condition
            swept = [own.with_(guidance=scale).for_condition(kind) for scale in config.guidances]
            scales = sorted({float(generation.guidance) for generation in (own, *swept)})
            if config.guidances:
                # A student that was taught with guidance is sampled without.
                plain = [name for name, card in self.dense.items() if not card.sampling]
                self.extras["sweep"] = {"models": [*plain, *names], "guidances": scales}
            if config.curve:
                samples = config.curve_samples or config.samples
                self.extras["curve"] = {"strategies": names, "samples": samples, "guidance": own.guidance}
        self.split = "test" if config.conditions == "test" else "heldout"
        self.published = cache(lambda name: published(campaign, name, self.device))
        self.judge = cache(self._judge)

    def missing(self, result: Comparison | None) -> list[str]:
        """What a result of the same table does not hold, `sweep` or `curve`."""
        return [name for name, asked in self.extras.items() if getattr(result, name, None) != asked]

    def load(self) -> None:
        """Read the rows; `DataError` where there are too few to judge by."""
        self.dataset, self.partition = self.campaign.clustered()
        self.train, judging = (
            samples_of(self.campaign, self.dataset, split, self.router) for split in ("train", self.split)
        )
        self.references = len(judging)
        rows = self.train if self.config.conditions == "train" else judging
        # Conditions of a shorter list are the first of a longer one, so a curve of fewer samples than the
        # table sees the same ones.
        most = max(self.config.samples, self.config.curve_samples or 0)
        self.conditions = RowConditions.drawn(self.campaign, rows, self.config.conditions, most, self.seed)

    @cached_property
    def encoder(self) -> VisionEncoder:
        """Whose features are compared."""
        return extractor(self.config.extractor, self.config.extractor_size, str(self.device))

    @cached_property
    def reference(self) -> Reference:
        """Every held-out picture, or every test picture."""
        return self._of(Rows(self.dataset, self.split), "the campaign's data")

    @cached_property
    def fitted(self) -> Reference:
        """Training pictures whose principal components are the axes."""
        pictures = training_pictures(self.dataset, self.seed, "judge", self.config.fit_rows)
        return self._of(pictures, "training pictures of the campaign")

    def _of(self, pictures: Rows, name: str) -> Reference:
        return Reference.of_pictures(pictures, name, self.encoder, self.campaign.store)

    @cached_property
    def floor(self) -> Rows:
        """Training pictures in the place of samples: the least distance that there can be."""
        return training_pictures(self.dataset, self.seed, "floor", self.config.samples)

    @cached_property
    def axes(self) -> tuple[int, Axes]:
        """Most components, however many pictures there are, and which.

        They are those of training pictures: of the reference's own they would fit its noise. And half as many
        as there are pictures, since a covariance of more is singular or nearly so.
        """
        fitted, config = self.fitted, self.config
        most = min(config.components, min(self.references, fitted.about.count) // 2)
        if most < 1:
            what = f"{SPLITS[self.split]} rows are too few to judge by ({self.references})"
            raise DataError(what, f"hold out more: data.ingest.{self.split}")

        def projection() -> Projection:
            return Projection.fit(fitted.features(self.encoder, config.batch).rows, most)

        about = {"axes": "of training pictures", "axes_hash": fitted.about.data, "most": most}
        return most, Axes(about, cache(projection))

    def _judge(self, samples: int) -> Judge:
        (most, axes), encoder, references = self.axes, self.encoder, self.references
        components = min(most, samples // 2)
        how = How(encoder.name, encoder.kind, encoder.width, samples, references, components, axes)
        metrics = ["frechet", *(["precision", "recall"] if min(samples, references) > DENSITY_K else [])]
        store, batch = self.campaign.store, self.config.batch
        return Judge(store, encoder, self.reference, metrics, how, batch)

    def drawn(
        self, name: str, candidate: Candidate | None = None, guidance: float | None = None, samples: int = 0
    ) -> Drawn:
        """Samples of a single network, or of the ensemble under a strategy of this name.

        Weights are the published ones but for a `candidate`'s; `samples` are as many as the table's for 0.
        """
        candidate = candidate or self.published(name if name in (*self.dense, "pretrain") else ENSEMBLE)
        routing = name if candidate.routed else None
        generation = self.override.generation.with_(**candidate.model.card.sampling)
        generation = generation.with_(routing=routing, guidance=guidance)
        return Drawn(candidate, generation, self.conditions.first(samples or self.config.samples))

    def swept(self) -> Iterator[tuple[str, float, Drawn]]:
        """Every model of the sweep at every one of its rising guidance scales, and its samples."""
        for name, scale in product(self.extras["sweep"]["models"], self.extras["sweep"]["guidances"]):
            yield name, scale, self.drawn(name, guidance=scale)

    def row(
        self, name: str, drawn: Drawn, keep: bool = False
    ) -> tuple[ComparedModel, SavedSamples | None, bool]:
        """Measure samples, unless it is known what they are.

        Gives the numbers, if asked for (`keep`) the first samples, and whether they were drawn now.
        """
        point, saved, new = self.judge(len(drawn)).measure(drawn, keep)
        numbers = {column: point.number(metric) for column, metric in NUMBERS.items()}
        cost = {column: point.cost.get(column) for column in COSTS}
        cost["seconds"] = point.cost.get("draw_seconds")
        if None in (numbers["distance"], *cost.values()):
            file = f"{self.campaign.store.location}/{POINTS}/{point.key}.json"
            raise DataError(f"{file} lacks its distance or what it cost", "remove it, and compare again")
        return ComparedModel(name=name, **numbers, **cost), saved, new
