"""`atoll compare` of several campaigns: one table over their seeds, and what is refused."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers import command, merged, refused


@pytest.fixture(scope="module")
def pair(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two campaigns of the same weights whose seeds differ, so that noise and conditions do."""
    folders = tuple(tmp_path_factory.mktemp("several") / name for name in "ab")
    for seed, folder in enumerate(folders):
        shutil.copytree(whole, folder)
        changed(folder, seed=seed)
    return folders[0], folders[1]


def changed(folder: Path, **settings: Any) -> Path:
    """The campaign as if it had been started with other settings."""
    yaml_path, json_path = folder / "campaign.yaml", folder / "campaign.json"
    yaml_path.write_text(yaml.safe_dump(merged(yaml.safe_load(yaml_path.read_text()), settings)))
    tree = json.loads(json_path.read_text())
    json_path.write_text(json.dumps({**tree, "config": merged(tree["config"], settings)}))
    return folder


def test_each_is_compared_and_all_are_one_table(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = command(capsys, "compare", *pair, "--out", tmp_path)
    assert answer.code == 0, answer
    assert "over 2 seeds" in answer.out and "distance / monolith" in answer.out
    found = json.loads((tmp_path / "reports/seeds.json").read_text())
    each = [json.loads((folder / "reports/compare.json").read_text()) for folder in pair]
    assert [one["key"] for one in found["campaigns"]] == [one["key"] for one in each]
    assert [one["seed"] for one in found["campaigns"]] == [0, 1]
    lines = list(csv.DictReader((tmp_path / "reports/seeds.csv").read_text().splitlines()))
    distances = [one["rows"][0]["distance"] for one in each]
    (line,) = (line for line in lines if (line["model"], line["measure"]) == ("monolith", "distance"))
    assert float(line["least"]) == min(distances) and float(line["most"]) == max(distances)
    assert min(distances) < max(distances)
    again = command(capsys, "compare", *pair, "--out", tmp_path)
    assert again.out.count("finished already") == 2


def test_what_one_campaign_lacks_is_told(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One ensemble need not get as far as the monolith: then there is one value, and no interval."""
    copies = [Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in pair]
    for folder, share in zip(copies, (0.5, None), strict=True):
        assert command(capsys, "compare", folder).code == 0
        path = folder / "reports/compare.json"
        found = json.loads(path.read_text())
        columns, row = (
            ["model", "of_monolith", "how"],
            ["once", share, "never" if share is None else "between"],
        )
        found["tables"]["reach"] = {"columns": columns, "rows": [row]}
        path.write_text(json.dumps(found))
    answer = command(capsys, "compare", *copies, "--out", tmp_path)
    assert answer.code == 0 and "0.5 (0.5 to 0.5); 0.5, in 1 of them" in answer.out, answer


def test_what_was_measured_otherwise_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loose = changed(Path(shutil.copytree(pair[1], tmp_path / "b")), train={"log_every": 3})
    assert command(capsys, "compare", pair[0], loose, "--out", tmp_path).code == 0
    path = loose / "reports/compare.json"
    found = json.loads(path.read_text())
    del found["metric"]["reference_hash"]
    path.write_text(json.dumps(found))
    answer = command(capsys, "compare", pair[0], loose, "--out", tmp_path)
    refused(answer, "measured otherwise", "reference_hash", "remove reports/compare.json")


def test_campaigns_that_are_no_repetition_are_refused(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(command(capsys, "compare", pair[0], pair[0], "--out", tmp_path), "both of seed 0")
    other = changed(Path(shutil.copytree(pair[1], tmp_path / "other")), train={"lr": 3e-4})
    refused(command(capsys, "compare", pair[0], other, "--out", tmp_path), "more than its seed: train.lr")
    assert not (tmp_path / "reports").exists()
