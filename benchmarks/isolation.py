"""When isolated experts beat one network of equal FLOPs: small campaigns, and what their ratios follow from.

    python benchmarks/isolation.py --emoji FOLDER --icons FOLDER --to FOLDER [--jobs 2] [--seeds 0]
    python benchmarks/isolation.py --quick

The folders are those that examples/emoji/prepare.py and examples/icons/prepare.py write. Each campaign of
`CASES` trains K experts that share nothing, a router, and one network of equal FLOPs, on one of `DATA`: 1,700
to 20,000 training images, with clusters by features, by owner or at random. All are in batches of 8 at the
emoji recipe's rate. A ratio is that of distances to the same held-out images, `top-1` over the one network. A
line in logarithms is fitted to the ratios (`FACTORS`), and every campaign is predicted by the line of the
others. Two results that were measured elsewhere, by another protocol, are predicted by all.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, child, finish, new, parsed, parser, row, run_command, train

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
FACTORS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "steps of an expert": lambda facts: math.log(facts["steps"]),
    "inertia over random clusters'": lambda facts: math.log(facts["inertia"]),
    "images of an expert": lambda facts: math.log(facts["rows"]),
    "epochs": lambda facts: math.log(facts["epochs"]),
}
"""What a ratio may follow from."""
ELSEWHERE = {
    "emoji, 29 epochs": ({"steps": 6_000, "inertia": 0.819, "rows": 1_741, "epochs": 28.7}, 0.901),
    "emoji, 160 epochs": ({"steps": 33_000, "inertia": 0.819, "rows": 1_741, "epochs": 160}, 0.668),
}
"""Facts and ratios of benchmarks/results/headline.json."""


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
    how: dict[str, Any] = {"guidance": 2.0, "steps": 3 if quick else 20, "samples": samples}
    more = {"components": 8} if quick else {}
    found = atoll.evaluate(campaign, model, metrics="frechet", **how, **more)
    facts = {"distance": float(found["frechet"])}
    if model == "monolith":
        return facts
    partition, config = load(campaign.store), campaign.config
    inertia, images, k = partition.about.inertia, config.budget.samples, config.partition.k
    rows = sum(partition.masses)
    batch = config.budget.expert_batch or config.train.batch
    share = 1 - config.router.share
    return {
        **facts,
        "steps": share * images / k / batch,
        "inertia": inertia.clusters / inertia.random if inertia else 1.0,  # none: cut at random
        "rows": rows / k,
        "epochs": images / rows,
    }


# The line.


def fitted(facts: Sequence[Mapping[str, float]], factors: Sequence[str]) -> np.ndarray[Any, Any]:
    """Constant and exponents."""
    table = np.array([[1, *(FACTORS[name](each) for name in factors)] for each in facts])
    return np.linalg.lstsq(table, np.log([each["ratio"] for each in facts]), rcond=None)[0]


def predicted(line: np.ndarray[Any, Any], facts: Mapping[str, float], factors: Sequence[str]) -> float:
    """The ratio that a line gives."""
    return float(np.exp(line @ [1, *(FACTORS[name](facts) for name in factors)]))


def rows_of(facts: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Ratios, and for every choice of factors how far each is from what the line of the others says."""
    rows = [row(name, metric, value) for name, each in facts.items() for metric, value in each.items()]
    for count in range(min(4, len(facts) - 2)):
        for factors in combinations(FACTORS, count):
            called = "line of " + (", ".join(factors) or "nothing: their mean")
            errors = []
            for name, each in facts.items():
                others = [other for known, other in facts.items() if known != name]
                errors.append(
                    abs(math.log(predicted(fitted(others, factors), each, factors) / each["ratio"]))
                )
            line = fitted([*facts.values()], factors)
            rows.append(
                row(called, "median error of a campaign left out", math.expm1(float(np.median(errors))))
            )
            rows.append(row(called, "largest error of a campaign left out", math.expm1(max(errors))))
            for name, value in zip(("constant", *factors), line, strict=True):
                rows.append(row(called, f"exponent of {name}" if name in factors else name, float(value)))
            for name, (known, ratio) in ELSEWHERE.items():
                guess = predicted(line, known, factors)
                rows.append(row(called, f"{name}: predicted over measured", guess / ratio))
    return rows


if __name__ == "__main__":
    main()
