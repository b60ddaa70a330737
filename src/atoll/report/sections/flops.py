"""Where the training FLOPs went."""

from typing import Any

from atoll.report.facts import Facts, total


def section(facts: Facts) -> dict[str, Any]:
    """The runs of the ensemble, those beside them, and the sums."""
    planned = [run.train_flops or 0.0 for run in facts.ensemble]
    base = facts.monolith.train_flops or 0.0
    student = facts.student.train_flops if facts.student else None
    seconds = [run.seconds for run in facts.ensemble if run.seconds is not None]
    return {
        "name": "Experts + router + pretraining" if facts.pretrain else "Experts + router",
        "total": total([run.train_flops for run in facts.ensemble]),
        "sum": sum(planned),
        "longest": max(sum(planned), base) or 1.0,
        "seconds": sum(seconds) if seconds else None,
        "beside": [facts.monolith, *([facts.student] if facts.student else [])],
        "student_ratio": student / base if student and base else None,
    }
