"""Rare concepts and common ones: how they are chosen, and how pictures of them are judged."""

import csv
import shutil
from pathlib import Path

import pytest
import torch

from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import findings
from atoll.cli import main as cli
from atoll.curate.audit import ConceptCounts
from atoll.curate.tail import FARTHEST, RealPictures, TailPrompts
from atoll.train.run import train_run
from curate.conftest import Said
from helpers import assembled, refused

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
    if not (folder / "monolith" / "expert").exists():
        train_run(Campaign.open(folder), "monolith")
    for argv in (["index", str(folder), "--least", "2"], ["audit", str(folder)]):
        cli.atoll.main(["concepts", *argv], standalone_mode=False)
    return folder


@pytest.fixture
def campaign(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "c"))


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
    assert FARTHEST < -1


def test_rare_concepts_are_paired_with_common_ones(campaign: Path, said: Said):
    answer = said("concepts", "tail", campaign, "--n", "5", "--least", "2", "--template", "a {}")
    assert answer.code == 0, answer.err
    store = Campaign.open(campaign).store
    prompts = TailPrompts.read(store, TailPrompts.PLACE)
    counts = ConceptCounts.read(store, ConceptCounts.PLACE)
    totals = counts.table().sum(1)
    rare, common = zip(*prompts.pairs, strict=True)
    there = sorted(int(total) for total in totals if total >= 2)
    assert sorted(totals[list(rare)].tolist()) == there[:5]
    assert len(set(common)) == 5 and min(totals[list(common)]) >= there[-max(10, len(there) // 10)]
    assert prompts.templates == ("a {}",)


def test_an_audit_of_another_vocabulary_is_refused(campaign: Path, said: Said):
    answer = said("concepts", "index", campaign, "--least", "3")
    assert "--vocabulary FILE names others" in answer.out
    refused(
        said("concepts", "tail", campaign, "--n", "2"), "changed since the audit: run 'atoll concepts audit'"
    )


def test_models_are_drawn_and_judged(campaign: Path, said: Said):
    said("concepts", "tail", campaign, "--n", "4", "--least", "2")
    argv = ["concepts", "evaluate", campaign, "--each", "2", "--extractor", "pixels"]
    models = ["--model", "monolith", "--model", "ensemble:top-1", "--model", "ensemble:full"]
    answer = said(*argv, *models)
    assert answer.code == 0, answer.err
    rows = list(csv.DictReader((campaign / "reports" / "concepts" / "tail.csv").read_text().splitlines()))
    models = {row["model"] for row in rows}
    assert models == {"real pictures, each left out in turn", "monolith", "ensemble:top-1", "ensemble:full"}
    for row in rows:
        assert 0 <= float(row["hit"]) <= 1 and 0 <= float(row["rank"]) <= 1
        assert int(row["best_expert"]) <= int(row["rows"])
        assert bool(row["routed"]) == row["model"].startswith("ensemble")
    top = {row["concept"]: float(row["routed"]) for row in rows if row["model"] == "ensemble:top-1"}
    assert len(top) == 8 and all(
        float(row["rows"]) >= top[row["concept"]] for row in rows if row["concept"] in top
    )
    (finding,) = [x for x in findings(Campaign.open(campaign).store) if "Rare" in x.title]
    assert [row[0] for row in finding.rows][1:] == ["monolith", "ensemble:top-1", "ensemble:full"]
    before = (campaign / "reports" / "concepts" / "tail.csv").read_bytes()
    assert said(*argv, *[x for m in sorted(models) if "real" not in m for x in ("--model", m)]).code == 0
    again = (campaign / "reports" / "concepts" / "tail.csv").read_bytes()
    assert sorted(again.splitlines()) == sorted(before.splitlines())  # the same noise, the same pictures


def test_what_is_missing_is_said(campaign: Path, said: Said):
    refused(said("concepts", "evaluate", campaign), "no prompts", "atoll concepts tail")
    refused(
        said("concepts", "tail", campaign, "--n", "9999"),
        "9999 rare ones take 39996: lower --least, or --n to",
    )
    few = ("--n", "2", "--least", "100000")
    refused(
        said("concepts", "tail", campaign, *few), "0 concepts in 100000 training rows or more", "index more"
    )
    refused(said("concepts", "tail", campaign, "--n", "2", "--template", "x"), "no place for a concept")
    said("concepts", "tail", campaign, "--n", "2")
    said("concepts", "index", campaign, "--least", "4")
    refused(said("concepts", "evaluate", campaign), "other concepts")
    (campaign / "reports" / "concepts" / "counts.json").unlink()
    refused(said("concepts", "tail", campaign), "no counts", "atoll concepts audit")
