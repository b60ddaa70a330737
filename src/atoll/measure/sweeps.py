"""What a guidance sweep and a curve over FLOPs come to: the best scale, and when a model is as good."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.measure.streams import Cell, Table

GUIDANCE = ("model", "guidance", "distance", "precision", "recall")
BEST = ("model", "guidance", "distance", "precision", "recall", "edge", "ratio")
CURVE = ("model", "share", "train_flops", "of_monolith", "distance", "precision", "recall")
REACH = ("model", "target", "train_flops", "of_monolith", "how")
BASE = "monolith"

Row = Mapping[str, Cell]
How = Literal["between points", "at the first point", "never"]


def best_table(rows: Sequence[Row]) -> Table:
    """Each model at its own best guidance: the smallest distance, of equal ones the smaller scale.

    Args:
        rows: of the table `guidance`.

    Returns:
        Per model the row, `edge` (`low` or `high` where the best is at an end of the scales, so that a better
        one may lie beyond; else empty) and `ratio`, its distance over that of the monolith at its own best.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    found = {name: _best([row for row in rows if row["model"] == name]) for name in models}
    base = found.get(BASE)
    lines: list[list[Cell]] = []
    for name, (row, edge) in found.items():
        ratio = None if name == BASE or base is None else ratio_of(row["distance"], base[0]["distance"])
        lines.append([*(row[column] for column in GUIDANCE), edge, ratio])
    return Table(BEST, lines)


def _best(rows: Sequence[Row]) -> tuple[Row, str]:
    ordered = sorted(rows, key=lambda row: _number(row["guidance"]))
    best = min(ordered, key=lambda row: _number(row["distance"]))
    scale = _number(best["guidance"])
    if len(ordered) > 1 and best is ordered[-1]:
        return best, "high"
    return best, "low" if len(ordered) > 1 and best is ordered[0] and scale > 0 else ""


def ratio_of(value: Cell, base: Cell) -> float | None:
    """One number over another; None where there is none, or nothing to divide by."""
    if value is None or not base:
        return None
    return _number(value) / _number(base)


@dataclass(frozen=True)
class Reached:
    """When a model is as good as the target.

    Attributes:
        train_flops: operations spent by then; None if it never was.
        how: `between points` is interpolated; `at the first point` it was as good already, and may have been
            before.
    """

    train_flops: float | None
    how: How


def reached(path: Sequence[tuple[float, float]], target: float) -> Reached:
    """Where a path first comes down to a target, by linear interpolation.

    Args:
        path: training FLOPs, rising, and distances.
        target: distance to be reached.
    """
    for number, (flops, distance) in enumerate(path):
        if distance > target:
            continue
        if number == 0:
            return Reached(flops, "at the first point")
        before, above = path[number - 1]
        return Reached(before + (flops - before) * (above - target) / (above - distance), "between points")
    return Reached(None, "never")


def reach_table(rows: Sequence[Row], start: str | None = None) -> Table:
    """When each model reaches the monolith's final distance.

    Args:
        rows: of the table `curve`.
        start: a model that the others begin with (shared pretraining): its points come before theirs.

    Returns:
        Per model the `target`, the training FLOPs of its `Reached`, and these over the monolith's. The
        monolith's own row is what the others are read against: it comes before its end where the monolith no
        longer improves, or by the noise of the distances.
    """
    paths = {
        name: [row for row in rows if row["model"] == name]
        for name in dict.fromkeys(row["model"] for row in rows)
    }
    final = paths.get(BASE, [])[-1:]
    lines: list[list[Cell]] = []
    for name, own in paths.items() if final else ():
        if name == start:
            continue
        target, whole = _number(final[0]["distance"]), final[0]["train_flops"]
        points = [*(paths.get(start, []) if start and name != BASE else []), *own]
        path = [(_number(row["train_flops"]), _number(row["distance"])) for row in points]
        found = reached(path, target)
        lines.append([name, target, found.train_flops, ratio_of(found.train_flops, whole), found.how])
    return Table(REACH, lines)


def _number(value: Cell) -> float:
    assert isinstance(value, int | float)
    return float(value)
