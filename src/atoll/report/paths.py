"""What happens while sampling, for the section `Why`: who serves, how steady paths are and where they end."""

from collections.abc import Sequence
from typing import Any

from atoll.campaign.results import Diagnosis
from atoll.report.campaign import Campaign
from atoll.report.figures import Series
from atoll.report.timed import by_time
from atoll.report.wording import percent, significant

STYLES = ("selected", "mixture", "own", "faint")


def switches(found: Diagnosis) -> dict[str, Any] | None:
    """How often the leading expert changes."""
    rates = {r["strategy"]: r for r in found.select("switches", step="all")}
    if not rates:
        return None
    said = [
        f"{name}: {percent(r['rate'])} of the steps, {percent(r['ever'])} of the samples at least once"
        for name, r in rates.items()
    ]
    moving = [name for name, r in rates.items() if r["rate"]]
    series = _lines(found, moving, "switches", "rate")
    chart = by_time(series, "share of samples", "Share of samples whose leading expert changes", zero=True)
    return {"said": said, "chart": chart, "legend": [(one.name, one.style) for one in series]}


def usage(campaign: Campaign, found: Diagnosis) -> dict[str, Any] | None:
    """How much every expert is used."""
    rows = found.select("usage")
    if not rows:
        return None
    names = list(dict.fromkeys(r["strategy"] for r in rows))
    used = {(r["strategy"], r["expert"]): r for r in rows}
    longest = max(max(r["used"], r["size"], r["asked"]) for r in rows) or 1.0
    lines = []
    for expert in range(campaign.partition.k):
        first = used[names[0], expert]
        shares = [("training rows", first["size"]), ("conditions", first["asked"])]
        shares += [(name, used[name, expert]["used"]) for name in names]
        lines.append(
            {
                "name": f"Expert {expert}",
                "style": f"e{expert}",
                "shares": [(label, value, 100 * value / longest) for label, value in shares],
            }
        )
    return {"names": names, "lines": lines}


def stability(found: Diagnosis) -> dict[str, Any] | None:
    """How far paths react to small changes."""
    rows = found.select("stability")
    if not rows:
        return None
    names = [r["strategy"] for r in rows]
    series = _lines(found, names, "lipschitz", "foreseen")
    chart = by_time(series, "change", "How fast the foreseen picture changes with the state", zero=True)
    lines = [
        {
            "name": r["strategy"],
            "samples": r["samples"],
            "numbers": [(label, _spread(r, label)) for label in ("sensitivity", "refinement")],
        }
        for r in rows
    ]
    return {"lines": lines, "chart": chart, "legend": [(one.name, one.style) for one in series]}


def landing(campaign: Campaign, found: Diagnosis) -> dict[str, Any] | None:
    """Share of the samples that end in the cluster of the expert that served them, and the distances."""
    rows = {(r["strategy"], r["cluster"]): r for r in found.select("landing")}
    if not rows:
        return None
    names = list(dict.fromkeys(strategy for strategy, _ in rows))
    lines = []
    for cluster in ("all", *range(campaign.partition.k)):
        own = [rows[name, cluster] for name in names]
        shares = [(name, r["landed"], 100 * (r["landed"] or 0)) for name, r in zip(names, own, strict=True)]
        named = ("All", "") if cluster == "all" else (f"Expert {cluster}", f"e{cluster}")
        lines.append({"name": named[0], "style": named[1], "shares": shares})
    said = [f"{name}: {_ends(rows[name, 'all'], 'served', 'others')}" for name in names]
    real = rows[names[0], "all"]
    if real["own"] is not None:
        said.append(f"held-out pictures, from their own cluster’s: {_ends(real, 'own', 'heldout_others')}")
    return {"names": names, "lines": lines, "said": said}


def _ends(row: dict[str, Any], near: str, far: str) -> str:
    said = significant(row[near], 3)
    return said + (f", and {significant(row[far], 3)} from the others’" if row[far] is not None else "")


def _lines(found: Diagnosis, names: Sequence[str], table: str, column: str) -> list[Series]:
    """A line over t for every strategy."""
    return [
        Series(
            name,
            "monolith" if name == "monolith" else STYLES[number % len(STYLES)],
            [
                (r["t"], r[column])
                for r in found.select(table, strategy=name)
                if r["t"] is not None and r[column] is not None
            ],
            dots=True,
        )
        for number, name in enumerate(names)
    ]


def _spread(row: dict[str, Any], column: str) -> str:
    se = row[f"{column}_se"]
    return significant(row[column]) + (f" ± {significant(se, 2)}" if se is not None else "")
