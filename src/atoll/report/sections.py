"""Sections of the page about the campaign itself: its head, clusters, training, cost and provenance."""

import math
from typing import Any

from atoll.campaign.measured import BASE
from atoll.data.formats import ClusterMap
from atoll.report.charts import Series, by_time, ring, training_curve
from atoll.report.facts import Facts, total

SIDE, MARGIN = 440, 10
"""Width of the clusters' map, and what stays free around it."""
Dot = tuple[float, float]


def head(facts: Facts) -> dict[str, Any]:
    """The ring, the models that the tiles are about, runs that are not finished."""
    compared = facts.comparison
    return {
        "ring": ring(facts.partition.sizes),
        "monolith": compared.row(BASE) if compared else None,
        "best": compared.best if compared else None,
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
        "training": training_curve("Training loss", curves),
        "validation": by_time(
            "Validation loss at fixed times t", [Series(r.name, r.style, r.validation) for r in runs], "loss"
        ),
        "router_training": training_curve(
            "Router cross-entropy", [Series(router.name, router.style, router.losses)]
        ),
        "router_loss": by_time(
            "Cross-entropy at fixed times t",
            [Series("Router, cross-entropy", router.style, router.validation)],
            "cross-entropy",
            [("knowing only the sizes", entropy)],
            zero=True,
        ),
        "router_accuracy": by_time(
            "Share of held-out rows whose cluster the router finds, at fixed times t",
            [Series("Router, accuracy", router.style, router.accuracy)],
            "accuracy",
            [("always the largest cluster", max(shares))],
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
        name = "none: pixels as they are" if name == "none" else name
        size, unit = (about.get("size"), "px") if about.get("size") else (about.get("max_length"), "tokens")
        return str(about.get("hash") or ""), name + (f", {size} {unit}" if size else "")

    partition, compared = facts.partition, facts.comparison
    published = [run for run in facts.runs if run.card]
    cards = [run.card for run in published if run.card]
    versions = sorted({f"torch {card.provenance['torch']}" for card in cards if card.provenance.get("torch")})
    lines = [
        ("Partition", partition.hash, f"{partition.method}, K = {partition.k}"),
        ("Clustered by", *producer(partition.encoder)),
        ("Latents", *producer(cards[0].latents if cards else None)),
        ("Text states", *producer(cards[0].text if cards else None)),
        ("Judged by", *producer(compared.metric if compared else None)),
        ("Code", "", ", ".join([f"atoll {facts.frozen.code}", *versions])),
    ]
    return {"lines": [line for line in lines if line[2]], "published": published}
