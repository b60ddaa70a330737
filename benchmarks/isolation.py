"""When isolated experts beat one network of equal FLOPs: small campaigns, and what their ratios follow from.

    python benchmarks/isolation.py --emoji FOLDER --icons FOLDER --to FOLDER [--jobs 2] [--seeds 0]
    python benchmarks/isolation.py --quick

The folders are those that examples/emoji/prepare.py and examples/icons/prepare.py write. Each campaign of
`CASES` trains K experts that share nothing, a router, and one network of equal FLOPs, on one of `DATA`: 1,700
to 20,000 training images, with clusters by features, by owner or at random. All are in batches of 8 at the
rate 0.002. A ratio is that of distances to the same held-out images, `top-1` over the one network. A
line in logarithms is fitted to the ratios (`FACTORS`), and every campaign is predicted by the line of the
others. Two results that were measured elsewhere, by another protocol, are predicted by all.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, Row, child, finish, new, parsed, parser, row, run_command, train

import atoll
from atoll.campaign.folder import Campaign
from atoll.data.partition import load

COMMON = (
    *("student=null", "budget.pretrain=0", "budget.expert_batch=8", "sampling.routing=top-1"),
    *("train.milestones=0", "train.validations=1", "train.previews=0", "sampling.guide_share=1"),
)
EMOJI = ("google", "twitter", "fluent3d", "openmoji")
OUTLINES = ("ph", "tabler", "mdi")
DATA: dict[str, tuple[str, Sequence[str]]] = {
    "emoji": ("emoji", EMOJI),
    "emoji of Google": ("emoji", EMOJI[:1]),
    "icons of three sets": ("icons", OUTLINES),
    "logos": ("icons", ("logos",)),
    "Fluent icons": ("icons", ("fluent",)),
}
"""Name, which of the folders, and its files."""


@dataclass(frozen=True)
class Case:
    """A campaign of islands, and the single network that it is held against."""

    data: str
    k: int
    images: int
    """That the single network is trained on."""
    cut: str = "features"
    seed: int = 0

    @property
    def name(self) -> str:
        """Of its folder and row."""
        return f"{self.data}, K = {self.k} by {self.cut}, {self.images:,} images, seed {self.seed}"

    @property
    def single(self) -> str:
        """Folder of the single network, which several cases may share."""
        return f"{self.data}, one network, {self.images:,} images, seed {self.seed}"

    @property
    def partition(self) -> tuple[str, ...]:
        """The settings that cut the data."""
        how = {"owner": ("column", "partition.column=source"), "random": ("random",)}.get(self.cut, ())
        return (f"partition.k={self.k}", *([f"partition.method={how[0]}", *how[1:]] if how else []))


CASES = (
    Case("emoji", 8, 30_000),
    Case("emoji", 2, 30_000),
    Case("logos", 4, 30_000),
    Case("emoji of Google", 4, 30_000),
    Case("icons of three sets", 4, 30_000),
    Case("Fluent icons", 4, 30_000),
    Case("emoji", 4, 100_000),
    Case("emoji", 16, 100_000),
    Case("emoji", 8, 100_000, "random"),
    Case("logos", 2, 100_000),
    Case("emoji of Google", 2, 100_000),
    Case("icons of three sets", 3, 100_000, "owner"),
    Case("icons of three sets", 2, 100_000),
)
FACTORS = {"steps of an expert": "steps", "inertia over random clusters'": "inertia", "epochs": "epochs"}
"""What a ratio may follow from; an expert's images in the data follow from its steps and the epochs."""
ELSEWHERE = {
    "islands that share nothing, rate 0.002, bf16, 400,000 images: top-1": 400_000,
    "islands that share nothing, 2,228,480 images: top-1": 2_228_480,
}
"""Cases of benchmarks/results/headline.json on emoji, K = 8, and the images of their single network."""
JUDGE = "Lite2, 64 px, 64 axes"


def main() -> None:
    """Train the campaigns, and fit the line."""
    words = parser(__doc__, "two tiny campaigns, of which the distances mean nothing", "campaigns")
    words.add_argument("--emoji", type=Path, metavar="FOLDER", help="of parquet files")
    words.add_argument("--icons", type=Path, metavar="FOLDER", help="of parquet files")
    words.add_argument("--to", type=Path, metavar="FOLDER", help="of the campaigns")
    words.add_argument("--jobs", type=int, default=2, help="campaigns at once")
    words.add_argument("--seeds", type=int, nargs="+", default=[0])
    words.add_argument("--samples", type=int, default=500, help="images that a model draws")
    options = parsed(words, distance)
    if not options.quick and not (options.emoji and options.icons and options.to):
        options.error("give --emoji FOLDER --icons FOLDER --to FOLDER, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            options.to, options.samples, options.jobs = Path(scratch), 40, 1
            cases = [Case("glyphs", k, images) for k in (2, 3) for images in (400, 640)]
        else:
            asked = options.only or [""]
            cases = [replace(case, seed=seed) for seed in options.seeds for case in CASES]
            cases = [case for case in cases if any(text in case.name for text in asked)]
        facts = measured(cases, options)
        finish("isolation", rows_of(facts), options, {"facts": facts})


def measured(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Facts of every case, with its ratio."""
    for case in {case.data: case for case in cases}.values():  # data sets are shared
        folder = new(options.to / case.single, *settings(case, True, options), alone=not options.quick)
        run_command("data", "prepare", folder, alone=not options.quick)

    def one(work: tuple[Case, bool]) -> tuple[str, dict[str, float]]:
        case, single = work
        name = case.single if single else case.name
        folder = new(options.to / name, *settings(case, single, options), alone=not options.quick)
        train(folder, "monolith" if single else "", alone=not options.quick)
        how = {"folder": str(folder), "model": "monolith" if single else "ensemble"}
        return name, child(__file__, **how, samples=options.samples, quick=options.quick)

    works = list(dict.fromkeys((replace(case, k=2, cut="features"), True) for case in cases))
    works += [(case, False) for case in cases]
    works.sort(key=lambda work: -work[0].images)  # none is then alone at the end
    with ThreadPoolExecutor(options.jobs) as pool:  # `--quick` trains in this process, in the main thread
        found = dict((map if options.quick else pool.map)(one, works))
    both = {case.name: (found[case.name], found[case.single]["distance"]) for case in cases}
    return {
        name: {**facts, "single": single, "ratio": facts["distance"] / single}
        for name, (facts, single) in both.items()
    }


def settings(case: Case, single: bool, options: argparse.Namespace) -> tuple[str, list[str]]:
    """Recipe and settings of a campaign."""
    sets = [*COMMON, f"seed={case.seed}", f"budget.samples={case.images}"]
    sets += [f"monolith={json.dumps(single)}", *(() if single else case.partition)]
    sets.append(f"data.path={(options.to / f'data of {case.data}').resolve()}")
    if options.quick:
        return "quickstart", [*sets, "data.ingest.glyphs.limit=400", "network.depth=1", "router.depth=1"]
    which, names = DATA[case.data]
    files = {name: str((getattr(options, which) / f"{name}.parquet").resolve()) for name in names}
    sources = {name.replace("-", "_"): {"source": file} for name, file in files.items()}
    sets += [f"data.source={json.dumps(sources)}", "data.ingest.id=id"]
    return "emoji", [*sets, "train.batch=8", "train.lr=0.002", "train.parallel.compile=true"]


def distance(folder: str, model: str, samples: int, quick: bool) -> dict[str, float]:
    """Distance of a model to the held-out images, and the facts of its campaign."""
    campaign = Campaign.open(folder)
    how: dict[str, Any] = {"steps": 3, "components": 8} if quick else {"steps": 20}
    found = atoll.evaluate(campaign, model, metrics="frechet", guidance=2.0, samples=samples, **how)
    facts = {"distance": float(found["frechet"])}
    if model == "monolith":
        return facts
    partition, config = load(campaign.store), campaign.config
    inertia, images, k = partition.about.inertia, config.budget.samples, config.partition.k
    rows = sum(partition.masses)
    return {
        **facts,
        "steps": (1 - config.router.share) * images / k / (config.budget.expert_batch or 1),
        "inertia": inertia.clusters / inertia.random if inertia else 1.0,  # none: cut at random
        "rows": rows / k,
        "epochs": images / rows,
    }


# The line.


def terms(facts: Mapping[str, float], factors: Sequence[str]) -> list[float]:
    """Of the line: the constant's 1, and the factors' logarithms."""
    return [1.0, *(math.log(facts[FACTORS[name]]) for name in factors)]


def fitted(facts: Sequence[Mapping[str, float]], factors: Sequence[str]) -> np.ndarray[Any, Any]:
    """Constant and exponents."""
    table = np.array([terms(each, factors) for each in facts])
    return np.linalg.lstsq(table, np.log([each["ratio"] for each in facts]), rcond=None)[0]


def rows_of(facts: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Ratios, and for every choice of factors how far each is from what the line of the others says."""
    rows = [row(name, metric, value) for name, each in facts.items() for metric, value in each.items()]
    elsewhere = measured_elsewhere()
    for count in range(min(len(FACTORS) + 1, len(facts) - 2)):
        for factors in combinations(FACTORS, count):
            line, errors = fitted([*facts.values()], factors), list[float]()
            for each in facts.values():
                others = fitted([other for other in facts.values() if other is not each], factors)
                errors.append(math.expm1(abs(others @ terms(each, factors) - math.log(each["ratio"]))))
            found = {"median error of a campaign left out": statistics.median(errors)}
            found |= {"largest error of a campaign left out": max(errors), "constant": line[0]}
            found |= {f"exponent of {name}": value for name, value in zip(factors, line[1:], strict=True)}
            for name, (known, ratio) in elsewhere.items():
                found[f"{name}: predicted over measured"] = math.exp(line @ terms(known, factors)) / ratio
            called = "line of " + (", ".join(factors) or "nothing: their mean")
            rows += [row(called, metric, float(value)) for metric, value in found.items()]
    return rows


def measured_elsewhere() -> dict[str, tuple[dict[str, float], float]]:
    """Facts and ratio of the cases `ELSEWHERE`, by their epochs."""
    headline = json.loads((RESULTS / "headline.json").read_text())["ratios"]
    found = {}
    for case, images in ELSEWHERE.items():
        steps, epochs = 0.96 * images / 8 / 8, images / 13_928
        ratio = statistics.geometric_mean(headline[case][JUDGE].values())
        found[f"emoji, {epochs:.0f} epochs"] = {"steps": steps, "inertia": 0.819, "epochs": epochs}, ratio
    return found


if __name__ == "__main__":
    main()
