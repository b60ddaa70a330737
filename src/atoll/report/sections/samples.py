"""Pictures side by side, one row per prompt."""

from typing import Any

from atoll.report.facts import Facts, pixelated


def section(facts: Facts) -> dict[str, Any] | None:
    """Models, and of every prompt its pictures; None before anything was compared."""
    compared = facts.comparison
    if compared is None or not compared.prompts:
        return None
    rows = [
        (prompt, cluster, [(name, pictures[number]) for name, pictures in facts.pictures.items()])
        for number, (prompt, cluster) in enumerate(zip(compared.prompts, compared.clusters, strict=True))
    ]
    shown = [picture for pictures in facts.pictures.values() for picture in pictures]
    return {"rows": rows, "pixelated": pixelated(shown)}
