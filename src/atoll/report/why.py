"""The section `Why`: what `atoll diagnose` found, in sentences, charts and heat maps."""

from collections.abc import Callable, Sequence
from typing import Any

from markupsafe import Markup

from atoll.campaign.results import Diagnosis
from atoll.report import figures, paths
from atoll.report.campaign import Campaign
from atoll.report.figures import Heat, Series
from atoll.report.sections import Section
from atoll.report.timed import by_time
from atoll.report.wording import finite, percent, ratio, significant

Row = dict[str, Any]
SPLITS = {"heldout": "held-out rows", "train": "training rows"}
MODELS = {
    "own": "its own cluster’s expert (oracle)",
    "selected": "the router’s first choice (top-1)",
    "mixture": "all, weighted (full)",
}
SURE = 2.0
"""Standard errors from which a difference is called one."""


def section(campaign: Campaign) -> Section | None:
    """Everything that the section shows; None before `atoll diagnose`."""
    found = campaign.diagnosis
    if found is None:
        return None
    return {
        "rows": SPLITS.get(found.splits[0], found.splits[0]),
        "findings": [one for make in _FINDINGS if (one := make(campaign, found))],
        "missing": ", ".join(map(str, found.missing)),
        "leaked": (found.copies or {}).get("leaked"),
        "router": _router(found),
        "split_legend": [(SPLITS.get(split, split), _split_style(split)) for split in found.splits],
        "models": _models(found),
        "experts": _experts(campaign, found),
        "absent": _absent(campaign, found),
        "disagreement": _disagreement(found),
        "switches": paths.switches(found),
        "usage": paths.usage(campaign, found),
        "landing": paths.landing(campaign, found),
        "stability": paths.stability(found),
        "copies": _copies(campaign, found),
    }


# Findings in words.


def _at_home(campaign: Campaign, found: Diagnosis) -> str | None:
    """Whether every expert is the best one on its own cluster."""
    beaten, judged = [], 0
    for cluster in range(campaign.partition.k):
        rows = [r for r in found.select("experts", t="mean", cluster=cluster) if r["error"] is not None]
        own = next((r for r in rows if r["expert"] == cluster), None)
        if own is None or len(rows) < 2:
            continue
        judged += 1
        best = min(rows, key=lambda r: float(r["error"]))
        if best is not own:
            beaten.append(f"on cluster {cluster} expert {best['expert']} is better")
    if not judged:
        return None
    said = (
        f"Experts know their own data: {judged - len(beaten)} of {judged} are the best on their own cluster"
    )
    return said + (f"; {', '.join(beaten)}." if beaten else ".")


def _against_monolith(campaign: Campaign, found: Diagnosis) -> str | None:
    """At which times the selected expert and the mixture beat the monolith, and where they lose."""
    parts = []
    for gap, name in (("selected-monolith", "first choice"), ("mixture-monolith", "weighted mixture")):
        rows = [r for r in found.select("differences", gap=gap, cluster="all") if r["t"] != "mean"]
        sure = [r for r in rows if r["se"] and abs(r["difference"]) > SURE * r["se"]]
        wins, losses = ([r["t"] for r in sure if (r["difference"] < 0) == less] for less in (True, False))
        if rows:
            parts.append(f"the {name} beats it {_times(wins)} and loses {_times(losses)}")
    if not parts:
        return None
    return f"Against the monolith, by more than {SURE:g} standard errors: {'; '.join(parts)}."


def _by_cluster(campaign: Campaign, found: Diagnosis) -> str | None:
    """Clusters where the monolith is better than the router's first choice."""
    rows = found.select("differences", gap="selected-monolith", t="mean")
    lost = [
        r["cluster"] for r in rows if r["cluster"] != "all" and r["se"] and r["difference"] > SURE * r["se"]
    ]
    if not rows:
        return None
    if not lost:
        return "On no cluster is the monolith surely better than the first choice, averaged over time."
    return (
        f"The monolith is better than the first choice on {_clusters(lost)}, averaged over time"
        f" ({', '.join(f'{campaign.partition.sizes[n]:,}' for n in lost)} training rows)."
    )


def _router_words(campaign: Campaign, found: Diagnosis) -> str | None:
    """How sure the router is, and how right, nearest to noise."""
    rows = found.select("router")
    if not rows:
        return None
    last = rows[-1]
    nll, prior, error, chance = (finite(last[n]) for n in ("nll", "prior_nll", "ece", "ece_chance"))
    said = f"At t = {last['t']:g} the router is right in {percent(last['accuracy'])} of the cases"
    if nll is not None and prior is not None:
        worse = "worse than" if nll > prior else "better than"
        said += (
            f"; its cross-entropy, {significant(nll)}, is {worse} the cluster sizes’ ({significant(prior)})"
        )
    if error is not None and chance is not None and error > SURE * chance:
        way = "too sure" if last["confidence"] > last["accuracy"] else "not sure enough"
        said += f". It is {way}: dividing its logits by {significant(last['temperature'], 2)} would suit best"
    return said + "."


def _loss(campaign: Campaign, found: Diagnosis) -> str | None:
    """What the router's choice costs against being told the cluster."""
    gaps = found.select("differences", gap="selected-own", t="mean", cluster="all")
    errors = found.select("errors", model="own", t="mean", cluster="all")
    if not gaps or not errors or not gaps[0]["se"] or not errors[0]["error"]:
        return None
    row, own = gaps[0], errors[0]
    share = row["difference"] / own["error"]
    if row["difference"] < SURE * row["se"]:
        return "Told the right cluster, the ensemble would do no better than by the router’s first choice."
    return f"The router’s first choice costs {percent(share)} of error against being told the cluster."


def _copy_words(campaign: Campaign, found: Diagnosis) -> str | None:
    rows = found.select("nearest", cluster="all")
    if not rows or rows[0]["suspicious"] is None:
        return None
    quantile = float(found.settings.get("quantile", 0.01))
    # By ratio or by distance, so that chance alone gives up to twice the quantile.
    return (
        f"{percent(rows[0]['suspicious'])} of the samples are nearer to a training picture than"
        f" {percent(1 - quantile, 0)} of held-out pictures are (by chance: up to {percent(2 * quantile, 0)})."
    )


_FINDINGS: Sequence[Callable[[Campaign, Diagnosis], str | None]] = (
    _at_home,
    _against_monolith,
    _by_cluster,
    _router_words,
    _loss,
    _copy_words,
)


def _times(times: Sequence[float]) -> str:
    if not times:
        return "nowhere"
    return f"at t = {', '.join(f'{t:.2g}' for t in times)}"


def _clusters(numbers: Sequence[int]) -> str:
    names = [str(number) for number in numbers]
    if len(names) == 1:
        return f"cluster {names[0]}"
    return f"clusters {', '.join(names[:-1])} and {names[-1]}"


# Charts.


def _router(found: Diagnosis) -> dict[str, Markup | None]:
    own = found.select("router")
    prior = finite(own[0]["prior_nll"]) if own else None
    guess = finite(own[0]["prior_accuracy"]) if own else None
    return {
        "nll": by_time(
            [_line(found, split, "nll") for split in found.splits],
            "cross-entropy",
            "Cross-entropy of the router by time",
            [("knowing only the sizes", prior)] if prior is not None else [],
            zero=True,
        ),
        "accuracy": by_time(
            [
                *(_line(found, split, "accuracy") for split in found.splits),
                _line(found, found.splits[0], "confidence", "confidence", "mixture"),
            ],
            "share",
            "Accuracy and mean confidence of the router by time",
            [("always the largest cluster", guess)] if guess is not None else [],
            share=True,
        ),
        "calibration": by_time(
            [
                _line(found, found.splits[0], "ece", "calibration error", "selected"),
                _line(found, found.splits[0], "ece_chance", "a calibrated router, by chance", "faint"),
            ],
            "calibration error",
            "Expected calibration error of the router by time",
            zero=True,
        ),
    }


def _split_style(split: str) -> str:
    return "selected" if split == "heldout" else "own"


def _line(found: Diagnosis, split: str, column: str, name: str = "", style: str = "") -> Series:
    rows = [(r["t"], finite(r[column])) for r in found.select("router", split=split)]
    label = name or f"{column} on {SPLITS.get(split, split)}"
    return Series(label, style or _split_style(split), [(t, v) for t, v in rows if v is not None], dots=True)


def _models(found: Diagnosis) -> dict[str, Any]:
    """Errors by time against the monolith's; plain errors where there is none."""
    base = _errors(found, "monolith", "all")
    series = [
        Series(name, model, _over(_errors(found, model, "all"), base), dots=True)
        for model, name in MODELS.items()
    ]
    numbers = sorted({r["cluster"] for r in found.select("errors") if r["cluster"] != "all"})
    clusters = [
        Series(
            f"cluster {number}",
            f"e{number}",
            _over(_errors(found, "selected", number), _errors(found, "monolith", number)),
            dots=True,
        )
        for number in numbers
        if base
    ]
    guide = [("monolith", 1.0)] if base else []
    title = "error / monolith’s" if base else "error"
    return {
        "legend": [(name, model) for model, name in MODELS.items()],
        "relative": bool(base),
        "chart": by_time(series, title, "Error by time of the ensemble’s ways to answer", guide),
        "clusters": by_time(clusters, title, "Error of the first choice by time and cluster", guide),
        "cluster_legend": [(one.name.capitalize(), one.style) for one in clusters if one.points],
    }


def _errors(found: Diagnosis, model: str, cluster: Any) -> dict[float, float]:
    rows = found.select("errors", model=model, cluster=cluster)
    return {r["t"]: r["error"] for r in rows if r["t"] != "mean" and r["error"] is not None}


def _over(values: dict[float, float], base: dict[float, float]) -> list[tuple[float, float]]:
    if not base:
        return sorted(values.items())
    return [(t, v / base[t]) for t, v in sorted(values.items()) if base.get(t)]


# Heat maps.


def _experts(campaign: Campaign, found: Diagnosis) -> dict[str, Any] | None:
    """Error of every expert (and the monolith) on every cluster, over that of the cluster's own expert."""
    if not found.select("experts"):
        return None
    times = sorted({r["t"] for r in found.select("experts") if r["t"] != "mean"})
    few = times if len(times) <= 4 else [times[round(i * (len(times) - 1) / 3)] for i in range(4)]
    whole: Any = "mean" if found.select("experts", t="mean") else times[-1]
    return {
        "whole": _expert_map(campaign, found, whole, small=False),
        "by_time": [(f"t = {t:.2g}", _expert_map(campaign, found, t, small=True)) for t in few],
    }


def _expert_map(campaign: Campaign, found: Diagnosis, t: Any, small: bool) -> Markup:
    k = campaign.partition.k
    errors = {(r["expert"], r["cluster"]): finite(r["error"]) for r in found.select("experts", t=t)}
    for row in found.select("errors", t=t, model="monolith"):
        errors["monolith", row["cluster"]] = finite(row["error"])
    present: list[Any] = sorted({e for e, _ in errors if e != "monolith"})
    names: list[Any] = present + (["monolith"] if ("monolith", 0) in errors else [])
    cells = []
    for name in names:
        line = []
        for cluster in range(k):
            value, own = errors.get((name, cluster)), errors.get((cluster, cluster))
            who = "monolith" if name == "monolith" else f"expert {name}"
            title = f"{who} on cluster {cluster}: error {significant(value)}"
            if value is None:
                line.append(Heat(None, "", f"{title}, no rows"))
            elif own is None or own == 0:
                line.append(Heat(0.0, significant(value), title))
            else:
                text = f"{title}, {ratio(value / own)} that of its own expert"
                line.append(Heat(value / own - 1, ratio(value / own), text, framed=name == cluster))
        cells.append(line)
    rows = [("Monolith", "monolith") if n == "monolith" else (f"Expert {n}", f"e{n}") for n in names]
    columns = [(f"Cluster {n}", f"e{n}") for n in range(k)]
    about = f"Error of every expert on every cluster at t = {t}, over that of the cluster's own expert"
    return figures.heat_map(rows, columns, cells, about, small)


def _absent(campaign: Campaign, found: Diagnosis) -> Markup | None:
    """What is lost on each cluster when an expert is missing, as a part of the mixture's error."""
    rows = found.select("missing", t="mean")
    whole = {r["cluster"]: finite(r["error"]) for r in found.select("errors", t="mean", model="mixture")}
    losses = {(r["expert"], r["cluster"]): finite(r["loss"]) for r in rows}
    present = sorted({expert for expert, _ in losses})
    if len(present) < 2:
        return None
    cells = []
    for expert in present:
        line = []
        for cluster in range(campaign.partition.k):
            loss, base = losses.get((expert, cluster)), whole.get(cluster)
            title = f"without expert {expert}, cluster {cluster}"
            if loss is None or not base:
                line.append(Heat(None, "", f"{title}: no rows"))
            else:
                text = f"{loss / base:+.0%}"
                line.append(Heat(2 * loss / base, text, f"{title}: {text} error", framed=expert == cluster))
        cells.append(line)
    names = [(f"No expert {n}", f"e{n}") for n in present]
    columns = [(f"Cluster {n}", f"e{n}") for n in range(campaign.partition.k)]
    return figures.heat_map(names, columns, cells, "Change of the mixture's error without each expert")


# What happens while sampling.


def _disagreement(found: Diagnosis) -> Markup | None:
    rows = found.select("disagreement", cluster="all")
    points = [(r["t"], r["angle"]) for r in rows if r["t"] != "mean" and r["angle"] is not None]
    line = Series("angle between two experts", "selected", points, dots=True)
    return by_time([line], "degrees", "Mean angle between the velocities of two experts by time", zero=True)


def _copies(campaign: Campaign, found: Diagnosis) -> dict[str, Any] | None:
    rows = found.select("nearest")
    if not rows:
        return None
    lines = [
        {
            **row,
            "name": "All" if row["cluster"] == "all" else f"Expert {row['cluster']}",
            "style": "router" if row["cluster"] == "all" else f"e{row['cluster']}",
        }
        for row in rows
    ]
    shown = {"suspicious": campaign.pairs(found.pictures), "closest": campaign.pairs(found.closest)}
    pairs = {
        table: [
            {"pair": pair, "why": row["why"], "ratio": row["ratio"], "cluster": row["cluster"]}
            for pair, row in zip(own, found.select(table), strict=False)
        ]
        for table, own in shown.items()
    }
    both = [p for own in shown.values() for one in own for p in (one.sample, one.training) if p is not None]
    strategy = found.strategies[0] if found.strategies else ""
    pixelated = max((picture.width for picture in both), default=0) <= 64
    return {"lines": lines, **pairs, "pixelated": pixelated, "strategy": strategy}
