"""The report of a campaign: one self-contained HTML page, and its figures as JSON."""

from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from atoll.report import compared, evaluated, palette, sections, why, wording
from atoll.report.campaign import Campaign, open_campaign
from atoll.report.summary import summary
from atoll.store.store import Store

PAGE = "reports/index.html"
SUMMARY = "reports/summary.json"


def write_report(store: Store) -> str:
    """Write `reports/summary.json` and `reports/index.html` for whatever the campaign has by now.

    The same campaign gives the same bytes. The page needs no network and runs no script.

    Args:
        store: the campaign.

    Returns:
        Path or URL of the page.

    Raises:
        PartitionError: the campaign has no partition yet.
        DataError: a file of the campaign is not what Atoll writes.
        StoreError: a file cannot be read or written.
    """
    campaign = open_campaign(store)
    store.put_json(SUMMARY, summary(campaign))
    store.put(PAGE, render(campaign).encode("utf-8", "replace"))
    return store.name(PAGE)


def render(campaign: Campaign) -> str:
    """The page as text."""
    loader = PackageLoader("atoll.report")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _filters()
    k = campaign.partition.k
    return environment.get_template("page.html").render(
        campaign=campaign,
        compared=campaign.comparison,
        style=Markup(loader.get_source(environment, "style.css")[0]),
        colours={
            "light": Markup(palette.variables(k)),
            "dark": Markup(palette.variables(k, dark=True)),
            "classes": Markup(palette.classes(k)),
        },
        header=sections.header(campaign),
        samples=sections.samples(campaign),
        routing=sections.routing(campaign),
        clusters=sections.clusters(campaign),
        charts=sections.charts(campaign),
        strategies=sections.strategies(campaign),
        beyond=compared.section(campaign),
        evaluated=evaluated.section(campaign),
        why=why.section(campaign),
        ledger=sections.ledger(campaign),
        provenance=sections.provenance(campaign),
        config=yaml.safe_dump(campaign.config, sort_keys=False, allow_unicode=True),
    )


def _filters() -> dict[str, Any]:
    return {
        "whole": wording.whole,
        "significant": wording.significant,
        "ratio": wording.ratio,
        "percent": wording.percent,
        "decimals": wording.decimals,
        "flops": wording.flops,
        "time": wording.seconds,
        "short": wording.short_hash,
    }
