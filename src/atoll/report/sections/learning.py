"""Loss curves, and what the router knows."""

import math
from typing import Any

from atoll.report.charts import Series, by_time, training_curve
from atoll.report.facts import Facts


def section(facts: Facts) -> dict[str, Any]:
    """Charts of training and validation; None where nothing is logged."""
    # The monolith is drawn first and the experts on top of it.
    dense = [run for run in (facts.monolith, facts.pretrain, facts.student) if run is not None]
    runs = [run for run in (*dense, *facts.experts) if run.losses or run.validation]
    shares = [size / sum(facts.partition.sizes) for size in facts.partition.sizes]
    router, entropy = facts.router, -sum(share * math.log(share) for share in shares if share)
    # A student's training loss is its distance from its teachers, so only its validations compare.
    curves = [Series(run.name, run.style, run.losses) for run in runs if run.role != "student"]
    return {
        "runs": sorted(runs, key=lambda run: run.role != "expert"),
        "training": training_curve("Training loss", curves),
        "validation": by_time(
            "Validation loss at fixed times t", [Series(r.name, r.style, r.validation) for r in runs], "loss"
        ),
        "router_training": training_curve(
            "Router cross-entropy", [Series(router.name, router.style, router.losses)]
        ),
        "router_loss": by_time(
            "Cross-entropy at fixed times t",
            [Series("Router, cross-entropy", "router", router.validation)],
            "cross-entropy",
            [("knowing only the sizes", entropy)],
            zero=True,
        ),
        "router_accuracy": by_time(
            "Share of held-out rows whose cluster the router finds, at fixed times t",
            [Series("Router, accuracy", "router", router.accuracy)],
            "accuracy",
            [("always the largest cluster", max(shares))],
            share=True,
        ),
    }
