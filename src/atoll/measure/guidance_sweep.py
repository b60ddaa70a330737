"""A guidance sweep: every model at every scale, and each at its own best."""

from collections.abc import Sequence
from typing import Any

from atoll.base.console import say
from atoll.campaign.results import ComparedModel, Record, Table
from atoll.measure.comparison import BASE, Bench
from atoll.measure.departure import WIDE
from atoll.measure.table import Cell, number, ratio_of

MEASURED = ("distance", "precision", "recall")
GUIDANCE = ("model", "guidance", *MEASURED)
BEST = (*GUIDANCE, "edge", "ratio")


def guidance_sweep(bench: Bench, request: dict[str, Any]) -> dict[str, Table]:
    """Tables `guidance` and `best`.

    Args:
        bench: of the comparison.
        request: `models`, that is monolith and student, as far as there are any, and routing strategies; and
            `guidances`, rising.
    """
    say(f"compare: guidance {', '.join(f'{scale:g}' for scale in request['guidances'])}")
    lines: list[list[Cell]] = []
    for name in request["models"]:
        for scale in request["guidances"]:
            row, new = bench.row(bench.model(name), name, scale, bench.config.samples)
            tell(name, f"guidance {scale:<6g}", row, new)
            lines.append([name, scale, *(getattr(row, key) for key in MEASURED)])
    table = Table.of(GUIDANCE, lines)
    best = best_table(table.records)
    for record in best.records:
        ratio = f"   {record['ratio']:.3f} of the monolith's" if record["ratio"] is not None else ""
        edge = ", the last scale tried" if record["edge"] else ""
        say(f"  {record['model']:<{WIDE}} best at guidance {record['guidance']:g}{edge}{ratio}")
    return {"guidance": table, "best": best}


def tell(name: str, where: str, row: ComparedModel, new: bool) -> None:
    """Print a point."""
    spent = f"{row.seconds:.0f} s" if new else "known"
    say(f"  {name:<{WIDE}} {where}   distance {row.distance:8.3f}   {spent}")


def best_table(rows: Sequence[Record]) -> Table:
    """Each model at its own best guidance: the smallest distance, of equal ones the smaller scale.

    Args:
        rows: of the table `guidance`.

    Returns:
        Per model the row, `edge` (`low` or `high` where the best is at an end of the scales, so that a better
        one may lie beyond; else empty) and `ratio`, its distance over that of the monolith at its own best.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    best = {name: _best([row for row in rows if row["model"] == name]) for name in models}
    base = best.get(BASE)
    lines: list[list[Cell]] = []
    for name, (row, edge) in best.items():
        ratio = None if name == BASE or base is None else ratio_of(row["distance"], base[0]["distance"])
        lines.append([*(row[column] for column in GUIDANCE), edge, ratio])
    return Table.of(BEST, lines)


def _best(rows: Sequence[Record]) -> tuple[Record, str]:
    ordered = sorted(rows, key=lambda row: number(row["guidance"]))
    best = min(ordered, key=lambda row: number(row["distance"]))
    scale = number(best["guidance"])
    if len(ordered) > 1 and best is ordered[-1]:
        return best, "high"
    return best, "low" if len(ordered) > 1 and best is ordered[0] and scale > 0 else ""
