"""Sections of the page: head, clusters, training, cost, provenance, then what was compared and evaluated."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.campaign.measured import BASE, Comparison, MeasuredPoint, PairRow
from atoll.campaign.roles import SINGLE
from atoll.data.formats import ClusterMap
from atoll.report.charts import (
    Axis,
    Chart,
    Series,
    Strip,
    by_time,
    linear_axis,
    log_axis,
    model_name,
    model_styles,
    ring,
    training_curve,
)
from atoll.report.facts import Facts, Point, clean_tree, pixelated, total

SIDE, MARGIN = 440, 10
"""Width of the clusters' map, and what stays free around it."""
Dot = tuple[float, float]

STRIPS = ("once", "top-1", "full")
"""Routings whose strips are shown where they were compared; else the first three."""
MOST_PAIRS = 12
EVALUATED = "reports/evaluate"
VARIED = ("routing", "guidance", "steps", "seed")
"""Fields of a protocol that a table is about: they may differ within it."""
NAMES = ("reference", "extractor", "code")
"""Fields that decide no number: hashes stand for the first two."""


def head(facts: Facts) -> dict[str, Any]:
    """The ring, the models that the tiles are about, runs that are not finished."""
    compared = facts.comparison
    best, monolith = (compared.best, compared.row(BASE)) if compared else (None, None)
    costs = [row.gflops_per_step for row in (best, monolith) if row is not None and row.gflops_per_step]
    return {
        "cost": costs[0] / costs[1] if len(costs) == 2 else None,
        "ring": ring(facts.partition.sizes),
        "monolith": monolith,
        "best": best,
        "default": compared.row(compared.default) if compared else None,
        "unfinished": [run for run in facts.runs if not run.finished],
    }


def clusters(facts: Facts) -> dict[str, Any]:
    """For each cluster its run, sizes, sheet and words; the even size, the longest bar, and a map."""
    partition = facts.partition
    clusters = facts.optional(ClusterMap.PLACE, ClusterMap)
    words = [*(clusters.words if clusters else []), *[[]] * partition.k]
    cards = [
        {
            "run": run,
            "size": size,
            "heldout": heldout,
            "sheet": facts.picture(f"partition/sheets/{number}.png"),
            "words": ", ".join(words[number]),
        }
        for number, (run, size, heldout) in enumerate(
            zip(facts.by_role["expert"], partition.sizes, partition.heldout, strict=False)
        )
    ]
    rows = sum(partition.sizes)
    even = rows / partition.k
    buckets = [
        {"number": n, **{size: rows[n] for size, rows in partition.buckets.items()}}
        for n in range(partition.k)
    ]
    return {
        "cards": cards,
        "buckets": buckets,
        "total": rows,
        "even": even,
        "longest": max(*partition.sizes, even),
        "map": placed(clusters) if clusters and clusters.points else None,
    }


def placed(clusters: ClusterMap) -> dict[str, Any]:
    """The map in pixels, both axes to one scale: dots in drawing order, the names' places, the height."""
    across, down = ([point[axis] for point in clusters.points] for axis in (0, 1))
    # One scale for both axes: distances on the map are comparable in all directions.
    scale = (SIDE - 2 * MARGIN) / max(max(across) - min(across), max(down) - min(down), 1e-9)
    dots = [
        (round(MARGIN + (x - min(across)) * scale, 1), round(MARGIN + (max(down) - y) * scale, 1), cluster)
        for x, y, cluster in clusters.points
    ]
    members: dict[int, list[Dot]] = {}
    for left, top, cluster in dots:
        members.setdefault(cluster, []).append((left, top))
    # A name stands at the medians of its dots: a mean would be drawn into the gap between two groups.
    middles = {
        cluster: tuple(sorted(dot[axis] for dot in own)[len(own) // 2] for axis in (0, 1))
        for cluster, own in sorted(members.items())
    }
    height = round(2 * MARGIN + (max(down) - min(down)) * scale, 1)
    return {"dots": dots, "names": middles, "height": height, "width": SIDE, "explained": clusters.explained}


def learning(facts: Facts) -> dict[str, Any]:
    """Charts of training and validation, and of what the router knows; None where nothing is logged."""
    # Single networks are drawn first and the experts on top of them.
    single = [run for run in (facts.baseline, facts.one("pretrain"), facts.one("student")) if run]
    runs = [run for run in (*single, *facts.by_role["expert"]) if run.losses or run.validation]
    shares = [size / sum(facts.partition.sizes) for size in facts.partition.sizes]
    # What a router scores that has learned the clusters' sizes and nothing of the pictures.
    entropy = -sum(share * math.log(share) for share in shares if share)
    router = facts.by_role["router"][0]
    # A student's training loss is its distance from its teachers, so only its validations compare.
    curves = [Series(run.name, run.style, run.losses) for run in runs if run.run.kind.task != "distill"]
    return {
        "runs": sorted(runs, key=lambda run: run.run.expert is None),
        "training": training_curve(curves),
        "validation": by_time(Series(run.name, run.style, run.validation) for run in runs),
        "router_training": training_curve([Series(router.name, router.style, router.losses)]),
        "router_loss": by_time(
            [Series("Router, cross-entropy", router.style, router.validation)],
            [("cluster sizes only", entropy)],
            zero=True,
        ),
        "router_accuracy": by_time(
            [Series("Router, accuracy", router.style, router.accuracy)],
            [("always the largest cluster, in training", max(shares))],
            share=True,
        ),
    }


def flops(facts: Facts) -> dict[str, Any]:
    """Where the training FLOPs went: the runs of the ensemble, those beside them, and the sums."""
    # The bar shows what is known; the sum beside it says nothing until all of it is.
    planned = [run.train_flops or 0.0 for run in facts.ensemble]
    base, student = facts.baseline.train_flops or 0.0, facts.one("student")
    seconds = [run.seconds for run in facts.ensemble if run.seconds is not None]
    return {
        "name": "Experts + router + pretraining" if facts.one("pretrain") else "Experts + router",
        "total": total(run.train_flops for run in facts.ensemble),
        "sum": sum(planned),
        "longest": max(sum(planned), base) or 1.0,
        "seconds": sum(seconds) if seconds else None,
        "beside": [run for run in (facts.baseline, student) if run],
        "student_ratio": student.train_flops / base if student and student.train_flops and base else None,
    }


def provenance(facts: Facts) -> dict[str, Any]:
    """What made what: hashes, encoders, versions, and a table of the published networks."""

    def producer(about: dict[str, Any] | None) -> tuple[str, str]:
        about = about or {}
        name = str(about.get("name") or "")
        name = "none: pixels" if name == "none" else name
        size, unit = (about.get("size"), "px") if about.get("size") else (about.get("max_length"), "tokens")
        return str(about.get("hash") or ""), name + (f", {size} {unit}" if size else "")

    partition, compared = facts.partition, facts.comparison
    published = [run for run in facts.runs if run.card]
    cards = [run.card for run in published if run.card]
    versions = sorted({f"torch {card.provenance['torch']}" for card in cards if card.provenance.get("torch")})
    lines = [
        ("Partition", partition.hash, f"{partition.method}, K = {partition.k}"),
        ("Partition features", *producer(partition.encoder)),
        ("Latents", *producer(cards[0].latents if cards else None)),
        ("Text encoder", *producer(cards[0].text if cards else None)),
        ("Feature extractor", *producer(compared.metric if compared else None)),
        ("Code", "", ", ".join([f"atoll {facts.frozen.code}", *versions])),
    ]
    return {"lines": [line for line in lines if line[2]], "published": published}


# What `atoll compare` and `atoll evaluate` measured.


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
        marks = scales if len(scales) <= 8 else linear_axis(scales).marks
        x = Axis(scales[0] - edge, scales[-1] + edge, "guidance", marks=marks)
        chart = Chart(lines, x, linear_axis(value for line in lines for _, value in line.points))
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
        x = linear_axis([0.0, most], title="training FLOPs")
        if relative:
            marks, end = (0, 0.25, 0.5, 0.75, 1), max(1.02, 1.01 * most)
            x = Axis(0.0, end, "training FLOPs, of the monolith’s", marks=marks, label="{:.0%}".format)
        y = log_axis(value for line in lines for _, value in line.points)
        chart = Chart(lines, x, y, [("", distance) for _, distance in paths.get(BASE, [])[-1:]])
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
            if not isinstance(content, dict) or MeasuredPoint.header().items() <= content.items():
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
                row[name] = f"{value:g}" if isinstance(value, float) else value and str(value)
            rows.append(row)
        notes = {note for p in group for v in p.values.values() for note in v.notes}
        table = {"first": group[0], "rows": rows, "varied": varied, "notes": sorted(notes)}
        tables.append(table | {"stale": any(stale)})
    return tables
