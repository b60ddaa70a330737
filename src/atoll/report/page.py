"""The report of a campaign: one self-contained HTML page, and its figures as JSON."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from atoll.base import text as numbers
from atoll.base.errors import ConfigError, PartitionError
from atoll.data.formats import PartitionFile
from atoll.report import charts, palette, text
from atoll.report.facts import Facts
from atoll.report.sections import (
    beyond,
    clusters,
    evaluated,
    findings,
    flops,
    head,
    learning,
    provenance,
    routing,
    samples,
    sampling,
    strategies,
    why,
)
from atoll.report.summary import Summary, summary
from atoll.store.store import Store

PAGE = "reports/index.html"
SECTIONS = (
    *(head, samples, routing, clusters, learning, strategies, beyond, evaluated),
    *(findings, why, sampling, flops, provenance),
)
"""What each makes of the facts is told by the template of its name; None where there is nothing yet."""
FILTERS = {
    "whole": text.whole,
    "decimals": text.decimals,
    "significant": numbers.significant,
    "ratio": numbers.ratio,
    "percent": numbers.percent,
    "flops": numbers.flops,
    "time": numbers.duration,
    "model": palette.model_name,
}


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
    if not store.exists(PartitionFile.PLACE):
        where = store.location
        raise PartitionError(f"{where} has no partition", f"run 'atoll partition {where}' first")
    facts = Facts(store)
    store.put_json(Summary.PLACE, summary(facts).to_json())
    store.put(PAGE, render(facts).encode("utf-8", "replace"))
    return store.name(PAGE)


def write_page(path: Path, page: str, option: str) -> None:
    """Write a page to a file that an option of the command names.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, "utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})", f"give another {option}") from None


def render(facts: Facts) -> str:
    """The page as text."""
    contexts: dict[str, Any] = {one.__name__.rpartition(".")[2]: one.section(facts) for one in SECTIONS}
    return (
        environment()
        .get_template("page.html")
        .render(
            facts=facts,
            colours=Markup(palette.stylesheet(facts.partition.k)),
            config=yaml.safe_dump(facts.frozen.config, sort_keys=False, allow_unicode=True),
            **contexts,
        )
    )


@cache
def environment() -> Environment:
    """Where templates find each other, the drawings' frame and the ways to write numbers."""
    page = Environment(
        loader=PackageLoader("atoll.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.filters |= FILTERS
    page.globals["frame"] = (charts.LEFT, charts.RIGHT, charts.TOP, charts.BOTTOM)
    return page
