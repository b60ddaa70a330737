"""The quickstart as a user runs it: time, equal training FLOPs, and the ensemble against the monolith.

    python benchmarks/quickstart.py [--quick] [--seeds 0 1 2] [--json PATH]
    python benchmarks/quickstart.py --campaigns campaigns/quickstart [--json PATH]

Every seed is a campaign of its own (`atoll quickstart --set seed=S`), run one after the other; or finished
quickstarts are read, as `make demo` leaves them. The ratio of a campaign is the ensemble's distance over the
monolith's, from the same conditions and the same noise; its seconds are those of all stages, installation
apart. A second run of the first campaign measures what finished stages cost.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from harness import finish, median_row, row, run_command

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
    parser.add_argument("--campaigns", type=Path, nargs="+", help="finished quickstarts to read")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.campaigns or [Path(scratch) / f"seed-{seed}" for seed in options.seeds]
        if not options.campaigns:
            for folder, seed in zip(folders, options.seeds, strict=True):
                quickstart(folder, f"seed={seed}", *(QUICK if options.quick else []))
        runs = [json.loads((folder / "reports/summary.json").read_text()) for folder in folders]
        again = time.monotonic()
        quickstart(folders[0])
        again = time.monotonic() - again
    table = [
        median_row("quickstart", "seconds", [r["seconds"] for r in runs], "s", target=("<=", 720)),
        row("second run", "seconds", again, "s", target=("<=", 30)),
        median_row(
            "experts + router",
            "|FLOPs / monolith's - 1|",
            [abs(r["flops_ratio"] - 1) for r in runs],
            target=("<=", 0.01),
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
        {"metric": runs[0]["metric"], "quick": options.quick},
    )


def quickstart(folder: Path, *sets: str) -> None:
    run_command("quickstart", "--dir", folder, *(part for s in sets for part in ("--set", s)))


if __name__ == "__main__":
    main()
