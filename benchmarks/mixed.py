"""A mixed ensemble against one of flows alone: half of the experts predict noise on the cosine schedule.

    python benchmarks/mixed.py [--quick] [--seeds 0 1 2] [--json PATH]
    python benchmarks/mixed.py --campaigns CAMPAIGNS [--json PATH]

Every seed is a pair of campaigns on the quickstart's glyphs at a smaller budget, without the monolith. Both
have the same data, partition, router, networks, steps and batches; in the mixed one the experts of odd number
learn eps on VP-cosine, and are converted when they are asked. The ratio of a pair is the mixed ensemble's
distance over the other's, from the same conditions and noise; below 1 the mixed one is better. The interval
is that of the mean over seeds, Student's, 95 %, of the logarithms. With `--campaigns` the pairs are kept in
that folder; the same command again does only what is missing.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from harness import finish, median_row, ratio_interval, row
from quickstart import QUICK, quickstart

SETS = ["monolith=false", "budget.samples=150000", "compare.strategies=[once, top-1, full]"]
SMALL = [*QUICK, "compare.strategies=[once]", "compare.samples=100", "compare.steps=4"]
NOISE = "{objective: {schedule: vp-cosine, prediction: eps}}"
MIXED = f"islands={{1: {NOISE}, 3: {NOISE}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="one small pair, in under two minutes; its ratio means little"
    )
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--campaigns", type=Path, help="folder to keep the campaigns in")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    with tempfile.TemporaryDirectory() as scratch:
        root = options.campaigns or Path(scratch)
        pairs = [pair(root, seed, options.quick) for seed in seeds]
    notes = {"metric": pairs[0][0]["metric"], "seeds": seeds, "quick": options.quick}
    finish("mixed", table(pairs), options.json, notes)


def pair(root: Path, seed: int, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the reports of both campaigns of a seed sum up: flows alone, mixed."""
    sets = [*SETS, *(SMALL if quick else []), f"seed={seed}"]
    flow, mixed = root / f"flow-{seed}", root / f"mixed-{seed}"
    quickstart(flow, *sets)
    quickstart(mixed, *sets, MIXED, f"data.path={(flow / 'data').absolute()}")
    one, other = (json.loads((folder / "reports/summary.json").read_text()) for folder in (flow, mixed))
    if one["partition"] != other["partition"]:
        raise SystemExit(f"{flow} and {mixed} have different partitions")
    return one, other


def table(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of the result."""
    costs = [abs(cost(mixed) / cost(flow) - 1) for flow, mixed in pairs]
    rows = [median_row("training", "|FLOPs mixed / flow - 1|", costs, target=("<=", 0.01))]
    for name in pairs[0][0]["distance"]:
        ratios = [mixed["distance"][name] / flow["distance"][name] for flow, mixed in pairs]
        rows.append(median_row(name, "distance, mixed / flow", ratios))
        if len(ratios) > 1:
            mean, spread = ratio_interval(ratios)
            rows.append(row(name, "the same, mean and 95 % interval", mean, spread=spread))
        for case, number in (("flow", 0), ("mixed", 1)):
            rows.append(
                median_row(f"{name}, {case}", "distance", [both[number]["distance"][name] for both in pairs])
            )
    return rows


def cost(summary: dict[str, Any]) -> float:
    """Training operations of experts and router."""
    spent = summary["train_flops"]
    return float(spent["experts"] + spent["router"])


if __name__ == "__main__":
    main()
