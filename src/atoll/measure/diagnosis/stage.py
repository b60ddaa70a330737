"""The diagnose stage: why the ensemble is good or bad, from what a campaign published."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.config import loose_fields
from atoll.base.console import say
from atoll.base.device import own_device, using_threads
from atoll.base.format import code_version
from atoll.base.hashing import digest
from atoll.base.part import Part
from atoll.base.pictures import png
from atoll.base.text import NONE
from atoll.campaign.card_facts import single_cards
from atoll.campaign.diagnosed import CopyRow, Diagnosis, DiagnosisTables
from atoll.campaign.folder import Campaign
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.columns import Column
from atoll.data.samples import Samples
from atoll.data.settings import features_column
from atoll.encoders.vision import VisionEncoder, extractor, vision_encoder
from atoll.measure.diagnosis.labelled_rows import answers_of, errors_of, labelled, weak_experts
from atoll.measure.diagnosis.sampled import (
    Copies,
    cluster_match,
    leaders,
    reactions,
    stability,
    switches,
    two_nearest,
    usage,
)
from atoll.measure.models import (
    Candidate,
    RowConditions,
    SamplingOverride,
    published,
    samples_of,
    stored_as,
    strategies_for,
    supported,
)
from atoll.measure.pictures import SPLITS, Rows, encoded, extraction, measured_rows
from atoll.measure.shards import ShardedRows, cut
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, read_manifest
from atoll.model.generate import Sampling, generate
from atoll.model.routing import Routing
from atoll.model.sampler import times

FOLDER = "reports/diagnostics"
USUAL = ("once", "top-1")
"""Strategies beside the campaign's own, if none are named."""
_CHUNK = 4096
Tables = dict[str, list[Any]]
Features = Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]


def diagnose(campaign: Campaign, part: Part | None = None) -> Diagnosis | None:
    """Measure and write; what was measured of the same parts with the same settings is not measured again.

    With `part` shards of rows and pictures are made, and nothing is judged: None, unless all is known.
    """
    store, config, seed = campaign.store, campaign.config.diagnose, campaign.config.seed
    with using_threads(config.threads):
        content, router = read_manifest(store), Checkpoint(store, "ensemble/router").card
        baseline = single_cards(campaign, router, ("monolith",))
        parts = content.parts | {name: card.weights_sha256 for name, card in baseline.items()}
        dataset, partition = campaign.clustered()
        drawn_at = [config.conditions] if config.samples and config.strategies != [] else []
        for split in {*config.splits, *drawn_at}:
            measured_rows(dataset, split)
        override = SamplingOverride.of(campaign, config)
        strategies = [str(Routing.named(name)) for name in strategies_for(campaign, config.strategies, USUAL)]
        settings = config.model_dump(exclude={*loose_fields(DiagnoseConfig)})
        settings |= {"seed": seed, "strategies": strategies}
        settings |= {name: getattr(override.generation, name) for name in ("steps", "guidance")}
        settings |= {"shift": override.generation.shift} if override.generation.shift != 1 else {}
        settings |= stored_as(campaign.config.sampling.residency)
        key = digest({"parts": parts, "settings": settings, "data": dataset.content})
        if (known := Diagnosis.known(store, key)) is not None:
            say("diagnose: finished already")
            return known
        start, missing = time.monotonic(), sorted(set(range(partition.k)) - set(content.experts))
        asked = strategies if config.samples else []
        able = supported(asked, partition.k, missing, PRETRAIN_PART in content.parts)
        look = _Look(campaign, router, bool(baseline), {name: Routing.named(name) for name in able}, key)
        if part is not None:
            for rows in look.works.values():
                rows.write_part(part)
            return None
        tables, about = look.tables()
        result = Diagnosis(
            key=key,
            parts=parts,
            code=code_version(),
            seconds=round(time.monotonic() - start, 1),
            settings=settings,
            overrides=override.changes,
            k=partition.k,
            sizes=partition.sizes,
            missing=missing,
            strategies=able,
            tables=DiagnosisTables(**{name: tuple(rows) for name, rows in tables.items()}),
            **about,
        )
        _summarise(result)
        result.write(store)
        for rows in look.works.values():
            rows.tidy()
        return result


class _Look:
    """One look at a campaign: rows that take long to make (`works`), and the tables that they give.

    What is made is known by the `key` of the diagnosis. Networks are loaded when a shard is made.
    """

    def __init__(
        self, campaign: Campaign, router: Card, baseline: bool, routings: dict[str, Routing], key: str
    ) -> None:
        self.campaign, self.router, self.routings, self.key = campaign, router, routings, key
        self.override = SamplingOverride.of(campaign, campaign.config.diagnose)
        self.config, self.seed, self.device = campaign.config.diagnose, campaign.config.seed, own_device()
        self.dataset, self.partition = campaign.clustered()
        self.train, self.heldout = (self.dataset.split(name) for name in ("train", "heldout"))
        self.candidate = published(campaign, "ensemble", self.device)
        if self.candidate.missing:
            names = ", ".join(map(str, self.candidate.missing))
            say(f"  warning: experts {names} are missing and left out; their share goes to the others")
        self.models = {name: (self.candidate, routing) for name, routing in routings.items()}
        self.monolith = published(campaign, "monolith", self.device) if baseline else None
        if self.monolith is not None and routings:
            self.models["monolith"] = self.monolith, Routing()
        # Only the partition's features can say whether samples lie in their experts' clusters.
        size = (self.partition.about.encoder or {}).get("size")
        self.own_space = self.config.extractor is None and self.config.extractor_size in (None, size)
        self.own_space = self.own_space and len(self.partition.centroids) > 0

    @cached_property
    def encoder(self) -> VisionEncoder | None:
        """Whose features say where samples lie, and whether they are copies; None where nothing can judge."""
        config, cut_by = self.config, self.campaign.config.partition
        if not self.routings or not (self.own_space or len(self.heldout)):
            return None
        if config.extractor is not None:
            return extractor(config.extractor, config.extractor_size, str(self.device))
        # as the partition saw pictures
        return vision_encoder(cut_by.encoder, config.extractor_size or cut_by.encoder_size, str(self.device))

    @cached_property
    def works(self) -> dict[tuple[str, str], ShardedRows]:
        """All that takes long, by kind and what it is of."""
        config, works = self.config, dict[tuple[str, str], ShardedRows]()

        def add(kind: str, of: str, count: int, make: Callable[[range], dict[str, Tensor]]) -> None:
            about: dict[str, Any] = {"diagnosis": self.key, "rows": [kind, of]}
            about |= {} if self.encoder is None else {"extractor": self.encoder.producer()}
            name, store = f"{kind} of {of}", self.campaign.store
            works[kind, of] = ShardedRows(store, about, name, count, config.batch, make)

        for split in config.splits:
            samples = samples_of(self.campaign, self.dataset, split, self.router)
            add("answers", split, min(len(samples), config.rows), partial(self._answers, samples))
        for name, (candidate, routing) in self.models.items():
            if name in self.routings or len(self.heldout):  # else nothing would judge them
                judged = self.own_space or name not in [*self.routings][1:]
                add("samples", name, config.samples, partial(self._draw, candidate, routing, judged))
            if count := min(config.probed, config.samples):  # the first of them again
                add("reactions", name, count, partial(self._react, candidate, routing))
        if self.encoder is not None and len(self.heldout) and self._column(self.encoder) is None:
            for split, rows in (("heldout", self.heldout), ("train", self.train)):
                pictures, how = Rows(self.dataset, split, rows), (f"{split} pictures", config.batch)
                works["pictures", split] = extraction(self.campaign.store, pictures, self.encoder, *how)
        return works

    def _answers(self, samples: Samples, part: range) -> dict[str, Tensor]:
        config, base = self.config, None if self.monolith is None else self.monolith.model.bank
        rows = labelled(samples, self.partition.clusters, config.rows, self.seed, config.batch, part)
        return answers_of(self.candidate.model.bank, base, rows, self.partition.k, config, self.device)

    def _draw(self, candidate: Candidate, routing: Routing, judged: bool, part: range) -> dict[str, Tensor]:
        model, sampling = candidate.model, self._sampling(routing, part)
        made = {
            "weights": torch.zeros(len(part), sampling.generation.steps, model.bank.k),
            "latents": torch.empty(len(part), *sampling.shape),
        }
        for drawn in generate(model.bank, sampling):
            rows = [number - part.start for number in drawn.rows]
            made["latents"][rows] = drawn.latents.cpu()
            if drawn.trace is not None:
                made["weights"][rows] = drawn.trace.stacked().transpose(0, 1)
        if judged and self.encoder is not None:
            batch, count = self.config.batch, self.config.samples
            both = zip(cut(part, batch), made["latents"].split(batch), strict=True)
            features = [encoded(self.encoder, model.pictures(x, [*numbers]), count) for numbers, x in both]
            made["features"] = torch.from_numpy(np.concatenate(features))
        return made

    def _react(self, candidate: Candidate, routing: Routing, part: range) -> dict[str, Tensor]:
        return reactions(candidate.model.bank, self._sampling(routing, part))

    def tables(self) -> tuple[Tables, dict[str, Any]]:
        """All tables, and the fields of the result that say whether samples are copies."""
        config, works, tables = self.config, self.works, Tables()
        about: dict[str, Any] = {"copies": None, "pictures": [], "closest": []}
        for split in config.splits:
            rows = works["answers", split]
            say(f"diagnose: {rows.count:,} {SPLITS[split]} rows at {len(config.times)} times")
            how = self.candidate.missing, self.monolith is not None, self.partition.sizes, config
            _extend(tables, errors_of(rows.whole(), *how), split=split)
        samples = dict[str, dict[str, Tensor]]()
        for name, (_, routing) in self.models.items():
            if ("samples", name) in works:
                drawn_by = f"under {routing}" if name in self.routings else "of the monolith"
                say(f"diagnose: {config.samples:,} pictures {drawn_by}, {self.override.text}")
                samples[name] = works["samples", name].whole()

        generation = self.override.generation.at(*self.candidate.model.shape[1:])
        if (count := min(config.probed, config.samples)) and self.models:
            say(f"diagnose: {count:,} pictures of each nudged, and in {2 * generation.steps} steps")
            for name in self.models:
                steady = stability(works["reactions", name].whole(), generation, config.batch)
                _extend(tables, {"stability": [steady[0]], "lipschitz": steady[1]}, strategy=name)

        # Who serves the samples of each strategy.
        starts = times(generation.steps, generation.shift)[:-1]
        for name in self.routings:
            weights = samples[name]["weights"].transpose(0, 1).contiguous()
            served = usage(weights, self._conditions.labels, self.partition.sizes)
            _extend(tables, {"usage": served, "switches": switches(weights, starts)}, strategy=name)

        # Whether samples lie in their experts' clusters, and whether those of the first strategy are copies,
        # which only held-out pictures can judge.
        if self.encoder is None:
            return tables, about
        parts = [features for _, features in self._features("heldout")]
        real = np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
        for name in self.routings if self.own_space else ():
            features, trace = samples[name]["features"].numpy(), samples[name]["weights"].transpose(0, 1)
            places, clusters = self.partition, self.partition.clusters[self.heldout]
            where = real, clusters, places.centroids, places.prices
            _extend(tables, {"landing": cluster_match(features, trace.numpy(), *where)}, strategy=name)
        if len(self.heldout):
            copies, facts = self._copies(self.encoder, samples, real)
            tables, about = tables | copies, about | facts
        return tables, about

    def _copies(
        self, encoder: VisionEncoder, samples: Mapping[str, Mapping[str, Tensor]], real: NDArray[np.float32]
    ) -> tuple[Tables, dict[str, Any]]:
        """Tables of copies among samples of the first strategy, and among those of the monolith at the same
        noise and conditions."""
        first = samples[next(iter(self.routings))]
        features, served = first["features"].numpy(), leaders(first["weights"].transpose(0, 1).numpy())
        say(f"diagnose: {len(features):,} pictures against {len(self.train):,} training pictures")
        nearest, usual = (two_nearest(rows, self._features("train")) for rows in (features, real))
        clusters = self.partition.clusters[self.heldout]
        copies = Copies(nearest, usual, served, clusters, self.config.quantile)
        leaked, limits = int(copies.heldout.same.sum()), copies.limits
        if leaked:
            what = f"{leaked} of {len(real)} held-out pictures are training pictures too"
            say(f"  warning: {what}: what is measured on held-out rows flatters (see data.ingest.group)")
        tables: Tables = {
            "nearest": copies.by_cluster(self.partition.k),
            "suspicious": copies.suspicious(self.config.named),
            "closest": copies.closest(),
        }
        named = limits and dict(zip(("ratio", "distance"), limits, strict=True))
        facts = {
            "copies": {"limits": named, "leaked": leaked, **encoder.producer()},
            "pictures": self._show(tables["suspicious"], first["latents"], "pairs"),
            "closest": self._show(tables["closest"], first["latents"], "closest"),
        }
        if "monolith" in samples:
            nearest = two_nearest(samples["monolith"]["features"].numpy(), self._features("train"))
            alike = replace(copies, samples=nearest, served=np.zeros(len(served), np.int64))
            _extend(tables, {"nearest": alike.by_cluster(0)}, cluster="monolith")
        return tables, facts

    @cached_property
    def _conditions(self) -> RowConditions:
        """Those that `compare` draws at as well, with the same seed, split and number."""
        split = self.config.conditions
        samples = samples_of(self.campaign, self.dataset, split, self.router)
        return RowConditions.drawn(self.campaign, samples, split, self.config.samples, self.seed)

    def _sampling(self, routing: Routing, part: range) -> Sampling:
        generation, conditions = self.override.generation.with_(routing=routing), self._conditions
        how = {"first": part.start, "batch": self.config.batch, "labels": conditions.labels}
        return self.candidate.model.sampling(conditions.of_model, generation, len(part), **how)

    def _column(self, encoder: VisionEncoder) -> Column | None:
        """The column of features that this encoder made."""
        name = features_column(encoder.name)
        column = self.dataset.column(name) if self.dataset.has_column(name) else None
        return column if column is not None and column.meta.producer == encoder.producer() else None

    def _features(self, split: str) -> Features:
        """Features of a split's pictures in parts."""
        assert self.encoder is not None
        rows, column = self.heldout if split == "heldout" else self.train, self._column(self.encoder)
        if column is not None:
            yield from ((some, values.float().numpy()) for some, values in column.blocks(rows, _CHUNK))
        elif len(rows):
            for part, made in self.works["pictures", split]:
                yield rows[part.start : part.stop], made["features"].numpy()

    def _show(self, copies: Sequence[CopyRow], latents: Tensor, folder: str) -> list[dict[str, Any]]:
        """Write the samples of a table and their nearest training pictures; their keys and the caption."""
        shown = []
        for number, copy in enumerate(copies):
            keys = {name: f"{FOLDER}/{folder}/{number:02d}-{name}.png" for name in ("sample", "training")}
            numbers, model = [copy.sample], self.candidate.model
            self.campaign.store.put(keys["sample"], png(model.pictures(latents[numbers], numbers)[0]))
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
        nll = f"NLL {shown(row.nll)} (prior {shown(row.prior_nll)}), calibration error {shown(row.ece)}"
        say(f"  t = {row.t:<7g} router: accuracy {shown(row.accuracy)}, {nll}")
    for error in diagnosis.select("errors", t="mean", cluster="all"):
        say(f"  error of {error.model:<9} {shown(error.error)} ± {shown(error.se)}")
    for number, (own, best, whose) in weak_experts(diagnosis.tables, diagnosis.splits[0]).items():
        what = f"expert {number} errs on its own cluster by {shown(own)}, {whose} by {shown(best)}"
        say(f"  warning: {what}; to leave it out: atoll assemble --quarantine {number}")
