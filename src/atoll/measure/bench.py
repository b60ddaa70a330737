"""The bench of a comparison: models are loaded, drawn from and judged when a point is not known yet."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.base.pictures import png
from atoll.campaign.baselines import load_dense
from atoll.campaign.folder import Campaign
from atoll.campaign.settings.measure import CompareConfig
from atoll.data.samples import Samples
from atoll.encoders.extractors import extractor
from atoll.encoders.vae import Autoencoder, autoencoder_of
from atoll.encoders.vision import VisionEncoder
from atoll.ensemble.card import Card
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.expert import Expert, read_card
from atoll.ensemble.model import Model
from atoll.ensemble.routing import Routing
from atoll.measure.compare import Conditions, cost, draw, drawn_conditions
from atoll.measure.judge import Judge
from atoll.measure.pairs import Kept
from atoll.measure.points import Points, Row


@dataclass(frozen=True)
class Subject:
    """A model that pictures are drawn from.

    Attributes:
        name: of a single network, or of a routing strategy.
        weights: what its weights are known by, part by part.
        load: brings it.
        single: whether it is one network, which no routing concerns.
        device: where it is.
    """

    name: str
    weights: Mapping[str, str]
    load: Callable[[], Ensemble | Expert]
    single: bool
    device: torch.device

    @property
    def routing(self) -> str | None:
        """The strategy's canonical name; None for one network."""
        return None if self.single else str(Routing.named(self.name))


class Bench:
    """Everything that the points of a comparison share.

    Args:
        campaign: with an ensemble.
        config: of the comparison.
        router: the router's card.
        parts: digests of the weights of all parts, `ensemble.json`'s and those of the single networks.
        dense: names of the single networks.

    Raises:
        DataError: there are no held-out rows.
    """

    def __init__(
        self,
        campaign: Campaign,
        config: CompareConfig,
        router: Card,
        parts: Mapping[str, str],
        dense: Iterable[str],
    ) -> None:
        self.campaign, self.config, self.router = campaign, config, router
        self.parts, self.dense, self.seed = dict(parts), tuple(dense), campaign.config.seed
        self.dataset, self.made = campaign.clustered()
        self.train, heldout = self._samples("train"), self._samples("heldout")
        if len(heldout) == 0:
            raise DataError("the data set has no held-out rows", "ingest with data.ingest.heldout above 0")
        asked = heldout if config.conditions == "heldout" else self.train
        most = max(config.samples, config.curve_samples or 0)
        self.conditions = drawn_conditions(asked, self.made.clusters, most, self.seed)
        self.known: list[Row] = []
        self.device = own_device()
        self._load = cache(self._loaded)
        self.judge = cache(lambda pictures: self._judge.of(pictures))

    def _samples(self, split: str) -> Samples:
        kind, shape = self.campaign.config.condition, self.router.shape
        return Samples(self.dataset, self.dataset.split(split), kind, shape)

    @cached_property
    def points(self) -> Points:
        """What was measured before of the same data, by the same judge."""
        names = ("conditions", "steps", "components", "fit_rows")
        shared = {name: getattr(self.config, name) for name in names}
        data = {"data": self.dataset.content, "partition": self.router.partition, "seed": self.seed}
        return Points(self.campaign.store, {**data, **shared, "extractor": self.encoder.producer()})

    @cached_property
    def encoder(self) -> VisionEncoder:
        """Whose features are compared."""
        return extractor(self.config.extractor, self.config.extractor_size, str(self.device))

    @cached_property
    def _judge(self) -> Judge:
        """Made when it is first needed: it looks at many pictures."""
        return Judge.make(self.encoder, self.dataset, self.config, self.seed)

    @cached_property
    def vae(self) -> Autoencoder:
        """Turns latents into pictures."""
        return autoencoder_of(self.router.latents, str(self.device))

    def published(self, name: str) -> Subject:
        """A single network as it was published, or the ensemble under the strategy of this name."""
        if name in (*self.dense, "pretrain"):
            weights = {name: read_card(self.campaign.store, f"{name}/expert").weights_sha256}
            return Subject(name, weights, lambda: self._load(name), True, self.device)
        weights = {part: value for part, value in self.parts.items() if part not in self.dense}
        return Subject(name, weights, lambda: self._load(""), False, self.device)

    def _loaded(self, name: str) -> Ensemble | Expert:
        if name:
            return load_dense(self.campaign, name, self.device)
        residency = self.campaign.config.sampling.residency
        return Model.load(self.campaign.store, residency=residency, device=self.device).denoiser

    def row(self, subject: Subject, guidance: float, samples: int) -> tuple[Row, bool]:
        """What is known of a model at one guidance, drawn now if nothing is; and whether it was."""
        return self._point(subject, guidance, samples, keep=False)[::2]

    def kept(self, subject: Subject) -> tuple[Row, Kept]:
        """The same at the comparison's own guidance, with its first samples."""
        row, kept, _ = self._point(subject, self.config.guidance, self.config.samples, keep=True)
        assert kept is not None
        return row, kept

    def _point(
        self, subject: Subject, guidance: float, samples: int, keep: bool
    ) -> tuple[Row, Kept | None, bool]:
        what = {
            "weights": dict(subject.weights),
            "routing": subject.routing,
            "guidance": float(guidance),
            "samples": samples,
        }
        found = self.points.get(what, keep) or (None if keep else self._of_table(subject, guidance, samples))
        if found is not None:
            return {"name": subject.name, **found[0]}, found[1], False
        row, kept = self._draw(subject, guidance, samples, keep)
        self.points.put(what, row, kept)
        return {"name": subject.name, **row}, kept, True

    def _of_table(self, subject: Subject, guidance: float, samples: int) -> tuple[Row, None] | None:
        """The row of an earlier table, of a version that kept no points."""
        if (guidance, samples) != (self.config.guidance, self.config.samples):
            return None
        if subject.weights != self.published(subject.name).weights:
            return None
        return next(
            ((row, None) for row in self.known if _canonical(row["name"], self.dense) == _name(subject)), None
        )

    def _draw(self, subject: Subject, guidance: float, samples: int, keep: bool) -> tuple[Row, Kept | None]:
        model, config = subject.load(), self.config.model_copy(update={"guidance": guidance})
        asked = self.conditions.first(samples)
        drawn = draw(model, self.vae, subject.routing, asked, self.seed, config, subject.device)
        judge = self.judge(samples)
        features = judge.look(drawn.pictures)
        row = {**judge.measure(features), "seconds": round(drawn.seconds, 1), **cost(model, drawn, config)}
        return row, Kept.of(drawn.pictures, features) if keep else None

    def show(self, subject: Subject, shown: Conditions) -> list[Any] | None:
        """Draw the pictures to look at and write them; weights `[step][picture][expert]` of an ensemble."""
        model, noise = subject.load(), self.seed + 1
        drawn = draw(model, self.vae, subject.routing, shown, noise, self.config, subject.device)
        self.write(subject.name, [png(picture) for picture in drawn.pictures])
        if drawn.trace is None:
            return None
        weights: list[Any] = np.round(drawn.trace.stacked().numpy().astype(float), 4).tolist()
        return weights

    def write(self, name: str, pictures: Iterable[bytes]) -> None:
        """Pictures to look at."""
        for number, picture in enumerate(pictures):
            self.campaign.store.put(f"reports/compare/{name}/{number:02d}.png", picture)


def _canonical(name: str, dense: Iterable[str]) -> str:
    return name if name in dense else str(Routing.named(name))


def _name(subject: Subject) -> str:
    return subject.routing or subject.name
