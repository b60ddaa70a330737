"""The quickstart as a user runs it: time, equal training FLOPs, and the ensemble against the monolith.

    python benchmarks/quickstart.py [--quick] [--seeds 0 1 2] [--dir DIR] [--json PATH]

Every seed is a campaign of its own (`atoll quickstart --set seed=S`), run one after the other. The ratio of a
seed is the ensemble's distance over the monolith's, from the same conditions and the same noise. A second run
of the first campaign measures what finished stages cost.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import finish, median_row, row

QUICK = [
    "data.ingest.glyphs.limit=1200",
    "budget.samples=8000",
    "compare.samples=150",
    "compare.fit_rows=300",
    "compare.steps=8",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="smaller, in under two minutes; ratios mean little then"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--dir", type=Path, help="keep the campaigns here")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.dir or Path(scratch)
        runs = [run(folder / f"seed-{seed}", seed, options.quick) for seed in options.seeds]
        again = time.monotonic()
        quickstart(folder / f"seed-{options.seeds[0]}", options.seeds[0], options.quick)
        again = time.monotonic() - again
    table = [
        median_row("quickstart", "seconds", [r["wall"] for r in runs], "s", target=("<=", 720)),
        row("second run", "seconds", again, "s", target=("<=", 30)),
        median_row(
            "experts + router",
            "training FLOPs / monolith",
            [r["flops_ratio"] for r in runs],
            target=("<=", 1.01),
        ),
        median_row(
            "experts + router",
            "training FLOPs / monolith (least)",
            [r["flops_ratio"] for r in runs],
            target=(">=", 0.99),
        ),
    ]
    for name in runs[0]["distance"]:
        if name != "monolith":
            ratios = [r["distance"][name] / r["distance"]["monolith"] for r in runs]
            target = {"target": ("<=", 1.0)} if name == runs[0]["default"] else {}
            table.append(median_row(name, "distance / monolith", ratios, **target))
    table.append(median_row("monolith", "distance", [r["distance"]["monolith"] for r in runs]))
    finish(
        "quickstart",
        table,
        options.json,
        {"metric": runs[0]["metric"], "seeds": options.seeds, "quick": options.quick},
    )


def run(folder: Path, seed: int, quick: bool) -> dict:
    start = time.monotonic()
    quickstart(folder, seed, quick)
    wall = time.monotonic() - start
    summary = json.loads((folder / "reports/summary.json").read_text())
    return {**summary, "wall": wall, "default": "commit"}


def quickstart(folder: Path, seed: int, quick: bool) -> None:
    sets = [f"seed={seed}", *(QUICK if quick else [])]
    argv = [sys.executable, "-m", "atoll", "quickstart", "--dir", str(folder)]
    subprocess.run([*argv, *(part for s in sets for part in ("--set", s))], check=True)


if __name__ == "__main__":
    main()
