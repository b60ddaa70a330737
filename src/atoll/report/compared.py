"""Sections of the page about what `atoll compare` and `atoll evaluate` measured."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.campaign.measured import BASE, Comparison, MeasuredPoint, PairRow
from atoll.campaign.roles import SINGLE
from atoll.report.charts import Axis, Chart, Series, Strip, linear_axis, log_axis
from atoll.report.facts import Facts, Point, clean_tree, pixelated
from atoll.report.palette import model_name, model_styles

STRIPS = ("once", "top-1", "full")
"""Routings whose strips are shown where they were compared; else the first three."""
MOST_PAIRS = 12
EVALUATED = "reports/evaluate"
VARIED = ("routing", "guidance", "steps", "seed")
"""Fields of a protocol that a table is about: they may differ within it."""
NAMES = ("reference", "extractor", "code")
"""Fields that decide no number: hashes stand for the first two."""


def samples(facts: Facts) -> dict[str, Any] | None:
    """Of every prompt the pictures of all models, side by side."""
    compared = facts.comparison
    if compared is None or not compared.prompts:
        return None
    rows = [
        (prompt, cluster, [(name, pictures[number]) for name, pictures in facts.pictures.items()])
        for number, (prompt, cluster) in enumerate(zip(compared.prompts, compared.clusters, strict=True))
    ]
    every = [picture for pictures in facts.pictures.values() for picture in pictures]
    return {"rows": rows, "pixelated": pixelated(every)}


def routing(facts: Facts) -> dict[str, Any] | None:
    """Of every prompt a strip for each routing: which expert served the sample at which step."""
    compared = facts.comparison
    if compared is None or not compared.routing:
        return None
    names = [name for name in STRIPS if name in compared.routing] or list(compared.routing)[:3]
    rows = []
    for number, (prompt, cluster) in enumerate(zip(compared.prompts, compared.clusters, strict=True)):
        weights = {name: [step[number] for step in compared.routing[name]] for name in names}
        strips = [(name, Strip(f"{name}, sample {number + 1}", of)) for name, of in weights.items()]
        rows.append((prompt, cluster, facts.pictures["data"][number], strips))
    return {"names": names, "rows": rows}


def strategies(facts: Facts) -> dict[str, Any] | None:
    """What the numbers of the table of models and routings are read against."""
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


def beyond(facts: Facts) -> dict[str, Any] | None:
    """What was measured beyond the table: other guidance, the way of the training, the same noise."""
    compared = facts.comparison
    if compared is None or not any(table.rows for table in compared.tables.present().values()):
        return None
    tables = compared.tables
    rows: list[Any] = [*(tables.guidance or ()), *(tables.curve or ())]
    styles = model_styles(row.model for row in rows)
    return {
        "guidance": _guidance(compared, styles) if tables.guidance else None,
        "curve": _curve(compared, styles) if tables.curve else None,
        "pairs": _pairs(facts, compared, tables.pairs) if tables.pairs else None,
    }


def _paths(rows: Iterable[Any], column: str) -> dict[str, list[Point]]:
    """Distance over a column, by model. No distance of 0 or below: the axis may be logarithmic."""
    paths: dict[str, list[Point]] = {}
    for row in rows:
        if getattr(row, column) is not None and (row.distance or 0) > 0:
            paths.setdefault(row.model, []).append((getattr(row, column), row.distance))
    return {name: sorted(path) for name, path in paths.items()}


def _series(paths: Mapping[str, Sequence[Point]], styles: Mapping[str, str]) -> list[Series]:
    return [Series(model_name(name), styles[name], path) for name, path in paths.items()]


def _guidance(compared: Comparison, styles: Mapping[str, str]) -> dict[str, Any]:
    chart, lines = None, _series(_paths(compared.tables.guidance or (), "guidance"), styles)
    if lines:
        scales = sorted({scale for line in lines for scale, _ in line.points})
        # A dot at the very end would be cut in half by the frame.
        edge = 0.02 * (scales[-1] - scales[0] or 1.0)
        marks = scales if len(scales) <= 8 else linear_axis("", scales).marks
        x = Axis("guidance", scales[0] - edge, scales[-1] + edge, marks=marks)
        y = linear_axis("distance", [value for line in lines for _, value in line.points])
        chart = Chart("Distance over the guidance scale", lines, x, y)
    return {"chart": chart, "best": compared.tables.best or ()}


def _curve(compared: Comparison, styles: Mapping[str, str]) -> dict[str, Any]:
    rows = compared.tables.curve or ()
    # Without a baseline there is nothing to count FLOPs in but themselves.
    relative = any(row.model == BASE for row in rows)
    paths = _paths(rows, "of_monolith" if relative else "train_flops")
    # Before shared pretraining is finished there is no ensemble: its lines begin where pretraining's ends.
    start = paths.get("pretrain", [])[-1:]
    lines = _series({name: path if name in SINGLE else start + path for name, path in paths.items()}, styles)
    chart = None
    if lines:
        most = max(spent for line in lines for spent, _ in line.points)
        x = linear_axis("training FLOPs", [0.0, most])
        if relative:
            marks, end = (0, 0.25, 0.5, 0.75, 1), max(1.02, 1.01 * most)
            x = Axis("training FLOPs, of the monolith’s", 0.0, end, marks=marks, label="{:.0%}".format)
        y = log_axis("distance", [value for line in lines for _, value in line.points])
        guides = [("", distance) for _, distance in paths.get(BASE, [])[-1:]]
        chart = Chart("Distance over training FLOPs", lines, x, y, guides)
    return {
        "chart": chart,
        "relative": relative,
        "pretrain": "pretrain" in paths,
        "reach": compared.tables.reach or (),
    }


def _pairs(facts: Facts, compared: Comparison, pairs: Iterable[PairRow]) -> dict[str, Any]:
    """Correlations by strategy, and the pictures to look at, baseline and strategy side by side."""
    lines: dict[tuple[str, str], dict[str, PairRow]] = {}
    for row in pairs:
        lines.setdefault((row.strategy, row.space), {})[row.partner] = row
    # The pictures are the default routing's where it was compared, since that is what users will see.
    names = [name for name, _ in lines]
    routings = [name for name in names if name not in SINGLE] or names
    chosen = compared.default if compared.default in routings else routings[0]
    sides = (facts.pictures.get(name, ()) for name in (BASE, chosen))
    both = [pair for pair in zip(*sides, compared.prompts, strict=False) if pair[0] and pair[1]]
    return {
        "lines": [(*names, by) for names, by in lines.items()],
        "chosen": chosen,
        "pictures": both[:MOST_PAIRS],
        "pixelated": pixelated([picture for left, right, _ in both for picture in (left, right)]),
    }


def evaluated(facts: Facts) -> list[dict[str, Any]]:
    """A table for every protocol, so that unlike numbers never share one; models sorted by name."""
    points = []
    for key in facts.store.list(EVALUATED):
        if key.endswith(".json") and key.count("/") == EVALUATED.count("/") + 1:
            content = clean_tree(facts.store.get_json(key))
            # Points of another version are passed over: `atoll evaluate` measures them again.
            if not isinstance(content, dict) or MeasuredPoint.fits(content):
                points.append(MeasuredPoint.of_json(content, facts.store.name(key)))
    # Points share a table only where everything that decides their numbers is the same but for four fields.
    groups: dict[str, list[MeasuredPoint]] = {}
    for point in sorted(points, key=lambda point: str(point.subject["name"])):
        how = point.protocol.model_dump(mode="json", exclude={*VARIED, *NAMES})
        how["settings"] = {name: value.settings for name, value in point.values.items()}
        groups.setdefault(json.dumps(how, sort_keys=True), []).append(point)

    tables = []
    for group in groups.values():
        varied = [name for name in VARIED if any(getattr(p.protocol, name) is not None for p in group)]
        stale = [facts.is_stale(point.subject.get("weights") or {}) for point in group]
        rows = []
        for point, old in zip(group, stale, strict=True):
            row: dict[str, Any] = {"name": f"{point.subject['name']}{'*' * old}", **point.values}
            for name in varied:
                value = getattr(point.protocol, name)
                row[name] = (
                    f"{value:g}" if isinstance(value, float) else None if value is None else str(value)
                )
            rows.append(row)
        notes = {value.note for point in group for value in point.values.values() if value.note}
        table = {"first": group[0], "rows": rows, "varied": varied, "notes": sorted(notes)}
        tables.append(table | {"stale": any(stale)})
    return tables
