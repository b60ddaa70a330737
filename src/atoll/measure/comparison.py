"""The compare stage: load what a campaign published, measure it, write `reports/`."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.threads import using_threads
from atoll.base.version import code_version
from atoll.campaign.baselines import dense_cards
from atoll.campaign.folder import Campaign
from atoll.campaign.pretrain import pretrain_finished
from atoll.campaign.results import Comparison
from atoll.campaign.settings.measure import BEYOND, CompareConfig
from atoll.data.samples import Samples
from atoll.encoders.vision import akin
from atoll.ensemble.card import Card
from atoll.ensemble.expert import read_card
from atoll.ensemble.folder import read_manifest
from atoll.ensemble.routing import Routing
from atoll.measure.bench import Bench
from atoll.measure.beyond import flops_curve, guidance_sweep
from atoll.measure.compare import Conditions
from atoll.measure.course import Course
from atoll.measure.pairs import Kept, pair_table
from atoll.measure.pictures import Rows
from atoll.measure.points import Row
from atoll.measure.streams import to_csv
from atoll.measure.sweeps import BASE

RESULT = "reports/compare.json"
FOLDER = "reports/compare"
MODELS = (
    *("name", "distance", "precision", "recall", "seconds"),
    *("gflops_per_step", "experts_per_step", "router_calls_per_step", "router_share"),
)
"""Columns of `models.csv`."""
TABLES = ("pairs", "guidance", "best", "curve", "reach")
"""The other tables, in the JSON and as CSV."""


@dataclass(frozen=True)
class Wanted:
    """What is to be measured.

    Attributes:
        config: with the strategies that this ensemble can follow.
        sweep: what the guidance sweep was asked for, as the result names it; None for no sweep.
        curve: the same of the curve.
    """

    config: CompareConfig
    sweep: dict[str, Any] | None
    curve: dict[str, Any] | None

    @classmethod
    def of(cls, campaign: Campaign, experts: int, present: Sequence[int], dense: Iterable[str]) -> "Wanted":
        """Out of the settings."""
        asked = campaign.config.compare
        config = asked.model_copy(update={"strategies": _possible(asked.strategies, experts, present)})
        if not config.guidances and not config.curve:
            return cls(config, None, None)
        names = config.sweep or list(dict.fromkeys([str(campaign.config.sampling.routing), "top-1"]))
        names = list({str(Routing.named(name)): name for name in _possible(names, experts, present)}.values())
        if not names:
            raise ConfigError("compare.sweep: none of these strategies is possible here", "name another one")
        scales = sorted({float(scale) for scale in (config.guidance, *config.guidances)})
        models = [*dense, *names]
        samples = config.curve_samples or config.samples
        curve = {"strategies": names, "samples": samples, "guidance": config.guidance}
        return cls(
            config,
            {"models": models, "guidances": scales} if config.guidances else None,
            curve if config.curve else None,
        )

    def missing(self, found: dict[str, Any]) -> list[str]:
        """What a result of the same table does not hold."""
        asked = {"sweep": self.sweep, "curve": self.curve}
        return [name for name, value in asked.items() if value is not None and found.get(name) != value]


def compare_campaign(campaign: Campaign) -> dict[str, Any]:
    """Measure monolith, student, strategies; a comparison of the same parts and settings is not repeated.

    Every point that was measured is kept, so a comparison that was stopped goes on where it was, and one with
    other settings draws what is new.

    Raises:
        StoreError: there is no ensemble, or a part is damaged.
        ConfigError: a strategy or a curve that is not possible here.
        DataError: there are too few held-out rows.
    """
    store = campaign.store
    content, router = read_manifest(store), read_card(store, "ensemble/router")
    dense = dense_cards(campaign, router)
    wanted = Wanted.of(campaign, content.k, content.experts, dense)
    parts = content.parts | {name: card.weights_sha256 for name, card in dense.items()}
    settings = {
        "config": wanted.config.model_dump(exclude=set(BEYOND)),
        "default": str(campaign.config.sampling.routing),
        **({"token": "class"} if "/" in wanted.config.extractor else {}),  # DINOv2 once had another feature
    }
    key = digest({"parts": parts, **settings, "seed": campaign.config.seed})
    found: dict[str, Any] = store.get_json(RESULT) if store.exists(RESULT) else {}
    same = found.get("key") == key and Comparison.fits(found)
    if same and not wanted.missing(found):
        say("compare: finished already")
        if "parts" not in found:  # of an earlier version, whose key is that of these parts all the same
            store.put_json(RESULT, found := {**found, "parts": parts})
        if "neighbours" not in found["metric"]:
            say(
                f"  without precision, recall and pairs, which are newer: remove {RESULT} to measure them too"
            )
        return found
    on_the_way = wanted.curve is not None and (not same or "curve" in wanted.missing(found))
    course = Course(campaign, content, router, list(dense)) if on_the_way else None
    bench = Bench(campaign, wanted.config, router, parts, dense)
    with using_threads(wanted.config.threads):
        if not same:
            head = {**Comparison.header(), "key": key, "parts": parts, "code": code_version(), "seconds": 0.0}
            found = _write(campaign, head, lambda: _table(bench, router, dense))
        if bench.encoder.producer().items() <= found["metric"].items():
            bench.known = found["rows"]
        for name in wanted.missing(found):
            found = _write(campaign, found, partial(_beyond, name, bench, course, wanted))
    return found


def _write(campaign: Campaign, found: dict[str, Any], more: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure more, and write the result with it: JSON, and its tables as CSV."""
    store, start = campaign.store, time.monotonic()
    added = more()
    tables = {**found.get("tables", {}), **added.pop("tables")}
    seconds = round(found["seconds"] + time.monotonic() - start, 1)
    found = {**found, **added, "seconds": seconds, "tables": tables}
    store.put(f"{FOLDER}/models.csv", to_csv(MODELS, [[row.get(c) for c in MODELS] for row in found["rows"]]))
    for name in TABLES:
        if name in tables:
            store.put(f"{FOLDER}/{name}.csv", to_csv(tables[name]["columns"], tables[name]["rows"]))
        elif store.exists(f"{FOLDER}/{name}.csv"):
            store.delete(f"{FOLDER}/{name}.csv")  # of other settings
    store.put_json(RESULT, found)
    return found


def _beyond(name: str, bench: Bench, course: Course | None, wanted: Wanted) -> dict[str, Any]:
    """The sweep or the curve."""
    if name == "sweep":
        assert wanted.sweep is not None
        asked, tables = wanted.sweep, guidance_sweep(bench, wanted.sweep["models"], wanted.sweep["guidances"])
    else:
        assert wanted.curve is not None and course is not None
        asked = wanted.curve
        tables = flops_curve(bench, course, wanted.curve["strategies"], wanted.curve["samples"])
    return {name: asked, "tables": {key: table.to_json() for key, table in tables.items()}}


def _possible(names: Sequence[str], experts: int, present: Sequence[int]) -> list[str]:
    """The strategies that an ensemble of these experts can follow; which are left out is said."""
    kept = []
    for name in names:
        routing = Routing.named(name)
        if routing.needs_labels and len(present) < experts:
            say(f"  warning: {name} is left out: the clusters of missing experts have nobody to go to")
        elif not routing.possible(experts):
            say(f"  warning: {name} is left out: there are {experts} experts")
        else:
            kept.append(name)
    return kept


def _table(bench: Bench, router: Card, dense: Mapping[str, Card]) -> dict[str, Any]:
    """Every model and strategy: how good, at what cost, how alike; and pictures to look at."""
    campaign, config, store = bench.campaign, bench.config, bench.campaign.store
    shown = _shown(bench.train, bench.made.clusters, config.prompts, config.shown)
    say(f"compare: {config.samples} pictures each, {config.steps} steps, guidance {config.guidance:g}")
    rows: list[Row] = []
    samples, traces = dict[str, Kept](), dict[str, Any]()
    for name in (*dense, *config.strategies):
        subject = bench.published(name)
        row, samples[name] = bench.kept(subject)
        weights = bench.show(subject, shown)
        if weights is not None:
            traces[name] = weights
        rows.append(row)
        say(
            f"  {name:<20} distance {row['distance']:8.3f}   {row['gflops_per_step']:.3f} GFLOPs a step"
            f" (router {row['router_share']:.1%})   {row['seconds']:.0f} s"
        )
    bench.write("data", [png(bench.dataset.image(int(bench.train.rows[index]))) for index in shown.index])
    experts = [read_card(store, f"ensemble/experts/{n}") for n in read_manifest(store).experts]
    return {
        "metric": _metric(bench),
        "default": str(campaign.config.sampling.routing),
        "rows": rows,
        "train_flops": {
            "monolith": dense[BASE].train_flops if BASE in dense else None,
            "experts": sum(card.train_flops for card in experts),
            "router": router.train_flops,
            "pretrain": read_card(store, "pretrain/expert").train_flops
            if pretrain_finished(campaign)
            else 0.0,
            **({"student": dense["student"].train_flops} if "student" in dense else {}),
        },
        "prompts": shown.captions(),
        "clusters": shown.clusters.tolist(),
        "routing": traces,
        "tables": _pairs(bench, samples),
    }


def _metric(bench: Bench) -> dict[str, Any]:
    """What the numbers are."""
    config, judge = bench.config, bench.judge(bench.config.samples)
    real = judge.real(bench.dataset, config.samples, bench.seed)
    encoder = bench.made.about["encoder"] or {}
    return {
        "distance": f"Fréchet distance on {judge.components} principal components of {config.extractor}",
        **judge.encoder.producer(),  # its name, hash and size
        "components": judge.components,
        "axes": "of training pictures",
        "fit_rows": config.fit_rows,
        "reference": "held-out pictures",
        "reference_hash": Rows(bench.dataset, "heldout").digest,
        "reference_rows": len(judge.features),
        "samples": config.samples,
        "conditions": f"of {config.conditions} rows",
        "steps": config.steps,
        "guidance": config.guidance,
        "sampler": "Euler",
        "ema": True,
        "seed": bench.seed,
        "same_features_as_partition": encoder.get("name") == config.extractor,
        "akin_to_partition": akin(str(encoder.get("name", "")), config.extractor),
        "real_training_pictures": real["distance"],
        "neighbours": judge.about_neighbours(config.samples)
        | {"real_precision": real["precision"], "real_recall": real["recall"]},
    }


def _pairs(bench: Bench, samples: Mapping[str, Kept]) -> dict[str, Any]:
    """The table `pairs`, where there is a monolith to pair with."""
    if BASE not in samples:
        return {}
    others = {name: kept for name, kept in samples.items() if name != BASE}
    where = bench.conditions
    table = pair_table(samples[BASE], others, where.clusters, where.index, bench.seed)
    for record in table.records():
        if record["space"] == "pixels" and record["partner"] == "any" and record["effect"] is not None:
            same = next(r for r in table.records() if r["strategy"] == record["strategy"])
            say(
                f"  {record['strategy']:<20} and monolith, same noise: pixels correlate by"
                f" {same['mean']:.3f}, any two by {record['mean']:.3f}"
            )
    return {"pairs": table.to_json()}


def _shown(train: Samples, clusters: Any, prompts: list[str], count: int) -> Conditions:
    """Rows whose captions are shown: those asked for, then training rows spread over the clusters."""
    captions = [str(c) for c in train.dataset.take(train.rows).column("caption").to_pylist()]
    where = {caption: number for number, caption in reversed(list(enumerate(captions)))}
    chosen = []
    for prompt in prompts[:count]:
        if prompt not in where:
            raise ConfigError(
                f"compare.prompts: no training row has the caption {prompt!r}", "choose one that exists"
            )
        chosen.append(where[prompt])
    own = clusters[train.rows]
    order = np.random.default_rng(0).permutation(len(own))
    for turn in range(count - len(chosen)):
        wanted = turn % (int(clusters.max()) + 1)
        chosen.append(
            next(
                (int(i) for i in order if own[i] == wanted and int(i) not in chosen),
                int(order[turn % len(order)]),
            )
        )
    index = np.array(chosen, dtype=np.int64)
    return Conditions(train, index, own[index])
