"""Comparisons of several seeds as one table: medians, ranges, intervals, and what may not stand together."""

import csv
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from atoll.base.errors import AtollError
from atoll.campaign.measured import ComparedModel, Comparison
from atoll.measure.seeds import interval, over_seeds, unlike
from helpers import Run, merged, refused

METRIC = {"name": "net", "samples": 10, "seed": 0, "neighbours": {"k": 3, "real_recall": 0.8}}


def compared(monolith: float, once: float, **more: Any) -> Comparison:
    rows = [{"name": "monolith", "distance": monolith, "precision": 0.1}]
    rows.append({"name": "once", "distance": once, "precision": 0.2})
    beside = {"prompts": [], "clusters": [], "routing": {}}
    return Comparison.parse({"metric": METRIC, "rows": rows, **beside, **more}, "here")


def test_the_interval_is_scipys() -> None:
    values = [3.0, 4.5, 3.9, 2.2]
    expected = stats.t.interval(0.95, 3, loc=stats.tmean(values), scale=stats.sem(values))
    assert interval(values) == pytest.approx(expected, rel=1e-12)
    assert interval([1.0]) is None and interval([]) is None


def test_ratios_are_taken_within_a_campaign() -> None:
    """Levels differ far more between campaigns than models do within one."""
    rows = over_seeds([compared(10, 8), compared(20, 19), compared(40, 40)])
    lines = {(row.model, row.measure): row.model_dump() for row in rows}
    ratio, apart = lines["once", "distance / monolith"], lines["once", "distance - monolith"]
    assert (ratio["median"], ratio["least"], ratio["most"], ratio["campaigns"]) == (0.95, 0.8, 1.0, 3)
    half = 4.302653 / 3**0.5  # Student's t of two degrees of freedom; the differences' deviation is 1
    assert (apart["low"], apart["mean"], apart["high"]) == pytest.approx((-1 - half, -1, -1 + half), abs=1e-5)
    assert lines["once", "precision"]["median"] == 0.2
    assert ("monolith", "distance / monolith") not in lines


def test_a_model_that_one_campaign_lacks_is_left_out() -> None:
    other = compared(20, 19)
    other.rows.append(ComparedModel(name="top-1", distance=1.0))
    assert {one.model for one in over_seeds([compared(10, 8), other])} == {"monolith", "once"}
    alone = compared(10, 8)
    del alone.rows[0]
    measures = {one.measure for one in over_seeds([alone, alone])}
    assert measures == {"distance", "precision"}, "without a monolith there is nothing to divide by"


def test_training_is_held_against_the_monoliths() -> None:
    spent = {"monolith": 100.0, "experts": 50.0, "router": 4.0, "pretrain": 45.0, "student": 33.0}
    found = {row.model: row for row in over_seeds([compared(2, 1, train_flops=spent)] * 2)}
    for name, share in (("ensemble", 0.99), ("student", 0.33)):
        assert found[name].least == found[name].most == share and found[name].campaigns == 2


def test_unlike_comparisons_are_named() -> None:
    one = compared(2, 1)
    assert unlike(one, changed_metric(seed=1, neighbours={"k": 3, "real_recall": 0.7})) == []
    for change in ({"samples": 11}, {"fit_rows": 3}, {"neighbours": {"k": 5}}):
        assert unlike(one, changed_metric(**change)) == list(change)
    swept, other = (compared(2, 1, sweep={"guidances": [scale]}) for scale in (1.0, 2.0))
    assert unlike(swept, other) == ["sweep"] and unlike(swept, one) == []


def changed_metric(**change: Any) -> Comparison:
    return compared(2, 1, metric={**METRIC, **change})


def test_what_a_model_card_says_has_its_type() -> None:
    for key, value in {"guidance": None, "samples": 2.5, "distance": 1, "reference_rows": "x" * 9}.items():
        with pytest.raises(AtollError, match=f"metric.{key} is of another type"):
            changed_metric(**{key: value})


# The command.


@pytest.fixture
def pair(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two campaigns of the same weights whose seeds differ, so that noise and conditions do."""
    folders = tuple(tmp_path_factory.mktemp("several") / name for name in "ab")
    for seed, folder in enumerate(folders):
        # Another test may have compared the campaign as it is.
        shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("reports"))
        changed(folder, seed=seed)
    return folders[0], folders[1]


def changed(folder: Path, **settings: Any) -> Path:
    """The campaign as if it had been started with other settings."""
    yaml_path, json_path = folder / "campaign.yaml", folder / "campaign.json"
    yaml_path.write_text(yaml.safe_dump(merged(yaml.safe_load(yaml_path.read_text()), settings)))
    tree = json.loads(json_path.read_text())
    json_path.write_text(json.dumps({**tree, "config": merged(tree["config"], settings)}))
    return folder


@contextmanager
def report(folder: Path) -> Iterator[dict[str, Any]]:
    """What was compared of a campaign, to be changed."""
    path = folder / "reports/compare.json"
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def test_each_is_compared_and_all_are_one_table(pair: tuple[Path, Path], tmp_path: Path, run: Run) -> None:
    for number in (1, 2):
        assert run("compare", *pair, "--out", tmp_path, "--part", f"{number}/2").code == 0
    assert not list(tmp_path.rglob("seeds.json"))
    assert all(list(folder.glob("reports/work/*/*.safetensors")) for folder in pair)
    answer = run("compare", *pair, "--out", tmp_path)
    assert answer.code == 0, answer
    assert not [path for folder in pair for path in folder.glob("reports/work/*")]
    assert "over 2 seeds" in answer.out and "distance / monolith" in answer.out
    seeds = json.loads((tmp_path / "reports/seeds.json").read_text())
    each = [json.loads((folder / "reports/compare.json").read_text()) for folder in pair]
    assert [one["key"] for one in seeds["campaigns"]] == [one["key"] for one in each]
    assert [one["seed"] for one in seeds["campaigns"]] == [0, 1]
    lines = list(csv.DictReader((tmp_path / "reports/seeds.csv").read_text().splitlines()))
    distances = [one["rows"][0]["distance"] for one in each]
    (line,) = (line for line in lines if (line["model"], line["measure"]) == ("monolith", "distance"))
    assert float(line["least"]) == min(distances) and float(line["most"]) == max(distances)
    assert min(distances) < max(distances)
    assert run("compare", *pair, "--out", tmp_path).out.count("finished already") == 2

    # One ensemble need not get as far as the monolith: then there is one value, and no interval.
    for folder, share in zip(pair, (0.5, None), strict=True):
        columns = ["model", "target", "train_flops", "of_monolith", "how"]
        row = ["once", 1.0, 1.0, share, "never" if share is None else "between points"]
        with report(folder) as content:
            content["tables"]["reach"] = {"columns": columns, "rows": [row]}
    answer = run("compare", *pair, "--out", tmp_path)
    assert answer.code == 0 and "0.5 (0.5 to 0.5); 0.5, in 1 of them" in answer.out, answer

    # What decides no result may differ; what was measured otherwise may not.
    changed(pair[1], train={"log_every": 3})
    assert run("compare", *pair, "--out", tmp_path).code == 0
    with report(pair[1]) as content:
        del content["metric"]["reference_hash"]
    answer = run("compare", *pair, "--out", tmp_path)
    refused(answer, "measured otherwise", "reference_hash", "remove reports/compare.json")


def test_campaigns_that_are_no_repetition_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, run: Run
) -> None:
    refused(run("compare", pair[0], pair[0], "--out", tmp_path), "both of seed 0")
    other = changed(Path(shutil.copytree(pair[1], tmp_path / "other")), train={"lr": 3e-4})
    refused(run("compare", pair[0], other, "--out", tmp_path), "more than its seed: train.lr")
    assert not (tmp_path / "reports").exists()
