"""Balance of the clusters, their contact sheets, and how far each expert is."""

from typing import Any

from atoll.report.facts import Facts


def section(facts: Facts) -> dict[str, Any]:
    """For each cluster its run, size, held-out rows and sheet; the even size and the longest bar."""
    partition = facts.partition
    heldout = [*partition.heldout, *[None] * partition.k]
    cards = [
        {"run": run, "size": size, "heldout": rows, "sheet": facts.picture(f"partition/sheets/{number}.png")}
        for number, (run, size, rows) in enumerate(zip(facts.experts, partition.sizes, heldout, strict=False))
    ]
    total = sum(partition.sizes)
    even = total / partition.k
    return {"cards": cards, "total": total, "even": even, "longest": max(*partition.sizes, even)}
