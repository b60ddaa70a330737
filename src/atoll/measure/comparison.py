"""The compare stage: monolith, student and ensemble side by side, with equal conditions and equal noise.

A training curve shows how good they were after each part of their training. At share s the ensemble is made
of every expert's averaged weights after s of its own steps, and of the router as it was published. Its FLOPs
are s of the experts', all of the router's, and all of the pretraining's, since no expert exists before it is
finished. Until then the pretrained network is what there is.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from atoll.base.console import say
from atoll.base.device import using_threads, weights_dtype
from atoll.base.errors import ConfigError
from atoll.base.format import code_version
from atoll.base.hashing import digest
from atoll.base.part import Part
from atoll.base.pictures import png
from atoll.base.table import ratio_of
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import pretrain_finished
from atoll.campaign.measured import (
    BASE,
    BestRow,
    ComparedModel,
    Comparison,
    ComparisonTables,
    CurveRow,
    GuidanceRow,
    How,
    ReachRow,
)
from atoll.campaign.milestones import TrainingRun
from atoll.campaign.roles import RUNS
from atoll.campaign.runs import Run
from atoll.campaign.settings.measure import EXTRA
from atoll.encoders.vision import akin
from atoll.measure.metrics.precision_recall import PRECISION_K
from atoll.measure.models import WIDE, Candidate, Drawn, RowConditions, stored_as
from atoll.measure.pictures import SPLITS
from atoll.measure.same_noise import SavedSamples, pair_table
from atoll.measure.setup import CommonSetup
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Costs, Trace
from atoll.model.folder import PRETRAIN_PART
from atoll.model.generation import Residency
from atoll.model.model import ENSEMBLE, Model
from atoll.model.residency import ResidentExperts
from atoll.store.log import Entry


@dataclass(frozen=True)
class CurvePoint:
    """A model after a share of its own training; of an ensemble, of its experts'."""

    share: float
    train_flops: float
    weights: Mapping[str, str]
    """What they are known by; empty for what was published, like the milestones."""
    chosen: Mapping[str, Entry | None]


class TrainingCurve:
    """The way of a campaign's training by its checkpoints; `ConfigError` if experts share no milestones."""

    def __init__(self, setup: CommonSetup) -> None:
        self.setup, self.store, content = setup, setup.campaign.store, setup.content
        self.experts = {
            n: TrainingRun.of(self.store, f"ensemble/experts/{n}", f"{Run('expert', n).folder}/run")
            for n in content.experts
        }
        # An expert without steps of its own has the same weights at every share.
        self.trained = {n: run for n, run in self.experts.items() if run.steps}
        names = ["pretrain"] if pretrain_finished(setup.campaign) else []
        names += [name for name in setup.dense if name == "monolith"]
        self.single = {name: TrainingRun.of(self.store, f"{name}/expert", f"{name}/run") for name in names}
        self.guide = {PRETRAIN_PART: content.parts[PRETRAIN_PART]} if PRETRAIN_PART in content.parts else {}
        without = [n for n, run in self.trained.items() if not run.shares]
        if without or not self.trained:
            who = ", ".join(map(str, without or self.experts))
            what = f"compare.curve: no checkpoints on the way were kept by the experts {who}"
            fix = "set train.milestones (2 or more) before they are trained, or leave out compare.curve"
            raise ConfigError(what, fix)
        if not self.ensemble()[:-1]:
            what = "compare.curve: the experts kept checkpoints at different parts of their training"
            raise ConfigError(what, "give all islands the same train.milestones, or leave out compare.curve")

    def ensemble(self) -> list[CurvePoint]:
        """The ensemble at every share that all its trained experts have kept, and at the end."""
        pretrain = self.single["pretrain"].card.train_flops if "pretrain" in self.single else 0.0
        first, points = min(self.trained.values(), key=lambda run: len(run.shares)), list[CurvePoint]()
        ways: list[tuple[float, dict[str, Entry | None]]] = [
            (share, {f"experts/{n}": run.at(share, first.steps) for n, run in self.experts.items()})
            for share in first.shares
        ]
        ways = [(s, chosen) for s, chosen in ways if all(chosen[f"experts/{n}"] for n in self.trained)]
        for share, chosen in [*ways, (1.0, dict[str, Entry | None]())]:
            spent = self.setup.router.train_flops + pretrain
            weights = {"router": self.setup.router.weights_sha256, **self.guide} if chosen else {}
            for n, run in self.experts.items():
                milestone = chosen.get(f"experts/{n}")
                spent += run.card.train_flops * (milestone.step / run.steps if milestone else 1.0)
                if chosen:
                    weights[f"experts/{n}"] = milestone.sha256 if milestone else run.card.weights_sha256
            points.append(CurvePoint(share, spent, weights, chosen))
        return points

    def dense(self, name: str) -> list[CurvePoint]:
        """Monolith or pretraining at its own milestones, and at the end."""
        run = self.single[name]
        points = [
            CurvePoint(share, run.card.train_flops * share, {name: milestone.sha256}, {name: milestone})
            for share, milestone in zip(run.shares, run.milestones, strict=False)  # the last may be the end
        ]
        return [*points, CurvePoint(1.0, run.card.train_flops, {}, {})]

    def candidate(self, point: CurvePoint, name: str) -> Candidate:
        """A model at a stage, by its name or a strategy's; its weights are loaded when it first draws."""
        setup, chosen = self.setup, point.chosen
        if not chosen:
            return setup.published(name if name in self.single else ENSEMBLE)
        device, k, residency = setup.device, setup.content.k, setup.campaign.config.sampling.residency
        dtype, stored_by = weights_dtype(residency.dtype, device), stored_as(residency)
        # The published model's: settings vouch for what Atoll does not know.
        vae, single = setup.published(ENSEMBLE).model.vae, self.single.get(name)
        missing = sorted(set(range(k)) - set(self.experts)) if single is None else ()

        def loaded() -> Bank:
            if single is not None:
                whole = Residency(dtype=residency.dtype, keep=residency.keep)
                return Bank(ResidentExperts([single.stored(chosen[name])], whole, device, dtype))
            stored = {n: run.stored(chosen[f"experts/{n}"]) for n, run in self.experts.items()}
            experts = ResidentExperts([stored.get(n) for n in range(k)], residency, device, dtype)
            guide = Checkpoint(self.store, f"ensemble/{PRETRAIN_PART}") if self.guide else None
            cards = {n: run.card for n, run in self.experts.items()}
            costs = Costs.of(setup.router, cards, k, guide.card if guide else None)
            router = Checkpoint(self.store, "ensemble/router").router(device, dtype)
            return Bank(experts, router, missing, costs, guide.expert(device, dtype=dtype) if guide else None)

        model = Model(loaded, single.card if single else setup.router, device, vae=vae)
        return Candidate(name if single else ENSEMBLE, point.weights, model, missing, stored_by)

    def drawn(self, asked: Mapping[str, Any]) -> Iterator[tuple[CurvePoint, str, Drawn]]:
        """Every point and model, and its samples; asked for are `strategies` of the ensemble, and `samples`
        of each point."""
        points = [(point, [name]) for name in self.single for point in self.dense(name)]
        points += [(point, list(asked["strategies"])) for point in self.ensemble()]
        for point, names in points:
            candidate = self.candidate(point, names[0])  # for all strategies: it is loaded once
            for name in names:
                yield point, name, self.setup.drawn(name, candidate, samples=asked["samples"])


def training_curve(setup: CommonSetup, curve: TrainingCurve, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every model after every part of its training, and when each is as good as the finished monolith."""
    say(f"compare: on the way of the training, {asked['samples']:,} pictures each")
    base = curve.single[BASE].card.train_flops if BASE in curve.single else None
    rows = []
    for point, name, drawn in curve.drawn(asked):
        row, _, new = setup.row(name, drawn)
        show_point(row, f"{point.share:6.1%} trained", new)
        spent, part = point.train_flops, ratio_of(point.train_flops, base)
        numbers = row.model_dump(include={"distance", "precision", "recall"})
        rows.append(CurveRow(model=name, share=point.share, train_flops=spent, of_monolith=part, **numbers))
    order = [*curve.single, *asked["strategies"]]
    rows.sort(key=lambda row: order.index(row.model))
    reach = reach_table(rows, "pretrain" if "pretrain" in curve.single else None)
    for reached in reach:
        least = "at most " if reached.how == "at the first point" else ""
        what = "does not reach the monolith's final distance"
        if reached.of_monolith is not None:
            what = f"as good as the finished monolith after {least}{reached.of_monolith:.1%} of its FLOPs"
        say(f"  {reached.model:<{WIDE}} {what}")
    return {"curve": tuple(rows), "reach": tuple(reach)}


def show_point(row: ComparedModel, where: str, new: bool) -> None:
    """Print a point of a sweep or a curve."""
    spent = f"{row.seconds:.0f} s" if new else "known"
    say(f"  {row.name:<{WIDE}} {where}   distance {row.distance:8.3f}   {spent}")


def crossing(path: Sequence[tuple[float, float]], target: float) -> tuple[float | None, How]:
    """Training FLOPs at which a path of (FLOPs, distance) first comes down to a target, by linear
    interpolation, and how that is known; see `ReachRow`."""
    for number, (flops, distance) in enumerate(path):
        if distance > target:
            continue
        if number == 0:
            return flops, "at the first point"
        before, above = path[number - 1]
        return before + (flops - before) * (above - target) / (above - distance), "between points"
    return None, "never"


def reach_table(rows: Sequence[CurveRow], start: str | None = None) -> list[ReachRow]:
    """When each model reaches the monolith's final distance; nothing without a monolith. The points of
    `start`, a model that the others begin with (shared pretraining), come before theirs."""
    paths: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        assert row.distance is not None
        paths.setdefault(row.model, []).append((row.train_flops, row.distance))
    if BASE not in paths:
        return []
    whole, target = paths[BASE][-1]
    reach = []
    for name, path in paths.items():
        if name == start:
            continue
        # No expert exists before pretraining is finished: until then the pretrained network is what there is.
        before = paths.get(start, []) if start and name != BASE else []
        flops, how = crossing([*before, *path], target)
        part = ratio_of(flops, whole)
        reach.append(ReachRow(model=name, target=target, train_flops=flops, of_monolith=part, how=how))
    return reach


FOLDER = "reports/compare"


def compare(campaign: Campaign, part: Part | None = None) -> Comparison | None:
    """Measure monolith, student, strategies; a comparison of the same parts and settings is not repeated.

    Every point that was measured is kept, so a comparison that was stopped goes on where it was, and one with
    other settings draws what is new. With `part` shards of pictures are drawn, and nothing is compared: None,
    unless all is known.

    Raises:
        StoreError: there is no ensemble, or a part is damaged.
        ConfigError: a strategy or a curve that is not possible here.
        DataError: there are too few rows to judge by.
    """
    store, config = campaign.store, campaign.config.compare
    with using_threads(config.threads):
        setup = CommonSetup(campaign)
        parts = setup.content.parts | {name: card.weights_sha256 for name, card in setup.dense.items()}
        key = digest(
            {
                "parts": parts,
                **stored_as(campaign.config.sampling.residency),
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
        if part is not None:
            for reference in (setup.fitted, setup.reference):
                reference.write_part(setup.encoder, config.batch, part)
            setup.judge(config.samples).write_part(setup.floor, part)
            for name in (*setup.dense, *setup.strategies):
                setup.judge(config.samples).write_part(setup.drawn(name), part, keep=True)
            scales = setup.swept() if "sweep" in missing else ()
            stages = curve.drawn(setup.extras["curve"]) if curve else ()
            for _, _, drawn in chain(scales, stages):
                setup.judge(len(drawn)).write_part(drawn, part)
            return None
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
    for name, card in setup.dense.items():
        if own := ", ".join(f"{word} {value}" for word, value in card.sampling.items()):
            say(f"  {name} as it was trained: {own}")
    rows: list[ComparedModel] = []
    samples, weights = dict[str, SavedSamples](), dict[str, Any]()
    for name in (*setup.dense, *setup.strategies):
        row, saved, _ = setup.row(name, setup.drawn(name), keep=True)
        if saved is not None:
            samples[name] = saved
        rows.append(row)
        if drawn_by := show_pictures(setup, name, shown):
            weights[name] = drawn_by
        cost = f"{row.gflops_per_step:.3f} GFLOPs a step (router {row.router_share:.1%})"
        say(f"  {name:<{WIDE}} distance {row.distance:8.3f}   {cost}   {row.seconds:.0f} s")
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
            alike = f"pixels correlate by {same.mean:.3f}, any two by {pair.mean:.3f}"
            say(f"  {pair.strategy:<{WIDE}} and monolith, same noise: {alike}")
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


def show_pictures(setup: CommonSetup, name: str, shown: RowConditions) -> list[Any]:
    """Write the pictures to look at of a model; of an ensemble, the weights of its experts."""
    # Their seed is another one than the points': nobody should pick a favourite among pictures that count.
    drawn = setup.drawn(name)
    drawn = replace(drawn, generation=drawn.generation.with_(seed=setup.seed + 1), conditions=shown)
    traces, numbers = list[Trace](), list[int]()
    for batch in drawn.batches(range(len(shown)), setup.config.batch):
        for number, picture in zip(batch.numbers, batch.pictures, strict=True):
            setup.campaign.store.put(f"{FOLDER}/{name}/{number:02d}.png", png(picture))
        if batch.trace is not None:
            traces.append(batch.trace)
            numbers += batch.numbers
    if not traces:
        return []
    return np.round(Trace.joined(traces, numbers).stacked().double().numpy(), 4).tolist()  # type: ignore[no-any-return]


def _metric(setup: CommonSetup) -> dict[str, Any]:
    """What the numbers are."""
    config, judge, made = setup.config, setup.judge(setup.config.samples), setup.encoder.producer()
    real, _, _ = judge.measure(setup.floor)
    partition, generation = setup.partition.about.encoder or {}, setup.override.generation
    return {
        "distance": f"Fréchet distance on {judge.how.components} principal components of {config.extractor}",
        **made,  # the network's name, hash and size
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
        "same_features_as_partition": all(partition.get(k) == made.get(k) for k in ("hash", "token")),
        "akin_to_partition": akin(str(partition.get("name", "")), config.extractor),
        "real_training_pictures": real.number("frechet"),
        "real_samples": len(setup.floor),
        **({"shift": generation.shift} if generation.shift != 1 else {}),
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
    train, count = setup.train, max(setup.config.shown, len(setup.config.prompts))
    captions = [str(c) for c in train.dataset.take(train.rows).column("caption").to_pylist()]
    first, chosen = {caption: n for n, caption in reversed(list(enumerate(captions)))}, list[int]()
    for prompt in setup.config.prompts:
        if prompt not in first:
            what = f"compare.prompts: no training row has the caption {prompt!r}"
            raise ConfigError(what, "choose one that exists")
        chosen.append(first[prompt])
    clusters, k = setup.partition.clusters[train.rows], int(setup.partition.clusters.max()) + 1
    # Of a fixed seed, not the campaign's: pages of several seeds show the same captions.
    order = np.random.default_rng(0).permutation(len(clusters))
    for turn in range(count - len(chosen)):
        fresh = (int(i) for i in order if clusters[i] == turn % k and int(i) not in chosen)
        chosen.append(next(fresh, int(order[turn % len(order)])))
    index = np.array(chosen, dtype=np.int64)
    return RowConditions(train, index, clusters[index], "train")


def sweep(setup: CommonSetup, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every model at every guidance scale, and each at its best."""
    say(f"compare: guidance {', '.join(f'{scale:g}' for scale in asked['guidances'])}")
    rows = []
    for name, scale, drawn in setup.swept():
        row, _, new = setup.row(name, drawn)
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
