"""`reports/summary.json`: the figures of a campaign for programs."""

from typing import Any

from atoll.report.campaign import Campaign, Run


def summary(campaign: Campaign) -> dict[str, Any]:
    """The figures, in a fixed order; what is not there yet is null.

    FLOPs are those that finished runs spent, so `experts` is null until all are finished.
    """
    compared = campaign.comparison
    best = compared.best if compared else None
    tables = {name: table.records for name, table in compared.tables.items()} if compared else {}
    flops = {
        "monolith": campaign.monolith.spent_flops,
        "experts": _sum(campaign.experts),
        "router": campaign.router.spent_flops,
        "pretrain": campaign.pretrain.spent_flops if campaign.pretrain else 0.0,
    }
    complete = all(value is not None for value in flops.values())
    if campaign.student:
        flops["student"] = campaign.student.spent_flops
    return {
        "campaign": campaign.name,
        "atoll": campaign.code,
        "seconds": campaign.seconds,
        "stages": campaign.stages or None,
        "images": campaign.partition.rows,
        "partition": campaign.partition.hash,
        "cluster_sizes": list(campaign.partition.sizes),
        "cluster_heldout": list(campaign.partition.heldout),
        "train_flops": flops,
        "flops_ratio": campaign.flops_ratio if complete else None,
        "distance": {row.name: row.distance for row in compared.rows} if compared else {},
        "best": best.name if best else None,
        "default": campaign.default,
        "ratio_to_monolith": {
            row.name: compared.ratio(row) for row in compared.rows if row.name != "monolith"
        }
        if compared
        else {},
        "metric": compared.metric if compared else None,
        **({"compared": tables} if tables else {}),
        "unfinished": [run.name.lower() for run in campaign.runs if not run.finished],
    }


def _sum(runs: list[Run]) -> float | None:
    spent = [run.spent_flops for run in runs]
    return None if any(value is None for value in spent) else sum(value or 0.0 for value in spent)
