"""What a comparison measured beyond its table: other guidance, the way of the training, the same noise."""

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from atoll.campaign.results import Comparison
from atoll.report import figures
from atoll.report.campaign import Campaign, Point
from atoll.report.figures import Axis, Series
from atoll.report.sections import Section
from atoll.report.wording import clean, finite, percent

Row = dict[str, Any]
STRATEGIES = ("selected", "mixture", "own", "router")
"""CSS classes of the strategies' colours, in order."""
DENSE = {"monolith": "Monolith", "pretrain": "Shared pretraining", "student": "Student"}
MOST_PAIRS = 12


def section(campaign: Campaign) -> Section | None:
    """Everything that the part shows; None before anything of it was measured."""
    compared = campaign.comparison
    if compared is None or not any(table.rows for table in compared.tables.values()):
        return None
    return {
        "guidance": _guidance(compared) if compared.records("guidance") else None,
        "curve": _curve(compared) if compared.records("curve") else None,
        "pairs": _pairs(campaign, compared) if compared.records("pairs") else None,
    }


def _styles(compared: Comparison) -> dict[str, str]:
    """One colour for each model in all charts."""
    rows = [*compared.records("guidance"), *compared.records("curve")]
    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    own = [name for name in names if name not in DENSE]
    return {name: name for name in names if name in DENSE} | {
        name: STRATEGIES[n % len(STRATEGIES)] for n, name in enumerate(own)
    }


def _line(rows: Sequence[Row], model: str, x: Callable[[Row], float | None]) -> list[Point]:
    points = [(x(row), finite(row["distance"])) for row in rows if str(row["model"]) == model]
    return [(px, py) for px, py in points if px is not None and py is not None and py > 0]


def _shown(name: str) -> str:
    return DENSE.get(name, clean(name))


def _guidance(compared: Comparison) -> Section:
    """Distance over guidance, and each model at its best."""
    styles, rows = _styles(compared), compared.records("guidance")
    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    paths = {name: sorted(_line(rows, name, lambda r: finite(r["guidance"]))) for name in names}
    lines = [Series(_shown(name), styles[name], path, dots=True) for name, path in paths.items()]
    lines = [one for one in lines if one.points]
    best = [
        {**row, "name": _shown(str(row["model"]))}
        for row in compared.records("best")
        if row["guidance"] is not None
    ]
    edge = any(row["edge"] for row in best)
    return {"chart": _chart(lines), "legend": _legend(lines), "best": best, "edge": edge}


def _chart(lines: Sequence[Series]) -> Markup | None:
    if not lines:
        return None
    scales = sorted({x for one in lines for x, _ in one.points})
    wide = figures.linear_axis("guidance", scales)
    marks = scales if len(scales) <= 8 else wide.marks
    edge = 0.02 * (scales[-1] - scales[0] or 1.0)
    x = Axis("guidance", scales[0] - edge, scales[-1] + edge, marks=marks, label=lambda v: f"{v:g}")
    y = figures.linear_axis("distance", [v for one in lines for _, v in one.points])
    names = ", ".join(one.name for one in lines)
    return figures.line_chart(lines, x, y, f"Distance over the guidance scale: {names}")


def _legend(lines: Sequence[Series]) -> list[tuple[str, str]]:
    return [(one.name, one.style) for one in lines]


def _curve(compared: Comparison) -> Section:
    """Distance over training FLOPs. The ensemble's lines begin where shared pretraining's ends."""
    styles, rows = _styles(compared), compared.records("curve")
    relative = any(row["model"] == "monolith" for row in rows)
    column = "of_monolith" if relative else "train_flops"
    names = list(dict.fromkeys(str(row["model"]) for row in rows))
    paths = {name: _line(rows, name, lambda r: finite(r[column])) for name in names}
    start = paths.get("pretrain", [])[-1:]
    lines = [
        Series(_shown(n), styles[n], path if n in DENSE else [*start, *path], dots=True)
        for n, path in paths.items()
        if path
    ]
    return {
        "chart": _course(lines, relative, paths.get("monolith", [])),
        "legend": _legend(lines),
        "relative": relative,
        "pretrain": "pretrain" in paths,
        "reach": [
            {**row, "name": _shown(str(row["model"])), "words": _reached(row)}
            for row in compared.records("reach")
        ],
    }


def _course(lines: Sequence[Series], relative: bool, monolith: Sequence[Point]) -> Markup | None:
    if not lines:
        return None
    most = max(x for one in lines for x, _ in one.points)
    title = "training FLOPs, of the monolith’s" if relative else "training FLOPs"
    x = figures.linear_axis(title, [0.0, most])
    if relative:
        marks = (0, 0.25, 0.5, 0.75, 1)
        x = Axis(title, 0.0, max(1.02, 1.01 * most), marks=marks, label=lambda v: f"{v:.0%}")
    y = figures.log_axis("distance", [v for one in lines for _, v in one.points])
    guides = [("", monolith[-1][1])] if monolith else []
    names = ", ".join(one.name for one in lines)
    return figures.line_chart(lines, x, y, f"Distance over training FLOPs: {names}", guides)


def _reached(row: Row) -> str:
    share = finite(row["of_monolith"])
    if share is None:
        return "not reached"
    return ("at most " if row["how"] == "at the first point" else "") + percent(share)


def _pairs(campaign: Campaign, compared: Comparison) -> Section:
    """Correlations by strategy, and the pictures to look at, monolith and strategy side by side."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in compared.records("pairs"):
        found.setdefault((str(row["strategy"]), str(row["space"])), {})[str(row["partner"])] = row
    lines = [
        {
            "name": _shown(name),
            "space": clean(space),
            "same": by.get("same noise"),
            "cluster": by.get("same cluster"),
            "any": by.get("any"),
        }
        for (name, space), by in found.items()
    ]
    names = list(dict.fromkeys(name for name, _ in found))
    routings = [name for name in names if name not in DENSE] or names
    chosen = campaign.default if campaign.default in routings else routings[0]
    sides = (campaign.pictures.get(name, ()) for name in ("monolith", chosen))
    shown = [
        (one, other, prompt)
        for one, other, prompt in zip(*sides, compared.prompts, strict=False)
        if one is not None and other is not None
    ]
    widest = max((max(one.width, other.width) for one, other, _ in shown), default=0)
    return {
        "lines": lines,
        "chosen": _shown(chosen),
        "pictures": shown[:MOST_PAIRS],
        "pixelated": widest <= 64,
    }
