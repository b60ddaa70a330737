"""What finished campaigns measured, side by side: every model and strategy over the monolith, over seeds.

    python benchmarks/campaigns.py NAME campaigns/quickstart campaigns/seed1 campaigns/seed2 [--over monolith]

Reads `reports/compare.json` as `atoll compare` leaves it; campaigns differ in their seed alone. A ratio is
taken within a campaign, where both sides start from the same conditions and the same noise. Of several
campaigns the table has the median with the range, and the mean difference with its 95 % interval (Student's
t over seeds). What all campaigns measured beyond the table stands below it: each model at its own best
guidance, the FLOPs to the monolith's final distance, and how alike pictures of the same noise are.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import finish, interval, median_row, row

MAY_DIFFER = {"seed", "real_training_pictures", "neighbours"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="of the result")
    parser.add_argument("campaigns", type=Path, nargs="+")
    parser.add_argument("--over", default="monolith", help="the model that others are held against")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [json.loads((folder / "reports/compare.json").read_text()) for folder in options.campaigns]
    metric = found[0]["metric"]
    for folder, other in zip(options.campaigns, found, strict=True):
        differs = [key for key, value in metric.items() if alike(other["metric"].get(key)) != alike(value)]
        if set(differs) - MAY_DIFFER:
            parser.error(f"{folder} was measured otherwise than {options.campaigns[0]}: {', '.join(differs)}")
        for name in ("sweep", "curve"):
            if other.get(name) != found[0].get(name) and name in other and name in found[0]:
                parser.error(f"{folder} and {options.campaigns[0]} were asked for another {name}")
    finish(options.name, table(found, options.over), options.json, {"metric": metric})


def alike(value: Any) -> Any:
    """A field of the metric without what the pictures themselves gave."""
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in value.items() if not key.startswith("real_")}


def table(found: Sequence[dict[str, Any]], over: str) -> list[dict[str, Any]]:
    """Rows for what all campaigns measured."""
    models = [{line["name"]: line for line in one["rows"]} for one in found]
    base = [one[over]["distance"] for one in models]
    lines = [median_row(over, "distance", base)]
    for name in models[0]:
        if name == over or any(name not in one for one in models):
            continue
        own = [one[name]["distance"] for one in models]
        lines.append(median_row(name, f"distance / {over}", [a / b for a, b in zip(own, base, strict=True)]))
        if len(own) > 1:
            apart = [a - b for a, b in zip(own, base, strict=True)]
            mean = statistics.mean(apart)
            lines.append(row(name, f"distance - {over}, 95 %", mean, spread=interval(apart)))
        shares = [one[name].get("router_share") for one in models]
        if all(shares):
            lines.append(median_row(name, "router's share of the operations", shares))
    return lines + beyond(found)


def beyond(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for the other tables that all campaigns have."""
    lines = []
    # Where a campaign has no number, the others' median says so: one that never got there counts as missed.
    for table_name, numbers in (
        ("best", {"guidance": "best guidance", "ratio": "distance / monolith, each at its best"}),
        ("reach", {"of_monolith": "training FLOPs to the monolith's final distance / its own"}),
        ("pairs", {"mean": "correlation with the monolith's pictures"}),
    ):
        tables = [records(one, table_name) for one in found]
        for row_name in tables[0] if all(tables) else ():
            for column, metric in numbers.items():
                values = [table.get(row_name, {}).get(column) for table in tables]
                there = [value for value in values if value is not None]
                if there:
                    of = "" if len(there) == len(values) else f", in {len(there)} of {len(values)}"
                    if any(table.get(row_name, {}).get("how") == "at the first point" for table in tables):
                        of += ", at most"
                    lines.append(median_row(", ".join(row_name), f"{metric}{of}", there))
    return lines


def records(one: dict[str, Any], table_name: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of a table of a comparison, by what they are of; none if it was not measured."""
    made = one.get("tables", {}).get(table_name, {"columns": [], "rows": []})
    rows = [dict(zip(made["columns"], values, strict=True)) for values in made["rows"]]
    names = ("model", "strategy", "space", "partner")
    return {tuple(str(line[name]) for name in names if name in line): line for line in rows}


if __name__ == "__main__":
    main()
