"""What `atoll diagnose` found: findings to put into words, charts over time and heat maps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.base.text import ratio, significant
from atoll.campaign.diagnosed import Diagnosis
from atoll.report.charts import Chart, Series, by_time
from atoll.report.facts import Facts, pixelated

SPLITS = {"heldout": "held-out rows", "train": "training rows"}
ANSWERS = {
    "own": "its own cluster’s expert (oracle)",
    "selected": "the router’s first choice (top-1)",
    "mixture": "all, weighted (full)",
}
"""How the ensemble may answer, and CSS classes of the colours."""
SURE = 2.0
"""Standard errors from which a difference is called one."""


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map.

    Attributes:
        strength: from -1 (good) over 0 (neutral) to 1 (bad); None is an empty cell.
        text: in the cell; left out in small maps.
        title: for the tooltip.
        framed: whether it has a frame.
    """

    strength: float | None
    text: str
    title: str
    framed: bool = False

    @property
    def kind(self) -> str:
        """CSS class of its colour."""
        return "empty" if self.strength is None else "bad" if self.strength > 0 else "good"

    @property
    def opacity(self) -> int:
        """Of the colour, in percent."""
        return round(6 + 54 * min(1.0, abs(self.strength or 0.0)))


def section(facts: Facts) -> dict[str, Any] | None:
    """Everything but what happens while sampling; None before `atoll diagnose`."""
    diagnosis = facts.diagnosis
    if diagnosis is None:
        return None
    return {
        "rows": SPLITS.get(diagnosis.splits[0], diagnosis.splits[0]),
        "missing": diagnosis.missing,
        "leaked": (diagnosis.copies or {}).get("leaked"),
        "home": _home(facts, diagnosis),
        "against": _against(diagnosis),
        "lost": _lost(diagnosis),
        "choice": _choice(diagnosis),
        "knows": _last(diagnosis.select("router")),
        "copied": _last(diagnosis.select("nearest", cluster="all")),
        "quantile": float(diagnosis.settings.get("quantile", 0.01)),
        "sure": SURE,
        "router": _router(diagnosis),
        "answers": _answers(diagnosis),
        "experts": _experts(facts, diagnosis),
        "absent": _absent(facts, diagnosis),
        "disagreement": by_time(
            "Mean angle between the velocities of two experts by time",
            [
                _line(
                    diagnosis, "angle between two experts", "selected", "disagreement", "angle", cluster="all"
                )
            ],
            "degrees",
            zero=True,
        ),
        "copies": _copies(facts, diagnosis),
    }


def _last(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    return rows[-1] if rows else None


# Findings.


def _home(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """On how many clusters the own expert is compared, and where another one is better."""
    beaten, judged = [], 0
    for cluster in range(facts.partition.k):
        rows = diagnosis.select("experts", t="mean", cluster=cluster)
        errors = {row["expert"]: row["error"] for row in rows if row["error"] is not None}
        if cluster in errors and len(errors) > 1:
            judged += 1
            best = min(errors, key=errors.__getitem__)
            if errors[best] < errors[cluster]:
                beaten.append((cluster, best))
    return {"judged": judged, "beaten": beaten} if judged else None


def _against(diagnosis: Diagnosis) -> list[tuple[str, list[float], list[float]]]:
    """At which times the first choice and the mixture beat the monolith for sure, and where they lose."""
    verdicts = []
    for gap, name in (("selected-monolith", "first choice"), ("mixture-monolith", "weighted mixture")):
        rows = [r for r in diagnosis.select("differences", gap=gap, cluster="all") if r["t"] != "mean"]
        sure = [r for r in rows if r["se"] and abs(r["difference"]) > SURE * r["se"]]
        wins, losses = ([r["t"] for r in sure if (r["difference"] < 0) == less] for less in (True, False))
        if rows:
            verdicts.append((name, wins, losses))
    return verdicts


def _lost(diagnosis: Diagnosis) -> list[int] | None:
    """Clusters where the monolith is surely better than the first choice; None where nobody compared."""
    rows = diagnosis.select("differences", gap="selected-monolith", t="mean")
    sure = [r for r in rows if r["se"] and r["difference"] > SURE * r["se"]]
    return [r["cluster"] for r in sure if r["cluster"] != "all"] if rows else None


def _choice(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """What the router's first choice costs against being told the cluster, and whether that is sure."""
    gap = _last(diagnosis.select("differences", gap="selected-own", t="mean", cluster="all"))
    errors = _last(diagnosis.select("errors", model="own", t="mean", cluster="all"))
    if not gap or not errors or not gap["se"] or not errors["error"]:
        return None
    return {"sure": gap["difference"] >= SURE * gap["se"], "share": gap["difference"] / errors["error"]}


# Charts.


def _line(diagnosis: Diagnosis, name: str, style: str, table: str, column: str, **where: Any) -> Series:
    rows = diagnosis.select(table, **where)
    return Series(
        name, style, [(r["t"], r[column]) for r in rows if r["t"] != "mean" and r[column] is not None]
    )


def _router(diagnosis: Diagnosis) -> dict[str, Chart | None]:
    first = (diagnosis.select("router") or [{"prior_nll": None, "prior_accuracy": None}])[0]

    def splits(column: str) -> list[Series]:
        styles = {split: "selected" if split == "heldout" else "own" for split in diagnosis.splits}
        return [
            _line(diagnosis, SPLITS.get(split, split), style, "router", column, split=split)
            for split, style in styles.items()
        ]

    return {
        "nll": by_time(
            "Cross-entropy of the router by time",
            splits("nll"),
            "cross-entropy",
            [("knowing only the sizes", first["prior_nll"])],
            zero=True,
        ),
        "accuracy": by_time(
            "Accuracy and mean confidence of the router by time",
            [*splits("accuracy"), _line(diagnosis, "confidence", "mixture", "router", "confidence")],
            "share",
            [("always the largest cluster", first["prior_accuracy"])],
            share=True,
        ),
        "calibration": by_time(
            "Expected calibration error of the router by time",
            [
                _line(diagnosis, "calibration error", "selected", "router", "ece"),
                _line(diagnosis, "a calibrated router, by chance", "router", "router", "ece_chance"),
            ],
            "calibration error",
            zero=True,
        ),
    }


def _answers(diagnosis: Diagnosis) -> dict[str, Chart | None]:
    """Errors by time against the monolith's; plain errors where there is none."""

    def errors(model: str, cluster: Any) -> dict[float, float]:
        return dict(_line(diagnosis, "", "", "errors", "error", model=model, cluster=cluster).points)

    def over(values: Mapping[float, float], base: Mapping[float, float]) -> list[tuple[float, float]]:
        return [(t, v / base[t]) for t, v in sorted(values.items()) if base.get(t)]

    base = errors("monolith", "all")
    everywhere = {model: errors(model, "all") for model in ANSWERS}
    lines = [
        Series(ANSWERS[model], model, over(values, base) if base else sorted(values.items()))
        for model, values in everywhere.items()
    ]
    numbers = sorted({r["cluster"] for r in diagnosis.select("errors") if r["cluster"] != "all"})
    clusters = [
        Series(f"Cluster {n}", f"e{n}", over(errors("selected", n), errors("monolith", n))) for n in numbers
    ]
    unit, guides = ("error / monolith’s", [("monolith", 1.0)]) if base else ("error", [])
    return {
        "chart": by_time("Error by time of the ensemble’s ways to answer", lines, unit, guides),
        "clusters": by_time("Error of the first choice by time and cluster", clusters, unit, guides),
    }


# Heat maps.


def _map(about: str, rows: Sequence[Any], k: int, cells: Sequence[Sequence[Cell]]) -> dict[str, Any]:
    """A row for each expert and perhaps the monolith, a column for each cluster."""
    names = [("Monolith", "", "monolith") if n == "monolith" else (f"Expert {n}", n, f"e{n}") for n in rows]
    columns = [(f"Cluster {n}", n, f"e{n}") for n in range(k)]
    return {"about": about, "rows": names, "columns": columns, "cells": cells}


def _experts(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Error of every expert (and the monolith) on every cluster: averaged over time, and at four times."""
    times = sorted({r["t"] for r in diagnosis.select("experts") if r["t"] != "mean"})
    if not times:
        return None
    few = times if len(times) <= 4 else [times[round(i * (len(times) - 1) / 3)] for i in range(4)]
    whole: Any = "mean" if diagnosis.select("experts", t="mean") else times[-1]
    return {
        "whole": _expert_map(facts, diagnosis, whole),
        "by_time": [(t, _expert_map(facts, diagnosis, t)) for t in few],
    }


def _expert_map(facts: Facts, diagnosis: Diagnosis, t: Any) -> dict[str, Any]:
    """Errors over that of the cluster's own expert."""
    clusters = range(facts.partition.k)
    errors = {(row["expert"], row["cluster"]): row["error"] for row in diagnosis.select("experts", t=t)}
    names: list[Any] = sorted({name for name, _ in errors})
    for row in diagnosis.select("errors", t=t, model="monolith"):
        errors["monolith", row["cluster"]] = row["error"]
    names += ["monolith"] if ("monolith", 0) in errors else []

    def cell(name: Any, cluster: int) -> Cell:
        value, diagonal = errors.get((name, cluster)), errors.get((cluster, cluster))
        title = f"{'monolith' if name == 'monolith' else f'expert {name}'} on cluster {cluster}: error"
        title = f"{title} {significant(value)}"
        if value is None:
            return Cell(None, "", f"{title}, no rows")
        if not diagonal:
            return Cell(0.0, significant(value), title)
        title = f"{title}, {ratio(value / diagonal)} that of its own expert"
        return Cell(value / diagonal - 1, ratio(value / diagonal), title, framed=name == cluster)

    about = f"Error of every expert on every cluster at t = {t}, over that of the cluster's own expert"
    return _map(
        about, names, len(clusters), [[cell(name, cluster) for cluster in clusters] for name in names]
    )


def _absent(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """What is lost on each cluster when an expert is missing, as a part of the mixture's error."""
    clusters = range(facts.partition.k)
    whole = {r["cluster"]: r["error"] for r in diagnosis.select("errors", t="mean", model="mixture")}
    losses = {(r["expert"], r["cluster"]): r["loss"] for r in diagnosis.select("missing", t="mean")}
    present = sorted({expert for expert, _ in losses})
    if len(present) < 2:
        return None

    def cell(expert: int, cluster: int) -> Cell:
        loss, base = losses.get((expert, cluster)), whole.get(cluster)
        title = f"without expert {expert}, cluster {cluster}"
        if loss is None or not base:
            return Cell(None, "", f"{title}: no rows")
        text = f"{loss / base:+.0%}"
        return Cell(2 * loss / base, text, f"{title}: {text} error", framed=expert == cluster)

    about = "Change of the mixture's error without each expert"
    return _map(about, present, len(clusters), [[cell(expert, n) for n in clusters] for expert in present])


def _copies(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """How near samples are to training pictures, and the pairs to look at."""
    rows = diagnosis.select("nearest")
    if not rows:
        return None
    pairs = {
        table: [
            (row, pair.caption, facts.picture(pair.sample), facts.picture(pair.training))
            for pair, row in zip(shown, diagnosis.select(table), strict=False)
        ]
        for table, shown in (("suspicious", diagnosis.pictures), ("closest", diagnosis.closest))
    }
    pictures = [picture for shown in pairs.values() for *_, left, right in shown for picture in (left, right)]
    strategy = diagnosis.strategies[0] if diagnosis.strategies else ""
    return {"lines": rows, **pairs, "pixelated": pixelated(pictures), "strategy": strategy}
