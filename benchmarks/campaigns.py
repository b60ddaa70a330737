"""What finished campaigns measured, side by side: every model and strategy over the monolith, over seeds.

    python benchmarks/campaigns.py NAME campaigns/quickstart campaigns/seed1 campaigns/seed2 [--over monolith]
    python benchmarks/campaigns.py NAME --quick

Reads `reports/compare.json` as `atoll compare` leaves it, and tells what `atoll compare A B C` tells, as a
benchmark's result: the median with the range; for a difference the mean with its 95 % interval (Student's t
over seeds). `--quick` trains two tiny campaigns by itself, whose distances mean nothing.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import Row, comparison_of, finish, median_row, parsed, parser, row, tiny

from atoll.campaign.measured import Comparison
from atoll.measure.seeds import over_seeds, unlike


def main() -> None:
    """Read the campaigns, or train tiny ones."""
    words = parser(__doc__, "two tiny campaigns of its own")
    words.add_argument("name", help="of the result")
    words.add_argument("campaigns", type=Path, nargs="*")
    words.add_argument("--over", default="monolith", help="the model that others are held against")
    options = parsed(words)
    if options.quick == bool(options.campaigns):
        options.error("give campaigns, or --quick")
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.campaigns or [tiny(Path(scratch), seed) for seed in (0, 1)]
        found = [comparison_of(folder) for folder in folders]
    for folder, other in zip(folders, found, strict=True):
        if differs := unlike(found[0], other):
            options.error(f"{folder} was measured otherwise than {folders[0]}: {', '.join(differs)}")
    real = [comparison.metric["real_training_pictures"] for comparison in found]
    lines = [*table(found, options.over), median_row("real training pictures", "distance", real)]
    finish(options.name, lines, options, {"metric": found[0].metric})


def table(found: Sequence[Comparison], over: str) -> list[Row]:
    """Rows for what all campaigns measured."""
    lines = []
    for line in over_seeds(found, over):
        # Where a campaign has no number, the others' median says so: one that never got there is a miss.
        of = "" if line.campaigns == len(found) else f", in {line.campaigns} of {len(found)}"
        if line.measure.startswith("distance - "):
            ends = None if line.low is None or line.high is None else (line.low, line.high)
            lines.append(row(line.model, f"{line.measure}, 95 %", line.mean, spread=ends))
        else:
            lines.append(row(line.model, line.measure + of, line.median, spread=(line.least, line.most)))
    return lines


if __name__ == "__main__":
    main()
