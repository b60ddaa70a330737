"""The emoji experiment: what islands gain over single networks of equal training FLOPs, and why.

    python examples/emoji/experiment.py train --source emoji64 --to headline [--only TEXT ...] [--seeds 3 4 5]
    python examples/emoji/experiment.py measure --to headline [--only TEXT ...] [--join PATH] [--json PATH]
    python examples/emoji/experiment.py floor --to headline [--join PATH] [--json PATH]
    python examples/emoji/experiment.py levers --campaign DIR --single DIR [--only TEXT ...] [--split test]
    python examples/emoji/experiment.py ablations CAMPAIGN --to FOLDER [--only TEXT ...] [--json PATH]
    python examples/emoji/experiment.py mixed --campaigns FOLDER [--seeds 0 1 2] [--json PATH]

Each but `floor` has `--quick`. `train` makes a campaign for every entry of `entries.py` and seed of what
`prepare.py` wrote, one process after the other, and goes on where it was stopped. `measure` takes what is
trained, and joins it to the models and seeds of an earlier JSON, whose campaigns may be gone. Guidance is
chosen on held-out pictures, for each model and seed by itself; the distance is that to the test pictures.
The best single network is the one of the smallest held-out distance among those of the same FLOPs, over all
seeds; where it learned at another rate, the best of the model's own rate is a second base. Ratios are within
a seed, and their interval is Student's of the logarithms, beside Welch's, which does not pair them. `floor`
measures real training pictures in a model's place; ratios are given in excess over it too. One choice was
made after a look at the test pictures: the islands' rate was lowered to the single network's.

`levers` holds every way of `guides.py` against the others, on campaigns that are trained: formulas of
velocities that the networks already give. Ways are chosen on held-out pictures of one seed and judged on test
pictures of others. With `--router` the experts are chosen by another campaign's router, on the same clusters.
Points are kept in the campaigns, so a run that was stopped goes on.

`ablations` are campaigns on the data of a finished one, each with one choice changed: the paper's (K, and
random clusters), or `--variant NAME KEY=VALUE ...`. Where CAMPAIGN has shared pretraining, they start from
that one and have what it left of the budget, so that experts, router and pretraining cost what CAMPAIGN's do.
Distances are over CAMPAIGN's monolith, from the same conditions and noise. As in the paper K experts share
one batch, so all take the same number of steps. `K = 1` is the control: one network that goes on from
pretraining on all the data, in the batches of CAMPAIGN's experts.

`mixed` are pairs of small quickstarts of equal cost without the monolith: flows alone, and one whose experts
of odd number learn eps on VP-cosine, and are converted when they are asked. Below 1 the mixed one is better.
"""

import argparse
import json
import math
import re
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from entries import ENTRIES, KEPT, SPLIT, UNSHARED, Entry, flops, published, tell, train
from guides import WAYS, Bench
from harness import (
    TINY,
    Row,
    asked,
    case,
    finish,
    median_row,
    parsed,
    ratio_interval,
    ratios,
    row,
    tiny,
    welch_interval,
)
from judges import GUIDED, GUIDED_APART, JUDGES, Album, matcher
from variants import SMALL, ablations, mixed

import atoll
from atoll.base.device import using_threads
from atoll.campaign.folder import Campaign
from atoll.measure.models import generation_of, supported
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, read_manifest
from atoll.model.routing import PRETRAIN

GUIDANCES = (1.5, 2.0, 3.0, 4.0)
ROUTINGS = ("top-1", "once", "once null sample-1", "once null pretrain")
AFTER = " after "
"""Comes before the share of pretraining after which its network guides, in the name of a model."""
COST = "training FLOPs over its teachers'"
SHARES = ("precision", "recall", "retrieval", "retrieval of real pictures", "twins", "copies", COST)
"""What is measured beside distances."""


def main() -> None:
    """Do what the case asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")

    what = {
        "train": "Train what is missing of islands and single networks, a campaign for each seed.",
        "measure": "Choose each model's guidance on held-out pictures, and measure it on test pictures.",
        "floor": "The distance of real training pictures to the test pictures.",
    }
    for name, does in what.items():
        one = case(cases, headline, "two tiny entries, trained and measured", "entries", name, does)
        one.add_argument("--to", type=Path, help="folder of the campaigns")
        one.add_argument("--source", type=Path, help="folder of parquet files")
        one.add_argument("--seeds", type=int, nargs="+", help="of these seeds only")
        one.add_argument("--draws", type=int, default=1, help="albums of each model: the distance's noise")
        one.add_argument("--samples", type=int, default=1000, help="test pictures; 0: held-out ones alone")
        one.add_argument("--routings", nargs="+", default=ROUTINGS, help="of the ensembles")
        one.add_argument("--list", action="store_true", help="only show the entries' names")
        one.add_argument("--join", type=Path, metavar="JSON", help="what was measured before; ours count")
    one = case(cases, levers, "one tiny campaign", "ways")
    one.add_argument("--campaign", type=Path, help="whose ensemble is measured")
    one.add_argument("--single", type=Path, help="whose monolith is measured")
    one.add_argument("--router", type=Path, help="another campaign's, in place of the ensemble's")
    one.add_argument("--split", default="heldout", choices=["heldout", "test"])
    one.add_argument("--samples", type=int, default=500)
    one = case(cases, ablations, "a tiny campaign, one variant", "variants")
    one.add_argument("campaign", type=Path, nargs="?", help="launched and compared")
    one.add_argument("--to", type=Path, help="folder of the variants' campaigns")
    one.add_argument("--variant", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"), default=[])
    one.add_argument("--strategies", nargs="+", default=["once", "top-1"])
    one.add_argument("--threads", type=int, default=0, help="of the comparisons; 0 for all cores")
    one = case(cases, mixed, "one small pair")
    one.add_argument("--seeds", type=int, nargs="+")
    one.add_argument("--campaigns", type=Path, help="folder to keep the campaigns in")
    options = parsed(parser)
    with tempfile.TemporaryDirectory() as scratch:
        options.run(options, Path(scratch))


# Islands and single networks.


def headline(options: argparse.Namespace, scratch: Path) -> None:
    """Train entries, measure them, or measure the floor, as `options.case` says."""
    entries = [entry for entry in ENTRIES if asked(options, entry.name)]
    if options.seeds:
        entries = [replace(entry, seeds=tuple(options.seeds)) for entry in entries]
    if options.list:
        print("\n".join(entry.name for entry in entries))
    elif options.quick:
        more = ("monolith=false", "student={step_share: 0.5}")
        entries = [
            Entry("single", (*SMALL, *KEPT), (0, 1), True),
            Entry("islands", (*SMALL, *more), (0, 1)),
        ]
        data = (*SPLIT, *(s for s in TINY if s.startswith("data.")), f"data.path={scratch / 'data'}")
        for entry, seed in _seeds(entries):
            train(entry, entry.folder(scratch, seed), seed, "quickstart", data, alone=False)
        judge = {"Lite2": {"extractor_size": 64, "components": 8}}
        report(measured(entries, scratch, Protocol((1.0, 2.0), 24, 24, 2, judge, 1)), options)
    elif not options.to or (options.case == "train" and not options.source):
        options.error("give --to FOLDER, and --source FOLDER to train; or --quick")
    elif options.case == "train":
        for entry, seed in _seeds(entries):
            source, data = options.source, options.to / "data"
            if entry.told:
                cut = [e for e in ENTRIES if not (e.single or e.rebalanced or "partition." in str(e.sets))]
                made = (each.folder(options.to, seed) for each in cut)
                islands = next((each for each in made if (each / "partition/partition.json").exists()), None)
                if islands is None:
                    options.error(f"{entry.name}: train islands of seed {seed} first, for clusters")
                source, data = options.to / f"told-{seed}", options.to / f"told-data-{seed}"
                tell(options.source, islands, source)
            if entry.rebalanced:
                data = options.to / "data-weighted"
            common = (*SPLIT, f"data.path={data.resolve()}", f"data.source={source.resolve()}")
            train(entry, entry.folder(options.to, seed), seed, "emoji", common)
    elif options.case == "measure":
        protocol = Protocol(samples=options.samples, draws=options.draws, routings=tuple(options.routings))
        known = json.loads(options.join.read_text()).get("floor", {}) if options.join else {}
        report(joined(options.join, measured(entries, options.to, protocol)), options, known)
    else:
        folders = (entry.folder(options.to, seed) for entry, seed in _seeds(entries))
        folder = next(folder for folder in folders if (folder / "partition/partition.json").exists())
        album = Album.real(Campaign.open(folder), "test", options.samples, folder / "reports/album/real")
        apart = album.without_twins(**next(iter(JUDGES.values())))["without twins"]
        report(joined(options.join, {}), options, {**album.distances(JUDGES), "without twins": apart})


def _seeds(entries: Sequence[Entry]) -> list[tuple[Entry, int]]:
    return [(entry, seed) for entry in entries for seed in entry.seeds]


Point = dict[str, Any]
"""Of a model and seed: `guidance` chosen, `test` values at it, `flops` of its campaign without the student,
and `all` held-out distances."""
Points = dict[str, dict[str, dict[int, Point]]]
"""By entry, model and seed."""


@dataclass(frozen=True)
class Protocol:
    """How models are measured."""

    guidances: tuple[float, ...] = GUIDANCES
    """Of which the best on held-out pictures is chosen."""
    chosen_on: int = 500
    """Held-out pictures for each of them."""
    samples: int = 1000
    """Test pictures; 0 for held-out distances only."""
    steps: int = 20
    judges: Mapping[str, dict[str, Any]] = field(default_factory=lambda: JUDGES)
    """The first chooses."""
    epochs: int = 20
    """That the network which matches captions learns."""
    draws: int = 1
    """Albums of each model, of other noise and other captions; the first is judged by all."""
    routings: tuple[str, ...] = ROUTINGS
    """Of an ensemble."""

    def point(self, folder: Path, name: str) -> Point:
        """One model of one campaign, at its best guidance on the held-out pictures."""
        alone = {"monolith": None, "student": None, GUIDED: "once null pretrain", GUIDED_APART: "once"}
        model, routing = (name, alone[name]) if name in alone else ("ensemble", name.split(AFTER)[0])
        (first, judge), campaign = next(iter(self.judges.items())), Campaign.open(folder)
        albums = folder / "reports" / "album" / re.sub(r"\W+", "-", name)
        how = {"routing": routing} if routing else {}
        generation = generation_of(campaign).with_(steps=self.steps, **how)

        def album(split: str, count: int, name: str, **more: Any) -> Album:
            return Album.of(campaign, model, generation.with_(**more), split, count, albums / name)

        def distance(guidance: float) -> float:
            if model in (GUIDED, GUIDED_APART):  # no model of the campaign, so by its pictures
                drawn = album("heldout", self.chosen_on, f"heldout-{guidance:g}", guidance=guidance)
                return drawn.distances({first: judge})[first]
            settings = {"guidance": guidance, "steps": self.steps, "samples": self.chosen_on, **judge}
            point = atoll.evaluate(campaign, model, routing=routing, metrics="frechet", **settings)
            return float(point["frechet"])

        heldout = {guidance: distance(guidance) for guidance in self.guidances}
        best = min(self.guidances, key=lambda guidance: heldout[guidance])
        test, again, spent = dict[str, float](), list[float](), flops(folder)
        if self.samples:
            drawn = [
                album("test", self.samples, str(seed), guidance=best, seed=seed) for seed in range(self.draws)
            ]
            known, first_drawn = f"{campaign.dataset().content[:12]}.safetensors", drawn[0]
            seen = matcher(first_drawn.training, folder.parent / f"matcher-{known}", self.epochs)
            # It has seldom seen a picture, but has seen none that a model learned from either.
            unseen = matcher(first_drawn.heldout, folder.parent / f"unseen-{known}", 10 * self.epochs)
            test = {f"{name}, unseen rows": value for name, value in first_drawn.matches(unseen).items()}
            test |= first_drawn.matches(seen) | first_drawn.without_twins(**judge)
            test = first_drawn.distances(self.judges) | test
            again = [other.distances({first: judge})[first] for other in drawn[1:]]
        if name == "student":
            test[COST] = flops(folder, "student") / spent
        of_all = {f"{guidance:g}": value for guidance, value in heldout.items()}
        return {"guidance": best, "flops": spent, "test": test, "all": of_all, "drawn again": again}


def measured(entries: Sequence[Entry], to: Path, protocol: Protocol) -> Points:
    """Points of what is trained."""
    points: Points = {}
    for entry, seed in _seeds(entries):
        folder = entry.folder(to, seed)
        if not published(folder, entry.single):
            print(f"{folder.name}: not trained yet")
            continue
        models = ["monolith"]
        if entry.single:
            models += [GUIDED] if {*KEPT} <= {*entry.sets} else []
        else:
            store = Campaign.open(folder).store
            manifest, share = read_manifest(store), 1.0
            if PRETRAIN_PART in manifest.parts:  # of shared pretraining, what the guide had learned
                guide, end = (
                    Checkpoint(store, part).card for part in (f"ensemble/{PRETRAIN_PART}", "pretrain/expert")
                )
                share = guide.samples / end.samples
            models = supported(protocol.routings, manifest.k, (), PRETRAIN_PART in manifest.parts)
            models = [f"{m}{AFTER}{share:g}" if PRETRAIN in m and share < 1 else m for m in models]
            models += [GUIDED_APART] if {*KEPT, *UNSHARED} <= {*entry.sets} else []
        models += ["student"] if (folder / "student/expert/card.json").exists() else []
        for model in models:
            points.setdefault(entry.name, {}).setdefault(model, {})[seed] = protocol.point(folder, model)
    return points


def joined(path: Path | None, points: Points) -> Points:
    """What an earlier JSON has of models and seeds, and what was measured now."""
    for name, models in (json.loads(path.read_text())["points"] if path else {}).items():
        for model, earlier in models.items():
            here = points.setdefault(name, {}).setdefault(model, {})
            here |= {int(s): point for s, point in earlier.items() if not here.get(int(s), {}).get("test")}
    return points


def report(points: Points, options: argparse.Namespace, floor: Mapping[str, float] | None = None) -> None:
    """Print the table and write the JSON; ratios are over a single network as it is, and over one guided."""
    floor, by_seed = floor or {}, dict[str, dict[str, dict[int, float]]]()
    rows = [row("real training pictures", judge, value) for judge, value in floor.items()]
    for name, model, own in ((n, m, own) for n, models in points.items() for m, own in models.items()):
        case = f"{name}: {model}"
        best = [min(point["all"].values()) for point in own.values()]
        rows.append(median_row(case, "held-out distance at its best guidance", best))
        values = in_all(own.values())
        rows += [
            median_row(case, value, [point["test"][value] for point in own.values()]) for value in values
        ]
        for over, way, some in _bases(points, name, own):
            if (over, way) == (name, model):
                continue
            singles, base = points[over][way], over if way == "monolith" else f"{over}: {way}"
            for value in values:
                known = all(value in singles[seed]["test"] for seed in some)
                if re.split(" within |, unseen", value)[0] in SHARES or not known:
                    continue
                mine, theirs = ([of[seed]["test"][value] for seed in some] for of in (some, singles))
                pairs = ratios(mine, theirs)
                kind = case if way == "monolith" else f"{case}, over {way}"
                # The best comes first, and what is kept by seed is over it.
                by_seed.setdefault(kind, {}).setdefault(value, dict(zip(some, pairs, strict=True)))
                rows.append(_interval_row(case, f"{value}, over {base}", pairs))
                if unpaired := welch_interval(mine, theirs):
                    middle = math.exp(statistics.fmean(map(math.log, pairs)))
                    rows.append(row(case, f"{value}, over {base}, 95 % unpaired", middle, spread=unpaired))
                if value in floor:
                    # Real pictures are not at zero either, so a ratio of distances understates a difference.
                    excess = ratios(*([each - floor[value] for each in of] for of in (mine, theirs)))
                    rows.append(
                        _interval_row(case, f"{value}, excess over real pictures, over {base}", excess)
                    )
    finish("headline", rows, options, {"ratios": by_seed, "floor": floor, "points": points})


def _interval_row(case: str, metric: str, pairs: Sequence[float]) -> Row:
    mean, spread = ratio_interval(pairs)
    return row(case, metric + (", 95 %" if spread else ""), mean, spread=spread)


def in_all(points: Iterable[Point]) -> list[str]:
    """Values that all of these have, in the order of the first."""
    first, *others = (point["test"] for point in points)
    return [value for value in first if all(value in other for other in others)]


def _bases(points: Points, name: str, own: dict[int, Point]) -> list[tuple[str, str, dict[int, Point]]]:
    """Single networks to hold an entry against, whether guided, and the points of the seeds that both have.

    The best of all its seeds and the best of its rate; then what is better with some of the seeds alone.
    """
    ways = "monolith", GUIDED
    rates = [None, *(entry.rate for entry in ENTRIES if entry.name == name)]
    found = {(best_single(points, own, way, rate), way): own for way in ways for rate in rates}
    few: dict[tuple[str | None, str], dict[int, Point]] = {}
    for seed, point in own.items():
        for way in ways:
            base = best_single(points, {seed: point}, way), way
            if base not in found:
                few.setdefault(base, {})[seed] = point
    return [(over, way, some) for (over, way), some in (found | few).items() if over]


def best_single(
    points: Points, own: dict[int, Point], way: str = "monolith", rate: str | None = None
) -> str | None:
    """The single network of the smallest held-out distance among those of the same FLOPs and seeds, tested.

    It is as it is (`monolith`), or guided by its own first milestone (`GUIDED`); of one learning rate, or of
    any. Who is told the cluster does not count: it is told more than the caption.
    """
    out = {entry.name for entry in ENTRIES if entry.told or rate not in (None, entry.rate)}
    spent = statistics.fmean(point["flops"] for point in own.values())
    alike = {
        name: statistics.fmean(min(models[way][seed]["all"].values()) for seed in own)
        for name, models in points.items()
        if way in models
        and name not in out
        and all(point["test"] for point in models[way].values())
        and own.keys() <= models[way].keys()
        and abs(statistics.fmean(point["flops"] for point in models[way].values()) / spent - 1) < 0.01
    }
    return min(alike, key=lambda name: alike[name]) if alike else None


# Ways to guide.


def levers(options: argparse.Namespace, scratch: Path) -> None:
    """All ways of both models, on one thread, as the committed result."""
    if options.quick:
        options.campaign = options.single = tiny(scratch, 0, "train.milestones=8")
        options.samples = 40
    elif not (options.campaign or options.single):
        options.error("give --campaign, --single or both, or --quick")
    rows: list[Row] = []
    for name, folder in (("ensemble", options.campaign), ("monolith", options.single)):
        router = options.router if name == "ensemble" else None
        bench = Bench(folder, name, options.samples, options.split, router=router)
        for way in WAYS[name] if folder else ():
            if not asked(options, f"{name}: {way.name}"):
                continue
            way = replace(way, steps=2) if options.quick else way
            try:
                with using_threads(1):
                    values = bench.measured(way)
            except LookupError as error:
                print(f"left out: {way.name}: {error}")
                continue
            rows += [row(f"{bench.case}: {way.name}", metric, value) for metric, value in values.items()]
            print(f"{name}: {way.name}: {values}", flush=True)
    finish("levers", rows, options, {"split": options.split, "samples": options.samples})


if __name__ == "__main__":
    main()
