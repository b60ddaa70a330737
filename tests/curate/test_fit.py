"""Fits of performance to frequency: the published figures, what has none, and how tables are joined."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from atoll.base.errors import DataError
from atoll.curate.fit import Fit, binned, fit
from curate.conftest import Said
from helpers import refused


def published(shared_data: Path, pretraining: str, search: str, backbone: str) -> Fit:
    """The authors' counts and accuracies, joined as the README of the data says."""

    def name(row: dict[str, Any]) -> tuple[str, str]:
        concept = row["concept"].lower().replace("_", " ")
        plane = row["downstream"] == "cifar10" and concept == "plane"
        return row["downstream"], "airplane" if plane else concept

    def rows(table: str, **where: str) -> list[dict[str, Any]]:
        filters = [(key, "==", value) for key, value in where.items()]
        path = shared_data / "frequency" / f"{table}.parquet"
        return pq.read_table(path, filters=[*filters, ("downstream", "!=", "imagenet-r")]).to_pylist()

    counts = {name(r): r["count"] for r in rows("counts", pretraining=pretraining, search=search)}
    results = rows("accuracy", pretraining=pretraining, backbone=backbone)
    both = [(counts[name(row)], row["accuracy"]) for row in results if name(row) in counts]
    return fit(*zip(*both, strict=True), draws=100)


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
    for value, low, high in (found.slope, found.pearson, found.spearman):
        assert low < value < high and high - low < 0.3 * value


def test_a_gain_costs_times_the_examples_and_without_a_trend_infinitely_many():
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 1000, 300)
    results = np.round(np.log1p(counts) + generator.normal(0, 2, 300), 1)
    found, logs = fit(counts, results), np.log(np.maximum(counts, 1))
    assert found.slope.value == pytest.approx(stats.linregress(logs / np.log(10), results).slope)
    assert found.spearman.value == pytest.approx(stats.spearmanr(counts, results)[0])
    assert found.examples_for(found.slope.value).value == pytest.approx(10)
    flat = fit(generator.integers(1, 10_000, 500), generator.normal(0, 1, 500), draws=300)
    assert flat.slope.low < 0 < flat.slope.high
    assert flat.examples_for(10).high == np.inf


def test_an_interval_holds_the_truth_about_as_often_as_it_says():
    held = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        counts = np.exp(generator.uniform(0, 8, 80))
        results = 3 * np.log10(counts) + generator.normal(0, 2, 80)
        _, low, high = fit(counts, results, draws=100, seed=seed).slope
        held += low < 3 < high
    assert 86 <= held <= 99


def test_the_published_bins_count_an_empty_one_as_nothing():
    counts = np.array([1, 1, 2, 1000, 1000, 2000, 100_000], dtype=np.float64)
    figure = binned(counts, np.ones(7))
    assert figure is not None and figure < 1  # equal results everywhere, and yet a figure
    assert binned(np.array([1.0, 1, 100_000]), np.array([1.0, 2, 3])) is None  # all inner bins are empty


def test_what_cannot_be_fitted():
    for counts, results, words in (
        ([1, 2], [1, 2, 3], "2 counts for 3 results"),
        ([1, 2], [1, 2], "2 concepts"),
        ([1, 2, -3], [1, 2, 3], "negative"),
        ([1, 2, 3], [1, float("nan"), 3], "no number"),
        ([5, 5, 5], [1, 2, 3], "all counts are 5"),
        ([0, 1, 0], [1, 2, 3], "all counts are 0 or 1"),
        ([1, 2, 3], [4, 4, 4], "all results are 4"),
    ):
        with pytest.raises(DataError, match=words):
            fit(counts, results)


COUNTS = "concept,set,count\nHot_Dog,a,10\ncat,a,100\nbird,a,1000\nbird,b,5\nfish,a,10000\n"
RESULTS = "concept,set,score\nhot dog,a,1\ncats,a,9\ncat,a,2\nBIRD,a,3\nbird,b,0\nfish,a,4\n"


def options(folder: Path, counts: str = COUNTS) -> list[str]:
    (folder / "c.csv").write_text(counts)
    (folder / "r.csv").write_text(RESULTS)
    files = ["--counts", f"{folder}/c.csv", "--results", f"{folder}/r.csv", "--out", str(folder)]
    return ["concepts", "fit", *files]


def test_tables_are_joined_by_concept_and_common_words(tmp_path: Path, said: Said):
    argv = options(tmp_path)
    answer = said(*argv, "--where", "set=a")
    assert answer.code == 0 and "4 concepts; 1 results have no count" in answer.out
    written = json.loads((tmp_path / "reports/concepts/fit.json").read_text())
    assert written["slope"][0] == pytest.approx(1) and written["pearson"][0] == pytest.approx(1)
    assert said(*argv).code == 0
    assert json.loads((tmp_path / "reports/concepts/fit.json").read_text())["concepts"] == 5


def test_tables_that_cannot_be_joined(tmp_path: Path, said: Said):
    for counts, more, *words in (
        (COUNTS, "--where set=b", "1 concepts", "three or more"),
        (COUNTS, "--where sett=b", "neither table has 'sett'", "set"),
        (COUNTS, "--where set", "COLUMN=VALUE"),
        (COUNTS, "--count size", "no numbers 'size'", "count"),
        (COUNTS + "BIRD,a,7\n", "", "bird / a stands twice", "1000 and 7"),
        ("name,count\ncat,1\n", "", "no column 'concept'"),
        ("concept,count,size\ncat,1,2\n", "", "2 columns of numbers", "count, size"),
        ("concept,kind\ncat,x\n", "", "0 columns of numbers"),
        ("", "", "no parquet"),
    ):
        refused(said(*options(tmp_path, counts), *more.split()), *words)
