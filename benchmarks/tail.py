"""The long tail: rare and common concepts by single network and ensemble, as they are and drawn by weight.

    python benchmarks/headline.py train --source emoji64 --to headline --seeds 3 --only \\
        "batch 8, rate 0.002, 400,000" "share nothing, 400,000" "drawn by weight"
    python benchmarks/tail.py --to headline [--json PATH]
    python benchmarks/tail.py --quick

The campaigns are those of `headline.py`; drawn by weight, a concept in more than 20 rows counts for 20
(MetaCLIP's rule), at the same FLOPs. All draw the same prompts from the same noise; see `atoll concepts
evaluate`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import finish, row
from headline import ALONE, APART, ENTRIES, EVEN, SPLIT, Entry, names, train

from atoll.campaign.folder import Campaign
from atoll.curate.audit import audit_stage, index_stage
from atoll.curate.fit import fit
from atoll.curate.tail import KINDS, REAL, RESULTS, TailPrompts, evaluate_stage, tail_stage

WEIGHTED = ", drawn by weight"
MODELS = {
    "single": ("single, batch 8, rate 0.002, 400,000 images", "monolith"),
    "islands": (f"{APART}, 400,000 images", "ensemble:top-1"),
    "islands, full": (f"{APART}, 400,000 images", "ensemble:full"),
    f"single{WEIGHTED}": (f"single{WEIGHTED}, batch 8, rate 0.002, 400,000 images", "monolith"),
    f"islands{WEIGHTED}": (f"{APART}{WEIGHTED}, 400,000 images", "ensemble:top-1"),
}
"""Entry of `headline.py`, and the model of it."""
STYLES = ("{}, openmoji style", "{}, google style", "{}, twitter style", "{}, fluent3d style")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, help="folder of the campaigns of headline.py")
    parser.add_argument("--seed", type=int, default=3, help="of the campaigns")
    parser.add_argument("--n", type=int, default=60, help="rare concepts")
    parser.add_argument("--each", type=int, default=1, help="pictures of a prompt, of four for each concept")
    parser.add_argument("--quick", action="store_true", help="two tiny campaigns of its own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            models, n = tiny(Path(folder)), 3
            report(judged(models, n, 1, {"steps": 2}, ("{}",)), options.json)
    elif options.to:
        folders = {one.name: one.folder(options.to, options.seed) for one in ENTRIES}
        models = {name: (folders[of], model) for name, (of, model) in MODELS.items()}
        ready = {name: one for name, one in models.items() if trained(*one)}
        report(judged(ready, options.n, options.each, {"steps": 20, "guidance": 2.0}, STYLES), options.json)
    else:
        parser.error("give --to FOLDER or --quick")


def trained(folder: Path, model: str) -> bool:
    card = "monolith/expert/card.json" if model == "monolith" else "ensemble/ensemble.json"
    return (folder / card).exists()


def tiny(folder: Path) -> dict[str, tuple[Path, str]]:
    """Campaigns whose pictures mean nothing, as they are and drawn by weight."""
    text = ("condition=text", "network.family=pixart", "data.text_length=8", "partition.k=2")
    small = (*text, "budget.samples=640", "network.depth=1", "train.batch=16", "router.train.batch=16")
    found = {}
    for weighted in (False, True):
        sets = (*small, *ALONE[1:], *(EVEN if weighted else ()))
        entry = Entry(f"islands{WEIGHTED * weighted}", sets, weighted=weighted)
        data = ("data.ingest.glyphs.limit=300", f"data.path={folder / 'data'}")
        train(entry, entry.folder(folder, 0), 0, ["quickstart", *SPLIT, *data], alone=False)
        found[entry.name] = (entry.folder(folder, 0), "ensemble:top-1")
    return found


def judged(
    models: dict[str, tuple[Path, str]],
    n: int,
    each: int,
    how: dict[str, Any],
    templates: tuple[str, ...],
) -> dict[str, list[dict[str, Any]]]:
    """Rows of `tail.csv` by model; prompts are those of the first campaign's counts."""
    prompts, found = None, {}
    for name, (folder, model) in models.items():
        campaign = Campaign.open(folder)
        index_stage(campaign, names(campaign, folder), 1, "phrase")
        audit_stage(campaign, 0.7)
        if prompts is None:
            prompts = tail_stage(campaign, n, least=3, templates=templates)
        campaign.store.put_json(TailPrompts.PLACE, prompts.to_json())
        compare = campaign.config.compare
        space = (compare.extractor, compare.extractor_size)
        rows = [one.model_dump() for one in evaluate_stage(campaign, [model], space, each, generation=how)]
        (folder / RESULTS).rename(folder / RESULTS.replace(".csv", f"-{model.replace(':', '-')}.csv"))
        found.setdefault(REAL, [one for one in rows if one["model"] == REAL])
        found[name] = [one for one in rows if one["model"] != REAL]
    return found


def report(found: dict[str, list[dict[str, Any]]], path: Path | None) -> None:
    """Means with intervals over concepts, slopes over frequency, and differences of paired concepts."""
    rows = []
    for name, of in found.items():
        for value in ("hit", "rank"):
            for kind in KINDS:
                values = np.array([one[value] for one in of if one["kind"] == kind])
                rows.append(row(f"{name}: {kind}", value, float(values.mean()), "", interval(values)))
        for count in ("rows", "best_expert", "routed"):
            x, ranks = ([one[value] for one in of] for value in (count, "rank"))
            if len(of) > 3 and None not in x and len(set(ranks)) > 1:
                slope = fit(x, ranks).slope
                case = f"{name}: rank over {count.replace('_', ' ')}"
                rows.append(row(case, "for ten times", slope.value, "", slope[1:]))
    for name in found:
        other = name.removesuffix(WEIGHTED)
        if other != name and other in found:
            for kind in KINDS:
                before = {one["concept"]: one["rank"] for one in found[other] if one["kind"] == kind}
                gains = [one["rank"] - before[one["concept"]] for one in found[name] if one["kind"] == kind]
                gain = np.array(gains)
                rows.append(row(f"{name}: {kind}", "rank gained", float(gain.mean()), "", interval(gain)))
    finish("tail", rows, path, {"concepts": found})


def interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    """95 % of a bootstrap over concepts."""
    draws = np.random.default_rng(0).choice(values, (1000, len(values))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return float(low), float(high)


if __name__ == "__main__":
    main()
