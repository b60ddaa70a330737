"""The diagnose stage: why the ensemble is good or bad, from what a campaign published."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from atoll.base.config import loose_fields
from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import DataError
from atoll.base.format import code_version
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.processes import ProcessGroup
from atoll.base.text import NONE
from atoll.campaign.card_facts import single_cards
from atoll.campaign.diagnosed import CopyRow, Diagnosis, DiagnosisTables
from atoll.campaign.folder import Campaign
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.settings import features_column
from atoll.encoders.vision import VisionEncoder, extractor, vision_encoder
from atoll.measure.diagnosis.labelled_rows import errors_of, labelled, weak_experts
from atoll.measure.diagnosis.sampled import (
    Copies,
    cluster_match,
    leaders,
    stability,
    switches,
    two_nearest,
    usage,
)
from atoll.measure.models import (
    RowConditions,
    SamplingOverride,
    published,
    samples_of,
    strategies_for,
    supported,
)
from atoll.measure.pictures import cut, gathered, shares, sharing
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
Tables = dict[str, list[Any]]
Features = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]


def diagnose(campaign: Campaign) -> Diagnosis:
    """Measure and write; what was measured of the same parts with the same settings is not measured again."""
    with sharing(campaign.config.diagnose.threads) as world:
        return _diagnosed(campaign, world)


def _diagnosed(campaign: Campaign, world: ProcessGroup) -> Diagnosis:
    store, config, seed = campaign.store, campaign.config.diagnose, campaign.config.seed
    content, router = read_manifest(store), Checkpoint(store, "ensemble/router").card
    baseline = single_cards(campaign, router, ("monolith",))
    parts = content.parts | {name: card.weights_sha256 for name, card in baseline.items()}
    dataset, partition = campaign.clustered()
    wanted = {*config.splits, *([config.conditions] if config.samples and config.strategies != [] else [])}
    if "heldout" in wanted and len(dataset.split("heldout")) == 0:
        raise DataError(
            "the data set has no held-out rows",
            "ingest with data.ingest.heldout above 0, or look at training rows:"
            " --set diagnose.splits=[train] --set diagnose.conditions=train",
        )
    override = SamplingOverride.of(campaign, config)
    strategies = [str(Routing.named(name)) for name in strategies_for(campaign, config.strategies, USUAL)]
    settings = config.model_dump(exclude={*loose_fields(DiagnoseConfig)})
    settings |= {"seed": seed, "strategies": strategies}
    settings |= {name: getattr(override.generation, name) for name in ("steps", "guidance")}
    settings |= {"shift": override.generation.shift} if override.generation.shift != 1 else {}
    key = digest({"parts": parts, "settings": settings, "data": dataset.content})
    if (known := world.once(lambda: Diagnosis.known(store, key))) is not None:
        say("diagnose: finished already")
        return known
    start = time.monotonic()
    look = _Look(campaign, router, bool(baseline), world)
    tables = look.at_rows()
    pretrained, asked = look.ensemble.pretrain is not None, strategies if config.samples else []
    able = supported(asked, partition.k, look.candidate.missing, pretrained)
    routings = {name: Routing.named(name) for name in able}
    look.draw(routings, tables)

    # The rest is the first process's: the others hear meanwhile that it is under way.
    def judge() -> Diagnosis:
        about: dict[str, Any] = {"strategies": list(routings), "copies": None, "pictures": [], "closest": []}
        judged, about = look.at_samples(routings, about) if routings else (Tables(), about)
        for name, rows in judged.items():
            tables.setdefault(name, []).extend(rows)
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
            tables=DiagnosisTables(**{name: tuple(rows) for name, rows in tables.items()}),
            **about,
        )
        _summarise(result)
        result.write(store)
        return result

    return world.once(judge)


class _Look:
    """One look at a campaign: what is loaded once for all of its tables."""

    def __init__(self, campaign: Campaign, router: Card, baseline: bool, world: ProcessGroup) -> None:
        self.campaign, self.router, self.world = campaign, router, world
        self.override = SamplingOverride.of(campaign, campaign.config.diagnose)
        self.config, self.seed, self.device = campaign.config.diagnose, campaign.config.seed, own_device()
        self.dataset, self.partition = campaign.clustered()
        self.train, self.heldout = (self.dataset.split(name) for name in ("train", "heldout"))
        self.candidate = published(campaign, "ensemble", self.device)
        self.ensemble = self.candidate.model.bank
        if self.ensemble.missing:
            names = ", ".join(map(str, self.ensemble.missing))
            say(f"  warning: experts {names} are missing and left out; their share goes to the others")
        self.monolith = published(campaign, "monolith", self.device) if baseline else None

    def at_rows(self) -> Tables:
        """Router and errors of velocities, on rows of known cluster."""
        config, tables = self.config, Tables()
        base = None if self.monolith is None else self.monolith.model.bank
        for split in config.splits:
            samples = samples_of(self.campaign, self.dataset, split, self.router)
            say(f"diagnose: {min(len(samples), config.rows):,} {split} rows at {len(config.times)} times")
            parts, how = (
                shares(min(len(samples), config.rows), config.batch, self.world),
                (config.rows, self.seed),
            )
            rows = labelled(samples, self.partition.clusters, *how, config.batch, parts[self.world.rank])
            one = self.ensemble, base, rows, self.partition.sizes, config, self.device
            _extend(tables, errors_of(*one, self.world, parts), split=split)
        return tables

    def draw(self, routings: Mapping[str, Routing], tables: Tables) -> None:
        """Draw with every strategy, and once more to see how stable its paths are, for the tables."""
        config, generation = self.config, self.override.generation
        self.traces, self.latents = dict[str, Tensor](), dict[str, Tensor]()
        models: dict[str, tuple[Bank, Routing]] = {name: (self.ensemble, r) for name, r in routings.items()}
        if self.monolith is not None and routings:
            models["monolith"] = (self.monolith.model.bank, Routing())
        for name, (bank, routing) in models.items():
            if name not in routings and not len(self.heldout):
                continue  # nothing would judge them
            drawn_by = f"under {routing}" if name in routings else "of the monolith"
            say(f"diagnose: {config.samples:,} pictures {drawn_by}, {self.override.text}")
            parts = shares(config.samples, config.batch, self.world)
            own = parts[self.world.rank]
            weights = torch.zeros(len(own), generation.steps, bank.k)
            latents = torch.empty(len(own), *self.candidate.model.shape)
            sampling = replace(self._sampling(routing, len(own)), first=own.start)
            for drawn in generate(bank, sampling):
                rows = [number - own.start for number in drawn.rows]
                latents[rows] = drawn.latents.cpu()
                if drawn.trace is not None:
                    weights[rows] = drawn.trace.stacked().transpose(0, 1)
            both = (gathered(self.world, part.numpy(), parts) for part in (weights, latents))
            self.traces[name], self.latents[name] = map(torch.from_numpy, both)

        # Every strategy and the monolith again, on the first of the samples.
        if (count := min(config.probed, config.samples)) and models:
            say(f"diagnose: {count:,} pictures of each nudged, and in {2 * generation.steps} steps")
            for name, (bank, routing) in models.items():
                steady = stability(bank, self._sampling(routing, count), self.world)
                if steady is not None:
                    _extend(tables, {"stability": [steady[0]], "lipschitz": steady[1]}, strategy=name)

    def at_samples(
        self, routings: dict[str, Routing], about: dict[str, Any]
    ) -> tuple[Tables, dict[str, Any]]:
        """Who serves the samples of each strategy, and whether they are copies; with the fields of the result
        that say so."""
        config = self.config
        generation = self.override.generation.at(*self.candidate.model.shape[1:])
        starts, tables = times(generation.steps, generation.shift)[:-1], Tables()
        latents, traces = self.latents, self.traces
        for name in routings:
            weights = traces[name].transpose(0, 1).contiguous()
            served = usage(weights, self._conditions.labels, self.partition.sizes)
            _extend(tables, {"usage": served, "switches": switches(weights, starts)}, strategy=name)

        # Whether samples lie in their experts' clusters, which only the partition's features can say, and
        # whether those of the first strategy are copies, which only held-out pictures can judge.
        own_space = config.extractor is None and len(self.partition.centroids) > 0
        if not own_space and not len(self.heldout):
            return tables, about
        if config.extractor is not None:
            encoder = extractor(config.extractor, config.extractor_size, str(self.device))
        else:  # as the partition saw pictures
            cut_by = self.campaign.config.partition
            size = config.extractor_size or cut_by.encoder_size
            encoder = vision_encoder(cut_by.encoder, size, str(self.device))
        model = self.candidate.model
        parts = [features for _, features in self._features(encoder, self.heldout)]
        real = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        for name in routings if own_space else list(routings)[:1]:
            numbers = torch.arange(config.samples).split(config.batch)
            pictures = [p for part in numbers for p in model.pictures(latents[name][part], part.tolist())]
            features, trace = encoder.encode(pictures).numpy(), traces[name].transpose(0, 1).numpy()
            if own_space:
                cut, clusters = self.partition, self.partition.clusters[self.heldout]
                landed = cluster_match(features, trace, real, clusters, cut.centroids, cut.prices)
                _extend(tables, {"landing": landed}, strategy=name)
            if name == next(iter(routings)) and len(self.heldout):
                copies, facts = self._copies(encoder, pictures, features, real, leaders(trace))
                tables, about = tables | copies, about | facts
        return tables, about

    def _copies(
        self,
        encoder: VisionEncoder,
        pictures: list[Image.Image],
        features: NDArray[np.float32],
        real: NDArray[np.float32],
        served: NDArray[np.int64],
    ) -> tuple[Tables, dict[str, Any]]:
        """Tables of copies among samples, and of those of the monolith at the same noise and conditions."""
        say(f"diagnose: {len(features):,} pictures against {len(self.train):,} training pictures")
        nearest, usual = (two_nearest(rows, self._features(encoder, self.train)) for rows in (features, real))
        clusters = self.partition.clusters[self.heldout]
        copies = Copies(nearest, usual, served, clusters, self.config.quantile)
        leaked, limits = int(copies.heldout.same.sum()), copies.limits
        if leaked:
            say(
                f"  warning: {leaked} of {len(real)} held-out pictures are training pictures too: what is"
                " measured on held-out rows flatters (see data.ingest.group)"
            )
        tables: Tables = {
            "nearest": copies.by_cluster(self.partition.k),
            "suspicious": copies.suspicious(self.config.named),
            "closest": copies.closest(),
        }
        named = limits and dict(zip(("ratio", "distance"), limits, strict=True))
        facts = {
            "copies": {"limits": named, "leaked": leaked, **encoder.producer()},
            "pictures": self._show(tables["suspicious"], pictures, "pairs"),
            "closest": self._show(tables["closest"], pictures, "closest"),
        }
        if self.monolith is not None:
            count, model = self.config.samples, self.monolith.model
            whole = np.empty((count, encoder.width), np.float32)
            for some in cut(range(count), self.config.batch):
                latents = self.latents["monolith"][some.start : some.stop]
                whole[some.start : some.stop] = encoder.encode(model.pictures(latents, [*some])).numpy()
            nearest = two_nearest(whole, self._features(encoder, self.train))
            alike = replace(copies, samples=nearest, served=np.zeros(count, np.int64))
            _extend(tables, {"nearest": alike.by_cluster(0)}, cluster="monolith")
        return tables, facts

    @cached_property
    def _conditions(self) -> RowConditions:
        """Those that `compare` draws at as well, with the same seed, split and number."""
        split = self.config.conditions
        samples = samples_of(self.campaign, self.dataset, split, self.router)
        return RowConditions.drawn(self.campaign, samples, split, self.config.samples, self.seed)

    def _sampling(self, routing: Routing, count: int) -> Sampling:
        generation, conditions = self.override.generation.with_(routing=routing), self._conditions
        how = {"batch": self.config.batch, "labels": conditions.labels}
        return self.candidate.model.sampling(conditions.of_model, generation, count, **how)

    def _features(self, encoder: VisionEncoder, rows: NDArray[np.int64]) -> Features:
        """Features of rows' pictures in parts: from the column, where this encoder made one."""
        name = features_column(encoder.name)
        column = self.dataset.column(name) if self.dataset.has_column(name) else None
        if column is not None and column.meta.producer != encoder.producer():
            column = None
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            if column is not None:
                yield part, column.read(part).float().numpy()
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


def _extend(tables: Tables, measured: Mapping[str, Sequence[Any]], **labels: str) -> None:
    """Add typed rows, with a value more that says what they were measured of."""
    for name, rows in measured.items():
        tables.setdefault(name, []).extend(row.model_copy(update=labels) for row in rows)


def _summarise(diagnosis: Diagnosis) -> None:
    """A few lines for whoever waits."""

    def shown(value: float | None) -> str:
        return NONE if value is None else f"{value:.4f}"

    for row in diagnosis.select("router"):
        say(
            f"  t = {row.t:<7g} router: accuracy {shown(row.accuracy)}, NLL {shown(row.nll)}"
            f" (prior {shown(row.prior_nll)}), calibration error {shown(row.ece)}"
        )
    for error in diagnosis.select("errors", t="mean", cluster="all"):
        say(f"  error of {error.model:<9} {shown(error.error)} ± {shown(error.se)}")
    for number, (own, best, whose) in weak_experts(diagnosis.tables, diagnosis.splits[0]).items():
        say(
            f"  warning: expert {number} errs on its own cluster by {shown(own)}, {whose} by {shown(best)};"
            f" to leave it out: atoll assemble --quarantine {number}"
        )
