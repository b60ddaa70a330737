"""Strips: which expert served each shown sample at which step."""

from typing import Any

from atoll.report.charts import Strip
from atoll.report.facts import Facts

STRIPS = ("once", "top-1", "full")
"""Routings that are shown where they were compared; else the first three."""


def section(facts: Facts) -> dict[str, Any] | None:
    """Names of routings, and of every sample its strips; None before anything was compared."""
    compared = facts.comparison
    if compared is None or not compared.routing:
        return None
    names = [name for name in STRIPS if name in compared.routing] or list(compared.routing)[:3]
    strips = {
        name: [
            Strip(f"{name}, sample {number + 1}", [step[number] for step in compared.routing[name]])
            for number in range(len(compared.prompts))
        ]
        for name in names
    }
    rows = [
        (prompt, cluster, facts.pictures["data"][number], [(name, strips[name][number]) for name in names])
        for number, (prompt, cluster) in enumerate(zip(compared.prompts, compared.clusters, strict=True))
    ]
    return {"names": names, "rows": rows}
