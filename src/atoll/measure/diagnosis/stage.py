"""The diagnose stage: why the ensemble is good or bad, from what a campaign published."""

import time
from collections.abc import Iterator
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
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.baselines import single_cards
from atoll.campaign.folder import Campaign
from atoll.campaign.results import Diagnosis, Table
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.dataset import DataSet
from atoll.data.partition import Partition
from atoll.data.settings import features_column
from atoll.encoders.extractors import extractor
from atoll.encoders.vision import VisionEncoder, vision_encoder
from atoll.measure.departure import Departure, possible, routings
from atoll.measure.diagnosis.cluster_match import landing
from atoll.measure.diagnosis.labelled_rows import labelled, measure
from atoll.measure.diagnosis.memorization import Copies, beside, leaders, two_nearest
from atoll.measure.diagnosis.stability import stability
from atoll.measure.diagnosis.suspects import suspects
from atoll.measure.diagnosis.usage import switches, usage
from atoll.measure.models import Candidate, RowConditions, published, samples_of
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
    departure = Departure.of(campaign, config)
    strategies = [str(Routing.named(name)) for name in routings(campaign, config.strategies, USUAL)]
    settings = config.model_dump(exclude={*loose_fields(DiagnoseConfig)})
    settings |= {"seed": seed, "strategies": strategies}
    settings |= {name: getattr(departure.generation, name) for name in ("steps", "guidance")}
    settings |= {"shift": departure.generation.shift} if departure.generation.shift != 1 else {}
    key = digest({"parts": parts, "settings": settings, "data": dataset.content})
    if (known := Diagnosis.known(store, key)) is not None:
        say("diagnose: finished already")
        return known
    start = time.monotonic()
    with using_threads(config.threads):
        diagnosis = _Diagnosis(campaign, dataset, partition, router, departure, strategies)
        tables, about = diagnosis.run(bool(baseline))
    result = Diagnosis(
        key=key,
        parts=parts,
        code=code_version(),
        seconds=round(time.monotonic() - start, 1),
        settings=settings,
        departures=departure.changes,
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
        departure: Departure,
        strategies: list[str],
    ) -> None:
        self.campaign, self.dataset, self.partition, self.router = campaign, dataset, partition, router
        self.departure, self.strategies = departure, strategies
        self.config, self.seed = campaign.config.diagnose, campaign.config.seed
        self.device = own_device()
        self.candidate = published(campaign, "ensemble", self.device)
        self.ensemble = self.candidate.model.bank

    def run(self, baseline: bool) -> tuple[dict[str, Table], dict[str, Any]]:
        """Tables by name, and what else is told."""
        if self.ensemble.missing:
            names = ", ".join(map(str, self.ensemble.missing))
            say(f"  warning: experts {names} are missing and left out; their share goes to the others")
        monolith = published(self.campaign, "monolith", self.device) if baseline else None
        tables = self._measured(None if monolith is None else monolith.model.bank)
        named = self.strategies if self.config.samples else []
        pretrained = self.ensemble.pretrain is not None
        kept = possible(named, len(self.ensemble.experts), self.candidate.missing, pretrained)
        routings = {name: Routing.named(name) for name in kept}
        sampled = {name: self._sampled(routing) for name, routing in routings.items()}
        about: dict[str, Any] = {"strategies": list(sampled), "copies": None, "pictures": [], "closest": []}
        if sampled:
            tables |= self._traced(sampled) | self._stability(routings, monolith)
            ends, facts = self._ends(sampled, monolith)
            tables, about = tables | ends, about | facts
        _summarise(tables)
        return tables, about

    def _measured(self, monolith: Bank | None) -> dict[str, Table]:
        config, tables = self.config, dict[str, dict[str, Table]]()
        for split in config.splits:
            samples = samples_of(self.campaign, self.dataset, split, self.router)
            say(f"diagnose: {min(len(samples), config.rows):,} {split} rows at {len(config.times)} times")
            rows = labelled(samples, self.partition.clusters, config.rows, self.seed, config.batch)
            measured = measure(self.ensemble, monolith, rows, self.partition.sizes, config, self.device)
            for name, table in measured.items():
                tables.setdefault(name, {})[split] = table
        return {name: Table.stacked("split", by_split) for name, by_split in tables.items()}

    def _sampling(self, routing: Routing, count: int) -> Sampling:
        """All about drawing the first pictures at the conditions of `_conditions`."""
        generation = self.departure.generation.with_(routing=routing)
        conditions, shape = self._conditions, self.candidate.model.shape
        batch, labels = self.config.batch, conditions.labels
        return Sampling(
            generation, conditions.of_model, shape, count, batch=batch, device=self.device, labels=labels
        )

    def _sampled(self, routing: Routing) -> Sampled:
        count, steps = self.config.samples, self.departure.generation.steps
        say(f"diagnose: {count:,} pictures under {routing}, {self.departure.text}")
        weights = torch.empty(steps, count, len(self.ensemble.experts))
        latents = torch.empty(count, *self.candidate.model.shape)
        for drawn in generate(self.ensemble, self._sampling(routing, count)):
            assert drawn.trace is not None
            weights[:, drawn.rows] = drawn.trace.stacked()
            latents[drawn.rows] = drawn.latents.cpu()
        return Sampled(weights, latents)

    @cached_property
    def _conditions(self) -> RowConditions:
        """Those of rows of the chosen split, in a seeded order."""
        samples = samples_of(self.campaign, self.dataset, self.config.conditions, self.router)
        order = np.random.default_rng(self.seed).permutation(len(samples))
        index = np.resize(order, self.config.samples).astype(np.int64)
        clusters = self.partition.clusters[samples.rows[index]]
        return RowConditions(samples, index, clusters, self.config.conditions)

    def _traced(self, sampled: dict[str, Sampled]) -> dict[str, Table]:
        clusters = self._conditions.labels
        starts = times(self.departure.generation.steps, self.departure.generation.shift)[:-1]
        used = {n: usage(s.weights, clusters, self.partition.sizes) for n, s in sampled.items()}
        changed = {n: switches(s.weights, starts) for n, s in sampled.items()}
        return {
            "usage": Table.stacked("strategy", used),
            "switches": Table.stacked("strategy", changed),
        }

    def _stability(self, routings: dict[str, Routing], monolith: Candidate | None) -> dict[str, Table]:
        """Of every strategy and of the monolith, on the first of the samples."""
        count = min(self.config.probed, self.config.samples)
        if not count:
            return {}
        say(
            f"diagnose: {count:,} pictures of each nudged, and in {2 * self.departure.generation.steps} steps"
        )
        models: dict[str, tuple[Bank, Routing]] = {
            name: (self.ensemble, routing) for name, routing in routings.items()
        }
        if monolith is not None:
            models["monolith"] = (monolith.model.bank, Routing())
        probed = {
            name: stability(model, self._sampling(routing, count))
            for name, (model, routing) in models.items()
        }
        return {
            "stability": Table.stacked("strategy", {name: ends for name, (ends, _) in probed.items()}),
            "lipschitz": Table.stacked("strategy", {name: path for name, (_, path) in probed.items()}),
        }

    def _ends(
        self, sampled: dict[str, Sampled], monolith: Candidate | None
    ) -> tuple[dict[str, Table], dict[str, Any]]:
        """Whether samples lie in their experts' clusters, and whether those of the first strategy and of the
        monolith are copies; tables, and what is shown of the copies."""
        heldout = self.dataset.split("heldout")
        own_space = self.config.extractor is None and len(self.partition.centroids) > 0
        if not own_space and not len(heldout):
            return {}, {}
        encoder, model = self._extractor(), self.candidate.model
        parts = [features for _, features in self._features(encoder, heldout)]
        real = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        tables, facts, landings = dict[str, Table](), dict[str, Any](), dict[str, Table]()
        for name, one in sampled.items():
            first = name == next(iter(sampled))
            if not own_space and not first:
                break
            numbers = torch.arange(len(one.latents)).split(self.config.batch)
            pictures = [p for part in numbers for p in model.pictures(one.latents[part], part.tolist())]
            features, weights = encoder.encode(pictures).numpy(), one.weights.numpy()
            if own_space:
                cut, clusters = self.partition, self.partition.clusters[heldout]
                landings[name] = landing(features, weights, real, clusters, cut.centroids, cut.prices)
            if first and len(heldout):
                copies = self._copies(encoder, features, real, leaders(weights))
                tables, facts = self._told(copies, encoder, pictures)
                if monolith is not None:
                    tables["nearest"] = beside(tables["nearest"], self._copies_of(monolith, encoder, copies))
        return tables | ({"landing": Table.stacked("strategy", landings)} if landings else {}), facts

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

    def _told(
        self, copies: Copies, encoder: VisionEncoder, pictures: list[Image.Image]
    ) -> tuple[dict[str, Table], dict[str, Any]]:
        """Tables of the copies, and the pictures that they name."""
        limits = dict(zip(("ratio", "distance"), copies.limits, strict=True)) if copies.limits else None
        same = copies.heldout.same
        leaked = int(same.sum())
        if leaked:
            say(
                f"  warning: {leaked} of {len(same)} held-out pictures are training pictures too: what is"
                " measured on held-out rows flatters (see data.ingest.group)"
            )
        tables = {
            "nearest": copies.by_cluster(self.partition.k),
            "suspicious": copies.suspicious(self.config.named),
            "closest": copies.closest(),
        }
        return tables, {
            "copies": {"limits": limits, "leaked": leaked, **encoder.producer()},
            "pictures": self._show(tables["suspicious"], pictures, "pairs"),
            "closest": self._show(tables["closest"], pictures, "closest"),
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

    def _show(self, named: Table, pictures: list[Image.Image], folder: str) -> list[dict[str, Any]]:
        """Write the samples of a table and their nearest training pictures; their keys and the caption."""
        shown = []
        for number, record in enumerate(named.records):
            sample, row = record["sample"], record["row"]
            assert isinstance(sample, int) and isinstance(row, int)
            keys = {name: f"{FOLDER}/{folder}/{number:02d}-{name}.png" for name in ("sample", "training")}
            self.campaign.store.put(keys["sample"], png(pictures[sample]))
            self.campaign.store.put(keys["training"], png(self.dataset.image(row)))
            caption = self.dataset.take([row]).column("caption").to_pylist()[0]
            shown.append({**keys, "caption": caption, "id": self.dataset.ids[row]})
        return shown


def _summarise(tables: dict[str, Table]) -> None:
    """A few lines for whoever waits."""
    first = tables["router"].records[0]["split"]
    for record in tables["router"].records:
        if record["split"] == first:
            say(
                f"  t = {record['t']:<7g} router: accuracy {_f(record['accuracy'])}, NLL {_f(record['nll'])}"
                f" (prior {_f(record['prior_nll'])}), calibration error {_f(record['ece'])}"
            )
    for record in tables["errors"].records:
        if (record["split"], record["t"], record["cluster"]) == (first, "mean", "all"):
            say(f"  error of {record['model']:<9} {_f(record['error'])} ± {_f(record['se'])}")
    for number, (error, best, whose) in suspects(tables, str(first)).items():
        say(
            f"  warning: expert {number} errs on its own cluster by {_f(error)}, {whose} by {_f(best)};"
            f" to leave it out: atoll assemble --quarantine {number}"
        )


def _f(value: float | int | str | None) -> str:
    return "–" if value is None else f"{value:.4f}"
