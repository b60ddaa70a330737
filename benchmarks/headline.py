"""The headline: islands and single networks of equal training FLOPs, judged on pictures held out for it.

    python benchmarks/headline.py train --source emoji64 --to headline [--only NAME ...] [--seeds 3 4 5]
    python benchmarks/headline.py measure --to headline [--only NAME ...] [--join PATH] [--json PATH]
    python benchmarks/headline.py floor --to headline [--join PATH] [--json PATH]
    python benchmarks/headline.py --quick

`emoji64` is what `examples/emoji/prepare.py` writes. `train` makes a campaign for every entry and seed in a
folder of its own, one process after the other, and goes on where it was stopped; several may run beside
each other with other `--only`. `measure` takes what is trained, and joins it to the models and seeds of an
earlier JSON, whose campaigns may be gone. Guidance is chosen on the held-out
pictures, for each model and seed by itself, and the distance is that to the test pictures at this guidance.
One choice was made after a look at the test pictures: the islands' rate was lowered to the single network's.
The best single network is the one of the smallest held-out distance among those of the same FLOPs, over all
seeds; ratios are within a seed, and their interval is Student's of the logarithms, beside Welch's, which does
not pair them. `floor` measures real training pictures in a model's place; ratios are given in excess over it
too. The test pictures of a model are drawn once and seen by all of `judges.py`.
"""

import argparse
import json
import math
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from harness import TINY, finish, median_row, ratio_interval, row, run_command, welch_interval
from judges import GUIDED, GUIDED_APART, JUDGES, Album, matcher
from pyarrow import parquet

import atoll
from atoll.campaign.folder import Campaign
from atoll.curate.vocabulary import nouns
from atoll.data.words import words_of
from atoll.measure.override import generation_of, supported
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, read_manifest
from atoll.model.routing import PRETRAIN
from atoll.store.store import Store

GUIDANCES = (1.5, 2.0, 3.0, 4.0)
ROUTINGS = ("top-1", "once", "once null sample-1", "once null pretrain")
AFTER = " after "
"""Comes before the share of pretraining after which its network guides, in the name of a model."""
FRESH = (3, 4, 5)
"""Seeds that are reported. The single network's batch and rate were chosen on seed 0; the islands' rate was
lowered after these had been judged on the test pictures once."""
SPLIT = ["data.ingest.heldout=0.05", "data.ingest.test=0.05"]
COST = "training FLOPs over its teachers'"
SHARES = ("precision", "recall", "retrieval", "retrieval of real pictures", "twins", "copies", COST)
"""What is measured beside distances."""
EPOCH = 13_928
UNSHARED = ("budget.pretrain=0", "sampling.routing=once")


@dataclass(frozen=True)
class Entry:
    """Campaigns that differ in their seed only.

    Attributes:
        name: for tables.
        sets: settings in place of the recipe's.
        single: whether it is one network, which `monolith` is; else an ensemble.
        seeds: of its campaigns.
        told: whether every caption begins with the picture's cluster.
        weighted: whether rows of rare concepts are drawn more often, see `tail.py`.
    """

    name: str
    sets: tuple[str, ...]
    single: bool = False
    seeds: tuple[int, ...] = FRESH
    told: bool = False
    weighted: bool = False

    @property
    def samples(self) -> int:
        """Training images that a single network of these FLOPs sees."""
        return next(int(one.split("=")[1]) for one in self.sets if one.startswith("budget.samples"))

    @property
    def student(self) -> bool:
        """Whether the experts teach a student."""
        return any(one.startswith("student=") for one in self.sets)

    def folder(self, to: Path, seed: int) -> Path:
        """Of the campaign of a seed."""
        return to / "-".join([*re.findall(r"[\w.]+", self.name), f"seed{seed}"])


def single(
    batch: int,
    rate: float,
    samples: int,
    *more: str,
    seeds: tuple[int, ...] = FRESH,
    name: str = "single",
    told: bool = False,
) -> Entry:
    """One network on all the data."""
    name = f"{name}, batch {batch}, rate {rate:g}, {samples:,} images"
    sets = (f"train.batch={batch}", f"train.lr={rate}", *UNSHARED, f"budget.samples={samples}")
    return Entry(name, (*sets, "train.parallel.compile=true", *more), single=True, seeds=seeds, told=told)


def islands(name: str, samples: int, *more: str, seeds: tuple[int, ...] = FRESH) -> Entry:
    """Eight experts in batches of 8, and a router."""
    sets = ("monolith=false", f"budget.samples={samples}", "budget.expert_batch=8", *more)
    return Entry(f"{name}, {samples:,} images", sets, seeds=seeds)


TUNED = [(8, 0.001), (8, 0.002), (8, 0.004), (16, 0.002), (16, 0.004), (32, 0.004), (64, 0.002), (64, 0.004)]
APART = "islands that share nothing"
SHARED = "islands after shared pretraining"
RATE = "train.lr=0.004"
ALONE = (RATE, *UNSHARED)
SLOWER = (*ALONE, "train.lr=0.002")
EVEN = ("data.weighted=true",)
JOINT = ("train.lr=0.002", "train.batch=8", "budget.pretrain=0.5")
"""At 0.004 the pretraining diverged after 70,000 images, and an expert of 160 epochs after 54,000."""
LONG = ("train.precision=bf16", "train.validations=2", "train.previews=0")
"""Of the long runs, for their time: matrix products in bf16."""
FAST = (*LONG, "train.parallel.compile=true")
PLAIN = ("student=null", "train.milestones=0", "sampling.guide_share=1")
"""In place of the recipe's, where an entry does not say otherwise."""
KEPT = ("train.milestones=8",)
"""Of networks whose earlier selves guide."""
WEAK = (*KEPT, "sampling.guide_share=0.25")
"""Pretraining's network after an eighth of all the training guides, as the single network's does."""
TAUGHT = "student={start: scratch, batch_share: 1, step_share: 0.25}"
"""A third of the FLOPs: a quarter of the single network's steps, each with its teacher's forward pass."""
ENTRIES = [
    *(single(batch, rate, 100_000, *LONG, seeds=(0,), name="single, bf16") for batch, rate in TUNED),
    single(8, 0.002, 400_000, *KEPT),
    single(64, 0.004, 400_000, seeds=(3,)),
    islands(APART, 400_000, *ALONE),
    islands(SHARED, 400_000, *JOINT),
    single(8, 0.002, 400_000, seeds=(3,), name="single, told the cluster", told=True),
    single(8, 0.002, 160 * EPOCH, *KEPT, *LONG, seeds=(3,)),
    islands(APART, 160 * EPOCH, *SLOWER, *FAST, seeds=(3,)),
    islands(
        f"{SHARED}, a student from scratch, bf16",
        400_000,
        *JOINT,
        *FAST,
        *WEAK,
        TAUGHT,
    ),
    single(8, 0.002, 400_000, *KEPT, *LONG, name="single, bf16"),
    single(32, 0.004, 400_000, *KEPT, *LONG, name="single, bf16"),
    islands(f"{APART}, rate 0.002, bf16", 400_000, *SLOWER, *FAST, *KEPT),
    islands(f"{APART}, rate 0.001, bf16", 400_000, *ALONE, "train.lr=0.001", *FAST, *KEPT, seeds=(3,)),
    islands(f"{APART}, equal compute, bf16", 400_000, *SLOWER, *FAST, "budget.compute=equal", seeds=(3,)),
    islands(
        f"{APART}, random clusters, bf16", 400_000, *SLOWER, *FAST, "partition.method=random", seeds=(3,)
    ),
    single(8, 0.002, 232_791, "network.heads=4", *KEPT, *LONG, seeds=(3,), name="single, bf16, 128 channels"),
    single(8, 0.002, 107_174, "network.heads=6", *KEPT, *LONG, seeds=(3,), name="single, bf16, 192 channels"),
    islands(
        f"{SHARED} of a quarter, bf16",
        400_000,
        *JOINT,
        "budget.pretrain=0.25",
        *FAST,
        *KEPT,
        "sampling.guide_share=0.5",
        seeds=(3,),
    ),
    *(
        islands(f"{SHARED}, K = {k}, bf16", 400_000, *JOINT, *FAST, *WEAK, f"partition.k={k}", seeds=(3,))
        for k in (4, 16)
    ),
    *(
        islands(f"{APART}, K = {k}, bf16", 400_000, *SLOWER, *FAST, *KEPT, f"partition.k={k}", seeds=(3,))
        for k in (4, 16)
    ),
    *(single(8, 0.002, samples, *LONG, seeds=(3,)) for samples in (800_000, 1_600_000, 3_200_000)),
    single(8, 0.002, 1_200_000, *KEPT, *LONG, seeds=(3,)),
    replace(single(8, 0.002, 400_000, *EVEN, seeds=(3,), name="single, drawn by weight"), weighted=True),
    replace(islands(f"{APART}, drawn by weight", 400_000, *ALONE, *EVEN, seeds=(3,)), weighted=True),
]
FREQUENT, LEAST = 20, 4
"""Rows from which on a concept is drawn less often, and rows that a concept has."""
OF_EMOJI = "skin tone style medium light dark openmoji twitter google fluent3d face sign button symbol"
"""Words that say how an emoji is drawn, or nothing."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
"""Of clusters, for captions."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=["train", "measure", "floor"], nargs="?")
    parser.add_argument("--to", type=Path, help="folder of the campaigns")
    parser.add_argument("--source", type=Path, help="folder of parquet files")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="entries whose names hold one of these texts"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="of these seeds only")
    parser.add_argument(
        "--draws", type=int, default=1, help="albums of each model, for the noise of the distance"
    )
    parser.add_argument(
        "--samples", type=int, default=1000, help="test pictures; 0 for the held-out distances alone"
    )
    parser.add_argument("--routings", nargs="+", default=ROUTINGS, help="of the ensembles that are measured")
    parser.add_argument("--list", action="store_true", help="only show the entries' names")
    parser.add_argument(
        "--quick", action="store_true", help="two tiny entries of its own, trained and measured"
    )
    parser.add_argument("--join", type=Path, metavar="JSON", help="what was measured before; ours count")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    entries = [e for e in ENTRIES if not options.only or any(text in e.name for text in options.only)]
    if options.list:
        print("\n".join(entry.name for entry in entries))
    elif options.quick:
        with tempfile.TemporaryDirectory() as folder:
            quick(Path(folder), options.json)
    elif options.stage == "train" and options.to and options.source:
        for entry in entries:
            for seed in options.seeds or entry.seeds:
                source, data = options.source, options.to / "data"
                if entry.told:
                    islands_of = next(e for e in ENTRIES if e.name.startswith(APART)).folder(options.to, seed)
                    source, data = options.to / f"told-{seed}", options.to / f"told-data-{seed}"
                    tell(options.source, islands_of, source)
                if entry.weighted:
                    data = options.to / "data-weighted"
                places = [f"data.path={data.resolve()}", f"data.source={source.resolve()}"]
                train(entry, entry.folder(options.to, seed), seed, ["emoji", *SPLIT, *places])
    elif options.stage == "measure" and options.to:
        protocol = Protocol(samples=options.samples, draws=options.draws, routings=tuple(options.routings))
        chosen = [replace(e, seeds=tuple(options.seeds)) if options.seeds else e for e in entries]
        report(
            joined(options.join, measured(chosen, options.to, protocol)),
            options.json,
            known_floor(options.join),
        )
    elif options.stage == "floor" and options.to:
        folders = (entry.folder(options.to, seed) for entry in entries for seed in entry.seeds)
        folder = next(folder for folder in folders if (folder / "partition/partition.json").exists())
        report(joined(options.join, {}), options.json, floor(folder, options.samples))
    else:
        parser.error(
            "give train --source FOLDER --to FOLDER, measure --to FOLDER, floor --to FOLDER, or --quick"
        )


def quick(folder: Path, path: Path | None) -> None:
    """Tiny campaigns, whose distances mean nothing."""
    sets = (
        "budget.samples=1280",
        "partition.k=2",
        "network.depth=1",
        "train.batch=16",
        "router.train.batch=16",
    )
    entries = [
        Entry("single", (*sets, *KEPT), single=True, seeds=(0, 1)),
        Entry("islands", (*sets, "monolith=false", "student={step_share: 0.5}"), seeds=(0, 1)),
    ]
    tiny = [
        "quickstart",
        *SPLIT,
        *(one for one in TINY if one.startswith("data.")),
        f"data.path={folder / 'data'}",
    ]
    for entry in entries:
        for seed in entry.seeds:
            train(entry, entry.folder(folder, seed), seed, tiny, alone=False)
    judge = {"Lite2": {"extractor_size": 64, "components": 8}}
    report(measured(entries, folder, Protocol((1.0, 2.0), 24, 24, 2, judge, 1)), path)


def train(entry: Entry, folder: Path, seed: int, common: list[str], alone: bool = True) -> None:
    """Make a campaign and train all of it, as far as that has not happened yet.

    Args:
        entry: what it is.
        folder: of the campaign.
        seed: of the campaign.
        common: the recipe, and settings of all campaigns.
        alone: every command as a process of its own.
    """
    run = partial(run_command, alone=alone)
    sets = (f"seed={seed}", *PLAIN, *common[1:], *entry.sets)
    if (folder / "campaign.yaml").exists():
        Campaign.open(folder, sets)  # which refuses other settings than it was started with
    else:
        run("new", str(folder), "--recipe", common[0], *(part for one in sets for part in ("--set", one)))
    for stage in (["data", "ingest"], ["data", "embed"], ["data", "encode"]):
        run(*stage, str(folder))
    if entry.weighted:
        run("concepts", "index", str(folder), "--vocabulary", str(names(Campaign.open(folder), folder)))
        run("concepts", "rebalance", str(folder), "--t", str(FREQUENT))
    run("partition", str(folder))
    settings = json.loads((folder / "campaign.json").read_text())["config"]
    roles = ["pretrain"] * bool(settings["budget"]["pretrain"])
    experts = [["expert", "--expert", str(number)] for number in range(settings["partition"]["k"])]
    runs = [["monolith"]] if entry.single else [*([role] for role in roles), *experts, ["router"]]
    for role, *which in runs:
        run("train", role, str(folder), *which)
    if not entry.single:
        run("assemble", str(folder))
    if entry.student:
        run("train", "student", str(folder))


def tell(source: Path, islands: Path, to: Path) -> None:
    """Write a source again, every picture's cluster as the first word of its caption.

    Args:
        source: folder of parquet files.
        islands: campaign of the same data, whose partition counts.
        to: new folder; nothing is done where it is whole.
    """
    campaign = Campaign.open(islands)
    clusters = campaign.clustered()[1].clusters
    words = dict(zip(campaign.dataset().table(["key"])["key"].to_pylist(), clusters, strict=True))
    to.mkdir(exist_ok=True)
    for file in sorted(source.glob("*.parquet")):
        table = parquet.read_table(file)
        captions = [
            f"{WORDS[words[f'{file.name}, row {number}']]}, {caption}"
            for number, caption in enumerate(table["caption"].to_pylist())
        ]
        place = table.column_names.index("caption")
        parquet.write_table(table.set_column(place, "caption", pa.array(captions)), to / file.name)


def names(campaign: Campaign, folder: Path) -> Path:
    """Write the vocabulary of the emoji: nouns of their names, without style and skin tone."""
    counts: Counter[str] = Counter()
    for caption in campaign.dataset().table(["caption"])["caption"].to_pylist():
        words = words_of(caption.rsplit(",", 1)[0].split(":")[0])
        counts.update({noun for word in words for noun in nouns(word)} - set(OF_EMOJI.split()))
    path = folder / "concepts.txt"
    path.write_text("".join(f"{word}\n" for word, count in counts.most_common() if count >= LEAST))
    return path


Point = dict[str, Any]
"""Of a model and seed: `guidance` chosen, `test` values at it, `flops` of its campaign without the student,
and `all` held-out distances."""


@dataclass(frozen=True)
class Protocol:
    """How models are measured.

    Attributes:
        guidances: of which the best on held-out pictures is chosen.
        chosen_on: held-out pictures for each of them.
        samples: test pictures; 0 for held-out distances only.
        steps: of the sampler.
        judges: see `judges.JUDGES`; the first chooses.
        epochs: that the network which matches captions learns.
        draws: albums of each model, of other noise and other captions; the first is judged by all.
        routings: of an ensemble.
    """

    guidances: tuple[float, ...] = GUIDANCES
    chosen_on: int = 500
    samples: int = 1000
    steps: int = 20
    judges: Mapping[str, dict[str, Any]] = field(default_factory=lambda: JUDGES)
    epochs: int = 20
    draws: int = 1
    routings: tuple[str, ...] = ROUTINGS

    def point(self, folder: Path, name: str) -> Point:
        """One model of one campaign, at its best guidance on the held-out pictures."""
        alone = {"monolith": None, "student": None, GUIDED: "once null pretrain", GUIDED_APART: "once"}
        model, routing = (name, alone[name]) if name in alone else ("ensemble", name.split(AFTER)[0])
        (first, judge), campaign = next(iter(self.judges.items())), Campaign.open(folder)
        place = folder / "reports" / "album" / re.sub(r"\W+", "-", name)
        generation = generation_of(campaign).with_(
            steps=self.steps, **({"routing": routing} if routing else {})
        )

        def distance(guidance: float) -> float:
            how = generation.with_(guidance=guidance)
            if model in (GUIDED, GUIDED_APART):  # no model of the campaign, so by its pictures
                shown = place / f"heldout-{guidance:g}"
                album = Album.of(campaign, model, how, "heldout", self.chosen_on, shown)
                return album.distances({first: judge})[first]
            settings = {"guidance": guidance, "steps": self.steps, "samples": self.chosen_on, **judge}
            return float(
                atoll.evaluate(campaign, model, routing=routing, metrics="frechet", **settings)["frechet"]
            )

        heldout = {guidance: distance(guidance) for guidance in self.guidances}
        best = min(self.guidances, key=lambda guidance: heldout[guidance])
        generation, spent = generation.with_(guidance=best), flops(folder)
        test, again = dict[str, float](), list[float]()
        if self.samples:
            albums = [
                Album.of(
                    campaign, model, generation.with_(seed=seed), "test", self.samples, place / str(seed)
                )
                for seed in range(self.draws)
            ]
            known = f"matcher-{campaign.dataset().content[:12]}.safetensors"
            album, network = albums[0], matcher(albums[0].training, folder.parent / known, self.epochs)
            test = album.distances(self.judges) | album.matches(network) | album.without_twins(**judge)
            again = [one.distances({first: judge})[first] for one in albums[1:]]
        if name == "student":
            test[COST] = flops(folder, "student") / spent
        return {
            "guidance": best,
            "flops": spent,
            "test": test,
            "all": {f"{guidance:g}": value for guidance, value in heldout.items()},
            "drawn again": again,
        }


Points = dict[str, dict[str, dict[int, Point]]]
"""By entry, model and seed."""


def measured(entries: list[Entry], to: Path, protocol: Protocol) -> Points:
    """Points of what is trained, by entry, model and seed."""
    found: Points = {}
    for entry in entries:
        for seed in entry.seeds:
            folder = entry.folder(to, seed)
            ready = "monolith/expert/card.json" if entry.single else "ensemble/ensemble.json"
            if not (folder / ready).exists():
                print(f"{folder.name}: not trained yet")
                continue
            names = ["monolith"]
            if not entry.single:
                store = Campaign.open(folder).store
                whole = read_manifest(store)
                names = supported(protocol.routings, whole.k, (), PRETRAIN_PART in whole.parts)
                share = guide_share(store) if PRETRAIN_PART in whole.parts else 1
                names = [f"{n}{AFTER}{share:g}" if PRETRAIN in n and share < 1 else n for n in names]
                names += [GUIDED_APART] if {*KEPT, *UNSHARED} <= {*entry.sets} else []
            elif set(KEPT) & set(entry.sets):
                names.append(GUIDED)
            names += ["student"] if (folder / "student/expert/card.json").exists() else []
            for name in names:
                found.setdefault(entry.name, {}).setdefault(name, {})[seed] = protocol.point(folder, name)
    return found


def joined(path: Path | None, found: Points) -> Points:
    """What an earlier JSON has of models and seeds, and what was found now."""
    earlier = json.loads(path.read_text())["points"] if path else {}
    for name, models in earlier.items():
        for model, points in models.items():
            here = found.setdefault(name, {}).setdefault(model, {})
            here.update(
                {int(s): point for s, point in points.items() if not here.get(int(s), {}).get("test")}
            )
    return found


def floor(folder: Path, samples: int) -> dict[str, float]:
    """Distances of real training pictures to the test pictures, by the same judges."""
    album = Album.real(Campaign.open(folder), "test", samples, folder / "reports/album/real")
    apart = album.without_twins(**next(iter(JUDGES.values())))["without twins"]
    return {**album.distances(JUDGES), "without twins": apart}


def known_floor(path: Path | None) -> dict[str, float]:
    """The floor of an earlier JSON."""
    return dict(json.loads(path.read_text()).get("floor", {})) if path else {}


def guide_share(store: Store) -> float:
    """Share of shared pretraining that the network had learned which serves the null branch."""
    return (
        Checkpoint(store, f"ensemble/{PRETRAIN_PART}").card.samples
        / Checkpoint(store, "pretrain/expert").card.samples
    )


def flops(folder: Path, role: str = "*") -> float:
    """Training operations of all that a campaign published but its student, or of one role."""
    cards = [*folder.glob("islands/*/expert/card.json"), *folder.glob("*/expert/card.json")]
    counted = {card for card in cards if card.match(f"{role}/expert/card.json")}
    counted -= {folder / "student/expert/card.json"} if role == "*" else set()
    return float(sum(json.loads(card.read_text())["train_flops"] for card in counted))


def report(found: Points, path: Path | None, floor: Mapping[str, float] | None = None) -> None:
    """Print the table and write the JSON; ratios are over a single network as it is, and over one guided."""
    floor, ratios = floor or {}, dict[str, dict[str, dict[int, float]]]()
    rows = [row("real training pictures", judge, value) for judge, value in floor.items()]
    for name, models in found.items():
        for model, points in models.items():
            case = f"{name}: {model}"
            best = [min(one["all"].values()) for one in points.values()]
            rows.append(median_row(case, "held-out distance at its best guidance", best))
            values = in_all(points.values())
            for value in values:
                rows.append(median_row(case, value, [one["test"][value] for one in points.values()]))
            for way in ("monolith", GUIDED):
                over = best_single(found, points, way)
                if over is None or (over, way) == (name, model):
                    continue
                singles, base = found[over][way], over if way == "monolith" else f"{over}: {way}"
                for value in values:
                    if value.split(" within ")[0] in SHARES:
                        continue
                    if any(value not in singles[seed]["test"] for seed in points):
                        continue
                    pairs = {
                        seed: one["test"][value] / singles[seed]["test"][value]
                        for seed, one in points.items()
                    }
                    ratios.setdefault(case if way == "monolith" else f"{case}, over {way}", {})[value] = pairs
                    mean, spread = ratio_interval([*pairs.values()])
                    kind = f"{value}, over {base}" + (", 95 %" if spread else "")
                    rows.append(row(case, kind, mean, spread=spread))
                    values_of = [[of[seed]["test"][value] for seed in points] for of in (points, singles)]
                    if unpaired := welch_interval(*values_of):
                        middle = math.exp(statistics.fmean(map(math.log, pairs.values())))
                        rows.append(
                            row(case, f"{value}, over {base}, 95 % unpaired", middle, spread=unpaired)
                        )
                    if value in floor:
                        excess = [
                            (points[seed]["test"][value] - floor[value])
                            / (singles[seed]["test"][value] - floor[value])
                            for seed in points
                        ]
                        mean, spread = ratio_interval(excess)
                        kind = f"{value}, excess over real pictures, over {base}" + (
                            ", 95 %" if spread else ""
                        )
                        rows.append(row(case, kind, mean, spread=spread))
    finish("headline", rows, path, {"ratios": ratios, "floor": floor, "points": found})


def in_all(points: Iterable[Point]) -> list[str]:
    """Values that all of these have, in the order of the first."""
    first, *others = (one["test"] for one in points)
    return [value for value in first if all(value in other for other in others)]


def best_single(found: Points, points: dict[int, Point], way: str = "monolith") -> str | None:
    """The single network of the smallest held-out distance among those of the same FLOPs and seeds, tested.

    Who is told the cluster does not count: it is told more than the caption.

    Args:
        found: all points.
        points: of the model that is held against it.
        way: `monolith` as it is, or `GUIDED` by its own first milestone.
    """
    told = {entry.name for entry in ENTRIES if entry.told}
    spent = statistics.fmean(one["flops"] for one in points.values())
    alike = {
        name: statistics.fmean(min(models[way][seed]["all"].values()) for seed in points)
        for name, models in found.items()
        if way in models
        and name not in told
        and all(point["test"] for point in models[way].values())
        and points.keys() <= models[way].keys()
        and abs(statistics.fmean(one["flops"] for one in models[way].values()) / spent - 1) < 0.01
    }
    return min(alike, key=lambda name: alike[name]) if alike else None


if __name__ == "__main__":
    main()
