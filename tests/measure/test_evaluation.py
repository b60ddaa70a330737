"""`atoll evaluate`: folders and models, alone and on two processes, and what it refuses."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.pictures import to_images
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.measure.evaluation import show_all
from atoll.measure.models import Drawn, RowConditions, published, samples_of
from atoll.model.generation import Generation
from atoll.model.model import joined
from atoll.model.sampler import Row, Sampler, starting_noise
from atoll.model.trace import Trace
from atoll.train.run import train_run
from helpers import atoll, command, partitioned, refused, refused_process
from helpers_extractors import save_clip, save_dinov2, save_pictures

QUICK = ["--set", "evaluate.threads=1", "--set", "evaluate.batch=8", "--set", "evaluate.kid_size=20"]


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dinov2(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("pictures")
    return save_pictures(base / "made", 45), save_pictures(base / "real", 37, seed=1)


def result(folder: Path) -> dict[str, Any]:
    """The only report below a folder."""
    (path,) = (folder / "reports/evaluate").glob("*.json")
    found = json.loads(path.read_text())
    assert path.stem == found["key"]
    return dict(found)


def values(found: dict[str, Any]) -> dict[str, float]:
    return {name: value["value"] for name, value in found["values"].items()}


def of_folders(folders: tuple[Path, Path], net: Path, out: Path) -> list[str | Path]:
    of = ["--images", folders[0], "--reference", folders[1], "--extractor", net, "--out", out]
    return ["evaluate", *of, "--set", "evaluate.extractor_size=28", *QUICK]


# Folders.


def test_a_folder_against_a_folder(
    folders: tuple[Path, Path], net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = command(capsys, *of_folders(folders, net, tmp_path))
    assert answer.code == 0, answer
    found = result(tmp_path)
    assert set(values(found)) == {"frechet", "kid", "precision", "recall", "density", "coverage"}
    assert found["protocol"]["samples"] == 45 and found["protocol"]["reference_count"] == 37
    assert found["protocol"]["picture_size"] == [12, 12] and found["protocol"]["routing"] is None
    assert found["values"]["kid"]["settings"]["size"] == 20 and found["values"]["kid"]["deviation"] > 0
    assert "FID" not in answer.out and "Fréchet distance on" in answer.out
    few = found["values"]["frechet"]["settings"]["components"]
    assert f"45 samples for {few} dimensions: so few make" in answer.out
    assert f"37 reference pictures for {few} dimensions: so few make" in answer.out
    (table,) = (tmp_path / "reports/evaluate").glob("*.csv")
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert float(row["frechet"]) == values(found)["frechet"] and row["name"] == "made"
    assert row["reference_hash"] == found["protocol"]["reference_hash"] and row["picture_size"] == "12x12"
    again = command(capsys, *of_folders(folders, net, tmp_path))
    assert "finished already" in again.out and "Fréchet distance on" in again.out


def test_rows_of_what_has_none_are_refused(
    folders: tuple[Path, Path], net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = command(capsys, *of_folders(folders, net, tmp_path), "--split", "train")
    refused(answer, "--split train is for a data set", "leave it out")
    assert not (tmp_path / "reports").exists()


def test_saved_statistics_are_as_good_as_the_pictures(
    folders: tuple[Path, Path], net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(capsys, *of_folders(folders, net, tmp_path / "one"))
    (saved,) = (tmp_path / "one/reports/references").glob("*.safetensors")
    answer = command(capsys, *of_folders((folders[0], saved), net, tmp_path / "other"))
    assert answer.code == 0, answer
    one, other = result(tmp_path / "one"), result(tmp_path / "other")
    assert values(one) == values(other)
    assert one["protocol"]["reference_hash"] == other["protocol"]["reference_hash"]
    theirs = save_dinov2(tmp_path / "theirs", seed=1)
    refused(
        command(capsys, *of_folders((folders[0], saved), theirs, tmp_path / "third")),
        "was made by another extractor",
        "give the pictures",
    )


@pytest.mark.slow
def test_a_mistake_on_one_of_two_processes_is_told_by_it(
    folders: tuple[Path, Path], net: Path, tmp_path: Path
) -> None:
    made = Path(shutil.copytree(folders[0], tmp_path / "made"))
    (made / "044.png").write_bytes(b"no picture")
    done = atoll(*of_folders((made, folders[1]), net, tmp_path), "--processes", 2)
    assert done.returncode == 2
    first, *rest = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert first == (
        f"error: {made / '044.png'}: unreadable: not one of PNG, JPEG, WEBP, BMP, GIF, TIFF: "
        "replace or remove it"
    )
    assert all("another process of this run has ended" in line for line in rest)  # a slow machine's


# What folders are refused.


def spoilt(folders: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders[0], tmp_path / "spoilt"))


def test_bad_folders(
    folders: tuple[Path, Path], net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, out = spoilt(folders, tmp_path), tmp_path / "out"

    def tried(*words: str, **changes: Any) -> None:
        argv = of_folders((changes.get("images", made), changes.get("reference", folders[1])), net, out)
        refused(command(capsys, *argv, *changes.get("more", ())), *words)

    Image.new("RGB", (30, 12)).save(made / "020.png")
    tried("020.png is 30x12, 000.png is 12x12", "bring all to one size")
    (made / "020.png").write_bytes((made / "000.png").read_bytes()[:60])
    tried("020.png: truncated", "replace or remove it")
    (made / "020.png").unlink()
    larger = save_pictures(tmp_path / "larger", 37, size=16)
    tried("the pictures are 12x12, those of the reference 16x16", reference=larger)
    (tmp_path / "empty").mkdir()
    tried("holds no images", images=tmp_path / "empty")
    tried("there is no folder", images=tmp_path / "nowhere")
    few = save_pictures(tmp_path / "few", 16)
    tried("16 samples for 16 dimensions: the covariance is singular", "evaluate.components", images=few)
    tried("16 reference pictures for 16 dimensions: the covariance is singular", reference=few)
    tried("unknown metric 'precison': did you mean 'precision'?", more=["--metrics", "precison"])
    tried("FID is the distance on Inception's features", more=["--metrics", "fid"])
    tried(
        "unknown key 'sample' in --set evaluate",
        "did you mean 'samples'?",
        more=["--set", "evaluate.sample=3"],
    )
    tried("there is no campaign", more=["--set", "seed=3"])
    tried("--steps is for a model", more=["--steps", "3"])
    assert not list(out.rglob("evaluate/*.json"))


def test_commands_that_say_too_little(capsys: pytest.CaptureFixture[str], folders: tuple[Path, Path]) -> None:
    refused(command(capsys, "evaluate"), "there is nothing to evaluate", "--images FOLDER")
    refused(command(capsys, "evaluate", "--images", folders[0]), "nothing to hold the pictures against")
    refused(command(capsys, "evaluate", "--list"), "--list needs a campaign")


# Models.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts, router and monolith of class labels, assembled."""
    folder = tmp_path_factory.mktemp("evaluate") / "letters"
    few = {"budget": {"samples": 160}, "data": {"ingest": {"heldout": 0.4}}, "train": {"previews": 0}}
    campaign = partitioned(folder, few)
    for what, island in (("expert", 0), ("expert", 1), ("router", None), ("monolith", None)):
        train_run(campaign, what, island)
    assemble(Campaign.open(folder))
    return folder


@pytest.fixture
def letters(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "letters"))


def of_model(folder: Path, net: Path, *more: str | Path) -> list[str | Path]:
    small = ["--extractor", net, "--set", "evaluate.extractor_size=28", "--samples", "24", "--steps", "2"]
    return ["evaluate", folder, *small, *QUICK, *more]


def test_models_of_a_campaign(letters: Path, net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--routing", "top-1"], ["--model", "monolith"]):
        answer = command(capsys, *of_model(letters, net, *more))
        assert answer.code == 0, answer
    found = [json.loads(path.read_text()) for path in (letters / "reports/evaluate").glob("*.json")]
    one, other = sorted(found, key=lambda each: each["subject"]["name"])
    assert one["protocol"]["routing"] == "top-1" and other["protocol"]["routing"] is None
    assert set(one["subject"]["weights"]) == {"experts/0", "experts/1", "router"}
    assert one["protocol"] | {"routing": None} == other["protocol"]
    assert one["protocol"]["reference_split"] == "heldout" and one["protocol"]["ema"] is True
    assert values(one) != values(other)
    listed = command(capsys, "evaluate", letters, "--list")
    assert listed.code == 0 and "warning" not in listed.out
    assert "top-1" in listed.out and (letters / "reports/evaluate/table.csv").exists()
    text = show_all(Campaign.open(letters).store, compared=())
    assert "warning: routing differs: top-1, none; do not compare" in text


def drawing(campaign: Campaign, **generation: Any) -> Drawn:
    """20 pictures of the ensemble at held-out conditions."""
    candidate = published(campaign, "ensemble", torch.device("cpu"))
    rows = samples_of(campaign, campaign.dataset(), "heldout", candidate.model.card)
    conditions = RowConditions.drawn(campaign, rows, "heldout", 20, 0)
    return Drawn(candidate, Generation(**generation), conditions)


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(trained: Path, net: Path, tmp_path: Path) -> None:
    found = []
    for processes in (1, 2):
        folder = Path(shutil.copytree(trained, tmp_path / str(processes)))
        more = ["--routing", "top-1", "--metrics", "kid,coverage", "--processes", str(processes)]
        done = atoll(*of_model(folder, net, *more))
        assert done.returncode == 0, done.stderr
        found.append(result(folder))
    one, other = found
    assert one["key"] == other["key"] and one["values"] == other["values"]
    assert one["cost"]["processes"] == 1 and other["cost"]["processes"] == 2


def test_compare_draws_what_a_plain_loop_draws(trained: Path) -> None:
    """Batches by expert change neither pictures nor traces: noise and draws belong to a picture's number."""
    campaign = Campaign.open(trained, ["evaluate.samples=20"])
    for name in ("once", "top-2", "oracle"):
        source = drawing(campaign, routing=name, steps=2, guidance=2.0, seed=4)
        model, conditions = source.candidate.model, source.conditions
        null, how = conditions.samples.null(), Generation(steps=2, guidance=2.0, routing=name, seed=4)
        made, drawn, plain, traces = dict[int, Any](), [], [], []
        for batch in source.batches(range(20), 6):
            made |= dict(zip(batch.numbers, batch.pictures, strict=True))
            assert batch.trace is not None
            drawn.append((list(batch.numbers), batch.trace))
        for rows in (range(6), range(6, 12), range(12, 18), range(18, 20)):
            labels = torch.from_numpy(conditions.clusters)[list(rows)]
            noise, cond = starting_noise(4, rows, model.shape), conditions.of_model.cond(rows)
            sampler = Sampler(model.bank, cond, null, Row.each(how, rows, labels), noise)
            plain += to_images(model.vae.decode(sampler.run()))
            traces.append(sampler.trace)
        expected = Trace.joined(traces)
        trace = joined(drawn)
        assert trace is not None and torch.equal(trace.stacked(), expected.stacked())
        assert trace.router_calls == expected.router_calls
        assert trace.expert_calls == expected.expert_calls
        pairs = zip((made[number] for number in range(20)), plain, strict=True)
        worst = max(np.abs(np.asarray(a).astype(int) - np.asarray(b)).max() for a, b in pairs)
        assert worst <= 1, (name, worst)


def test_the_clip_score_needs_clip_and_captions(
    letters: Path,
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clip = save_clip(tmp_path / "clip")
    answer = command(
        capsys,
        "evaluate",
        letters,
        "--extractor",
        clip,
        "--metrics",
        "clip-score,cmmd",
        "--samples",
        "16",
        *QUICK,
    )
    assert answer.code == 0, answer
    found = result(letters)["values"]
    assert 0 <= found["clip-score"]["value"] <= 100 and found["clip-score"]["deviation"] > 0
    assert found["cmmd"]["label"] == "CMMD" and found["cmmd"]["value"] > 0
    argv = [
        "evaluate",
        "--images",
        folders[0],
        "--reference",
        folders[1],
        "--out",
        tmp_path,
        "--extractor",
        clip,
    ]
    refused(command(capsys, *argv, "--metrics", "clip-score"), "clip-score needs captions")


def test_models_that_are_not_there(letters: Path, net: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(command(capsys, *of_model(letters, net, "--model", "monolit")), "did you mean 'monolith'?")
    refused(command(capsys, *of_model(letters, net, "--model", "student")), "has no student yet")
    refused(command(capsys, *of_model(letters, net, "--routing", "top1")), "top1")
    refused(command(capsys, *of_model(letters, net, "--guidance", "nan")), "guidance=nan")
    refused(command(capsys, "evaluate", letters, "--list"), "has no results")
    refused_process(atoll("evaluate", letters, "--metrics", "fidd"), "unknown metric 'fidd'")
