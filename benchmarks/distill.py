"""The student against a monolith from scratch: distance and training FLOPs, over campaigns of several seeds.

    python benchmarks/distill.py CAMPAIGN [CAMPAIGN ...] [--third CAMPAIGN ...] [--json PATH]
    python benchmarks/distill.py --quick

Campaigns were trained with a student and compared (`atoll launch`, `atoll compare`); they differ in their
seed only. The difference is taken within each campaign, at the same conditions and noise; its interval is
Student's at 95 % over the campaigns. `--third` names campaigns of the same seeds, in the same order, whose
monolith had a third of the budget (`budget.samples`), so that student and monolith cost alike. `--quick`
trains two tiny campaigns by itself, whose distances mean nothing.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from harness import comparison_of, finish, median_row, row, tiny

from atoll.measure.seeds import interval, unlike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("campaigns", type=Path, nargs="*")
    parser.add_argument("--third", type=Path, nargs="+", default=[])
    parser.add_argument("--quick", action="store_true", help="two tiny campaigns of its own, in minutes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_intermixed_args()
    if options.quick == bool(options.campaigns):
        parser.error("give campaigns, or --quick")
    if options.third and len(options.third) != len(options.campaigns):
        parser.error("give as many campaigns with --third as without")
    with tempfile.TemporaryDirectory() as scratch:
        own = "student={step_share: 1.0}"
        folders = options.campaigns or [tiny(Path(scratch), seed, own) for seed in (0, 1)]
        found, thirds = ([read(folder) for folder in some] for some in (folders, options.third))
        for folder in (*folders, *options.third):
            if differs := unlike(comparison_of(folders[0]), comparison_of(folder)):
                raise SystemExit(f"{folder} was compared otherwise: {', '.join(differs)}")
    notes = {
        "metric": found[0]["metric"],
        "quick": options.quick,
        "interval": "Student's at 95 %, over campaigns",
    }
    finish("distill", table(found, thirds), options.json, notes)


def table(found: list[dict[str, Any]], thirds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the result, from what compare.json of each campaign says."""
    student, monolith = ([distance(one, name) for one in found] for name in ("student", "monolith"))
    ensemble = [distance(one, one["default"]) for one in found]
    flops = [one["train_flops"]["student"] / one["train_flops"]["monolith"] for one in found]
    lines = [
        median_row("student", "FLOPs / monolith's", flops, target=("<=", 0.34)),
        *difference("student", "monolith", student, monolith, bound=True),
        *difference("ensemble", "monolith", ensemble, monolith),
        *difference("student", "ensemble", student, ensemble),
    ]
    if thirds:
        small = [distance(one, "monolith") for one in thirds]
        pairs = zip(thirds, found, strict=True)
        ratios = [t["train_flops"]["monolith"] / f["train_flops"]["student"] for t, f in pairs]
        lines.append(median_row("monolith at a third", "FLOPs / student's", ratios))
        lines += difference("student", "monolith at a third", student, small)
    for name, values in (("student", student), ("monolith", monolith), ("ensemble", ensemble)):
        lines.append(median_row(name, "distance", values))
    return lines


def difference(
    one: str, other: str, values: list[float], base: list[float], bound: bool = False
) -> list[dict[str, Any]]:
    """Mean and interval of the paired differences, and of their share of the base."""
    shares = [(a - b) / b for a, b in zip(values, base, strict=True)]
    lines = []
    for metric, each in (
        (f"distance - {other}'s", [a - b for a, b in zip(values, base, strict=True)]),
        (f"(distance - {other}'s) / it", shares),
    ):
        lines.append(row(one, metric, statistics.mean(each), spread=interval(each)))
    if bound and lines[0]["spread"]:
        low = lines[0]["spread"][0]
        lines.append(row(one, "lower end of the difference", low, target=("<=", 0.0)))
    return lines


def distance(found: dict[str, Any], name: str) -> float:
    for line in found["rows"]:
        if line["name"] == name:
            return float(line["distance"])
    raise SystemExit(f"{found['folder']}: {name} was not compared")


def read(folder: Path) -> dict[str, Any]:
    path = folder / "reports/compare.json"
    if not path.is_file():
        raise SystemExit(f"{folder} has not been compared: atoll compare {folder}")
    return {"folder": str(folder), **json.loads(path.read_text())}


if __name__ == "__main__":
    main()
