"""The compare stage: monolith, student and ensemble side by side, with equal conditions and equal noise."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atoll.base.console import say
from atoll.base.device import using_threads
from atoll.base.errors import ConfigError
from atoll.base.format import code_version
from atoll.base.hashing import digest
from atoll.base.pictures import png
from atoll.base.table import ratio_of
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import pretrain_finished
from atoll.campaign.measured import BASE, BestRow, ComparedModel, Comparison, ComparisonTables, GuidanceRow
from atoll.campaign.roles import RUNS
from atoll.campaign.settings.measure import EXTRA
from atoll.encoders.vision import akin
from atoll.measure.metrics.precision_recall import PRECISION_K
from atoll.measure.models import WIDE, RowConditions
from atoll.measure.same_noise import SavedSamples, pair_table
from atoll.measure.setup import SPLITS, CommonSetup
from atoll.measure.training_curve import TrainingCurve, show_point, training_curve
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Trace

FOLDER = "reports/compare"


def compare(campaign: Campaign) -> Comparison:
    """Measure monolith, student, strategies; a comparison of the same parts and settings is not repeated.

    Every point that was measured is kept, so a comparison that was stopped goes on where it was, and one with
    other settings draws what is new.

    Raises:
        StoreError: there is no ensemble, or a part is damaged.
        ConfigError: a strategy or a curve that is not possible here.
        DataError: there are too few rows to judge by.
    """
    store, config, setup = campaign.store, campaign.config.compare, CommonSetup(campaign)
    parts = setup.content.parts | {name: card.weights_sha256 for name, card in setup.dense.items()}
    key = digest(
        {
            "parts": parts,
            "config": config.model_dump(exclude={*EXTRA, "strategies", "steps", "guidance"}),
            "strategies": setup.strategies,
            "generation": setup.override.generation.model_dump(mode="json", exclude={"size"}),
        }
    )
    result = Comparison.known(store, key)
    missing = setup.missing(result)
    if result is not None and not missing:
        say("compare: finished already")
        return result
    # A curve that is not possible is refused before anything is drawn.
    curve = TrainingCurve(setup) if "curve" in missing else None
    setup.load()
    with using_threads(config.threads):
        if result is None:
            result = _table(setup, key, parts)
            result.write(store)
        # The table stands before sweep and curve are drawn: they take longest, and a stop costs only them.
        for name in missing:
            start, asked = time.monotonic(), setup.extras[name]
            tables = training_curve(setup, curve, asked) if curve and name == "curve" else sweep(setup, asked)
            seconds = round(result.seconds + time.monotonic() - start, 1)
            extended = result.tables.model_copy(update=tables)
            result = result.model_copy(update={name: asked, "tables": extended, "seconds": seconds})
            result.write(store)
    return result


def _table(setup: CommonSetup, key: str, parts: dict[str, str]) -> Comparison:
    """Every model and strategy: how good, at what cost, how alike; and pictures to look at."""
    start, store, config = time.monotonic(), setup.campaign.store, setup.config
    shown = _shown(setup)
    say(f"compare: {config.samples} pictures each, {setup.override.text}")
    rows: list[ComparedModel] = []
    samples, weights = dict[str, SavedSamples](), dict[str, Any]()
    for name in (*setup.dense, *setup.strategies):
        row, saved, _ = setup.row(name, keep=True)
        assert saved is not None
        samples[name] = saved
        rows.append(row)

        # The pictures to look at, and who painted them. Their seed is another one than the points': nobody
        # should pick a favourite among pictures that count.
        drawn = setup.drawn(setup.model(name), name, None, 0)
        drawn = replace(drawn, generation=drawn.generation.with_(seed=setup.seed + 1), conditions=shown)
        traces, numbers = list[Trace](), list[int]()
        for batch in drawn.batches(range(len(shown)), config.batch):
            for number, picture in zip(batch.numbers, batch.pictures, strict=True):
                store.put(f"{FOLDER}/{name}/{number:02d}.png", png(picture))
            if batch.trace is not None:
                traces.append(batch.trace)
                numbers += batch.numbers
        if traces:
            trace = Trace.joined(traces, numbers)
            weights[name] = np.round(trace.stacked().numpy().astype(float), 4).tolist()
        say(
            f"  {name:<{WIDE}} distance {row.distance:8.3f}   {row.gflops_per_step:.3f} GFLOPs a step"
            f" (router {row.router_share:.1%})   {row.seconds:.0f} s"
        )
    for number, index in enumerate(shown.index):
        picture = setup.dataset.image(int(setup.train.rows[index]))
        store.put(f"{FOLDER}/data/{number:02d}.png", png(picture))

    # What was spent on the training of each part.
    cards = [Checkpoint(store, f"ensemble/experts/{n}").card for n in setup.content.experts]
    cards += [setup.router, *setup.dense.values()]
    if pretrain_finished(setup.campaign):
        cards.append(Checkpoint(store, "pretrain/expert").card)
    spent: dict[str, float | None] = {BASE: None}
    spent |= {role.plural: 0.0 for role in RUNS.values() if role.counted == "ensemble"}
    for card in cards:
        part = RUNS[card.role].plural
        spent[part] = (spent.get(part) or 0.0) + card.train_flops

    # How alike pictures of the same noise are, where there is a monolith to pair with.
    metric, tables = _metric(setup), ComparisonTables()
    if BASE in samples:
        others = {name: saved for name, saved in samples.items() if name != BASE}
        clusters, index = setup.conditions.clusters, setup.conditions.index
        tables = ComparisonTables(pairs=tuple(pair_table(samples[BASE], others, clusters, index, setup.seed)))
    for pair in tables.pairs or ():
        if pair.space == "pixels" and pair.partner == "any" and pair.effect is not None:
            same = next(other for other in tables.pairs or () if other.strategy == pair.strategy)
            say(
                f"  {pair.strategy:<{WIDE}} and monolith, same noise: pixels correlate by"
                f" {same.mean:.3f}, any two by {pair.mean:.3f}"
            )
    return Comparison(
        key=key,
        parts=parts,
        code=code_version(),
        default=str(setup.campaign.config.sampling.routing),
        overrides=setup.override.changes,
        prompts=shown.captions(),
        clusters=shown.clusters.tolist(),
        routing=weights,
        metric=metric,
        rows=rows,
        train_flops=spent,
        tables=tables,
        seconds=round(time.monotonic() - start, 1),
    )


def _metric(setup: CommonSetup) -> dict[str, Any]:
    """What the numbers are."""
    config, judge = setup.config, setup.judge(setup.config.samples)
    real, _, _ = judge.measure(setup.training("floor", config.samples))
    assert real is not None
    partition, generation = setup.partition.about.encoder or {}, setup.override.generation
    return {
        "distance": f"Fréchet distance on {judge.how.components} principal components of {config.extractor}",
        **setup.encoder.producer(),  # its name, hash and size
        "components": judge.how.components,
        "axes": "of training pictures",
        "fit_rows": config.fit_rows,
        "reference": f"{SPLITS[setup.split]} pictures",
        "reference_hash": judge.reference.about.data,
        "reference_rows": setup.references,
        "samples": config.samples,
        "conditions": f"of {config.conditions} rows",
        "steps": generation.steps,
        "guidance": generation.guidance,
        "sampler": "Euler",
        "ema": True,
        "seed": setup.seed,
        "same_features_as_partition": partition.get("name") == config.extractor,
        "akin_to_partition": akin(str(partition.get("name", "")), config.extractor),
        "real_training_pictures": real.number("frechet"),
        "neighbours": {
            "k": PRECISION_K,
            "dimensions": setup.encoder.width,
            "samples": config.samples,
            "references": setup.references,
            "real_precision": real.number("precision"),
            "real_recall": real.number("recall"),
        },
    }


def _shown(setup: CommonSetup) -> RowConditions:
    """Rows whose captions are shown: those asked for, then training rows spread over the clusters."""
    train, count = setup.train, setup.config.shown
    captions = [str(c) for c in train.dataset.take(train.rows).column("caption").to_pylist()]
    first = {caption: number for number, caption in reversed(list(enumerate(captions)))}
    chosen = []
    for prompt in setup.config.prompts[:count]:
        if prompt not in first:
            what = f"compare.prompts: no training row has the caption {prompt!r}"
            raise ConfigError(what, "choose one that exists")
        chosen.append(first[prompt])
    clusters = setup.partition.clusters[train.rows]
    k = int(setup.partition.clusters.max()) + 1
    # Of a fixed seed, not the campaign's: pages of several seeds show the same captions.
    order = np.random.default_rng(0).permutation(len(clusters))
    for turn in range(count - len(chosen)):
        fresh = (int(i) for i in order if clusters[i] == turn % k and int(i) not in chosen)
        chosen.append(next(fresh, int(order[turn % len(order)])))
    index = np.array(chosen, dtype=np.int64)
    return RowConditions(train, index, clusters[index], "train")


def sweep(setup: CommonSetup, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every one of the `models` at every one of the rising `guidances`, and each at its best."""
    say(f"compare: guidance {', '.join(f'{scale:g}' for scale in asked['guidances'])}")
    rows = []
    for name in asked["models"]:
        for scale in asked["guidances"]:
            row, _, new = setup.row(name, guidance=scale)
            show_point(row, f"guidance {scale:<6g}", new)
            numbers = row.model_dump(include={"distance", "precision", "recall"})
            rows.append(GuidanceRow(model=name, guidance=scale, **numbers))
    best = best_table(rows)
    for best_row in best:
        ratio = f"   {best_row.ratio:.3f} of the monolith's" if best_row.ratio is not None else ""
        edge = ", the last scale tried" if best_row.edge else ""
        say(f"  {best_row.model:<{WIDE}} best at guidance {best_row.guidance:g}{edge}{ratio}")
    return {"guidance": tuple(rows), "best": tuple(best)}


def best_table(rows: Sequence[GuidanceRow]) -> list[BestRow]:
    """Each model at its own best guidance."""
    chosen: dict[str, tuple[GuidanceRow, str]] = {}
    for name in dict.fromkeys(row.model for row in rows):
        swept = sorted((row for row in rows if row.model == name), key=lambda row: row.guidance)
        best = min(swept, key=lambda row: row.distance or 0.0)
        edge = "high" if len(swept) > 1 and best is swept[-1] else ""
        # Nothing lies below a scale of 0, so a best one there is no edge.
        if len(swept) > 1 and best is swept[0] and best.guidance > 0:
            edge = "low"
        chosen[name] = best, edge
    base = chosen[BASE][0].distance if BASE in chosen else None
    return [
        BestRow(**row.model_dump(), edge=edge, ratio=None if name == BASE else ratio_of(row.distance, base))
        for name, (row, edge) in chosen.items()
    ]
