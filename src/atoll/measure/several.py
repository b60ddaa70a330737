"""`atoll compare` of several campaigns: each on its own, then all as one table over their seeds."""

from collections.abc import Sequence
from typing import Any

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.version import code_version
from atoll.campaign.folder import Campaign, decisive
from atoll.campaign.settings.campaign import UNFROZEN
from atoll.measure.comparison import RESULT as COMPARED
from atoll.measure.comparison import compare_campaign
from atoll.measure.pictures import Rows
from atoll.measure.seeds import seeds_table, unlike
from atoll.measure.streams import Table, to_csv
from atoll.store.store import Store

RESULT = "reports/seeds"
SCHEMA = 1
PRACTICAL = {"batch", "threads", "prompts", "shown"}
"""Settings of a comparison that decide no number."""
OWN = ("seed", "data.path", "data.source")
"""Settings that campaigns of several seeds need not share; which pictures their data holds is checked."""


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
                f"remove {COMPARED} of the older one (points are kept), and compare again",
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
    first, reference = _settings(campaigns[0]), _heldout(campaigns[0])
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
        if _heldout(campaign) != reference:
            than = campaigns[0].store.location
            raise ConfigError(f"{where} and {than} hold out other pictures", "compare them on the same data")


def _heldout(campaign: Campaign) -> str:
    """Digest of the pictures that judge."""
    return Rows(campaign.dataset(), "heldout").digest


def _settings(campaign: Campaign) -> dict[str, Any]:
    """All that decides a campaign's models, and how they are compared."""
    tree = campaign.config.model_dump(mode="json", exclude=set(UNFROZEN))
    found = {name: value for name, value in decisive(tree).items() if name not in OWN}
    return {
        **found,
        **decisive({"compare": campaign.config.compare.model_dump(exclude=PRACTICAL)}),
    }


def _show(table: Table, seeds: int) -> None:
    """What somebody compares seeds for."""
    say(f"over {seeds} seeds: median (range), and the mean with its 95 % interval")
    for one in table.records():
        if str(one["measure"]).startswith(("distance", "training")):
            interval = f" ({one['low']:.4g} to {one['high']:.4g})" if one["low"] is not None else ""
            few = f", in {one['campaigns']} of them" if one["campaigns"] != seeds else ""
            say(
                f"  {one['model']:<10} {one['measure']:<52} {one['median']:.4g}"
                f" ({one['least']:.4g} to {one['most']:.4g}); {one['mean']:.4g}{interval}{few}"
            )
