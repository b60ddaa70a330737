"""The section `Why`: what `atoll diagnose` found, as findings in words, charts over time and heat maps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.base.text import ratio, round_sig
from atoll.campaign.diagnosed import Diagnosis
from atoll.campaign.measured import BASE
from atoll.campaign.roles import RUNS
from atoll.report.charts import Chart, Series, by_time, model_name, model_styles
from atoll.report.facts import Facts, Point, pixelated

SPLITS = {"heldout": "held-out rows", "train": "training rows"}
ANSWERS = {
    "own": "the cluster’s own expert (oracle)",
    "selected": "the router’s top-1 expert",
    "mixture": "the weighted mixture (full)",
}
"""How the ensemble may answer, and CSS classes of the colours."""
SURE = 2.0
"""Standard errors from which a difference is called one."""


@dataclass(frozen=True)
class Cell:
    """A cell of a heat map; `strength` is from -1 (good) to 1 (bad), None where there is no value."""

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


def why(facts: Facts) -> dict[str, Any] | None:
    """Everything but what happens while sampling; None before `atoll diagnose`."""
    diagnosis = facts.diagnosis
    if diagnosis is None:
        return None
    angles = _line(diagnosis, "angle between two experts", "selected", "disagreement", "angle", cluster="all")
    return {
        "rows": SPLITS.get(diagnosis.splits[0], diagnosis.splits[0]),
        "missing": diagnosis.missing,
        "leaked": (diagnosis.copies or {}).get("leaked"),
        "quantile": float(diagnosis.settings.get("quantile", 0.01)),
        "sure": SURE,
        **_findings(facts.partition.k, diagnosis),
        "router": _router(diagnosis),
        "answers": _answers(diagnosis),
        "experts": _experts(facts.partition.k, diagnosis),
        "absent": _absent(facts.partition.k, diagnosis),
        "disagreement": by_time([angles], zero=True),
        "copies": _copies(facts, diagnosis),
    }


def _findings(k: int, diagnosis: Diagnosis) -> dict[str, Any]:
    """What the template puts into words; None or empty where there is nothing to say."""
    # On how many clusters the own expert is compared, and where another one is better.
    # A cluster without rows, or with one expert that is there, says nothing.
    beaten, judged = [], 0
    for cluster in range(k):
        rows = diagnosis.select("experts", t="mean", cluster=cluster)
        errors = {row.expert: row.error for row in rows if row.error is not None}
        if cluster in errors and len(errors) > 1:
            judged += 1
            best = min(errors, key=errors.__getitem__)
            if errors[best] < errors[cluster]:
                beaten.append((cluster, best))

    # At which times, and on which clusters, differences to the baseline exceed what chance would give.
    against = []
    for answer, name in (("selected", "top-1 expert"), ("mixture", "weighted mixture")):
        rows = diagnosis.select("differences", gap=f"{answer}-{BASE}", cluster="all")
        rows = [row for row in rows if row.t != "mean"]
        sure = [r for r in rows if r.se and abs(r.difference) > SURE * r.se]
        wins, losses = ([r.t for r in sure if (r.difference < 0) == less] for less in (True, False))
        if rows:
            against.append((name, wins, losses))
    rows = diagnosis.select("differences", gap=f"selected-{BASE}", t="mean")
    lost = [r.cluster for r in rows if r.cluster != "all" and r.se and r.difference > SURE * r.se]

    # What the router's top-1 expert costs compared with the true cluster's.
    choice = None
    gap = _last(diagnosis.select("differences", gap="selected-own", t="mean", cluster="all"))
    own = _last(diagnosis.select("errors", model="own", t="mean", cluster="all"))
    if gap and own and gap.se and own.error:
        choice = {"sure": gap.difference >= SURE * gap.se, "share": gap.difference / own.error}
    return {
        "home": {"judged": judged, "beaten": beaten} if judged else None,
        "against": against,
        "lost": lost if rows else None,
        "choice": choice,
        "knows": _last(diagnosis.select("router")),
        "copied": _last(diagnosis.select("nearest", cluster="all")),
    }


def _last(rows: Sequence[Any]) -> Any:
    return rows[-1] if rows else None


def _line(diagnosis: Diagnosis, name: str, style: str, table: str, column: str, **where: Any) -> Series:
    """A column over time, without the rows of all times together."""
    rows = ((row.t, getattr(row, column)) for row in diagnosis.select(table, **where))
    return Series(name, style, [(t, v) for t, v in rows if t not in ("mean", None) and v is not None])


def _router(diagnosis: Diagnosis) -> dict[str, Chart | None]:
    prior = next(iter(diagnosis.select("router")), None)
    guess, largest = (prior.prior_nll, prior.prior_accuracy) if prior else (None, None)
    styles = {split: "selected" if split == "heldout" else "own" for split in diagnosis.splits}

    def splits(column: str) -> list[Series]:
        return [
            _line(diagnosis, SPLITS.get(split, split), style, "router", column, split=split)
            for split, style in styles.items()
        ]

    return {
        "nll": by_time(splits("nll"), [("cluster sizes only", guess)], zero=True),
        "accuracy": by_time(
            [*splits("accuracy"), _line(diagnosis, "confidence", "mixture", "router", "confidence")],
            [("always the largest cluster, of these rows", largest)],
            share=True,
        ),
        "calibration": by_time(
            [
                _line(diagnosis, "calibration error", "selected", "router", "ece"),
                _line(diagnosis, "a calibrated router, by chance", "router", "router", "ece_chance"),
            ],
            zero=True,
        ),
    }


def _answers(diagnosis: Diagnosis) -> dict[str, Chart | None]:
    """Errors by time over the baseline's; plain errors where there is none."""

    def errors(model: str, cluster: Any) -> dict[float, float]:
        return dict(_line(diagnosis, "", "", "errors", "error", model=model, cluster=cluster).points)

    def over(values: Mapping[float, float], base: Mapping[float, float]) -> list[Point]:
        return [(t, v / base[t]) for t, v in sorted(values.items()) if base.get(t)]

    # What nobody can know is in every error, at each time another part: only ratios show who is better.
    base = errors(BASE, "all")
    lines = []
    for model, name in ANSWERS.items():
        own = errors(model, "all")
        lines.append(Series(name, model, over(own, base) if base else sorted(own.items())))
    numbers = sorted({row.cluster for row in diagnosis.select("errors") if row.cluster != "all"})
    clusters = [
        Series(f"Cluster {n}", f"e{n}", over(errors("selected", n), errors(BASE, n))) for n in numbers
    ]
    guides = [(BASE, 1.0)] if base else []
    return {"chart": by_time(lines, guides), "clusters": by_time(clusters, guides)}


def _map(rows: Sequence[Any], k: int, cell: Callable[[Any, int], Cell]) -> dict[str, Any]:
    """A row for each expert and perhaps the baseline, a column for each cluster."""
    return {
        "rows": [(RUNS[n].title, "", n) if n == BASE else (f"Expert {n}", n, f"e{n}") for n in rows],
        "columns": [(f"Cluster {n}", n, f"e{n}") for n in range(k)],
        "cells": [[cell(row, cluster) for cluster in range(k)] for row in rows],
    }


def _experts(k: int, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """Error of every expert (and the baseline) on every cluster: averaged over time, and at four times."""
    times = sorted({row.t for row in diagnosis.select("experts") if row.t != "mean"})
    if not times:
        return None
    # Small maps at the ends and at even steps between: ten of them would show nothing more.
    few = times if len(times) <= 4 else [times[round(i * (len(times) - 1) / 3)] for i in range(4)]
    whole = "mean" if diagnosis.select("experts", t="mean") else times[-1]

    def drawn(t: Any) -> dict[str, Any]:
        errors = {(row.expert, row.cluster): row.error for row in diagnosis.select("experts", t=t)}
        names: list[Any] = sorted({name for name, _ in errors})
        errors |= {(BASE, row.cluster): row.error for row in diagnosis.select("errors", t=t, model=BASE)}
        names += [BASE] if (BASE, 0) in errors else []

        def cell(name: Any, cluster: int) -> Cell:
            value, diagonal = errors.get((name, cluster)), errors.get((cluster, cluster))
            who = name if name == BASE else f"expert {name}"
            title = f"{who} on cluster {cluster}: error {round_sig(value)}"
            if value is None:
                return Cell(None, "", f"{title}, no rows")
            if not diagonal:
                return Cell(0.0, round_sig(value), title)
            times = ratio(value / diagonal)
            title = f"{title}, {times} that of its own expert"
            return Cell(value / diagonal - 1, times, title, framed=name == cluster)

        return _map(names, k, cell)

    return {"whole": drawn(whole), "by_time": [(t, drawn(t)) for t in few]}


def _absent(k: int, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """What is lost on each cluster when an expert is missing, as a part of the mixture's error."""
    whole = {row.cluster: row.error for row in diagnosis.select("errors", t="mean", model="mixture")}
    losses = {(row.expert, row.cluster): row.loss for row in diagnosis.select("missing", t="mean")}
    present = sorted({expert for expert, _ in losses})
    if len(present) < 2:
        return None

    def cell(expert: int, cluster: int) -> Cell:
        loss, base = losses.get((expert, cluster)), whole.get(cluster)
        title = f"without expert {expert}, cluster {cluster}"
        if loss is None or not base:
            return Cell(None, "", f"{title}: no rows")
        # Losses are small parts of an error, so the colour is full at half of it.
        text = f"{loss / base:+z.0%}".replace("-", "−")
        return Cell(2 * loss / base, text, f"{title}: {text} error", framed=expert == cluster)

    return _map(present, k, cell)


def _copies(facts: Facts, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """How near samples are to training pictures, and the pairs to look at."""
    nearest = diagnosis.select("nearest")
    if not nearest:
        return None
    pairs = {
        table: [
            (row, pair.caption, facts.picture(pair.sample), facts.picture(pair.training))
            for pair, row in zip(pictures, diagnosis.select(table), strict=False)
        ]
        for table, pictures in (("suspicious", diagnosis.pictures), ("closest", diagnosis.closest))
    }
    every = [picture for shown in pairs.values() for *_, left, right in shown for picture in (left, right)]
    strategy = diagnosis.strategies[0] if diagnosis.strategies else ""
    return {"lines": nearest, **pairs, "pixelated": pixelated(every), "strategy": strategy}


def sampling(facts: Facts) -> dict[str, Any] | None:
    """What happens while sampling: who serves, where samples end and how steady paths are."""
    diagnosis = facts.diagnosis
    if diagnosis is None:
        return None

    def lines(names: Sequence[str], table: str, column: str) -> list[Series]:
        styles = model_styles(names)
        return [_line(diagnosis, model_name(n), styles[n], table, column, strategy=n) for n in names]

    def by_expert(table: str, number: str) -> dict[Any, dict[str, Any]]:
        rows: dict[Any, dict[str, Any]] = {}
        for row in diagnosis.select(table):
            rows.setdefault(getattr(row, number), {})[row.strategy] = row
        return rows

    changes = {row.strategy: row for row in diagnosis.select("switches", step="all")}
    changing = [name for name, row in changes.items() if row.rate]
    usage, landing = by_expert("usage", "expert"), by_expert("landing", "cluster")
    stability = diagnosis.select("stability")
    # Size and conditions are the same for all strategies, so they are taken of any.
    used = []
    for expert, by in usage.items():
        first = next(iter(by.values()))
        used.append([expert, first.size, first.asked, *(row.used for row in by.values())])
    return {
        "changes": changes,
        "switches": by_time(lines(changing, "switches", "rate"), zero=True),
        "strategies": list(next(iter(usage.values()), ())),
        "usage": used,
        "most_used": max((max(row[1:]) for row in used), default=1.0),
        "landing": landing,
        "ends": [[cluster, *(row.landed for row in by.values())] for cluster, by in landing.items()],
        "stability": stability,
        "foreseen": by_time(lines([row.strategy for row in stability], "lipschitz", "foreseen"), zero=True),
    }
