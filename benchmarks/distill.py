"""The student against a monolith from scratch: distance and training FLOPs, over campaigns of several seeds.

    python benchmarks/distill.py CAMPAIGN [CAMPAIGN ...] [--third CAMPAIGN ...] [--json PATH]
    python benchmarks/distill.py --quick

Campaigns were trained with a student and compared (`atoll launch`, `atoll compare`); they differ in their
seed only. The difference is taken within each campaign, at the same conditions and noise; its interval is
Student's at 95 % over the campaigns. `--third` names campaigns of the same seeds, in the same order, whose
monolith had a third of the budget (`budget.samples`), so that student and monolith cost alike. `--quick`
trains two tiny campaigns by itself, whose distances mean nothing.
"""

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness import Row, comparison_of, finish, median_row, parsed, parser, ratios, row, tiny

from atoll.campaign.measured import Comparison
from atoll.measure.seeds import interval, unlike


def main() -> None:
    """Read the campaigns, or train tiny ones."""
    words = parser(__doc__, "two tiny campaigns of its own, in minutes")
    words.add_argument("campaigns", type=Path, nargs="*")
    words.add_argument("--third", type=Path, nargs="+", default=[])
    options = parsed(words)
    if options.quick == bool(options.campaigns):
        options.error("give campaigns, or --quick")
    if options.third and len(options.third) != len(options.campaigns):
        options.error("give as many campaigns with --third as without")
    with tempfile.TemporaryDirectory() as scratch:
        own = ("student={step_share: 1.0}", "compare.strategies=[top-1]")
        folders = options.campaigns or [tiny(Path(scratch), seed, *own) for seed in (0, 1)]
        found, thirds = ([comparison_of(folder) for folder in some] for some in (folders, options.third))
        for folder, other in zip((*folders, *options.third), (*found, *thirds), strict=True):
            if differs := unlike(found[0], other):
                raise SystemExit(f"{folder} was compared otherwise: {', '.join(differs)}")
    notes = {"metric": found[0].metric, "interval": "Student's at 95 %, over campaigns"}
    finish("distill", table(found, thirds), options, notes)


def table(found: Sequence[Comparison], thirds: Sequence[Comparison]) -> list[Row]:
    """Costs, differences within each campaign, and distances."""

    def distances(name: str, of: Sequence[Comparison] = found) -> list[float]:
        each = [next((line.distance for line in one.rows if line.name == name), None) for one in of]
        if None in each:
            raise SystemExit(f"{name} was not compared in every campaign")
        return [value for value in each if value is not None]

    def flops(name: str, of: Sequence[Comparison] = found) -> list[float]:
        return [one.train_flops[name] for one in of]

    student, monolith, ensemble = distances("student"), distances("monolith"), distances(found[0].default)
    cost = ratios(flops("student"), flops("monolith"))
    lines = [
        median_row("student", "FLOPs / monolith's", cost, target=("<=", 0.34)),
        *difference("student", "monolith", student, monolith, bound=True),
        *difference("ensemble", "monolith", ensemble, monolith),
        *difference("student", "ensemble", student, ensemble),
    ]
    if thirds:
        cost = ratios(flops("monolith", thirds), flops("student"))
        lines.append(median_row("monolith at a third", "FLOPs / student's", cost))
        lines += difference("student", "monolith at a third", student, distances("monolith", thirds))
    for name, values in (("student", student), ("monolith", monolith), ("ensemble", ensemble)):
        lines.append(median_row(name, "distance", values))
    return lines


def difference(
    one: str, other: str, values: Sequence[float], base: Sequence[float], bound: bool = False
) -> list[Row]:
    """Mean and interval of the paired differences, and of their share of the base."""
    apart = [a - b for a, b in zip(values, base, strict=True)]
    lines = [
        row(one, metric, statistics.mean(each), spread=interval(each))
        for metric, each in (
            (f"distance - {other}'s", apart),
            (f"(distance - {other}'s) / it", ratios(apart, base)),
        )
    ]
    if bound and lines[0]["spread"]:
        low = lines[0]["spread"][0]
        lines.append(row(one, "lower end of the difference", low, target=("<=", 0.0)))
    return lines


if __name__ == "__main__":
    main()
