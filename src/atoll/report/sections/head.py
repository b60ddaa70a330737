"""Key figures, and what is still to do."""

from typing import Any

from atoll.report.charts import ring
from atoll.report.facts import Facts


def section(facts: Facts) -> dict[str, Any]:
    """The ring, the models that the tiles are about, runs that are not finished."""
    compared = facts.comparison
    return {
        "ring": ring(facts.partition.sizes),
        "monolith": compared.row("monolith") if compared else None,
        "best": compared.best if compared else None,
        "default": compared.row(compared.default) if compared else None,
        "unfinished": [run for run in facts.runs if not run.finished],
    }
