"""Balance of the clusters, a map of some rows, their contact sheets, and how far each expert is."""

from typing import Any

from atoll.data.formats import ClusterMap
from atoll.report.facts import Facts

SIDE, MARGIN = 440, 10
"""Width of the map, and what stays free around it."""
Dot = tuple[float, float]


def section(facts: Facts) -> dict[str, Any]:
    """For each cluster its run, sizes, sheet and words; the even size, the longest bar, and a map."""
    partition = facts.partition
    found = facts.optional(ClusterMap.PLACE, ClusterMap)
    words = [*(found.words if found else []), *[[]] * partition.k]
    cards = [
        {
            "run": run,
            "size": size,
            "heldout": rows,
            "sheet": facts.picture(f"partition/sheets/{number}.png"),
            "words": ", ".join(words[number]),
        }
        for number, (run, size, rows) in enumerate(
            zip(facts.experts, partition.sizes, partition.heldout, strict=False)
        )
    ]
    total = sum(partition.sizes)
    even = total / partition.k
    whole = {"cards": cards, "total": total, "even": even, "longest": max(*partition.sizes, even)}
    return {**whole, "map": placed(found) if found and found.points else None}


def placed(found: ClusterMap) -> dict[str, Any]:
    """The map in pixels, both axes to one scale: dots in drawing order, the names' places, the height."""
    across, down = ([point[axis] for point in found.points] for axis in (0, 1))
    scale = (SIDE - 2 * MARGIN) / max(max(across) - min(across), max(down) - min(down), 1e-9)
    dots = [
        (round(MARGIN + (x - min(across)) * scale, 1), round(MARGIN + (max(down) - y) * scale, 1), cluster)
        for x, y, cluster in found.points
    ]
    mine: dict[int, list[Dot]] = {}
    for left, top, cluster in dots:
        mine.setdefault(cluster, []).append((left, top))
    names = {cluster: middle(places) for cluster, places in sorted(mine.items())}
    height = round(2 * MARGIN + (max(down) - min(down)) * scale, 1)
    return {"dots": dots, "names": names, "height": height, "width": SIDE, "explained": found.explained}


def middle(places: list[Dot]) -> Dot:
    """Where a cluster is densest, about: the medians of its dots."""
    left, top = (sorted(place[axis] for place in places)[len(places) // 2] for axis in (0, 1))
    return left, top
