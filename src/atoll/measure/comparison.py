"""The compare stage: monolith, student and ensemble side by side, with equal conditions and equal noise."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.processes import ProcessGroup
from atoll.base.rng import generator
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.baselines import single_cards
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import pretrain_finished
from atoll.campaign.results import ComparedModel, Comparison, Table
from atoll.campaign.runs import RUNS
from atoll.campaign.settings.measure import BEYOND, CompareConfig
from atoll.encoders.extractors import extractor
from atoll.encoders.vision import VisionEncoder, akin
from atoll.measure.departure import WIDE, Departure, possible, routings
from atoll.measure.metrics.metric import How
from atoll.measure.metrics.precision_recall import DENSITY_K, PRECISION_K
from atoll.measure.metrics.projection import Axes, Projection
from atoll.measure.models import Candidate, Drawn, RowConditions, published, samples_of
from atoll.measure.pictures import Rows, of_usual_size
from atoll.measure.points import FOLDER as POINTS
from atoll.measure.points import Judge
from atoll.measure.reference import Reference
from atoll.measure.same_noise import Kept, pair_table
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, Manifest, read_manifest
from atoll.model.model import ENSEMBLE, joined
from atoll.model.routing import Routing
from atoll.model.trace import Trace

FOLDER = "reports/compare"
USUAL = ("once", "top-1", "top-2", "full", "oracle")
"""Strategies beside the campaign's own, if none are named."""
BASE = "monolith"
NAMES = {"heldout": "held-out", "test": "test"}
NUMBERS = {"distance": "frechet", "precision": "precision", "recall": "recall"}
COSTS = ("gflops_per_step", "experts_per_step", "router_calls_per_step", "router_share")
"""Columns of a row, of a point's metrics and of its cost."""


@dataclass(frozen=True)
class Request:
    """What is to be compared.

    Attributes:
        strategies: that this ensemble can follow.
        departure: how samples are drawn.
        sweep: what the guidance sweep was asked for, as the result names it; None for no sweep.
        curve: the same of the training curve.
    """

    strategies: list[str]
    departure: Departure
    sweep: dict[str, Any] | None
    curve: dict[str, Any] | None

    @classmethod
    def of(cls, campaign: Campaign, content: Manifest, dense: Mapping[str, Card]) -> "Request":
        """Out of the settings."""
        config, departure = campaign.config.compare, Departure.of(campaign, campaign.config.compare)
        missing = sorted(set(range(content.k)) - set(content.experts))
        able = content.k, missing, PRETRAIN_PART in content.parts
        strategies = possible(routings(campaign, config.strategies, USUAL), *able)
        if not config.guidances and not config.curve:
            return cls(strategies, departure, None, None)
        names = possible(routings(campaign, config.sweep, ["top-1"]), *able)
        names = list({str(Routing.named(name)): name for name in names}.values())
        if not names:
            raise ConfigError("compare.sweep: none of these strategies is possible here", "name another one")
        scale = departure.generation.guidance
        kind = campaign.config.condition
        each = [departure.generation.with_(guidance=one).for_condition(kind) for one in config.guidances]
        scales = sorted({float(one.guidance) for one in (departure.generation, *each)})
        samples = config.curve_samples or config.samples
        sweep = {"models": [*dense, *names], "guidances": scales}
        curve = {"strategies": names, "samples": samples, "guidance": scale}
        return cls(
            strategies, departure, sweep if config.guidances else None, curve if config.curve else None
        )

    def missing(self, result: Comparison | None) -> list[str]:
        """What a result of the same table does not hold, `sweep` or `curve`."""
        beyond = {"sweep": self.sweep, "curve": self.curve}
        return [n for n, part in beyond.items() if part is not None and getattr(result, n, None) != part]


class Bench:
    """What the points of a comparison share: conditions, judge and models.

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
        self.config: CompareConfig = campaign.config.compare
        self.seed, self.device = campaign.config.seed, own_device()
        self.dataset, self.partition = campaign.clustered()
        self.split = "test" if self.config.conditions == "test" else "heldout"
        self.train, judging = (samples_of(campaign, self.dataset, s, router) for s in ("train", self.split))
        self.references = len(judging)
        if not self.references:
            what = f"the data set has no {NAMES[self.split]} rows"
            raise DataError(what, f"ingest with data.ingest.{self.split} above 0")
        rows = self.train if self.config.conditions == "train" else judging
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
        return self.training("judge", self.config.fit_rows)  # they fix the components

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
            what = f"{self.references} {NAMES[self.split]} rows cannot judge"
            raise DataError(what, f"hold out more: data.ingest.{self.split}")
        return components

    def _judge(self, samples: int) -> Judge:
        """The judge of so many pictures: no more components than half of them."""
        axes = Axes(
            {"axes": "of training pictures", "axes_hash": self._fit.digest, "most": self.components},
            lambda: self._projection,
        )
        components = min(self.components, samples // 2)
        encoder, held = self.encoder, self.references
        how = How(encoder.name, encoder.kind, encoder.width, samples, held, components, axes)
        metrics = ["frechet"]
        if min(samples, held) > DENSITY_K:
            metrics += ["precision", "recall"]
        return Judge(self.campaign.store, encoder, self.reference, metrics, how, self.config.batch)

    @cached_property
    def _projection(self) -> Projection:
        name = "training pictures of the campaign"
        fit = Reference.of_pictures(self._fit, name, self.encoder, self.campaign.store)
        features = fit.features(self.encoder, self.config.batch, ProcessGroup())
        assert features is not None
        return Projection.fit(features.rows, self.components)

    def drawn(self, candidate: Candidate, name: str, guidance: float | None, samples: int) -> Drawn:
        """Samples of a model, under a routing strategy of this name if it is an ensemble."""
        routing = name if candidate.routed else None
        generation = self.request.departure.generation.with_(routing=routing, guidance=guidance)
        return Drawn(candidate, generation, self.conditions.first(samples))

    def model(self, name: str) -> Candidate:
        """A single network as it was published, or the ensemble, by the name of a strategy."""
        return self.published(name if name in (*self.dense, "pretrain") else ENSEMBLE)

    def row(
        self, candidate: Candidate, name: str, guidance: float | None, samples: int
    ) -> tuple[ComparedModel, bool]:
        """What is known of a model, drawn now if nothing is; and whether it was."""
        row, _, new = self._row(candidate, name, guidance, samples, keep=False)
        return row, new

    def kept(self, name: str) -> tuple[ComparedModel, Kept]:
        """The same at the comparison's own guidance, with its first samples."""
        row, kept, _ = self._row(self.model(name), name, None, self.config.samples, keep=True)
        assert kept is not None
        return row, kept

    def _row(
        self, candidate: Candidate, name: str, guidance: float | None, samples: int, keep: bool
    ) -> tuple[ComparedModel, Kept | None, bool]:
        drawn = self.drawn(candidate, name, guidance, samples)
        point, kept, new = self.judge(samples).look(drawn, keep)
        assert point is not None
        numbers = {column: point.number(metric) for column, metric in NUMBERS.items()}
        cost = {column: point.cost.get(column) for column in COSTS}
        cost["seconds"] = point.cost.get("draw_seconds")
        if None in (numbers["distance"], *cost.values()):
            file = f"{self.campaign.store.location}/{POINTS}/{point.key}.json"
            raise DataError(f"{file} lacks its distance or what it cost", "remove it, and compare again")
        return ComparedModel(name=name, **numbers, **cost), kept, new

    def show(self, name: str, shown: RowConditions) -> list[Any] | None:
        """Draw the pictures to look at and write them; weights `[step][picture][expert]` of an ensemble."""
        drawn = self.drawn(self.model(name), name, None, 0)
        drawn = replace(drawn, generation=drawn.generation.with_(seed=self.seed + 1), conditions=shown)
        traces = list[tuple[list[int], Trace]]()
        for batch in drawn.batches(range(len(shown)), self.config.batch):
            for number, picture in zip(batch.numbers, batch.pictures, strict=True):
                self.write(name, number, png(picture))
            if batch.trace is not None:
                traces.append((list(batch.numbers), batch.trace))
        trace = joined(traces)
        if trace is None:
            return None
        weights: list[Any] = np.round(trace.stacked().numpy().astype(float), 4).tolist()
        return weights

    def write(self, name: str, number: int, picture: bytes) -> None:
        """A picture to look at."""
        self.campaign.store.put(f"{FOLDER}/{name}/{number:02d}.png", picture)


def compare(campaign: Campaign) -> Comparison:
    """Measure monolith, student, strategies; a comparison of the same parts and settings is not repeated.

    Every point that was measured is kept, so a comparison that was stopped goes on where it was, and one with
    other settings draws what is new.

    Raises:
        StoreError: there is no ensemble, or a part is damaged.
        ConfigError: a strategy or a curve that is not possible here.
        DataError: there are too few rows to judge by.
    """
    from atoll.measure.guidance_sweep import guidance_sweep
    from atoll.measure.training_curve import Course, training_curve

    store, config = campaign.store, campaign.config.compare
    content, router = read_manifest(store), Checkpoint(store, "ensemble/router").card
    dense = single_cards(campaign, router)
    request = Request.of(campaign, content, dense)
    parts = content.parts | {name: card.weights_sha256 for name, card in dense.items()}
    key = digest(
        {
            "parts": parts,
            "config": config.model_dump(exclude={*BEYOND, "strategies", "steps", "guidance"}),
            "strategies": request.strategies,
            "generation": request.departure.generation.model_dump(mode="json", exclude={"size"}),
        }
    )
    result = Comparison.known(store, key)
    missing = request.missing(result)
    if result is not None and not missing:
        say("compare: finished already")
        return result
    course = Course(campaign, content, router, list(dense)) if "curve" in missing else None
    bench = Bench(campaign, request, router, dense)
    with using_threads(config.threads):
        if result is None:
            result = _table(bench, key, parts)
            result.write(store)
        for name in missing:
            start = time.monotonic()
            if name == "sweep":
                assert request.sweep is not None
                tables = guidance_sweep(bench, request.sweep)
            else:
                assert request.curve is not None and course is not None
                tables = training_curve(bench, course, request.curve)
            seconds = round(result.seconds + time.monotonic() - start, 1)
            more = {name: getattr(request, name), "tables": {**result.tables, **tables}, "seconds": seconds}
            result = result.model_copy(update=more)
            result.write(store)
    return result


def _table(bench: Bench, key: str, parts: dict[str, str]) -> Comparison:
    """Every model and strategy: how good, at what cost, how alike; and pictures to look at."""
    start, departure = time.monotonic(), bench.request.departure
    shown = _shown(bench)
    say(f"compare: {bench.config.samples} pictures each, {departure.text}")
    rows: list[ComparedModel] = []
    samples, traces = dict[str, Kept](), dict[str, Any]()
    for name in (*bench.dense, *bench.request.strategies):
        row, samples[name] = bench.kept(name)
        weights = bench.show(name, shown)
        if weights is not None:
            traces[name] = weights
        rows.append(row)
        say(
            f"  {name:<{WIDE}} distance {row.distance:8.3f}   {row.gflops_per_step:.3f} GFLOPs a step"
            f" (router {row.router_share:.1%})   {row.seconds:.0f} s"
        )
    for number, index in enumerate(shown.index):
        bench.write("data", number, png(bench.dataset.image(int(bench.train.rows[index]))))
    metric, tables = _metric(bench), _pairs(bench, samples)
    return Comparison(
        key=key,
        parts=parts,
        code=code_version(),
        default=str(bench.campaign.config.sampling.routing),
        departures=departure.changes,
        prompts=shown.captions(),
        clusters=shown.clusters.tolist(),
        routing=traces,
        metric=metric,
        rows=rows,
        train_flops=_train_flops(bench),
        tables=tables,
        seconds=round(time.monotonic() - start, 1),
    )


def _train_flops(bench: Bench) -> dict[str, Any]:
    """What was spent on the training of each part."""
    store, dense = bench.campaign.store, bench.dense
    experts = [Checkpoint(store, f"ensemble/experts/{n}").card for n in read_manifest(store).experts]
    cards = [*experts, bench.router, *dense.values()]
    if pretrain_finished(bench.campaign):
        cards.append(Checkpoint(store, "pretrain/expert").card)
    spent: dict[str, float | None] = {BASE: None}
    spent |= {role.plural: 0.0 for role in RUNS.values() if role.counted == "ensemble"}
    for card in cards:
        name = RUNS[card.role].plural
        spent[name] = (spent.get(name) or 0.0) + card.train_flops
    return spent


def _metric(bench: Bench) -> dict[str, Any]:
    """What the numbers are."""
    config, judge = bench.config, bench.judge(bench.config.samples)
    real = judge.measure(bench.training("floor", config.samples))
    assert real is not None
    partition, generation = bench.partition.about.encoder or {}, bench.request.departure.generation
    return {
        "distance": f"Fréchet distance on {judge.how.components} principal components of {config.extractor}",
        **bench.encoder.producer(),  # its name, hash and size
        "components": judge.how.components,
        "axes": "of training pictures",
        "fit_rows": config.fit_rows,
        "reference": f"{NAMES[bench.split]} pictures",
        "reference_hash": judge.reference.about.data,
        "reference_rows": bench.references,
        "samples": config.samples,
        "conditions": f"of {config.conditions} rows",
        "steps": generation.steps,
        "guidance": generation.guidance,
        "sampler": "Euler",
        "ema": True,
        "seed": bench.seed,
        "same_features_as_partition": partition.get("name") == config.extractor,
        "akin_to_partition": akin(str(partition.get("name", "")), config.extractor),
        "real_training_pictures": real.number("frechet"),
        "neighbours": {
            "k": PRECISION_K,
            "dimensions": bench.encoder.width,
            "samples": config.samples,
            "references": bench.references,
            "real_precision": real.number("precision"),
            "real_recall": real.number("recall"),
        },
    }


def _pairs(bench: Bench, samples: Mapping[str, Kept]) -> dict[str, Table]:
    """The table `pairs`, where there is a monolith to pair with."""
    if BASE not in samples:
        return {}
    others = {name: kept for name, kept in samples.items() if name != BASE}
    where = bench.conditions
    table = pair_table(samples[BASE], others, where.clusters, where.index, bench.seed)
    for record in table.records:
        if record["space"] == "pixels" and record["partner"] == "any" and record["effect"] is not None:
            same = next(r for r in table.records if r["strategy"] == record["strategy"])
            say(
                f"  {record['strategy']:<{WIDE}} and monolith, same noise: pixels correlate by"
                f" {same['mean']:.3f}, any two by {record['mean']:.3f}"
            )
    return {"pairs": table}


def _shown(bench: Bench) -> RowConditions:
    """Rows whose captions are shown: those asked for, then training rows spread over the clusters."""
    train, count = bench.train, bench.config.shown
    captions = [str(c) for c in train.dataset.take(train.rows).column("caption").to_pylist()]
    where = {caption: number for number, caption in reversed(list(enumerate(captions)))}
    chosen = []
    for prompt in bench.config.prompts[:count]:
        if prompt not in where:
            what = f"compare.prompts: no training row has the caption {prompt!r}"
            raise ConfigError(what, "choose one that exists")
        chosen.append(where[prompt])
    clusters = bench.partition.clusters[train.rows]
    k = int(bench.partition.clusters.max()) + 1
    order = np.random.default_rng(0).permutation(len(clusters))
    for turn in range(count - len(chosen)):
        fresh = (int(i) for i in order if clusters[i] == turn % k and int(i) not in chosen)
        chosen.append(next(fresh, int(order[turn % len(order)])))
    index = np.array(chosen, dtype=np.int64)
    return RowConditions(train, index, clusters[index], "train")
