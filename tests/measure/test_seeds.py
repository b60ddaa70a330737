"""Comparisons of several seeds as one table: medians, ranges, intervals, and what may not stand together."""

from typing import Any

import pytest
from scipy import stats

from atoll.measure.seeds import interval, over_seeds, seeds_table, unlike

METRIC = {"name": "net", "samples": 10, "seed": 0, "neighbours": {"k": 3, "real_recall": 0.8}}


def compared(monolith: float, commit: float, **more: Any) -> dict[str, Any]:
    rows = [{"name": "monolith", "distance": monolith, "precision": 0.1}]
    rows.append({"name": "once", "distance": commit, "precision": 0.2})
    return {"metric": METRIC, "rows": rows, **more}


def test_the_interval_is_scipys() -> None:
    values = [3.0, 4.5, 3.9, 2.2]
    expected = stats.t.interval(0.95, 3, loc=stats.tmean(values), scale=stats.sem(values))
    assert interval(values) == pytest.approx(expected, rel=1e-12)
    assert interval([1.0]) is None and interval([]) is None


def test_ratios_are_taken_within_a_campaign() -> None:
    """Levels differ far more between campaigns than models do within one."""
    table = seeds_table([compared(10, 8), compared(20, 19), compared(40, 40)])
    lines = {(line["model"], line["measure"]): line for line in table.records()}
    ratio, apart = lines["once", "distance / monolith"], lines["once", "distance - monolith"]
    assert (ratio["median"], ratio["least"], ratio["most"], ratio["campaigns"]) == (0.95, 0.8, 1.0, 3)
    half = 4.302653 / 3**0.5  # Student's t of two degrees of freedom; the differences' deviation is 1
    assert (apart["low"], apart["mean"], apart["high"]) == pytest.approx(
        (-1 - half, -1.0, -1 + half), abs=1e-5
    )
    assert lines["once", "precision"]["median"] == 0.2
    assert ("monolith", "distance / monolith") not in lines


def test_a_model_that_one_campaign_lacks_is_left_out() -> None:
    other = compared(20, 19)
    other["rows"].append({"name": "top-1", "distance": 1.0})
    assert {one.model for one in over_seeds([compared(10, 8), other])} == {"monolith", "once"}
    alone = compared(10, 8)
    del alone["rows"][0]
    measures = {one.measure for one in over_seeds([alone, alone])}
    assert measures == {"distance", "precision"}, "without a monolith there is nothing to divide by"


def test_training_is_held_against_the_monoliths() -> None:
    spent = {"monolith": 100.0, "experts": 50.0, "router": 4.0, "pretrain": 45.0, "student": 33.0}
    found = {one.model: one.values for one in over_seeds([compared(2, 1, train_flops=spent)] * 2)}
    assert found["ensemble"] == [0.99, 0.99] and found["student"] == [0.33, 0.33]


def test_unlike_comparisons_are_named() -> None:
    one = compared(2, 1)
    other = {**one, "metric": {**METRIC, "seed": 1, "neighbours": {"k": 3, "real_recall": 0.7}}}
    assert unlike(one, other) == []
    for change in ({"samples": 11}, {"fit_rows": 3}, {"neighbours": {"k": 5}}):
        assert unlike(one, {**one, "metric": {**METRIC, **change}}) == list(change)
    assert unlike({**one, "sweep": {"guidances": [1.0]}}, {**one, "sweep": {"guidances": [2.0]}}) == ["sweep"]
    assert unlike({**one, "sweep": {"guidances": [1.0]}}, one) == []
