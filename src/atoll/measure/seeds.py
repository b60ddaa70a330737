"""Comparisons of campaigns that differ in their seed, as one table: medians, ranges, intervals of the mean.

A ratio or a difference is taken within a campaign, where both sides start from the same conditions and the
same noise. The interval is Student's at 95 %, over campaigns.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.base.config import Config, differences
from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File, code_version
from atoll.base.part import Part
from atoll.base.table import Table
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import BASE, Comparison
from atoll.campaign.roles import RUNS
from atoll.measure.comparison import compare
from atoll.measure.models import WIDE
from atoll.measure.pictures import Rows
from atoll.store.store import Store

OWN = ("seed", "data.path", "data.source")
"""Settings that campaigns of several seeds need not share; which pictures their data holds is checked."""
PLAIN = ("distance", "precision", "recall", "gflops_per_step", "router_share")


class SeedsRow(Config):
    """One number of one model, over campaigns."""

    model: str
    """Whose; of a pair also the space and the partner."""
    measure: str
    """Which number."""
    campaigns: int
    """How many have it."""
    median: float
    """Over campaigns, like all that follow."""
    least: float
    """The smallest."""
    most: float
    """The largest."""
    mean: float
    """The mean."""
    low: float | None
    """Lower end of Student's 95 % interval of the mean; none for a single value."""
    high: float | None
    """Its upper end."""

    @classmethod
    def of(cls, model: str, measure: str, values: Sequence[float]) -> "SeedsRow":
        """The number out of its values, one or more."""
        low, high = interval(values) or (None, None)
        middle, mean = statistics.median(values), statistics.fmean(values)
        ends: dict[str, Any] = {"least": min(values), "most": max(values), "low": low, "high": high}
        return cls(model=model, measure=measure, campaigns=len(values), median=middle, mean=mean, **ends)


class SeedsTable(File):
    """`seeds.json`: what comparisons of several seeds have in common."""

    FORMAT, PLACE = "atoll/seeds", "reports/seeds.json"
    ERROR, REMEDY = DataError, "run 'atoll compare' again"

    code: str
    """Version of Atoll."""
    metric: dict[str, Any]
    """What the distance is, as in the first comparison."""
    campaigns: list[dict[str, Any]]
    """Place, seed, and key of the comparison of each."""
    columns: tuple[str, ...]
    """Of the table."""
    rows: list[list[Any]]
    """One for each number of each model."""


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.stats import t  # takes half a second to import, and a single campaign needs none

    # Not t.interval: where all values are equal its scale is 0, and its ends are NaN.
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def over_seeds(comparisons: Sequence[Comparison], base: str = BASE) -> Iterator[SeedsRow]:
    """All that comparisons of different seeds, measured alike (`unlike` finds nothing), have in common.

    Those are numbers that all of them have; of `best` and `reach` also those that only some have, as a model
    need not get as far as the monolith in every campaign. Ratios and differences are taken to `base`.
    """
    monoliths = [comparison.row(base) for comparison in comparisons]
    bases = [row.distance for row in monoliths if row is not None and row.distance is not None]
    for first in comparisons[0].rows:
        rows = [row for comparison in comparisons if (row := comparison.row(first.name)) is not None]
        if len(rows) < len(comparisons):
            continue
        for measure in PLAIN:
            values = [getattr(row, measure) for row in rows]
            if None not in values:
                yield SeedsRow.of(first.name, measure, values)
        # Within a campaign both sides start from the same conditions and noise: ratios vary less than levels.
        levels = [row.distance for row in rows if row.distance is not None]
        if first.name != base and len(bases) == len(levels) == len(comparisons):
            pairs = list(zip(levels, bases, strict=True))
            yield SeedsRow.of(first.name, f"distance / {base}", [own / other for own, other in pairs])
            yield SeedsRow.of(first.name, f"distance - {base}", [own - other for own, other in pairs])

    # What was spent on training, over the monolith's.
    spent = [comparison.train_flops for comparison in comparisons]
    ensemble = [role.plural for role in RUNS.values() if role.counted == "ensemble"]
    extras = {name: [name] for name, role in RUNS.items() if role.counted == "extra"}
    for name, parts in {"ensemble": ensemble, **extras}.items():
        if all(flops.get(part) is not None for flops in spent for part in parts) and all(
            flops.get(BASE) for flops in spent
        ):
            sums = [sum(flops[part] or 0.0 for part in parts) / (flops[BASE] or 1.0) for flops in spent]
            yield SeedsRow.of(name, f"training FLOPs / {BASE}", sums)

    for table, column, measure in (
        ("best", "guidance", "best guidance"),
        ("best", "ratio", f"distance / {BASE}, each at its best"),
        ("reach", "of_monolith", f"training FLOPs to the {BASE}'s final distance / its own"),
        ("pairs", "mean", f"correlation with the {BASE}'s pictures"),
    ):
        names = ("strategy", "space", "partner") if table == "pairs" else ("model",)
        tables = [
            {tuple(getattr(row, name) for name in names): row for row in getattr(of.tables, table) or ()}
            for of in comparisons
        ]
        for key in dict.fromkeys(key for own in tables for key in own) if all(tables) else ():
            rows_of = [table_rows[key] for table_rows in tables if key in table_rows]
            values = [value for row in rows_of if (value := getattr(row, column)) is not None]
            if values:
                # Before its first milestone nobody knows when a model was that good.
                at_most = any(getattr(row, "how", None) == "at the first point" for row in rows_of)
                yield SeedsRow.of(", ".join(key), measure + (", at most" if at_most else ""), values)


def unlike(first: Comparison, other: Comparison) -> list[str]:
    """What two comparisons do not have in common beyond their seed, by name: then they share no table."""

    def decided(tree: Mapping[str, Any]) -> dict[str, Any]:
        # What real pictures came to is a result, and the seed is what differs.
        return {
            key: decided(part) if isinstance(part, Mapping) else part
            for key, part in tree.items()
            if key != "seed" and not key.startswith("real_")
        }

    one, two = decided(first.metric), decided(other.metric)
    differs = [name for name in dict.fromkeys([*one, *two]) if one.get(name) != two.get(name)]
    extra = [(name, getattr(first, name), getattr(other, name)) for name in ("sweep", "curve")]
    return differs + [name for name, mine, theirs in extra if mine and theirs and mine != theirs]


def compare_seeds(campaigns: Sequence[Campaign], out: Store, part: Part | None = None) -> SeedsTable | None:
    """Compare every campaign, then write `reports/seeds.json` and `.csv` with what they have in common.

    `ConfigError` if a seed comes twice, or campaigns were not trained or measured alike; else as `compare`,
    also with `part`: then the answer is None.
    """
    # They must repeat each other: the same settings and held-out pictures, each of a seed of its own.
    first, seen = campaigns[0], dict[int, str]()
    split = "test" if first.config.compare.conditions == "test" else "heldout"
    reference = Rows(first.dataset(), split).digest
    for campaign in campaigns:
        place, seed = campaign.store.location, campaign.config.seed
        if seed in seen:
            raise ConfigError(f"{seen[seed]} and {place} are both of seed {seed}", "give each seed once")
        seen[seed] = place
        differs = _differences(first.config, campaign.config) - set(OWN)
        differs |= {f"compare.{name}" for name in _differences(first.config.compare, campaign.config.compare)}
        if differs:
            what = f"{place} differs from {first.store.location} in more than its seed"
            raise ConfigError(f"{what}: {', '.join(sorted(differs))}", "compare it by itself")
        if Rows(campaign.dataset(), split).digest != reference:
            what = f"{place} and {first.store.location} hold out other pictures"
            raise ConfigError(what, "compare them on the same data")

    comparisons = list[Comparison]()
    for campaign in campaigns:
        say(f"{campaign.store.location}, seed {campaign.config.seed}")
        comparison = compare(campaign, part)
        if part is not None or comparison is None:
            continue
        comparisons.append(comparison)
        if other := unlike(comparisons[0], comparisons[-1]):
            what = f"{campaign.store.location} was measured otherwise than {first.store.location}"
            fix = f"remove {Comparison.PLACE} of the older one (points are kept), and compare again"
            raise ConfigError(f"{what}: {', '.join(other)}", fix)
    if part is not None:
        return None
    rows = list(over_seeds(comparisons))
    table = Table.of(SeedsRow, rows, "seeds")
    result = SeedsTable(
        code=code_version(),
        metric=comparisons[0].metric,
        campaigns=[
            {"campaign": campaign.store.location, "seed": campaign.config.seed, "key": comparison.key}
            for campaign, comparison in zip(campaigns, comparisons, strict=True)
        ],
        columns=tuple(column.name for column in table.columns),
        rows=table.cells,
    )
    out.put(SeedsTable.PLACE.replace(".json", ".csv"), table.to_csv())
    out.put_json(SeedsTable.PLACE, result.to_json())

    # What somebody compares seeds for.
    say(f"over {len(comparisons)} seeds: median (range), and the mean with its 95 % interval")
    for row in rows:
        if row.measure.startswith(("distance", "training")):
            ends = f" ({row.low:.4g} to {row.high:.4g})" if row.low is not None else ""
            few = f", in {row.campaigns} of them" if row.campaigns != len(comparisons) else ""
            middle = f"{row.median:.4g} ({row.least:.4g} to {row.most:.4g})"
            say(f"  {row.model:<{WIDE}} {row.measure:<52} {middle}; {row.mean:.4g}{ends}{few}")
    say(f"wrote {out.name(SeedsTable.PLACE)} and .csv")
    return result


def _differences(one: Config, other: Config) -> set[str]:
    """Settings that decide results and differ."""
    return {*differences(type(one), one.model_dump(mode="json"), other.model_dump(mode="json"))}
