"""What happens while sampling, for the section `Why`: who serves, how steady paths are and where they end."""

from typing import Any

from atoll.campaign.diagnosed import Diagnosis
from atoll.report.charts import Series, by_time
from atoll.report.facts import Facts
from atoll.report.palette import model_styles


def section(facts: Facts) -> dict[str, Any] | None:
    """Tables of strategies and lines over t; None before `atoll diagnose`."""
    diagnosis = facts.diagnosis
    if diagnosis is None:
        return None
    stability = diagnosis.select("stability")
    changes = {r["strategy"]: r for r in diagnosis.select("switches", step="all")}
    moving = [name for name, row in changes.items() if row["rate"]]
    return {
        "changes": changes,
        "switches": by_time(
            "Share of samples whose leading expert changes",
            _lines(diagnosis, moving, "switches", "rate"),
            "share of samples",
            zero=True,
        ),
        "usage": _by_expert(diagnosis, "usage", "expert"),
        "most_used": max(
            (max(r["used"], r["size"], r["asked"]) for r in diagnosis.select("usage")), default=1.0
        ),
        "landing": _by_expert(diagnosis, "landing", "cluster"),
        "stability": stability,
        "foreseen": by_time(
            "How fast the foreseen picture changes with the state",
            _lines(diagnosis, [row["strategy"] for row in stability], "lipschitz", "foreseen"),
            "change",
            zero=True,
        ),
    }


def _by_expert(diagnosis: Diagnosis, table: str, column: str) -> dict[Any, dict[str, Any]]:
    """Rows of a table by expert (or `all`), and by strategy."""
    rows: dict[Any, dict[str, Any]] = {}
    for row in diagnosis.select(table):
        rows.setdefault(row[column], {})[row["strategy"]] = row
    return rows


def _lines(diagnosis: Diagnosis, names: list[str], table: str, column: str) -> list[Series]:
    """A line over t for every strategy."""
    styles = model_styles(names)
    return [
        Series(
            name,
            styles[name],
            [
                (row["t"], row[column])
                for row in diagnosis.select(table, strategy=name)
                if row["t"] is not None and row[column] is not None
            ],
        )
        for name in names
    ]
