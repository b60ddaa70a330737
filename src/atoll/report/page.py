"""Pages of a campaign: the report with its figures as JSON, the dashboard, and what all templates share."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel

from atoll.base import text
from atoll.base.errors import ConfigError, PartitionError
from atoll.base.format import File
from atoll.base.table import Column, columns_of, shown
from atoll.base.text import NONE
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import BASE
from atoll.campaign.report_table import findings
from atoll.campaign.roles import BASELINE, RUNS
from atoll.campaign.runs import runs_of
from atoll.campaign.status import BAD, Observer, trouble
from atoll.data.formats import PartitionFile
from atoll.report import charts, sections, why
from atoll.report.facts import Facts, pixelated, total
from atoll.store.store import Store


def whole(value: float | None) -> str:
    """`12,345`."""
    return NONE if value is None else f"{value:,.0f}"


def decimals(value: float | None, digits: int = 2) -> str:
    """`0.77`, `−0.03`: a number about 1."""
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


_columns_of = cache(columns_of)


def cell(row: Any, key: Any) -> str:
    """A value of a table's row, in the unit that a typed row has for it; text and markup stay as they are."""
    # Units are those of the CSV and of the terminal, so one number never has two forms.
    value = getattr(row, key) if isinstance(row, BaseModel) else row[key]
    if isinstance(value, str):
        return value
    columns = _columns_of(type(row)) if isinstance(row, BaseModel) else ()
    return shown(value, next((column for column in columns if column.name == key), Column("")))


def chip(name: Any, style: str) -> Markup:
    """A name beside its colour."""
    return Markup('<span class="chip {}">{}</span>').format(style, name)


def served(expert: Any) -> str:
    """Whose samples a row is of: an expert's by its number, the baseline's, or all."""
    if expert == "all":
        return "All"
    return chip(RUNS[expert].title, expert) if expert == BASELINE else chip(f"Expert {expert}", f"e{expert}")


@cache
def environment() -> Environment:
    """The templates of all pages."""
    pages = Environment(
        loader=PackageLoader("atoll.report"),
        # Captions, names of hosts and settings come from elsewhere: nothing is markup unless it says so.
        autoescape=True,
        # A misspelled name would otherwise be an empty place on a page that nobody reads again.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = {
        "whole": whole,
        "decimals": decimals,
        "significant": text.round_sig,
        "ratio": text.ratio,
        "percent": text.percent,
        "flops": text.flops,
        "time": text.duration,
        "size": text.size,
        "model": charts.model_name,
    }
    pages.filters |= formats
    # Formats are functions too, so that a table's columns can name them.
    pages.globals |= {"write": formats, "cell": cell, "chip": chip, "served": served}
    pages.globals["frame"] = (charts.LEFT, charts.RIGHT, charts.TOP, charts.BOTTOM)
    return pages


PAGE = "reports/index.html"


def rendered(template: str, **given: Any) -> str:
    """A page or a part of one."""
    return environment().get_template(template).render(**given)


SECTIONS = (
    *(sections.head, sections.samples, sections.routing, sections.clusters, sections.learning),
    *(sections.strategies, sections.beyond, sections.evaluated, why.why, why.sampling),
    *(sections.flops, sections.provenance),
)
"""What the templates of the same names show, in `templates/sections/`; None where there is nothing yet."""


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
    """Write `reports/summary.json` and `reports/index.html` for whatever the campaign has by now; its place.

    The same campaign gives the same bytes. The page needs no network and runs no script. `PartitionError`
    before there is a partition, `DataError` for a file that is not what Atoll writes.
    """
    if not store.exists(PartitionFile.PLACE):
        where = store.location
        raise PartitionError(f"{where} has no partition", f"run 'atoll partition {where}' first")
    facts = Facts(store)
    store.put_json(Summary.PLACE, summary(facts).to_json())
    context = {section.__name__: section(facts) for section in SECTIONS}
    page = rendered(
        "page.html",
        facts=facts,
        colours=Markup(charts.stylesheet(facts.partition.k)),
        config=yaml.safe_dump(facts.frozen.config, sort_keys=False, allow_unicode=True),
        findings=findings(store),
        **context,
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
    tables = comparison.tables.present() if comparison else {}
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
        ratio_to_monolith={r.name: comparison.ratio(r) for r in rows if comparison and r.name != BASE},
        metric=comparison.metric if comparison else None,
        compared={name: table.records for name, table in tables.items()},
        unfinished=[run.name.lower() for run in facts.runs if not run.finished],
    )


def write_page(path: Path, page: str, option: str) -> None:
    """Write a page to a file that an option of the command names; `ConfigError` if that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, "utf-8", "replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error})", f"give another {option}") from None


class Dashboard:
    """A campaign at any stage as a page; nothing of it is changed."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self._observer = Observer(campaign)

    def now(self) -> str:
        """Render states, curves and previews; `StoreError` or `DataError` where files cannot be read."""
        status, store = self._observer.read(), self.campaign.store
        facts = Facts(store) if status.partitioned else None
        done, whole = (
            sum(getattr(run, part) for run in status.runs) for part in ("done_flops", "train_flops")
        )
        folders, previews = {run.name: run.folder for run in runs_of(self.campaign.config)}, []
        for run in status.runs if facts else []:
            keys = [key for key in store.list(f"{folders[run.name]}/run/previews") if key.endswith(".png")]
            # By number: names are not padded for all lengths of a training, and others may lie there.
            steps = {int(stem): key for key in keys if (stem := key.rpartition("/")[2][:-4]).isdecimal()}
            picture = facts.picture(steps[max(steps)]) if facts and steps else None
            if picture is not None:
                previews.append((run, max(steps), picture))
        return rendered(
            "dashboard_now.html",
            status=status,
            styles={run.name: run.role if run.island is None else f"e{run.island}" for run in status.runs},
            done=done / whole if whole else 0.0,
            counts=Counter(run.state for run in status.runs),
            troubles=[f"{run.name} {trouble(run)}" for run in status.bad],
            bad=BAD,
            learning=sections.learning(facts) if facts else None,
            facts=facts,
            previews=previews,
            pixelated=pixelated([picture for _, _, picture in previews]),
        )

    def still(self) -> str:
        """The partition, which never changes: sizes of the clusters and their contact sheets; or nothing."""
        if not self.campaign.is_partitioned:
            return ""
        facts = Facts(self.campaign.store)
        return rendered("dashboard_still.html", facts=facts, clusters=sections.clusters(facts))

    def write(self, path: Path) -> None:
        """Write all of it as one page that needs nothing else; `ConfigError` if that cannot be."""
        parts = {"now": Markup(self.now()), "still": Markup(self.still())}
        colours = Markup(charts.stylesheet(self.campaign.config.partition.k))
        page = rendered("dashboard.html", name=Facts(self.campaign.store).name, colours=colours, **parts)
        write_page(path, page, "--once")
