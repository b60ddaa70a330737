"""The diagnose stage: why the ensemble is good or bad, from what a campaign published."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.base.config import loose_fields
from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.text import NONE
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.card_facts import single_cards
from atoll.campaign.diagnosed import CopyRow, Diagnosis, DiagnosisTables
from atoll.campaign.folder import Campaign
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.dataset import DataSet
from atoll.data.partition import Partition
from atoll.data.settings import features_column
from atoll.encoders.vision import VisionEncoder, extractor, vision_encoder
from atoll.measure.diagnosis.cluster_match import cluster_match
from atoll.measure.diagnosis.labelled_rows import labelled, measure, weak_experts
from atoll.measure.diagnosis.memorization import Copies, leaders, two_nearest
from atoll.measure.diagnosis.stability import stability
from atoll.measure.diagnosis.usage import switches, usage
from atoll.measure.models import Candidate, RowConditions, published, samples_of
from atoll.measure.override import SamplingOverride, strategies_for, supported
from atoll.model.bank import Bank
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import read_manifest
from atoll.model.generate import Sampling, generate
from atoll.model.routing import Routing
from atoll.model.sampler import times

FOLDER = "reports/diagnostics"
USUAL = ("once", "top-1")
"""Strategies beside the campaign's own, if none are named."""
_CHUNK = 4096
F32 = NDArray[np.float32]


def diagnose(campaign: Campaign) -> Diagnosis:
    """Measure and write; what was measured of the same parts with the same settings is not measured again."""
    store, config, seed = campaign.store, campaign.config.diagnose, campaign.config.seed
    content = read_manifest(store)
    router = Checkpoint(store, "ensemble/router").card
    baseline = single_cards(campaign, router, ("monolith",))
    parts = content.parts | {name: card.weights_sha256 for name, card in baseline.items()}
    dataset, partition = _data(campaign)
    override = SamplingOverride.of(campaign, config)
    strategies = [str(Routing.named(name)) for name in strategies_for(campaign, config.strategies, USUAL)]
    settings = config.model_dump(exclude={*loose_fields(DiagnoseConfig)})
    settings |= {"seed": seed, "strategies": strategies}
    settings |= {name: getattr(override.generation, name) for name in ("steps", "guidance")}
    settings |= {"shift": override.generation.shift} if override.generation.shift != 1 else {}
    key = digest({"parts": parts, "settings": settings, "data": dataset.content})
    if (known := Diagnosis.known(store, key)) is not None:
        say("diagnose: finished already")
        return known
    start = time.monotonic()
    with using_threads(config.threads):
        diagnosis = _Diagnosis(campaign, dataset, partition, router, override, strategies)
        tables, about = diagnosis.run(bool(baseline))
    result = Diagnosis(
        key=key,
        parts=parts,
        code=code_version(),
        seconds=round(time.monotonic() - start, 1),
        settings=settings,
        overrides=override.changes,
        k=partition.k,
        sizes=partition.sizes,
        missing=sorted(set(range(partition.k)) - set(content.experts)),
        tables=tables,
        **about,
    )
    result.write(store)
    return result


def _data(campaign: Campaign) -> tuple[DataSet, Partition]:
    """Data set and partition, which belong together and hold the rows that are asked for."""
    (dataset, partition), config = campaign.clustered(), campaign.config.diagnose
    wanted = {*config.splits, *([config.conditions] if config.samples and config.strategies != [] else [])}
    if "heldout" in wanted and len(dataset.split("heldout")) == 0:
        raise DataError(
            "the data set has no held-out rows",
            "ingest with data.ingest.heldout above 0, or look at training rows:"
            " --set diagnose.splits=[train] --set diagnose.conditions=train",
        )
    return dataset, partition


@dataclass(frozen=True)
class Sampled:
    """Samples of one strategy.

    Attributes:
        weights: of the trace `(S, N, K)`.
        latents: `(N, C, H, W)`.
    """

    weights: torch.Tensor
    latents: torch.Tensor


class _Diagnosis:
    """One look at a campaign."""

    def __init__(
        self,
        campaign: Campaign,
        dataset: DataSet,
        partition: Partition,
        router: Card,
        override: SamplingOverride,
        strategies: list[str],
    ) -> None:
        self.campaign, self.dataset, self.partition, self.router = campaign, dataset, partition, router
        self.override, self.strategies = override, strategies
        self.config, self.seed = campaign.config.diagnose, campaign.config.seed
        self.device = own_device()
        self.candidate = published(campaign, "ensemble", self.device)
        self.ensemble = self.candidate.model.bank

    def run(self, baseline: bool) -> tuple[DiagnosisTables, dict[str, Any]]:
        """The tables, and the other fields of the result."""
        if self.ensemble.missing:
            names = ", ".join(map(str, self.ensemble.missing))
            say(f"  warning: experts {names} are missing and left out; their share goes to the others")
        monolith = published(self.campaign, "monolith", self.device) if baseline else None
        tables = self._measured(None if monolith is None else monolith.model.bank)
        named = self.strategies if self.config.samples else []
        pretrained = self.ensemble.pretrain is not None
        strategies = supported(named, len(self.ensemble.experts), self.candidate.missing, pretrained)
        routings = {name: Routing.named(name) for name in strategies}
        sampled = {name: self._sampled(routing) for name, routing in routings.items()}
        about: dict[str, Any] = {"strategies": list(sampled), "copies": None, "pictures": [], "closest": []}
        if sampled:
            tables |= self._traced(sampled) | self._stability(routings, monolith)
            ends, facts = self._memorisation(sampled, monolith)
            tables, about = tables | ends, about | facts
        result = DiagnosisTables(**{name: tuple(rows) for name, rows in tables.items()})
        _summarise(result)
        return result, about

    def _measured(self, monolith: Bank | None) -> dict[str, list[Any]]:
        config, tables = self.config, dict[str, list[Any]]()
        for split in config.splits:
            samples = samples_of(self.campaign, self.dataset, split, self.router)
            say(f"diagnose: {min(len(samples), config.rows):,} {split} rows at {len(config.times)} times")
            rows = labelled(samples, self.partition.clusters, config.rows, self.seed, config.batch)
            measured = measure(self.ensemble, monolith, rows, self.partition.sizes, config, self.device)
            for name, found in measured.items():
                tables.setdefault(name, []).extend(labelled_by(found, split=split))
        return tables

    def _sampling(self, routing: Routing, count: int) -> Sampling:
        """All about drawing the first pictures at the conditions of `_conditions`."""
        generation = self.override.generation.with_(routing=routing)
        conditions, shape = self._conditions, self.candidate.model.shape
        batch, labels = self.config.batch, conditions.labels
        return Sampling(
            generation, conditions.of_model, shape, count, batch=batch, device=self.device, labels=labels
        )

    def _sampled(self, routing: Routing) -> Sampled:
        count, steps = self.config.samples, self.override.generation.steps
        say(f"diagnose: {count:,} pictures under {routing}, {self.override.text}")
        weights = torch.empty(steps, count, len(self.ensemble.experts))
        latents = torch.empty(count, *self.candidate.model.shape)
        for drawn in generate(self.ensemble, self._sampling(routing, count)):
            assert drawn.trace is not None
            weights[:, drawn.rows] = drawn.trace.stacked()
            latents[drawn.rows] = drawn.latents.cpu()
        return Sampled(weights, latents)

    @cached_property
    def _conditions(self) -> RowConditions:
        """Those that `compare` draws at as well, with the same seed, split and number."""
        samples = samples_of(self.campaign, self.dataset, self.config.conditions, self.router)
        return RowConditions.drawn(
            self.campaign, samples, self.config.conditions, self.config.samples, self.seed
        )

    def _traced(self, sampled: dict[str, Sampled]) -> dict[str, list[Any]]:
        clusters = self._conditions.labels
        generation = self.override.generation
        starts = times(generation.steps, generation.shift)[:-1]
        tables: dict[str, list[Any]] = {"usage": [], "switches": []}
        for name, samples in sampled.items():
            used = usage(samples.weights, clusters, self.partition.sizes)
            tables["usage"] += labelled_by(used, strategy=name)
            tables["switches"] += labelled_by(switches(samples.weights, starts), strategy=name)
        return tables

    def _stability(self, routings: dict[str, Routing], monolith: Candidate | None) -> dict[str, list[Any]]:
        """Of every strategy and of the monolith, on the first of the samples."""
        count = min(self.config.probed, self.config.samples)
        if not count:
            return {}
        say(f"diagnose: {count:,} pictures of each nudged, and in {2 * self.override.generation.steps} steps")
        models: dict[str, tuple[Bank, Routing]] = {
            name: (self.ensemble, routing) for name, routing in routings.items()
        }
        if monolith is not None:
            models["monolith"] = (monolith.model.bank, Routing())
        tables: dict[str, list[Any]] = {"stability": [], "lipschitz": []}
        for name, (model, routing) in models.items():
            ends, path = stability(model, self._sampling(routing, count))
            tables["stability"] += labelled_by([ends], strategy=name)
            tables["lipschitz"] += labelled_by(path, strategy=name)
        return tables

    def _memorisation(
        self, sampled: dict[str, Sampled], monolith: Candidate | None
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Whether samples lie in their experts' clusters, and whether those of the first strategy and of the
        monolith are copies; tables, and what is shown of the copies."""
        heldout = self.dataset.split("heldout")
        own_space = self.config.extractor is None and len(self.partition.centroids) > 0
        if not own_space and not len(heldout):
            return {}, {}
        encoder, model = self._extractor(), self.candidate.model
        parts = [features for _, features in self._features(encoder, heldout)]
        real = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        tables, facts = dict[str, list[Any]](), dict[str, Any]()
        for name, samples in sampled.items():
            first = name == next(iter(sampled))
            if not own_space and not first:
                break
            numbers = torch.arange(len(samples.latents)).split(self.config.batch)
            pictures = [p for part in numbers for p in model.pictures(samples.latents[part], part.tolist())]
            features, weights = encoder.encode(pictures).numpy(), samples.weights.numpy()
            if own_space:
                cut, clusters = self.partition, self.partition.clusters[heldout]
                ends = cluster_match(features, weights, real, clusters, cut.centroids, cut.prices)
                tables.setdefault("landing", []).extend(labelled_by(ends, strategy=name))
            if first and len(heldout):
                copies = self._copies(encoder, features, real, leaders(weights))
                copied, facts = self._copied(copies, encoder, pictures)
                tables |= copied
                if monolith is not None:
                    whole = self._copies_of(monolith, encoder, copies).by_cluster(0)
                    tables["nearest"] += labelled_by(whole, cluster="monolith")
        return tables, facts

    def _copies(self, encoder: VisionEncoder, features: F32, real: F32, served: NDArray[np.int64]) -> Copies:
        """Samples and held-out pictures beside their nearest training pictures."""
        train, heldout = self.dataset.split("train"), self.dataset.split("heldout")
        say(f"diagnose: {len(features):,} pictures against {len(train):,} training pictures")
        drawn, other = (two_nearest(one, self._features(encoder, train)) for one in (features, real))
        return Copies(drawn, other, served, self.partition.clusters[heldout], self.config.quantile)

    def _copies_of(self, monolith: Candidate, encoder: VisionEncoder, like: Copies) -> Copies:
        """The same check of the monolith, from the noise and at the conditions of the others."""
        count, model = self.config.samples, monolith.model
        say(f"diagnose: {count:,} pictures of the monolith")
        features = np.empty((count, encoder.width), np.float32)
        for drawn in generate(model.bank, self._sampling(Routing(), count)):
            features[drawn.rows] = encoder.encode(model.pictures(drawn.latents, drawn.rows)).numpy()
        near = two_nearest(features, self._features(encoder, self.dataset.split("train")))
        return replace(like, samples=near, served=np.zeros(count, np.int64))

    def _copied(
        self, copies: Copies, encoder: VisionEncoder, pictures: list[Image.Image]
    ) -> tuple[dict[str, list[Any]], dict[str, Any]]:
        """Tables of the copies, and the pictures that they name."""
        limits = dict(zip(("ratio", "distance"), copies.limits, strict=True)) if copies.limits else None
        same = copies.heldout.same
        leaked = int(same.sum())
        if leaked:
            say(
                f"  warning: {leaked} of {len(same)} held-out pictures are training pictures too: what is"
                " measured on held-out rows flatters (see data.ingest.group)"
            )
        suspicious, closest = copies.suspicious(self.config.named), copies.closest()
        tables: dict[str, list[Any]] = {
            "nearest": copies.by_cluster(self.partition.k),
            "suspicious": suspicious,
            "closest": closest,
        }
        return tables, {
            "copies": {"limits": limits, "leaked": leaked, **encoder.producer()},
            "pictures": self._show(suspicious, pictures, "pairs"),
            "closest": self._show(closest, pictures, "closest"),
        }

    def _extractor(self) -> VisionEncoder:
        config, partition = self.config, self.campaign.config.partition
        if config.extractor is not None:
            return extractor(config.extractor, config.extractor_size, str(self.device))
        size = config.extractor_size or partition.encoder_size
        return vision_encoder(partition.encoder, size, str(self.device))  # as the partition saw pictures

    def _features(
        self, encoder: VisionEncoder, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Features of rows' pictures in parts: from the column, where this encoder made one."""
        name = features_column(encoder.name)
        kept = self.dataset.column(name) if self.dataset.has_column(name) else None
        if kept is not None and kept.meta.producer != encoder.producer():
            kept = None
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            if kept is not None:
                yield part, kept.read(part).float().numpy()
            else:
                yield part, encoder.encode([self.dataset.image(int(row)) for row in part]).numpy()

    def _show(
        self, copies: Sequence[CopyRow], pictures: list[Image.Image], folder: str
    ) -> list[dict[str, Any]]:
        """Write the samples of a table and their nearest training pictures; their keys and the caption."""
        shown = []
        for number, copy in enumerate(copies):
            keys = {name: f"{FOLDER}/{folder}/{number:02d}-{name}.png" for name in ("sample", "training")}
            self.campaign.store.put(keys["sample"], png(pictures[copy.sample]))
            self.campaign.store.put(keys["training"], png(self.dataset.image(copy.row)))
            caption = self.dataset.take([copy.row]).column("caption").to_pylist()[0]
            shown.append({**keys, "caption": caption, "id": self.dataset.ids[copy.row]})
        return shown


def labelled_by(rows: Sequence[Any], **labels: str) -> list[Any]:
    """Typed rows with a value more that says what they were measured of."""
    return [row.model_copy(update=labels) for row in rows]


def _summarise(tables: DiagnosisTables) -> None:
    """A few lines for whoever waits."""

    def shown(value: float | None) -> str:
        return NONE if value is None else f"{value:.4f}"

    assert tables.router and tables.errors is not None
    split = tables.router[0].split
    for row in tables.router:
        if row.split == split:
            say(
                f"  t = {row.t:<7g} router: accuracy {shown(row.accuracy)}, NLL {shown(row.nll)}"
                f" (prior {shown(row.prior_nll)}), calibration error {shown(row.ece)}"
            )
    for error in tables.errors:
        if (error.split, error.t, error.cluster) == (split, "mean", "all"):
            say(f"  error of {error.model:<9} {shown(error.error)} ± {shown(error.se)}")
    for number, (own, best, whose) in weak_experts(tables, split).items():
        say(
            f"  warning: expert {number} errs on its own cluster by {shown(own)}, {whose} by {shown(best)};"
            f" to leave it out: atoll assemble --quarantine {number}"
        )
