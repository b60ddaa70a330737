"""`reports/summary.json`: the figures of a campaign for programs."""

from typing import Any

from atoll.report.facts import Facts, Run, total


def summary(facts: Facts) -> dict[str, Any]:
    """The figures, in a fixed order; what is not there yet is null.

    FLOPs are those that finished runs spent, so `experts` is null until all are finished.
    """
    compared, partition = facts.comparison, facts.partition
    rows = compared.rows if compared else []
    tables = {name: table.records for name, table in compared.tables.items()} if compared else {}
    flops = {
        "monolith": _spent(facts.monolith),
        "experts": total([_spent(run) for run in facts.experts]),
        "router": _spent(facts.router),
        "pretrain": _spent(facts.pretrain) if facts.pretrain else 0.0,
    }
    complete = None not in flops.values()
    if facts.student:
        flops["student"] = _spent(facts.student)
    return {
        "campaign": facts.name,
        "atoll": facts.frozen.code,
        "seconds": facts.seconds,
        "stages": facts.stages or None,
        "images": partition.rows,
        "partition": partition.hash,
        "cluster_sizes": list(partition.sizes),
        "cluster_heldout": list(partition.heldout),
        "train_flops": flops,
        "flops_ratio": facts.flops_ratio if complete else None,
        "distance": {row.name: row.distance for row in rows},
        "best": compared.best.name if compared and compared.best else None,
        "default": compared.default if compared else None,
        "ratio_to_monolith": {
            row.name: compared.ratio(row) for row in rows if compared and row.name != "monolith"
        },
        "metric": compared.metric if compared else None,
        **({"compared": tables} if tables else {}),
        "unfinished": [run.name.lower() for run in facts.runs if not run.finished],
    }


def _spent(run: Run) -> float | None:
    return run.train_flops if run.finished else None
