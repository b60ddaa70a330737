"""What concepts buy: rare ones drawn and judged, and performance fitted to frequency."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow.csv import read_csv
from scipy import stats

from atoll.base.errors import DataError
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import findings
from atoll.cli import main as cli
from atoll.curate.audit import ConceptCounts
from atoll.curate.fit import FrequencyFit, binned, fit
from atoll.curate.tail import RealPictures, TailPrompts
from atoll.train.run import train_run
from helpers import Run, assembled, refused

TEXT = {
    "condition": "text",
    "network": {"family": "pixart", "size": "nano", "depth": 1, "heads": 1, "head_width": 16},
    "data": {"text_length": 8},
    "budget": {"samples": 128},
    "sampling": {"steps": 2},
    "monolith": True,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = assembled(tmp_path_factory.mktemp("tail") / "c", TEXT)
    train_run(Campaign.open(folder), "monolith")
    for argv in (["index", str(folder), "--least", "2"], ["audit", str(folder)]):
        cli.atoll.main(["concepts", *argv], standalone_mode=False)
    return folder


def real_pictures() -> RealPictures:
    """Four pictures on a circle: of concepts 0, 1, 2 and 3, the third also of concept 0."""
    angles = torch.tensor([0.0, 0.5, 1.0, 1.5])
    holds = torch.eye(4, dtype=torch.bool)
    holds[2, 0] = True
    return RealPictures(torch.stack([angles.cos(), angles.sin()], dim=1), holds)


def test_the_nearest_real_picture_judges():
    angles = torch.tensor([0.1, 0.9, 0.2, 1.4])
    pictures = torch.stack([angles.cos(), angles.sin()], dim=1) * 7
    hit, rank = real_pictures().judge(pictures, torch.tensor([0, 2, 2, 1]))
    # Rivals are of the same kind, every second place: 0 and 2, 1 and 3.
    assert hit.tolist() == [1, 1, 0, 0]
    assert rank.tolist() == [1, 0, 0, 0]  # the second is as near to 0 by a picture that has both


def test_a_real_picture_does_not_judge_itself():
    real = real_pictures()
    hit, _ = real.judge(real.features[:1], torch.tensor([0]), torch.tensor([0]))
    assert hit.tolist() == [1]  # by the third, which has concept 0 too


def test_rare_concepts_are_paired_with_common_ones(campaign: Path, run: Run):
    answer = run("concepts", "tail", campaign, "--n", "5", "--least", "2", "--template", "a {}")
    assert answer.code == 0, answer.err
    store = Campaign.open(campaign).store
    prompts = TailPrompts.read(store, TailPrompts.PLACE)
    totals = ConceptCounts.read(store, ConceptCounts.PLACE).table().sum(1)
    rare, common = zip(*prompts.pairs, strict=True)
    there = sorted(int(total) for total in totals if total >= 2)
    assert sorted(totals[list(rare)].tolist()) == there[:5]
    assert len(set(common)) == 5 and min(totals[list(common)]) >= there[-max(10, len(there) // 10)]
    assert prompts.templates == ("a {}",)


def test_an_audit_of_another_vocabulary_is_refused(campaign: Path, run: Run):
    assert "--vocabulary FILE names others" in run("concepts", "index", campaign, "--least", "3").out
    words = "changed since the audit: run 'atoll concepts audit'"
    refused(run("concepts", "tail", campaign, "--n", "2"), words)


def test_models_are_drawn_and_judged(campaign: Path, run: Run):
    run("concepts", "tail", campaign, "--n", "4", "--least", "2", "--template", "a {} of {5")
    argv = ["concepts", "evaluate", campaign, "--each", "2", "--extractor", "pixels"]
    models = ["--model", "monolith", "--model", "ensemble:top-1", "--model", "ensemble:full"]
    answer = run(*argv, *models)
    assert answer.code == 0, answer.err
    rows = list(csv.DictReader((table := campaign / "reports/concepts/tail.csv").read_text().splitlines()))
    models = {row["model"] for row in rows}
    assert models == {"real pictures, each left out in turn", "monolith", "ensemble:top-1", "ensemble:full"}
    for row in rows:
        assert 0 <= float(row["hit"]) <= 1 and 0 <= float(row["rank"]) <= 1
        assert int(row["best_expert"]) <= int(row["rows"])
        assert bool(row["routed"]) == row["model"].startswith("ensemble")
    top = {row["concept"]: float(row["routed"]) for row in rows if row["model"] == "ensemble:top-1"}
    assert len(top) == 8 and all(float(row["rows"]) >= top[row["concept"]] for row in rows)
    (finding,) = [x for x in findings(Campaign.open(campaign).store) if "Rare" in x.title]
    assert [row[0] for row in finding.rows][1:] == ["monolith", "ensemble:top-1", "ensemble:full"]
    before = sorted(table.read_bytes().splitlines())
    assert run(*argv, *[x for m in sorted(models) if "real" not in m for x in ("--model", m)]).code == 0
    assert sorted(table.read_bytes().splitlines()) == before  # the same noise, the same pictures


def test_what_is_missing_is_said(campaign: Path, run: Run):
    refused(run("concepts", "evaluate", campaign), "no prompts", "atoll concepts tail")
    tail = partial(run, "concepts", "tail", campaign)
    refused(tail("--n", "9999"), "9999 rare ones take 39996: lower --least, or --n to")
    refused(tail("--n", "2", "--least", "100000"), "0 concepts in 100000 training rows or more", "index more")
    refused(tail("--n", "2", "--template", "x"), "no place for a concept")
    tail("--n", "2")
    argv = "concepts", "evaluate", campaign, "--extractor", "pixels", "--model", "monolit"
    refused(run(*argv), "there is no model 'monolit': did you mean 'monolith'?")
    run("concepts", "index", campaign, "--least", "4")
    refused(run("concepts", "evaluate", campaign), "other concepts")
    (campaign / "reports" / "concepts" / "counts.json").unlink()
    refused(tail(), "no counts", "atoll concepts audit")


def published(shared_data: Path, pretraining: str, search: str, backbone: str) -> FrequencyFit:
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


def test_slope_and_ranks_are_those_of_scipy():
    generator = np.random.default_rng(1)
    counts = generator.integers(0, 1000, 300)
    results = np.round(np.log1p(counts) + generator.normal(0, 2, 300), 1)
    found, logs = fit(counts, results), np.log(np.maximum(counts, 1))
    assert found.slope.value == pytest.approx(stats.linregress(logs / np.log(10), results).slope)
    assert found.spearman.value == pytest.approx(stats.spearmanr(counts, results)[0])
    flat = fit(generator.integers(1, 10_000, 500), generator.normal(0, 1, 500), draws=300)
    assert flat.slope.low < 0 < flat.slope.high


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
    figure = binned(np.array([1, 1, 2, 1000, 1000, 2000, 100_000], dtype=np.float64), np.ones(7))
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


COUNTS = "concept,set,count\nHot_Dog,a,10\ncat,a,100\nbird,a,1000\nbird,b,9007199254740993\nfish,a,10000\n"
RESULTS = "concept,set,score\nhot dog,a,1\ncats,a,9\ncat,a,2\nBIRD,a,3\nbird,b,0\nfish,a,4\n"


def options(folder: Path, counts: str = COUNTS) -> list[str]:
    (folder / "c.csv").write_text(counts)
    (folder / "r.CSV").write_text(RESULTS)
    files = ["--counts", f"{folder}/c.csv", "--results", f"{folder}/r.CSV", "--out", str(folder)]
    return ["concepts", "fit", *files]


def test_tables_are_joined_by_concept_and_common_words(tmp_path: Path, run: Run):
    argv = options(tmp_path)
    answer = run(*argv, "--where", "set=a")
    assert answer.code == 0 and "4 concepts; 1 results have no count" in answer.out
    written = json.loads((tmp_path / "reports/concepts/fit.json").read_text())
    assert written["slope"][0] == pytest.approx(1) and written["pearson"][0] == pytest.approx(1)
    assert run(*argv).code == 0
    assert json.loads((tmp_path / "reports/concepts/fit.json").read_text())["concepts"] == 5
    for name in ("c.csv", "r.CSV"):  # with large strings, as Polars writes them
        table = read_csv(tmp_path / name)
        kinds = [*((of, pa.large_string()) for of in ("concept", "set")), table.schema.field(2)]
        pq.write_table(table.cast(pa.schema(kinds)), tmp_path / name[0])
    argv[3::2] = f"{tmp_path}/c", f"{tmp_path}/r", str(tmp_path)
    assert "5 concepts" in run(*argv).out


def test_tables_that_cannot_be_joined(tmp_path: Path, run: Run):
    for counts, more, *words in (
        (COUNTS, "--where set=b", "1 concepts", "three or more"),
        (COUNTS, "--where sett=b", "neither table has 'sett'", "set"),
        (COUNTS, "--where set", "COLUMN=VALUE"),
        (COUNTS, "--count size", "no numbers 'size'", "count"),
        (COUNTS + "BIRD,a,7\n", "", "bird / a stands twice", "1000 and 7"),
        ("name,count\ncat,1\n", "", "no column 'concept'"),
        ("concept,count,size\ncat,1,2\n", "", "2 columns of numbers", "count, size"),
        ("concept,count\ncat,1 000\n", "", "0 columns of numbers: write 1000"),
        ("", "", "no parquet"),
    ):
        refused(run(*options(tmp_path, counts), *more.split()), *words)
