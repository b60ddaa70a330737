"""The report of a campaign: one self-contained HTML page, and its figures as JSON."""

from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from atoll.base.errors import ConfigError, PartitionError
from atoll.base.format import File
from atoll.campaign.measured import BASE
from atoll.campaign.report_table import findings
from atoll.campaign.roles import RUNS
from atoll.data.formats import PartitionFile
from atoll.report import palette, sections, why
from atoll.report.facts import Facts, total
from atoll.report.html import environment
from atoll.store.store import Store

PAGE = "reports/index.html"
SECTIONS = {
    "head": sections.head,
    "samples": sections.samples,
    "routing": sections.routing,
    "clusters": sections.clusters,
    "learning": sections.learning,
    "strategies": sections.strategies,
    "beyond": sections.beyond,
    "evaluated": sections.evaluated,
    "findings": lambda facts: findings(facts.store),
    "why": why.why,
    "sampling": why.sampling,
    "flops": sections.flops,
    "provenance": sections.provenance,
}
"""What the template of each name, in `templates/sections/`, is given; None where there is nothing yet."""


class Summary(File):
    """`summary.json`: the figures of the report for programs; what is not there yet is null."""

    FORMAT, PLACE = "atoll/summary", "reports/summary.json"
    REMEDY = "write it again: atoll report"

    campaign: str
    """Name of the folder."""
    atoll: str
    """Version of Atoll that the campaign was started with."""
    seconds: float | None
    """Of all stages, where the quickstart took them."""
    stages: dict[str, float] | None
    """The same by stage."""
    images: int
    """Rows of the data set."""
    partition: str
    """Hash of the partition."""
    cluster_sizes: list[int]
    """Training rows of each cluster."""
    cluster_heldout: list[int]
    """Held-out rows of each cluster."""
    train_flops: dict[str, float | None]
    """Spent by `monolith`, `experts` (once all are finished), `router`, `pretrain` (0 without), `student`."""
    flops_ratio: float | None
    """Operations of experts, router and shared pretraining over the monolith's."""
    distance: dict[str, float | None]
    """To real pictures, by model or routing."""
    best: str | None
    """Routing of the smallest distance; `oracle` does not compete."""
    default: str | None
    """Routing that the campaign samples with."""
    ratio_to_monolith: dict[str, float | None]
    """Distances over the monolith's."""
    metric: dict[str, Any] | None
    """What the distance is, as in `compare.json`."""
    compared: dict[str, list[dict[str, Any]]]
    """Tables of `compare.json`, their rows as objects."""
    unfinished: list[str]
    """Runs that have not published."""


def write_report(store: Store) -> str:
    """Write `reports/summary.json` and `reports/index.html` for whatever the campaign has by now.

    The same campaign gives the same bytes. The page needs no network and runs no script. Returns its place.

    Raises:
        PartitionError: the campaign has no partition yet.
        DataError: a file of the campaign is not what Atoll writes.
    """
    if not store.exists(PartitionFile.PLACE):
        where = store.location
        raise PartitionError(f"{where} has no partition", f"run 'atoll partition {where}' first")
    facts = Facts(store)
    store.put_json(Summary.PLACE, summary(facts).to_json())
    context = {name: section(facts) for name, section in SECTIONS.items()}
    page = (
        environment()
        .get_template("page.html")
        .render(
            facts=facts,
            colours=Markup(palette.stylesheet(facts.partition.k)),
            config=yaml.safe_dump(facts.frozen.config, sort_keys=False, allow_unicode=True),
            **context,
        )
    )
    store.put(PAGE, page.encode("utf-8", "replace"))
    return store.name(PAGE)


def summary(facts: Facts) -> Summary:
    """The figures of a campaign at any stage."""
    comparison, partition = facts.comparison, facts.partition
    flops: dict[str, float | None] = {}
    for role in RUNS.values():
        runs = facts.by_role.get(role.name, [])
        if runs or role.counted == "ensemble":
            flops[role.plural] = total(run.train_flops if run.finished else None for run in runs)
    complete = None not in [flops[role.plural] for role in RUNS.values() if role.counted != "extra"]
    rows = comparison.rows if comparison else []
    best = comparison.best if comparison else None
    return Summary(
        campaign=facts.name,
        atoll=facts.frozen.code,
        seconds=facts.seconds,
        stages=facts.stages or None,
        images=partition.rows,
        partition=partition.hash,
        cluster_sizes=partition.sizes,
        cluster_heldout=partition.heldout,
        train_flops=flops,
        flops_ratio=facts.flops_ratio if complete else None,
        distance={row.name: row.distance for row in rows},
        best=best.name if best else None,
        default=comparison.default if comparison else None,
        ratio_to_monolith={
            row.name: comparison.ratio(row) for row in rows if comparison and row.name != BASE
        },
        metric=comparison.metric if comparison else None,
        compared={name: table.records for name, table in comparison.tables.present().items()}
        if comparison
        else {},
        unfinished=[run.name.lower() for run in facts.runs if not run.finished],
    )


def write_page(path: Path, page: str, option: str) -> None:
    """Write a page to a file that an option of the command names; `ConfigError` if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, "utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})", f"give another {option}") from None
