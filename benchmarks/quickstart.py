"""The quickstart as a user runs it: time, equal training FLOPs, and the ensemble against the monolith.

    python benchmarks/quickstart.py [--quick] [--seeds 0 1 2] [--json PATH]
    python benchmarks/quickstart.py --campaigns campaigns/quickstart [--json PATH]

Every seed is a campaign of its own (`atoll quickstart --set seed=S`), run one after the other. Finished ones,
as `make demo` leaves them, are only read. The ratio of a campaign is the ensemble's distance over the
monolith's, from the same conditions and the same noise; its seconds are those of all stages, installation
apart. A second run of the first campaign measures what finished stages cost.
"""

import json
import tempfile
import time
from pathlib import Path

from harness import TINY, finish, flags, median_row, parsed, parser, ratios, row, run_command


def main() -> None:
    """Run the quickstarts, or read them."""
    words = parser(__doc__, "smaller, in under two minutes; ratios mean little then")
    words.add_argument("--seeds", type=int, nargs="+", default=[0])
    words.add_argument("--campaigns", type=Path, nargs="+", help="where they are, and stay")
    options = parsed(words)
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.campaigns or [Path(scratch) / f"seed-{seed}" for seed in options.seeds]
        for seed, folder in zip(options.seeds, folders, strict=False):
            if not (folder / "reports/summary.json").is_file():
                sets = [f"seed={seed}", *(TINY if options.quick else [])]
                run_command("quickstart", "--dir", folder, *flags(sets))
        runs = [json.loads((folder / "reports/summary.json").read_text()) for folder in folders]
        again = time.monotonic()
        run_command("quickstart", "--dir", folders[0])
        again = time.monotonic() - again
    apart = [abs(run["flops_ratio"] - 1) for run in runs]
    rows = [
        median_row("quickstart", "seconds", [run["seconds"] for run in runs], "s", target=("<=", 300)),
        row("second run", "seconds", again, "s", target=("<=", 30)),
        median_row("experts + router", "|FLOPs / monolith's - 1|", apart, target=("<=", 0.01)),
    ]
    distances = {name: [run["distance"][name] for run in runs] for name in runs[0]["distance"]}
    for name in (name for name in distances if name != "monolith"):
        over = ratios(distances[name], distances["monolith"])
        target = ("<=", 1.0) if name == runs[0]["default"] else None
        rows.append(median_row(name, "distance / monolith", over, target=target))
    rows.append(median_row("monolith", "distance", distances["monolith"]))
    finish("quickstart", rows, options, {"metric": runs[0]["metric"]})


if __name__ == "__main__":
    main()
