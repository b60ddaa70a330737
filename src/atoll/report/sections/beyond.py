"""What a comparison measured beyond its table: other guidance, the way of the training, the same noise."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.campaign.measured import Comparison
from atoll.report.charts import Axis, Chart, Series, linear_axis, log_axis
from atoll.report.facts import Facts, Point, pixelated
from atoll.report.palette import DENSE, model_name, model_styles

MOST_PAIRS = 12


def section(facts: Facts) -> dict[str, Any] | None:
    """Everything that the part shows; None before anything of it was measured."""
    compared = facts.comparison
    if compared is None or not any(table.rows for table in compared.tables.present().values()):
        return None
    rows = [*compared.records("guidance"), *compared.records("curve")]
    styles = model_styles(row["model"] for row in rows)
    return {
        "guidance": _guidance(compared, styles),
        "curve": _curve(compared, styles),
        "pairs": _pairs(facts, compared),
    }


def _paths(rows: Sequence[Mapping[str, Any]], column: str) -> dict[str, list[Point]]:
    """Distance over a column, by model."""
    paths: dict[str, list[Point]] = {}
    for row in rows:
        if row[column] is not None and (row["distance"] or 0) > 0:
            paths.setdefault(str(row["model"]), []).append((row[column], row["distance"]))
    return {name: sorted(path) for name, path in paths.items()}


def _series(paths: Mapping[str, Sequence[Point]], styles: Mapping[str, str]) -> list[Series]:
    return [Series(model_name(name), styles[name], path) for name, path in paths.items()]


def _guidance(compared: Comparison, styles: Mapping[str, str]) -> dict[str, Any] | None:
    """Distance over guidance, and each model at its best."""
    rows = compared.records("guidance")
    if not rows:
        return None
    chart, lines = None, _series(_paths(rows, "guidance"), styles)
    if lines:
        scales = sorted({scale for line in lines for scale, _ in line.points})
        edge = 0.02 * (scales[-1] - scales[0] or 1.0)
        marks = scales if len(scales) <= 8 else linear_axis("", scales).marks
        x = Axis("guidance", scales[0] - edge, scales[-1] + edge, marks=marks)
        y = linear_axis("distance", [value for line in lines for _, value in line.points])
        chart = Chart("Distance over the guidance scale", lines, x, y)
    return {"chart": chart, "best": [r for r in compared.records("best") if r["guidance"] is not None]}


def _curve(compared: Comparison, styles: Mapping[str, str]) -> dict[str, Any] | None:
    """Distance over training FLOPs. The ensemble's lines begin where shared pretraining's ends."""
    rows = compared.records("curve")
    if not rows:
        return None
    relative = any(row["model"] == "monolith" for row in rows)
    paths = _paths(rows, "of_monolith" if relative else "train_flops")
    start = paths.get("pretrain", [])[-1:]
    lines = _series({name: path if name in DENSE else start + path for name, path in paths.items()}, styles)
    chart = None
    if lines:
        most = max(spent for line in lines for spent, _ in line.points)
        x = linear_axis("training FLOPs", [0.0, most])
        if relative:
            marks, end = (0, 0.25, 0.5, 0.75, 1), max(1.02, 1.01 * most)
            x = Axis("training FLOPs, of the monolith’s", 0.0, end, marks=marks, label="{:.0%}".format)
        y = log_axis("distance", [value for line in lines for _, value in line.points])
        guides = [("", distance) for _, distance in paths.get("monolith", [])[-1:]]
        chart = Chart("Distance over training FLOPs", lines, x, y, guides)
    reach, pretrain = compared.records("reach"), "pretrain" in paths
    return {"chart": chart, "relative": relative, "pretrain": pretrain, "reach": reach}


def _pairs(facts: Facts, compared: Comparison) -> dict[str, Any] | None:
    """Correlations by strategy, and the pictures to look at, monolith and strategy side by side."""
    lines: dict[tuple[str, str], dict[str, Any]] = {}
    for row in compared.records("pairs"):
        lines.setdefault((str(row["strategy"]), str(row["space"])), {})[str(row["partner"])] = row
    if not lines:
        return None
    names = [name for name, _ in lines]
    routings = [name for name in names if name not in DENSE] or names
    chosen = compared.default if compared.default in routings else routings[0]
    sides = (facts.pictures.get(name, ()) for name in ("monolith", chosen))
    shown = [both for both in zip(*sides, compared.prompts, strict=False) if both[0] and both[1]]
    small = pixelated([picture for one, other, _ in shown for picture in (one, other)])
    return {"lines": lines, "chosen": chosen, "pictures": shown[:MOST_PAIRS], "pixelated": small}
