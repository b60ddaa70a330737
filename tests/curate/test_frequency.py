"""Fits of performance to frequency: the published figures, and what has none."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from atoll.base.errors import DataError
from atoll.curate.frequency import Fit, binned, fit, ranks, slope

COLUMNS = ("downstream", "pretraining", "search", "backbone")


def published(shared_data: Path, pretraining: str, search: str, backbone: str) -> Fit:
    """The authors' counts and accuracies, joined as the README of the data says."""

    def name(row: dict[str, Any]) -> tuple[str, str]:
        concept = row["concept"].lower().replace("_", " ")
        plane = row["downstream"] == "cifar10" and concept == "plane"
        return row["downstream"], "airplane" if plane else concept

    def rows(table: str, **where: str) -> list[dict[str, Any]]:
        found = pq.read_table(shared_data / "frequency" / f"{table}.parquet").to_pylist()
        return [
            row
            for row in found
            if row["downstream"] != "imagenet-r" and all(row[key] == value for key, value in where.items())
        ]

    counts = {name(r): r["count"] for r in rows("counts", pretraining=pretraining, search=search)}
    results = rows("accuracy", pretraining=pretraining, backbone=backbone)
    both = [(counts[name(row)], row["accuracy"]) for row in results if name(row) in counts]
    return fit(*zip(*both, strict=True), draws=200)


@pytest.mark.parametrize(
    ("which", "figures"),
    [
        (("cc3m", "image", "RN50"), (0.9751, 0.4843, 7.110)),
        (("cc3m", "image", "ViT-B-16"), (0.9723, 0.4452, 6.045)),
        (("cc3m", "integrated", "RN50"), (0.9659, 0.5588, 9.891)),
        (("laion400m", "integrated", "ViT-B-32"), (0.9676, 0.2528, 4.477)),
    ],
)
def test_the_published_figures(shared_data: Path, which: tuple[str, ...], figures: tuple[float, ...]):
    found = published(shared_data, *which)
    assert found.concepts == 4469
    assert found.binned == pytest.approx(figures[0], abs=5e-4)
    assert found.pearson.value == pytest.approx(figures[1], abs=5e-4)
    assert found.slope.value == pytest.approx(figures[2], abs=0.01)
    for one in (found.slope, found.pearson, found.spearman):
        low, high = one.interval
        assert low < one.value < high and high - low < 0.3 * one.value


def test_let_it_wag(shared_data: Path):
    models = json.loads((shared_data / "frequency" / "let_it_wag.json").read_text())["models"]
    common, rare = (np.array([m[k] for m in models]) for k in ("imagenet", "let_it_wag"))
    few = common < 50
    slopes = [slope(common[rows], rare[rows]) / np.log(10) for rows in (few, ~few)]
    assert slopes == pytest.approx([0.6030, 1.5776], abs=5e-4)
    assert (common - rare).mean() == pytest.approx(22.74, abs=5e-3)


def test_as_scipy_computes_them():
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 1000, 300)
    results = np.round(np.log1p(counts) + generator.normal(0, 2, 300), 1)
    found, logs = fit(counts, results), np.log(np.maximum(counts, 1))
    assert found.pearson.value == pytest.approx(stats.pearsonr(logs, results)[0])
    assert found.spearman.value == pytest.approx(stats.spearmanr(counts, results)[0])
    assert found.slope.value == pytest.approx(stats.linregress(logs / np.log(10), results).slope)
    assert ranks(results).tolist() == stats.rankdata(results).tolist()
    assert found.examples_for(found.slope.value).value == pytest.approx(10)


def test_no_trend_costs_infinitely_much():
    generator = np.random.default_rng(0)
    found = fit(generator.integers(1, 10_000, 500), generator.normal(0, 1, 500))
    assert found.slope.interval[0] < 0 < found.slope.interval[1]
    assert found.examples_for(10).interval[1] == np.inf


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        counts = np.exp(generator.uniform(0, 8, 80))
        results = 3 * np.log10(counts) + generator.normal(0, 2, 80)
        low, high = fit(counts, results, draws=200, seed=seed).slope.interval
        held += low < 3 < high
    assert 86 <= held <= 99


def test_the_published_bins_count_an_empty_one_as_nothing():
    counts = np.array([1, 1, 2, 1000, 1000, 2000, 100_000], dtype=np.float64)
    assert binned(counts, np.ones(7)) < 1  # equal results everywhere, and yet a figure


@pytest.mark.parametrize(
    ("counts", "results", "what"),
    [
        ([1, 2], [1, 2, 3], "2 counts for 3 results"),
        ([1, 2], [1, 2], "2 concepts"),
        ([1, 2, -3], [1, 2, 3], "negative"),
        ([1, 2, 3], [1, float("nan"), 3], "no number"),
        ([5, 5, 5], [1, 2, 3], "all counts are 5"),
        ([1, 2, 3], [4, 4, 4], "all results are 4"),
    ],
)
def test_what_cannot_be_fitted(counts: list[float], results: list[float], what: str):
    with pytest.raises(DataError, match=what):
        fit(counts, results)
