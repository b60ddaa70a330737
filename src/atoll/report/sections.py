"""What each section of the page says, worked out from the collected campaign."""

import math
from typing import Any

from markupsafe import Markup

from atoll.base.errors import ConfigError
from atoll.base.text import duration
from atoll.campaign.results import ComparedModel, Comparison
from atoll.ensemble.routing import Routing
from atoll.report import figures, timed
from atoll.report.campaign import Campaign, Run
from atoll.report.figures import Series
from atoll.report.wording import NONE, clean, finite, flops, percent, ratio, significant, whole

Section = dict[str, Any]

STRIPS = ("once", "top-1", "full")
DENSE = {
    "monolith": "one model, trained on everything",
    "student": "one model, taught by the experts",
}


def header(campaign: Campaign) -> Section:
    """Lead, key figures, and what is still to do."""
    made, compared = campaign.partition, campaign.comparison
    unfinished = [_status(run) for run in campaign.runs if not run.finished]
    return {
        "lead": _lead(campaign),
        "ring": figures.ring(made.sizes),
        "tiles": _tiles(campaign),
        "unfinished": unfinished,
        "stale": campaign.stale,
        "verdict": _verdict(compared) if compared else None,
    }


def _lead(campaign: Campaign) -> str:
    k = campaign.partition.k
    what = (
        f"A decentralized diffusion model: the data set is cut into {k} clusters, one expert trains on each "
        "without any contact with the others, and a small router joins them into one model"
    )
    if not campaign.wants_monolith:
        return what + "."
    return what + "; a monolith of the same training cost stands beside it as the measure."


def _verdict(compared: Comparison) -> str | None:
    best = compared.best
    value = compared.ratio(best)
    if best is None or value is None:
        return None
    if value < 0.995:
        found = f"closer to real pictures than the monolith: {ratio(value)} its distance"
    elif value <= 1.005:
        found = "as close to real pictures as the monolith"
    else:
        found = f"further from real pictures than the monolith: {ratio(value)} its distance"
    return f"The ensemble ({best.name}) is {found}."


def _tiles(campaign: Campaign) -> list[dict[str, str]]:
    made, compared = campaign.partition, campaign.comparison
    tiles = [
        _tile("Pictures", whole(made.rows), f"{sum(made.sizes):,} to train, {sum(made.heldout):,} held out"),
        _tile("Islands", str(made.k), f"{min(made.sizes):,} to {max(made.sizes):,} rows each"),
    ]
    if compared:
        base = compared.row("monolith")
        if base:
            tiles.append(_tile("Monolith distance", significant(base.distance, 4), "lower is better"))
        best, default = compared.best, compared.row(campaign.default or "")
        if best and default and best.name == default.name:
            tiles.append(_distance_tile("Ensemble distance", best, compared, ", the best and the default"))
        else:
            tiles += [_distance_tile("Best distance", best, compared)] if best else []
            tiles += [_distance_tile("Default distance", default, compared)] if default else []
    spent = campaign.flops_ratio
    done = all(run.finished for run in campaign.runs)
    included = "router and shared pretraining" if campaign.pretrain else "router"
    note = f"of the monolith’s training FLOPs, {included} included"
    tiles.append(_tile("Training cost", ratio_exact(spent), note if done else note + "; as planned"))
    if campaign.seconds is not None:
        what = "all stages" if done else "the stages so far"
        tiles.append(_tile("Time", duration(campaign.seconds), f"{what}, on one machine"))
    return tiles


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _distance_tile(label: str, row: ComparedModel, compared: Comparison, more: str = "") -> dict[str, str]:
    share = compared.ratio(row)
    note = row.name + more + (f": {ratio(share)} the monolith’s" if share is not None else "")
    return _tile(label, significant(row.distance, 4), note)


def ratio_exact(value: float | None) -> str:
    """A ratio that ought to be 1, with three decimals."""
    return NONE if value is None else f"{value:.3f}×"


def _status(run: Run) -> str:
    if not run.seen or not run.samples:
        return f"{run.name}: not started"
    return f"{run.name}: {run.seen:,} of {run.samples:,} images"


def samples(campaign: Campaign) -> Section | None:
    """Pictures side by side, one row per prompt."""
    compared = campaign.comparison
    if compared is None or not compared.prompts:
        return None
    best = compared.best
    columns = [{"name": "real", "key": "data", "note": "", "best": False}]
    for row in compared.rows:
        is_best = best is not None and row.name == best.name
        columns.append(
            {"name": row.name, "key": row.name, "note": significant(row.distance, 4), "best": is_best}
        )
    rows = []
    for number, prompt in enumerate(compared.prompts):
        cells = [
            {
                "name": column["name"],
                "picture": campaign.pictures[str(column["key"])][number],
                "alt": f"Training picture: {prompt}"
                if column["key"] == "data"
                else f"Sample of {column['name']}: {prompt}",
            }
            for column in columns
        ]
        rows.append({"prompt": prompt, "cluster": compared.clusters[number], "cells": cells})
    sides = [p.width for shown in campaign.pictures.values() for p in shown if p is not None]
    metric = compared.metric
    return {
        "columns": columns,
        "rows": rows,
        "pixelated": max(sides, default=0) <= 64,
        "steps": metric.get("steps"),
        "guidance": metric.get("guidance"),
    }


def routing(campaign: Campaign) -> Section | None:
    """Strips: which expert served each shown sample at which step."""
    compared = campaign.comparison
    if compared is None or not compared.routing:
        return None
    names = [name for name in STRIPS if name in compared.routing] or list(compared.routing)[:3]
    rows = []
    for number, prompt in enumerate(compared.prompts):
        strips = []
        for name in names:
            weights = [step[number] for step in compared.routing[name] if number < len(step)]
            strips.append(
                {
                    "name": name,
                    "drawing": figures.strip(weights, f"{name}, sample {number + 1}") if weights else "",
                }
            )
        rows.append(
            {
                "prompt": prompt,
                "cluster": compared.clusters[number],
                "picture": campaign.pictures["data"][number],
                "strips": strips,
            }
        )
    return {"names": names, "rows": rows, "legend": [(run.name, run.style) for run in campaign.experts]}


def clusters(campaign: Campaign) -> Section:
    """Balance and contact sheets."""
    made = campaign.partition
    total, even = sum(made.sizes), sum(made.sizes) / made.k
    longest = max(*made.sizes, even) if made.k > 1 else even
    cards = []
    for number, (run, size) in enumerate(zip(campaign.experts, made.sizes, strict=True)):
        share = percent(size / total)
        name = f"Cluster {number}: {size:,} rows, {share}, {ratio(size / even)} the even share"
        cards.append(
            {
                "number": number,
                "run": run,
                "style": run.style,
                "size": size,
                "share": share,
                "heldout": made.heldout[number] if number < len(made.heldout) else None,
                "sheet": campaign.sheets[number],
                "bar": figures.balance_bar(name, run.style, size, even, longest),
                "status": _status(run),
            }
        )
    return {"cards": cards, "even": even, "mark": 100 * even / longest, "warnings": made.warnings}


def charts(campaign: Campaign) -> Section:
    """Loss curves and what the router knows."""
    # The monolith is drawn first and the experts on top of it.
    more = (campaign.pretrain, campaign.student)
    whole = [campaign.monolith, *(run for run in more if run is not None)]
    # A student's training loss is its distance from its teachers, so only its validations compare.
    denoisers = [run for run in (*whole, *campaign.experts) if run.losses or run.validation]
    legend = [run for run in (*campaign.experts, *whole) if run in denoisers]
    return {
        "legend": [(run.name, run.style) for run in legend],
        "training": _training([run for run in denoisers if run.role != "student"]),
        "validation": _validation(denoisers),
        "router_training": _training([campaign.router], "router cross-entropy"),
        "router_loss": _router_loss(campaign),
        "router_accuracy": _router_accuracy(campaign),
        "odd": [
            f"{run.name}: training losses that are not finite and are left out: {run.odd}"
            for run in campaign.runs
            if run.odd
        ],
        "unchecked": [run.name for run in campaign.runs if run.finished and not run.validation],
    }


def _training(runs: list[Run], what: str = "training loss") -> Markup | None:
    drawn = [
        Series(run.name, run.style, figures.smooth(run.losses), figures.thin(run.losses))
        for run in runs
        if len(run.losses) > 1
    ]
    if not drawn:
        return None
    # The raw line decides the range but for its few most extreme values, which are clipped by the frame.
    raw = sorted(y for one in drawn for _, y in one.raw if y > 0)
    high = raw[min(len(raw) - 1, int(0.995 * len(raw)))] if raw else 1.0
    values = [y for one in drawn for _, y in one.points] + [y for y in raw if y <= high]
    x = figures.log_axis("images seen", [p[0] for one in drawn for p in one.points])
    y = figures.log_axis(what, values)
    drawn = [
        Series(
            one.name,
            one.style,
            one.points,
            [(px, min(max(py, y.low), y.high)) for px, py in one.raw if px > 0],
        )
        for one in drawn
    ]
    names = ", ".join(one.name for one in drawn)
    return figures.line_chart(drawn, x, y, f"{what.capitalize()} against images seen: {names}")


def _validation(runs: list[Run]) -> Markup | None:
    drawn = [Series(r.name, r.style, r.validation, dots=True) for r in runs if r.validation]
    names = ", ".join(one.name for one in drawn if one.points)
    return timed.by_time(drawn, "loss", f"Validation loss at fixed times t: {names}")


def _router_loss(campaign: Campaign) -> Markup | None:
    total = sum(campaign.partition.sizes)
    guess = -sum(s / total * math.log(s / total) for s in campaign.partition.sizes)
    points = campaign.router.validation
    line = Series("Router, cross-entropy", "router", points, dots=True)
    about = "Cross-entropy of the router at fixed times t"
    return timed.by_time([line], "cross-entropy", about, [("knowing only the sizes", guess)], zero=True)


def _router_accuracy(campaign: Campaign) -> Markup | None:
    guess = max(campaign.partition.sizes) / sum(campaign.partition.sizes)
    points = campaign.router.accuracy
    line = Series("Router, accuracy", "router", points, dots=True)
    about = "Share of held-out rows whose cluster the router finds, at fixed times t"
    return timed.by_time([line], "accuracy", about, [("always the largest cluster", guess)], share=True)


def strategies(campaign: Campaign) -> Section | None:
    """The table of strategies."""
    compared = campaign.comparison
    if compared is None:
        return None
    floor = finite(compared.metric.get("real_training_pictures"))
    longest = max([row.distance or 0.0 for row in compared.rows] + [floor or 0.0]) or 1.0
    best, real = compared.best, compared.metric.get("neighbours")
    real = real if isinstance(real, dict) else {}
    rows = [
        {
            "row": row,
            "what": _describe(row.name),
            "ratio": compared.ratio(row) if row.name != "monolith" else None,
            "best": best is not None and row.name == best.name,
            "default": row.name == campaign.default,
            "bar": 100 * (row.distance or 0.0) / longest,
        }
        for row in compared.rows
    ]
    return {
        "rows": rows,
        "floor": floor,
        "floor_bar": 100 * floor / longest if floor is not None else None,
        "count": compared.metric.get("samples"),
        "metric": _metric(compared.metric),
        "favours": bool(compared.metric.get("same_features_as_partition")),
        "akin": bool(compared.metric.get("akin_to_partition")),
        "neighbours": any(row.precision is not None for row in compared.rows),
        "k": real.get("k"),
        "real": {name: finite(real.get(f"real_{name}")) for name in ("precision", "recall")},
        "has_baseline": compared.row("monolith") is not None,
        "oracle": any(row.name.startswith("oracle") for row in compared.rows),
    }


def _describe(name: str) -> str:
    """A model or a routing in words."""
    if name in DENSE:
        return DENSE[name]
    try:
        return Routing.named(name).describe()
    except ConfigError:  # of another version, or a function of the user's own
        return ""


def _metric(metric: dict[str, Any]) -> str:
    """What the distance is, in a sentence."""

    def part(text: str, *keys: str) -> str:
        values = [metric.get(key) for key in keys]
        if any(value is None for value in values):
            return ""
        shown = [f"{v:,}" if isinstance(v, int) and not isinstance(v, bool) else clean(v) for v in values]
        return text.format(*shown)

    what = clean(metric.get("distance") or "")
    if not what:
        inside = part("{} principal components of ", "components")
        what = f"Fréchet distance on {inside}{clean(metric.get('name') or 'unknown')} features"
    return (
        what
        + part(" (input of {} px)", "size")
        + part(" between {} sampled pictures", "samples")
        + part(" and {} {}", "reference_rows", "reference")
        + part(", at the conditions {}", "conditions")
        + part("; {} sampler", "sampler")
        + part(", {} steps", "steps")
        + part(", guidance {}", "guidance")
        + (", averaged weights" if metric.get("ema") else "")
        + part(", seed {}", "seed")
        + "."
    )


def ledger(campaign: Campaign) -> Section:
    """Where the training FLOPs went."""
    parts = campaign.ensemble
    known = [run.train_flops for run in parts]
    total = sum(value for value in known if value is not None)
    base = campaign.monolith.train_flops
    longest = max(total, base or 0.0)
    bar = [(f"{run.name}: {flops(run.train_flops)}", run.style, run.train_flops or 0.0) for run in parts]
    spent = [run.spent for run in parts if run.spent is not None]
    seen = [run.samples for run in campaign.experts if run.samples is not None]
    return {
        "rows": [(run, (run.train_flops or 0.0) / total if total else None) for run in parts],
        "total": total if all(value is not None for value in known) else None,
        "images": sum(seen) if len(seen) == campaign.partition.k else None,
        "seconds": sum(spent) if spent else None,
        "ratio": ratio_exact(campaign.flops_ratio),
        "parts_bar": figures.share_bar(bar, longest, f"{campaign.ensemble_name}: {flops(total)}"),
        "monolith_bar": figures.share_bar(
            [(f"Monolith: {flops(base)}", "monolith", base or 0.0)], longest, f"Monolith: {flops(base)}"
        ),
        "beside": [campaign.monolith, *([campaign.student] if campaign.student else [])],
        "student_ratio": ratio_exact(_over(campaign.student, base)),
        "planned": any(not run.finished for run in campaign.runs),
    }


def _over(run: Run | None, base: float | None) -> float | None:
    return run.train_flops / base if run and run.train_flops and base else None


def provenance(campaign: Campaign) -> Section:
    """What made what: hashes, encoders, versions."""
    made, cards = campaign.partition, [run.card for run in campaign.runs if run.card]
    facts: list[tuple[str, str, str]] = [
        ("Partition", made.hash, f"{made.method}, K = {made.k}"),
        ("Clustered by", *_encoder(made.encoder)),
    ]
    if cards:
        facts.append(("Latents", *_encoder(cards[0].latents)))
        facts.append(("Text states", *_encoder(cards[0].text)))
    if campaign.comparison:
        facts.append(("Judged by", *_encoder(campaign.comparison.metric)))
    made_by = sorted({str(v) for card in cards if (v := card.provenance.get("torch"))})
    facts.append(("Code", "", ", ".join([f"atoll {campaign.code}", *(f"torch {v}" for v in made_by)])))
    facts = [fact for fact in facts if fact[2]]
    parts = [
        {
            "name": run.name,
            "style": run.style,
            "family": run.card.family,
            "parameters": run.card.parameters,
            "weights": run.card.weights_sha256,
            "initial": run.card.provenance.get("initial_weights"),
        }
        for run in campaign.runs
        if run.card
    ]
    return {"facts": facts, "parts": parts}


def _encoder(about: dict[str, Any] | None) -> tuple[str, str]:
    """Hash and name of what made a column."""
    if not about:
        return "", ""
    name = clean(about.get("name") or "")
    name = "none: pixels as they are" if name == "none" else name
    size = about.get("size") or about.get("max_length")
    unit = "px" if about.get("size") else "tokens"
    return str(about.get("hash") or ""), name + (f", {size} {unit}" if size else "")
