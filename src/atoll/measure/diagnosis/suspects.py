"""Experts that do badly where they should do best: what a compromised island can do, and how it shows."""

from collections.abc import Mapping

from atoll.campaign.results import Table

SUSPECT = 1.1
"""How much larger than another's an expert's error on its own cluster is that is told of."""


def suspects(tables: Mapping[str, Table], split: str) -> dict[int, tuple[float, float, str]]:
    """Experts that a neighbour, or the monolith, surpasses for sure on their own cluster.

    Args:
        tables: `experts` and `errors` of a diagnosis.
        split: whose rows are looked at.

    Returns:
        By expert: its error, the lowest other one, and whose that is.
    """
    errors: dict[int, dict[str, tuple[float, float]]] = {}
    for table, name in (("experts", "expert {}"), ("errors", "{}")):
        key = "expert" if table == "experts" else "model"
        for record in tables[table].records:
            counts = (record["split"], record["t"]) == (split, "mean") and record["se"] is not None
            if counts and record["cluster"] != "all" and (table == "experts" or record[key] == "monolith"):
                values = float(record["error"]), float(record["se"])
                errors.setdefault(int(record["cluster"]), {})[name.format(record[key])] = values
    result = {}
    for cluster, known in errors.items():
        error, se = known.pop(f"expert {cluster}", (0.0, 0.0))
        whose = min(known, key=lambda name: known[name][0], default=None)
        if whose is not None and error - 3 * se > SUSPECT * known[whose][0]:
            result[cluster] = (error, known[whose][0], whose)
    return result
