"""The table of models and routings."""

from typing import Any

from atoll.report.facts import Facts


def section(facts: Facts) -> dict[str, Any] | None:
    """What the table's numbers are held against; None before anything was compared."""
    compared = facts.comparison
    if compared is None:
        return None
    floor = compared.metric.get("real_training_pictures")
    return {
        "floor": floor,
        "longest": max([row.distance or 0.0 for row in compared.rows] + [floor or 0.0]) or 1.0,
        "precision": any(row.precision is not None for row in compared.rows),
        "real": {"k": None, "real_precision": None, "real_recall": None}
        | (compared.metric.get("neighbours") or {}),
    }
