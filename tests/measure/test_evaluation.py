"""`atoll evaluate`: folders and models, on one process and two, what it refuses; points side by side."""

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
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import MeasuredPoint, Protocol
from atoll.measure.models import Drawn, RowConditions, published, samples_of, stored_as
from atoll.measure.request import show_all, table
from atoll.model.dispatch import Trace
from atoll.model.generation import Generation, Residency
from atoll.model.sampler import Row, Sampler, starting_noise
from helpers import Run, atoll, refused
from helpers_extractors import save_clip, save_dinov2, save_pictures

QUICK = ["--set", "evaluate.threads=1", "--set", "evaluate.batch=8", "--set", "evaluate.kid_size=20"]


def result(folder: Path) -> dict[str, Any]:
    """The only report below a folder."""
    (path,) = (folder / "reports/evaluate").glob("*.json")
    point = json.loads(path.read_text())
    assert path.stem == MeasuredPoint.of_json(point, "here").key
    return dict(point)


def values(point: dict[str, Any]) -> dict[str, float]:
    return {name: value["value"] for name, value in point["values"].items()}


def of_folders(folders: tuple[Path, Path], net: Path, out: Path) -> list[str | Path]:
    of = ["--images", folders[0], "--reference", folders[1], "--extractor", net, "--out", out]
    return ["evaluate", *of, "--set", "evaluate.extractor_size=28", *QUICK]


def of_model(folder: Path, net: Path, *more: str | Path) -> list[str | Path]:
    small = ["--extractor", net, "--set", "evaluate.extractor_size=28", "--samples", "24", "--steps", "2"]
    return ["evaluate", folder, *small, *QUICK, *more]


# Folders.


def test_a_folder_against_a_folder(folders: tuple[Path, Path], net: Path, tmp_path: Path, run: Run) -> None:
    answer = run(*of_folders(folders, net, tmp_path))
    assert answer.code == 0, answer
    point = result(tmp_path)
    assert set(values(point)) == {"frechet", "kid", "precision", "recall", "density", "coverage"}
    assert point["protocol"]["samples"] == 45 and point["protocol"]["reference_count"] == 37
    assert point["protocol"]["picture_size"] == [12, 12] and point["protocol"]["routing"] is None
    assert point["values"]["kid"]["settings"]["size"] == 20 and point["values"]["kid"]["deviation"] > 0
    assert "FID" not in answer.out and "Fréchet distance on" in answer.out
    few = point["values"]["frechet"]["settings"]["components"]
    assert f"45 samples and 37 reference pictures for {few} dimensions: so few make" in answer.out
    (path,) = (tmp_path / "reports/evaluate").glob("*.csv")
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert float(row["frechet"]) == values(point)["frechet"] and row["name"] == "made"
    assert row["reference_hash"] == point["protocol"]["reference_hash"] and row["picture_size"] == "12x12"
    again = run(*of_folders(folders, net, tmp_path))
    assert "finished already" in again.out and "Fréchet distance on" in again.out

    # Saved statistics are as good as the pictures, for the extractor that made them.
    (saved,) = (tmp_path / "reports/references").glob("*.safetensors")
    assert run(*of_folders((folders[0], saved), net, tmp_path / "other")).code == 0
    other = result(tmp_path / "other")
    assert values(other) == values(point)
    assert other["protocol"]["reference_hash"] == point["protocol"]["reference_hash"]
    theirs = save_dinov2(tmp_path / "theirs", seed=1)
    answer = run(*of_folders((folders[0], saved), theirs, tmp_path / "third"))
    refused(answer, "was made by another extractor", "give the pictures")


@pytest.mark.slow
def test_a_mistake_that_one_of_two_workers_meets_is_one_line(
    folders: tuple[Path, Path], net: Path, tmp_path: Path
) -> None:
    made = Path(shutil.copytree(folders[0], tmp_path / "made"))
    (made / "044.png").write_bytes(b"no picture")
    done = atoll(*of_folders((made, folders[1]), net, tmp_path), "--workers", 2)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "ended with code 2 (error: " in line and f"{made / '044.png'}: unreadable: not one of PNG" in line
    assert not list(tmp_path.rglob("evaluate/*.json"))


def test_what_cannot_be_measured_is_refused(
    folders: tuple[Path, Path], net: Path, tmp_path: Path, run: Run
) -> None:
    made, out = Path(shutil.copytree(folders[0], tmp_path / "spoilt")), tmp_path / "out"

    def tried(*words: str, **changes: Any) -> None:
        argv = of_folders((changes.get("images", made), changes.get("reference", folders[1])), net, out)
        refused(run(*argv, *changes.get("more", ())), *words)

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
    most = ["--set", "evaluate.components=16"]  # by default half as many as there are pictures
    tried("16 samples for 16 dimensions: the covariance is singular", images=few, more=most)
    tried("16 reference pictures for 16 dimensions: the covariance is singular", reference=few, more=most)
    for more, *words in (
        (["--split", "train"], "--split train is for a data set", "leave it out"),
        (["--metrics", "precison"], "unknown metric 'precison': did you mean 'precision'?"),
        (["--metrics", "fid"], "FID is the distance on Inception's features"),
        (["--set", "evaluate.sample=3"], "unknown key 'sample' in --set evaluate", "did you mean 'samples'?"),
        (["--set", "seed=3"], "there is no campaign"),
        (["--steps", "3"], "--steps is for a model"),
    ):
        tried(*words, more=more)
    assert not list(out.rglob("evaluate/*.json"))
    refused(run("evaluate"), "there is nothing to evaluate", "--images FOLDER")
    refused(run("evaluate", "--images", folders[0]), "nothing to hold the pictures against")
    refused(run("evaluate", "--list"), "--list needs a campaign")


def test_models_that_are_not_there(made: Path, net: Path, run: Run) -> None:
    for more, word in (
        (["--model", "monolit"], "did you mean 'monolith'?"),
        (["--model", "student"], "has no student yet"),
        (["--routing", "top1"], "top1"),
        (["--guidance", "nan"], "'--guidance': give a finite number"),
        (["--list"], "has no results"),
    ):
        refused(run(*of_model(made, net, *more)), word)


# Models.


def test_models_of_a_campaign(folder: Path, net: Path, run: Run) -> None:
    for more in (["--routing", "top-1"], ["--model", "monolith"]):
        answer = run(*of_model(folder, net, *more))
        assert answer.code == 0, answer
    points = [json.loads(path.read_text()) for path in (folder / "reports/evaluate").glob("*.json")]
    one, other = sorted(points, key=lambda each: each["subject"]["name"])
    assert one["protocol"]["routing"] == "top-1" and other["protocol"]["routing"] is None
    assert set(one["subject"]["weights"]) == {"experts/0", "experts/1", "router"}
    assert one["protocol"] | {"routing": None} == other["protocol"]
    assert one["protocol"]["reference_split"] == "heldout" and one["protocol"]["ema"] is True
    assert values(one) != values(other)
    listed = run("evaluate", folder, "--list")
    assert listed.code == 0 and "warning" not in listed.out
    assert "top-1" in listed.out and (folder / "reports/evaluate/table.csv").exists()
    text = show_all(Campaign.open(folder).store, compared=())
    assert "warning: routing differs: top-1, none; do not compare" in text


def test_parts_give_the_bits_of_one_process_and_those_of_other_settings_are_not_taken(
    made: Path, folder: Path, net: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts with 2 steps are of no use for 3 steps, another batch or extractor, and of all use for 2."""
    seen = list[int]()
    real = Drawn.batches

    def noted(self: Drawn, part: range, batch: int) -> Any:
        seen.append(part.start)
        return real(self, part, batch)

    monkeypatch.setattr(Drawn, "batches", noted)
    how = ["--set", "evaluate.batch=4", "--samples", "40", "--routing", "once"]
    how += ["--metrics", "frechet,kid,coverage"]
    for number in (1, 2, 3):
        assert run(*of_model(folder, net, *how, "--steps", "2", "--part", f"{number}/3")).code == 0
    assert sorted(seen) == [0, 16, 32] and not (folder / "reports/evaluate").exists()
    theirs = save_dinov2(folder / "theirs", seed=1)
    for of, steps, batch in ((net, 3, 4), (net, 2, 5), (theirs, 2, 4)):
        seen.clear()
        more = ["--set", f"evaluate.batch={batch}", "--steps", str(steps), "--part", "1/1"]
        assert run(*of_model(folder, of, *how, *more)).code == 0 and len(seen) == 3 - (batch == 5)
    seen.clear()
    assert run(*of_model(folder, net, *how, "--steps", "2")).code == 0 and seen == []
    whole = Path(shutil.copytree(made, tmp_path / "whole"))
    assert run(*of_model(whole, net, *how, "--steps", "2")).code == 0
    assert not list((whole / "reports/work").iterdir())
    points = [result(folder), result(whole)]
    for point in points:
        for name in ("seconds", "draw_seconds"):
            del point["cost"][name]
    assert points[0] == points[1] and points[0]["protocol"]["steps"] == 2
    refused(run(*of_model(folder, net, "--part", "3 of 4")), "--part '3 of 4' is no part of the shards")


@pytest.mark.parametrize("name", ["once", "top-2", "oracle"])
def test_what_is_measured_is_what_a_plain_loop_draws(made: Path, name: str) -> None:
    """Batches by expert change neither pictures nor traces: noise and draws belong to a picture's number."""
    campaign = Campaign.open(made)
    candidate = published(campaign, "ensemble", torch.device("cpu"))
    rows = samples_of(campaign, campaign.dataset(), "heldout", candidate.model.card)
    conditions, model = RowConditions.drawn(campaign, rows, "heldout", 20, 0), candidate.model
    how = Generation(steps=2, guidance=2.0, routing=name, seed=4)
    pictures, drawn, plain, traces = dict[int, Any](), [], [], []
    for batch in Drawn(candidate, how, conditions).batches(range(20), 6):
        pictures |= dict(zip(batch.numbers, batch.pictures, strict=True))
        assert batch.trace is not None
        drawn.append(batch.trace)
    for numbers in (range(6), range(6, 12), range(12, 18), range(18, 20)):
        labels = torch.from_numpy(conditions.clusters)[list(numbers)]
        noise, cond = starting_noise(4, numbers, model.shape), conditions.of_model.cond(numbers)
        sampler = Sampler(model.bank, cond, conditions.samples.null, Row.each(how, numbers, labels), noise)
        plain += to_images(model.vae.decode(sampler.run()))
        traces.append(sampler.trace)
    trace, expected = Trace.joined(drawn, [*pictures]), Trace.joined(traces)
    assert torch.equal(trace.stacked(), expected.stacked())
    assert (trace.router_calls, trace.expert_calls) == (expected.router_calls, expected.expert_calls)
    pairs = zip((pictures[number] for number in range(20)), plain, strict=True)
    assert max(np.abs(np.asarray(a).astype(int) - np.asarray(b)).max() for a, b in pairs) <= 1


def test_the_clip_score_needs_clip_and_captions(
    folder: Path, folders: tuple[Path, Path], tmp_path: Path, run: Run
) -> None:
    clip = ["--extractor", save_clip(tmp_path / "clip")]
    wanted = "--metrics", "clip-score,caption-found,cmmd,frechet-excess"
    answer = run("evaluate", folder, *clip, *wanted, "--samples", "16", *QUICK)
    assert answer.code == 0, answer
    numbers = result(folder)["values"]
    assert 0 <= numbers["clip-score"]["value"] <= 100 and numbers["clip-score"]["deviation"] > 0
    assert 0 <= numbers["caption-found"]["value"] <= 1
    assert numbers["caption-found"]["label"] == "own caption found among 16"
    assert numbers["cmmd"]["label"] == "CMMD" and numbers["cmmd"]["value"] > 0
    argv = ["evaluate", "--images", folders[0], "--reference", folders[1], "--out", tmp_path, *clip]
    refused(run(*argv, "--metrics", "clip-score"), "clip-score needs captions")
    refused(run(*argv, "--metrics", "frechet-excess"), "needs the training pictures of a campaign")


# Points side by side: unlike ones stand in one table with a warning only.


PLAIN: dict[str, Any] = {"extractor": "net", "extractor_hash": "a" * 64, "extractor_size": 28}
PLAIN |= {"resize": "bicubic", "rounding": "nearest", "picture_size": (12, 12), "reference": "data"}
PLAIN |= {"reference_hash": "d" * 64, "reference_split": "heldout", "reference_count": 100, "samples": 50}
PLAIN |= {"sampler": "Euler", "steps": 20, "guidance": 2.0, "routing": "once", "seed": 0, "ema": True}
PLAIN |= {"code": "0.1.0"}


def point_of(
    name: str = "ensemble", value: float = 3.0, components: int = 8, **changes: Any
) -> MeasuredPoint:
    distance = {"label": "Fréchet distance on net", "value": value, "settings": {"components": components}}
    kernel = {"label": "kernel distance on net", "value": 0.1, "deviation": 0.01, "settings": {"subsets": 5}}
    numbers = {"frechet": distance, "kid": kernel}
    protocol = Protocol(**{**PLAIN, **changes})
    return MeasuredPoint(subject={"name": name}, protocol=protocol, values=numbers, cost={"seconds": 1.0})


def test_everything_that_decides_a_result_changes_its_key() -> None:
    """But not what the reference is called, nor the version of Atoll."""
    beside = [{"value": 4.0}, {"reference": "elsewhere"}, {"code": "9"}]
    same = {point_of().key, *(point_of(**change).key for change in beside)}
    assert len(same) == 1
    others: dict[str, Any] = {
        field: value + 1 for field, value in PLAIN.items() if type(value) in (int, float)
    }
    others |= {field: value + "x" for field, value in PLAIN.items() if isinstance(value, str)}
    others |= {"picture_size": (12, 13), "ema": False, "conditions": "train"}
    others |= {"extractor_token": "class", "conditions_hash": "c", "shift": 3.0}
    assert set(others) == set(Protocol.model_fields)
    del others["reference"], others["code"]
    keys = {point_of(**{field: value}).key for field, value in others.items()}
    keys |= {point_of("monolith").key, point_of(components=9).key}
    assert len(keys | same) == len(others) + 3


def test_weights_in_another_type_are_another_subject() -> None:
    assert stored_as(Residency(experts=2)) == {} != stored_as(Residency(dtype="bf16"))
    assert stored_as(Residency(dtype="int8", keep=("a",))) == {"stored": "int8 but a"}


def test_like_results_stand_in_one_table_in_peace() -> None:
    listing = table([point_of(), point_of("monolith", 4.5)])
    assert listing.warnings == []
    assert listing.lines[0].split() == ["name", "frechet", "kid"]
    assert listing.lines[2].split() == ["monolith", "4.5", "0.1"]
    assert [row["frechet"] for row in listing.rows] == [3.0, 4.5]
    # Names do not matter where hashes agree, and another version is a note.
    assert table([point_of(), point_of(reference="elsewhere", extractor="/models/net")]).warnings == []
    listing = table([point_of(), point_of(code="0.2.0")])
    assert listing.warnings == [] and "code differs: 0.1.0, 0.2.0" in listing.notes


@pytest.mark.parametrize("field", sorted(set(PLAIN) - {"reference", "extractor", "code"}))
def test_a_field_that_differs_is_named(field: str) -> None:
    others = {"picture_size": (12, 13), "ema": False, "seed": 5}
    listing = table([point_of(), point_of(**{field: others.get(field, PLAIN[field] * 2)})])
    assert len(listing.warnings) == 1 and listing.warnings[0].startswith(f"{field} differs: ")
    assert f"warning: {field} differs" in listing.text()


def test_what_a_table_is_about_becomes_a_column() -> None:
    pair = [point_of(), point_of("monolith", routing=None, guidance=1.5)]
    assert len(table(pair).warnings) == 2
    listing = table(pair, ["routing", "guidance"])
    assert listing.warnings == []
    assert listing.lines[0].split()[:3] == ["name", "routing", "guidance"]
    assert listing.lines[2].split()[:3] == ["monolith", "-", "1.5"]
    other = table([point_of(), point_of(components=16)])
    assert other.warnings == ["frechet was measured with different settings: do not compare it"]
