"""What finished campaigns measured, side by side: every model and strategy over the monolith, over seeds.

    python benchmarks/campaigns.py NAME campaigns/quickstart campaigns/seed1 campaigns/seed2 [--over monolith]
    python benchmarks/campaigns.py NAME --quick

Reads `reports/compare.json` as `atoll compare` leaves it, and tells what `atoll compare A B C` tells, as a
benchmark's result: the median with the range; for a difference the mean with its 95 % interval (Student's t
over seeds). `--quick` trains two tiny campaigns by itself, whose distances mean nothing.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import finish, median_row, row, tiny

from atoll.measure.seeds import over_seeds, unlike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the result")
    parser.add_argument("campaigns", type=Path, nargs="*")
    parser.add_argument("--quick", action="store_true", help="two tiny campaigns of its own")
    parser.add_argument("--over", default="monolith", help="the model that others are held against")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    if options.quick == bool(options.campaigns):
        parser.error("give campaigns, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.campaigns or [tiny(Path(scratch), seed) for seed in (0, 1)]
        found = [json.loads((folder / "reports/compare.json").read_text()) for folder in folders]
    for folder, other in zip(folders, found, strict=True):
        if differs := unlike(found[0], other):
            parser.error(f"{folder} was measured otherwise than {folders[0]}: {', '.join(differs)}")
    real = [one["metric"]["real_training_pictures"] for one in found]
    lines = [*table(found, options.over), median_row("real training pictures", "distance", real)]
    finish(options.name, lines, options.json, {"metric": found[0]["metric"], "quick": options.quick})


def table(found: Sequence[dict[str, Any]], over: str) -> list[dict[str, Any]]:
    """Rows for what all campaigns measured."""
    lines = []
    for one in over_seeds(found, over):
        # Where a campaign has no number, the others' median says so: one that never got there is a miss.
        of = "" if len(one.values) == len(found) else f", in {len(one.values)} of {len(found)}"
        if one.measure.startswith("distance - "):
            lines.append(row(one.model, f"{one.measure}, 95 %", one.mean, spread=one.interval))
        else:
            lines.append(median_row(one.model, one.measure + of, one.values))
    return lines


if __name__ == "__main__":
    main()
