"""`atoll compare` of several campaigns: each on its own, then all as one table over their seeds."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.version import code_version
from atoll.campaign.campaign import Campaign
from atoll.campaign.comparison import compare_campaign
from atoll.campaign.config import UNFROZEN
from atoll.evaluate.seeds import seeds_table, unlike
from atoll.evaluate.streams import Table, to_csv
from atoll.store.store import Store
from atoll.train.settings import PRACTICAL

RESULT = "reports/seeds"
SCHEMA = 1


def compare_campaigns(campaigns: Sequence[Campaign], out: Store) -> dict[str, Any]:
    """Compare every campaign, then write `reports/seeds.json` and `.csv` with what they have in common.

    Args:
        campaigns: two or more of the same settings, each of a seed of its own.
        out: where `reports/` goes.

    Raises:
        ConfigError: a seed comes twice, or the campaigns were not trained or not measured alike.
        StoreError, DataError: as `compare_campaign`.
    """
    _check(campaigns)
    found = []
    for campaign in campaigns:
        say(f"{campaign.store.location}, seed {campaign.config.seed}")
        found.append(compare_campaign(campaign))
        if differs := unlike(found[0], found[-1]):
            raise ConfigError(
                f"{campaign.store.location} was measured otherwise than {campaigns[0].store.location}:"
                f" {', '.join(differs)}",
                "compare all of them with the same settings, on the same data",
            )
    table, metric = seeds_table(found), found[0]["metric"]
    named = [
        {"campaign": campaign.store.location, "seed": campaign.config.seed, "key": one["key"]}
        for campaign, one in zip(campaigns, found, strict=True)
    ]
    made = {"schema": SCHEMA, "code": code_version(), "metric": metric, "campaigns": named}
    result = {**made, **table.to_json()}
    out.put(f"{RESULT}.csv", to_csv(table.columns, table.rows))
    out.put_json(f"{RESULT}.json", result)
    _show(table, len(found))
    say(f"wrote {out.name(RESULT)}.json and .csv")
    return result


def _check(campaigns: Sequence[Campaign]) -> None:
    seen = dict[int, str]()
    first = _settings(campaigns[0])
    for campaign in campaigns:
        where, seed = campaign.store.location, campaign.config.seed
        if seed in seen:
            raise ConfigError(f"{seen[seed]} and {where} are both of seed {seed}", "give each seed once")
        seen[seed] = where
        other = _settings(campaign)
        if differs := sorted(key for key in first | other if first.get(key) != other.get(key)):
            than = campaigns[0].store.location
            raise ConfigError(
                f"{where} differs from {than} in more than its seed: {', '.join(differs)}",
                "compare it by itself",
            )


def _settings(campaign: Campaign) -> dict[str, str]:
    """All that decides a campaign's models but its seed and where its data lies."""
    tree = campaign.config.model_dump(mode="json", exclude={*UNFROZEN, "seed"})
    left_out = {f"data.{name}" for name in ("path", "source")}
    left_out |= {f"{part}.{name}" for part in ("train", "router.train") for name in PRACTICAL}
    return {name: value for name, value in _leaves(tree) if name not in left_out}


def _leaves(tree: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{of}{name}.")
        else:
            yield f"{of}{name}", json.dumps(value)


def _show(table: Table, seeds: int) -> None:
    """What somebody compares seeds for."""
    say(f"over {seeds} seeds: median (range), and the mean with its 95 % interval")
    for one in table.records():
        if str(one["measure"]).startswith(("distance", "training")):
            say(
                f"  {one['model']:<10} {one['measure']:<52} {one['median']:.4g}"
                f" ({one['least']:.4g} to {one['most']:.4g});"
                f" {one['mean']:.4g} ({one['low']:.4g} to {one['high']:.4g})"
            )
