"""`reports/summary.json`: the figures of a campaign for programs."""

from typing import Any

from atoll.base.format import File
from atoll.campaign.roles import RUNS
from atoll.report.facts import Facts, Run, total


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


def summary(facts: Facts) -> Summary:
    """The figures of a campaign at any stage."""
    compared, partition = facts.comparison, facts.partition
    rows = compared.rows if compared else []
    flops: dict[str, float | None] = {}
    for role in RUNS.values():
        trained = [_spent(run) for run in (facts.monolith, *facts.runs) if run.role == role.name]
        if trained or role.counted == "ensemble":
            flops[role.plural] = total(trained[:1] if role.counted == "baseline" else trained)
    complete = None not in [flops[role.plural] for role in RUNS.values() if role.counted != "extra"]
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
        best=compared.best.name if compared and compared.best else None,
        default=compared.default if compared else None,
        ratio_to_monolith={
            row.name: compared.ratio(row) for row in rows if compared and row.name != "monolith"
        },
        metric=compared.metric if compared else None,
        compared={name: table.records for name, table in compared.tables.present().items()}
        if compared
        else {},
        unfinished=[run.name.lower() for run in facts.runs if not run.finished],
    )


def _spent(run: Run) -> float | None:
    return run.train_flops if run.finished else None
