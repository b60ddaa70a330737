"""Comparisons of campaigns that differ in their seed, as one table: medians, ranges, intervals of the mean.

A ratio or a difference is taken within a campaign, where both sides start from the same conditions and the
same noise. The interval is Student's at 95 %, over campaigns.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.base.config import Config, differences
from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.version import code_version
from atoll.campaign.folder import Campaign
from atoll.campaign.results import Comparison, SeedsTable, Table
from atoll.campaign.runs import RUNS
from atoll.measure.comparison import BASE, compare
from atoll.measure.departure import WIDE
from atoll.measure.pictures import Rows
from atoll.measure.table import Cell
from atoll.store.store import Store

OWN = ("seed", "data.path", "data.source")
"""Settings that campaigns of several seeds need not share; which pictures their data holds is checked."""
COLUMNS = ("model", "measure", "campaigns", "median", "least", "most", "mean", "low", "high")
MAY_DIFFER = ("seed", "real_training_pictures")
"""Fields of `metric` that a seed decides."""
PLAIN = ("distance", "precision", "recall", "gflops_per_step", "router_share")
FURTHER = (
    ("best", "guidance", "best guidance"),
    ("best", "ratio", f"distance / {BASE}, each at its best"),
    ("reach", "of_monolith", f"training FLOPs to the {BASE}'s final distance / its own"),
    ("pairs", "mean", f"correlation with the {BASE}'s pictures"),
)
"""Numbers of the other tables: which table, which column, and what it is called here."""

Found = Mapping[str, Any]
"""What `compare.json` says."""


@dataclass(frozen=True)
class Values:
    """One number of one model, over campaigns.

    Attributes:
        model: whose; of a pair also the space and the partner.
        measure: which.
        values: of the campaigns that have it, in their order.
    """

    model: str
    measure: str
    values: list[float]

    @property
    def mean(self) -> float:
        """Over campaigns."""
        return statistics.fmean(self.values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the mean; None for a single value."""
        return interval(self.values)

    def cells(self) -> list[Cell]:
        """A row of the table."""
        low, high = self.interval or (None, None)
        values = self.values
        return [
            *(self.model, self.measure, len(values), statistics.median(values)),
            *(min(values), max(values), self.mean, low, high),
        ]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t as student_t

    half = float(student_t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def seeds_table(comparisons: Sequence[Found], base: str = BASE) -> Table:
    """All that these comparisons have in common, a row for each number."""
    return Table.of(COLUMNS, [one.cells() for one in over_seeds(comparisons, base)])


def over_seeds(comparisons: Sequence[Found], base: str = BASE) -> Iterator[Values]:
    """The same, value by value.

    Args:
        found: comparisons measured alike (`unlike` finds nothing), of different seeds.
        base: the model that ratios and differences are taken to, where it was measured.

    Yields:
        Numbers that all comparisons have; of `best` and `reach` also those that only some have, as a model
        need not get as far as the monolith in every campaign.
    """
    models = [{line["name"]: line for line in one["rows"]} for one in comparisons]
    for name in models[0]:
        if all(name in one for one in models):
            yield from _of_model(name, [one[name] for one in models], [one.get(base) for one in models], base)
    yield from _training(comparisons)
    for table, column, measure in FURTHER:
        tables = [_records(one, table) for one in comparisons]
        for name in tables[0] if all(tables) else ():
            lines = [one[name] for one in tables if name in one]
            values = [line[column] for line in lines if line[column] is not None]
            if values:
                at_most = any(line.get("how") == "at the first point" for line in lines)
                yield Values(", ".join(name), measure + (", at most" if at_most else ""), values)


def _of_model(name: str, lines: list[Any], against: list[Any], base: str) -> Iterator[Values]:
    for measure in PLAIN:
        values = [line.get(measure) for line in lines]
        if all(value is not None for value in values):
            yield Values(name, measure, values)
    if name != base and all(against):
        pairs = [(line["distance"], other["distance"]) for line, other in zip(lines, against, strict=True)]
        yield Values(name, f"distance / {base}", [one / other for one, other in pairs])
        yield Values(name, f"distance - {base}", [one - other for one, other in pairs])


def _training(comparisons: Sequence[Found]) -> Iterator[Values]:
    """What was spent on training, over the monolith's."""
    spent = [one.get("train_flops", {}) for one in comparisons]
    if not all(one.get(BASE) for one in spent):
        return
    ensemble = [role.plural for role in RUNS.values() if role.counted == "ensemble"]
    extras = {name: [name] for name, role in RUNS.items() if role.counted == "extra"}
    for name, parts in {"ensemble": ensemble, **extras}.items():
        if all(one.get(part) is not None for one in spent for part in parts):
            values = [sum(one[part] for part in parts) / one[BASE] for one in spent]
            yield Values(name, f"training FLOPs / {BASE}", values)


def _records(one: Found, table: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """Rows of a table of a comparison, by what they are of; none if it was not measured."""
    content = one.get("tables", {}).get(table, {"columns": [], "rows": []})
    rows = [dict(zip(content["columns"], values, strict=True)) for values in content["rows"]]
    names = ("model", "strategy", "space", "partner")
    return {tuple(str(line[name]) for name in names if name in line): line for line in rows}


def unlike(one: Found, other: Found) -> list[str]:
    """What two comparisons do not have in common beyond their seed, by name: then they share no table."""
    first, second = one["metric"], other["metric"]
    differs = [
        name
        for name in dict.fromkeys([*first, *second])
        if name not in MAY_DIFFER and _alike(first.get(name)) != _alike(second.get(name))
    ]
    return differs + [
        name for name in ("sweep", "curve") if one.get(name) and other.get(name) and one[name] != other[name]
    ]


def _alike(value: Any) -> Any:
    """A field of the metric without what the pictures themselves gave."""
    if not isinstance(value, Mapping):
        return value
    return {key: part for key, part in value.items() if not key.startswith("real_")}


def compare_seeds(campaigns: Sequence[Campaign], out: Store) -> SeedsTable:
    """Compare every campaign, then write `reports/seeds.json` and `.csv` with what they have in common.

    Args:
        campaigns: two or more of the same settings, each of a seed of its own.
        out: where `reports/` goes.

    Raises:
        ConfigError: a seed comes twice, or the campaigns were not trained or not measured alike.
        StoreError, DataError: as `compare`.
    """
    _must_repeat(campaigns)
    comparisons = []
    for campaign in campaigns:
        say(f"{campaign.store.location}, seed {campaign.config.seed}")
        comparisons.append(compare(campaign).to_json())
        if differs := unlike(comparisons[0], comparisons[-1]):
            raise ConfigError(
                f"{campaign.store.location} was measured otherwise than {campaigns[0].store.location}:"
                f" {', '.join(differs)}",
                f"remove {Comparison.PLACE} of the older one (points are kept), and compare again",
            )
    table, metric = seeds_table(comparisons), comparisons[0]["metric"]
    named = [
        {"campaign": campaign.store.location, "seed": campaign.config.seed, "key": one["key"]}
        for campaign, one in zip(campaigns, comparisons, strict=True)
    ]
    result = SeedsTable(
        code=code_version(), metric=metric, campaigns=named, columns=table.columns, rows=table.rows
    )
    out.put(SeedsTable.PLACE.replace(".json", ".csv"), table.to_csv())
    out.put_json(SeedsTable.PLACE, result.to_json())
    _show(table, len(comparisons))
    say(f"wrote {out.name(SeedsTable.PLACE)} and .csv")
    return result


def _must_repeat(campaigns: Sequence[Campaign]) -> None:
    seen = dict[int, str]()
    first, reference = campaigns[0].config, _heldout(campaigns[0])
    for campaign in campaigns:
        where, seed = campaign.store.location, campaign.config.seed
        if seed in seen:
            raise ConfigError(f"{seen[seed]} and {where} are both of seed {seed}", "give each seed once")
        seen[seed] = where
        other = campaign.config
        differs = _differences(first, other) - set(OWN)
        differs |= {f"compare.{name}" for name in _differences(first.compare, other.compare)}
        if differs:
            than = campaigns[0].store.location
            raise ConfigError(
                f"{where} differs from {than} in more than its seed: {', '.join(sorted(differs))}",
                "compare it by itself",
            )
        if _heldout(campaign) != reference:
            than = campaigns[0].store.location
            raise ConfigError(f"{where} and {than} hold out other pictures", "compare them on the same data")


def _heldout(campaign: Campaign) -> str:
    """Digest of the pictures that judge."""
    return Rows(campaign.dataset(), "heldout").digest


def _differences(one: Config, other: Config) -> set[str]:
    """Settings that decide results and differ."""
    return {*differences(type(one), one.model_dump(mode="json"), other.model_dump(mode="json"))}


def _show(table: Table, seeds: int) -> None:
    """What somebody compares seeds for."""
    say(f"over {seeds} seeds: median (range), and the mean with its 95 % interval")
    for one in table.records:
        if str(one["measure"]).startswith(("distance", "training")):
            interval = f" ({one['low']:.4g} to {one['high']:.4g})" if one["low"] is not None else ""
            few = f", in {one['campaigns']} of them" if one["campaigns"] != seeds else ""
            say(
                f"  {one['model']:<{WIDE}} {one['measure']:<52} {one['median']:.4g}"
                f" ({one['least']:.4g} to {one['most']:.4g}); {one['mean']:.4g}{interval}{few}"
            )
