"""`atoll compare` beyond its table: sweeps, pairs and curves, what is kept, and what is refused."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.base.errors import ConfigError, PartitionError
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.roles import BESIDE
from atoll.measure import models
from atoll.measure.training_curve import TrainingCurve
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.folder import PRETRAIN_PART
from atoll.model.model import Model, read_manifest
from atoll.store.signatures import new_key, sign, signer
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import Answer, assembled, command, entries, merged, of_no_number, partitioned, refused
from helpers_extractors import save_dinov2

Drawing = tuple[str | None, float, int]
MILESTONES: dict[str, Any] = {
    "data": {"ingest": {"glyphs": {"limit": 160}}},  # more than 5 held out, for precision and recall
    "train": {"milestones": 4},
    "budget": {"pretrain": 0.25, "samples": 960},
    "sampling": {"routing": "top-1"},
    "compare": {"strategies": ["top-1", "full"], "components": 4, "extractor_size": 28, "threads": 1},
}


def trained(folder: Path, changes: dict[str, Any]) -> Path:
    """A campaign with everything trained and assembled."""
    campaign = partitioned(folder, changes)
    if campaign.config.budget.pretrain:
        train_run(campaign, "pretrain")
    for role, island in (("expert", 0), ("expert", 1), ("router", None), ("monolith", None)):
        train_run(campaign, role, island)
    assemble(campaign)
    return folder


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dinov2(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, net: Path) -> Path:
    changes = merged(MILESTONES, {"compare": {"extractor": str(net)}})
    return trained(tmp_path_factory.mktemp("milestones") / "c", changes)


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "c"))


def copied(folder: Path, run: str, **card: Any) -> None:
    """The published monolith as that of another run too."""
    to = folder / run / "expert"
    shutil.copytree(folder / "monolith/expert", to, dirs_exist_ok=True)
    store = Store.open(folder)
    store.put_json(f"{run}/expert/card.json", store.get_json("monolith/expert/card.json") | card)


def compare(capsys: pytest.CaptureFixture[str], folder: Path, *settings: str) -> Answer:
    return command(capsys, "compare", folder, *(part for one in settings for part in ("--set", one)))


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "reports/compare.json").read_text()))


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    found = result(folder)["tables"][name]
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Drawing]:
    """Every drawing: strategy, guidance and number of pictures."""
    return watched(monkeypatch)


def watched(monkeypatch: pytest.MonkeyPatch, stop: Drawing | None = None) -> list[Drawing]:
    """Drawings from now on; one of them is stopped, as by Ctrl-C."""
    seen: list[Drawing] = []
    real = models.Drawn.batches

    def noted(self: models.Drawn, part: range, batch: int) -> Any:
        if len(self) > 4:  # the pictures to look at are not counted
            drawing = (self.about["routing"], self.generation.guidance, len(self))
            if drawing == stop:
                raise KeyboardInterrupt
            seen.append(drawing)
        return real(self, part, batch)

    monkeypatch.setattr(models.Drawn, "batches", noted)
    return seen


# The table.


def test_test_rows_judge_apart(
    folder: Path, tmp_path: Path, net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(compare(capsys, folder, "compare.conditions=test"), "the data set has no test rows")
    parted = {"data": {"ingest": {"heldout": 0.2, "test": 0.2}}, "budget": {"pretrain": 0}}
    there = assembled(tmp_path / "parted", merged(MILESTONES, parted))
    distances = []
    for split in ("heldout", "test"):
        sets = (f"compare.extractor={net}", f"compare.conditions={split}")
        assert compare(capsys, there, *sets).code == 0
        metric = result(there)["metric"]
        assert metric["reference"][:4] == split[:4] and metric["conditions"] == f"of {split} rows"
        assert metric["reference_rows"] == len(Campaign.open(there).dataset().split(split))
        distances.append(result(there)["rows"][0]["distance"])
    assert distances[0] != distances[1]


def test_rows_have_precision_and_recall_and_pairs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(capsys, folder).code == 0
    found = result(folder)
    assert all(0 <= row[key] <= 1 for row in found["rows"] for key in ("precision", "recall"))
    about = found["metric"]["neighbours"]
    heldout = found["metric"]["reference_rows"]
    assert (about["k"], about["dimensions"], about["samples"]) == (3, 16, 24)
    assert about["references"] == heldout and 0 <= about["real_recall"] <= 1
    pairs = table(folder, "pairs")
    assert [r["strategy"] for r in pairs] == ["top-1"] * 6 + ["full"] * 6
    assert {r["pairs"] for r in pairs if r["partner"] == "same noise"} == {24}
    assert all(-1 <= r["low"] <= r["mean"] <= r["high"] <= 1.5 for r in pairs if r["pairs"] > 1)
    lines = list(csv.DictReader((folder / "reports/compare/models.csv").read_text().splitlines()))
    assert [float(line["precision"]) for line in lines] == [row["precision"] for row in found["rows"]]
    assert (folder / "reports/compare/pairs.csv").read_text().startswith("strategy,space,partner,pairs,mean")
    assert not (folder / "reports/compare/curve.csv").exists()


def test_two_of_the_same_weights_draw_the_same_pictures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the monolith's weights in every expert, guidance 1: the same noise gives the same picture."""
    for number in range(2):
        copied(folder, f"islands/{number}", role="expert", island=number)
        shutil.rmtree(folder / f"islands/{number}/run")
    assemble(Campaign.open(folder))
    assert compare(capsys, folder, "compare.guidance=1.0").code == 0
    for row in table(folder, "pairs"):
        if row["partner"] == "same noise":
            assert row["mean"] == pytest.approx(1, abs=1e-6)
        else:
            assert row["mean"] < 0.999 and row["effect"] > 0
    ratio = {row["name"]: row["distance"] for row in result(folder)["rows"]}
    assert ratio["top-1"] == pytest.approx(ratio["monolith"], rel=1e-3)


def test_a_comparison_that_was_stopped_goes_on(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, draws: list[Any]
) -> None:
    """Stopped after two of three models: the third alone is drawn, and the result is the same."""
    whole = Path(shutil.copytree(folder, folder.parent / "whole"))
    compare(capsys, whole)
    assert [name for name, _, _ in draws] == [None, "top-1", "full"]
    draws.clear()
    with monkeypatch.context() as patch:
        watched(patch, stop=("full", 2.0, 24))
        assert compare(capsys, folder).code != 0 and not (folder / "reports/compare.json").exists()
    assert compare(capsys, folder).code == 0
    assert [name for name, _, _ in draws] == [None, "top-1", "full"]
    one, other = result(folder), result(whole)
    timed = ("seconds", "code")
    assert {k: v for k, v in one.items() if k not in (*timed, "rows")} == {
        k: v for k, v in other.items() if k not in (*timed, "rows")
    }
    assert [r["distance"] for r in one["rows"]] == [r["distance"] for r in other["rows"]]


def test_damaged_samples_are_drawn_again(
    folder: Path, capsys: pytest.CaptureFixture[str], draws: list[Any]
) -> None:
    compare(capsys, folder)
    before = (folder / "reports/compare/pairs.csv").read_bytes()
    for path in (folder / "reports/points").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:50])
    (folder / "reports/compare.json").unlink()
    draws.clear()
    assert compare(capsys, folder).code == 0 and len(draws) == 3
    assert (folder / "reports/compare/pairs.csv").read_bytes() == before


# Guidance.


def test_a_sweep_draws_what_is_new_and_nothing_twice(
    folder: Path, capsys: pytest.CaptureFixture[str], draws: list[Any]
) -> None:
    compare(capsys, folder)
    before, rows = result(folder), {row["name"]: row for row in result(folder)["rows"]}
    draws.clear()
    answer = compare(capsys, folder, "compare.guidances=[3, 1]")
    assert answer.code == 0 and "best at guidance" in answer.out
    assert sorted(draws, key=str) == sorted(
        [(name, scale, 24) for name in (None, "top-1") for scale in (1.0, 3.0)], key=str
    )
    found = table(folder, "guidance")
    assert [(r["model"], r["guidance"]) for r in found] == [
        (name, scale) for name in ("monolith", "top-1") for scale in (1.0, 2.0, 3.0)
    ]
    for row in found:
        if row["guidance"] == 2.0:
            assert row["distance"] == rows[row["model"]]["distance"]
    mono, top = table(folder, "best")
    least = {name: min(r["distance"] for r in found if r["model"] == name) for name in ("monolith", "top-1")}
    assert (mono["distance"], top["distance"]) == (least["monolith"], least["top-1"])
    assert top["ratio"] == pytest.approx(least["top-1"] / least["monolith"])
    after = result(folder)
    assert after["sweep"] == {"models": ["monolith", "top-1"], "guidances": [1.0, 2.0, 3.0]}
    assert after["key"] == before["key"] and after["rows"] == before["rows"]
    draws.clear()
    assert compare(capsys, folder, "compare.guidances=[1, 3]").out == "compare: finished already\n"
    assert compare(capsys, folder).out == "compare: finished already\n"  # what was measured beyond stays
    assert compare(capsys, folder, "compare.guidances=[1, 3, 5]").code == 0
    assert sorted(draws, key=str) == [("top-1", 5.0, 24), (None, 5.0, 24)]


def test_a_student_is_measured_with_the_others(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Here it has the monolith's weights, so it draws the same pictures."""
    copied(folder, "student", role="student")
    assert compare(capsys, folder, "compare.guidances=[3]").code == 0
    assert result(folder)["sweep"]["models"] == ["monolith", "student", "top-1"]
    distances = [[r["distance"] for r in table(folder, "guidance") if r["model"] == name] for name in BESIDE]
    assert distances[0] == distances[1] and len(distances[0]) == 2
    assert [r["ratio"] for r in table(folder, "best")][:2] == [None, 1.0]
    same = {r["strategy"]: r["mean"] for r in table(folder, "pairs") if r["partner"] == "same noise"}
    assert list(same) == ["student", "top-1", "full"] and same["student"] == pytest.approx(1, abs=1e-6)
    assert command(capsys, "report", folder).code == 0
    page = (folder / "reports/index.html").read_text()
    assert '<th scope="row">Student</th><td data-label="of">pixels</td>' in page


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("compare.sweep=[onec]", ["'onec'", "did you mean 'once'?"]),
        ("compare.sweep=[]", ["compare.sweep names no strategy"]),
        ("compare.guidances=[1, -2]", ["compare.guidances.1", "greater than or equal to 0"]),
    ],
)
def test_wrong_settings_are_one_line(
    made: Path, capsys: pytest.CaptureFixture[str], setting: str, words: list[str], draws: list[Any]
) -> None:
    refused(compare(capsys, made, setting), *words)
    assert draws == []


@pytest.mark.parametrize("stage", ["compare", "diagnose"])
def test_pictures_that_are_no_numbers_are_not_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    """They would be grey, and a broken model would have a distance like any other."""
    for n in range(2):
        of_no_number(folder / f"islands/{n}/expert")
        shutil.rmtree(folder / f"islands/{n}/run")
    command(capsys, "assemble", folder)
    words = "holds NaN" if stage == "compare" else "gives NaN"
    refused(command(capsys, stage, folder, "--set", "diagnose.rows=8"), words)
    assert not (folder / "reports/compare.json").exists()


def test_a_sweep_that_this_ensemble_cannot_follow_is_one_line(
    made: Path, capsys: pytest.CaptureFixture[str], draws: list[Any]
) -> None:
    answer = compare(capsys, made, "compare.sweep=[top-9]", "compare.guidances=[1]")
    refused(answer, "compare.sweep", "none of these")
    assert draws == []


# The way of the training.


def test_the_course_adds_up(made: Path) -> None:
    campaign = Campaign.open(made)
    router = Checkpoint(campaign.store, "ensemble/router").card
    course = TrainingCurve(campaign, read_manifest(campaign.store), router, ["monolith"])
    cards = {
        name: Checkpoint(campaign.store, f"{name}/expert").card for name in ("pretrain", "monolith", "router")
    }
    experts = [Checkpoint(campaign.store, f"islands/{n}/expert").card for n in range(2)]
    stages = course.ensemble()
    assert [stage.share for stage in stages] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.1)
    for stage in stages:
        spent = sum(card.train_flops for card in experts)
        expected = stage.share * spent + cards["pretrain"].train_flops + cards["router"].train_flops
        assert stage.train_flops == pytest.approx(expected, rel=0.05)
    assert stages[-1].train_flops == pytest.approx(
        sum(c.train_flops for c in (*experts, cards["pretrain"], cards["router"])), rel=1e-12
    )
    assert stages[-1].train_flops == pytest.approx(cards["monolith"].train_flops, rel=0.02)
    for name in ("monolith", "pretrain"):
        dense = course.dense(name)
        assert [one.share for one in dense] == pytest.approx([0.25, 0.5, 0.75, 1.0], abs=0.07)
        assert dense[-1].train_flops == cards[name].train_flops


def test_an_ensemble_on_its_way_has_the_averaged_weights_of_that_step(made: Path) -> None:
    campaign = Campaign.open(made)
    router = Checkpoint(campaign.store, "ensemble/router").card
    course = TrainingCurve(campaign, read_manifest(campaign.store), router, ["monolith"])
    stage = course.ensemble()[1]
    for number in range(2):
        commits = [e for e in entries(made / f"islands/{number}") if e["kind"] == "commit" and e["milestone"]]
        folder = made / f"islands/{number}/run" / commits[1]["checkpoint"]
        expected = load_file(folder / "ema.safetensors")
        loaded = course.experts[number].load(stage.chosen[f"experts/{number}"])
        assert all(torch.equal(p, expected[name]) for name, p in loaded.network.named_parameters())
        final = Checkpoint(campaign.store, f"islands/{number}/expert").expert()
        assert any(
            not torch.equal(p, expected[name]) for name, p in final.network.named_parameters()
        )  # it has learned since
    last = course.experts[0].load(course.experts[0].milestones[-1])
    done = Model.load(campaign.store).bank
    assert isinstance(done.experts, list) and isinstance(done.experts[0], Expert)
    for one, other in zip(last.network.parameters(), done.experts[0].network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_curve_is_drawn_once_and_its_ends_are_those_of_the_table(
    folder: Path, capsys: pytest.CaptureFixture[str], draws: list[Any]
) -> None:
    compare(capsys, folder)
    rows = {row["name"]: row["distance"] for row in result(folder)["rows"]}
    draws.clear()
    answer = compare(capsys, folder, "compare.curve=true")
    assert answer.code == 0 and ("of its FLOPs" in answer.out or "does not reach" in answer.out)
    assert sorted(draws, key=str) == [("top-1", 2.0, 24)] * 3 + [(None, 2.0, 24)] * 7  # seed's end is new
    curve = table(folder, "curve")
    assert [r["model"] for r in curve] == ["pretrain"] * 4 + ["monolith"] * 4 + ["top-1"] * 4
    ends = {r["model"]: r for r in curve if r["share"] == 1.0}
    assert ends["monolith"]["distance"] == rows["monolith"] and ends["top-1"]["distance"] == rows["top-1"]
    assert ends["monolith"]["of_monolith"] == 1.0
    flops = [r["train_flops"] for r in curve if r["model"] in ("pretrain", "top-1")]
    assert flops == sorted(flops)
    own, reach = table(folder, "reach")
    assert own["model"] == "monolith" and 0 < own["of_monolith"] <= 1
    assert reach["model"] == "top-1" and reach["target"] == rows["monolith"]
    assert reach["how"] == "never" or 0 < reach["of_monolith"] <= 1.02
    assert result(folder)["curve"] == {"strategies": ["top-1"], "samples": 24, "guidance": 2.0}
    draws.clear()
    assert compare(capsys, folder, "compare.curve=true").out == "compare: finished already\n"
    # Fewer pictures: all is new, also the ends, and nothing else is touched.
    assert compare(capsys, folder, "compare.curve=true", "compare.curve_samples=12").code == 0
    assert {count for _, _, count in draws} == {12} and len(draws) == 12
    assert (folder / "reports/compare/reach.csv").read_text().startswith("model,target,train_flops")


def test_an_earlier_network_of_shared_pretraining_guides(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, name = ["sampling.guide_share=0.5"], f"ensemble/{PRETRAIN_PART}"
    campaign = Campaign.open(folder, half)
    new_key(folder.parent / "key")
    sign(campaign.store, "pretrain/expert/card.json", folder.parent / "key")
    assemble(Campaign.open(folder))
    whole = Checkpoint(campaign.store, name).card
    assert signer(campaign.store, f"{name}/card.json") is not None
    assemble(campaign)
    assert signer(campaign.store, f"{name}/card.json") is None
    (commit,) = [e for e in entries(folder / "pretrain") if e.get("milestone") and e["step"] == 8]
    guide = Checkpoint(campaign.store, name).expert()
    average = load_file(folder / "pretrain/run" / commit["checkpoint"] / "ema.safetensors")
    assert all(torch.equal(p, average[key]) for key, p in guide.network.named_parameters())
    assert guide.card is not None and (guide.card.samples, whole.samples) == (8 * 16, 15 * 16)
    assert guide.card.train_flops == pytest.approx(whole.train_flops * 8 / 15)
    capsys.readouterr()
    assemble(campaign)
    assert "assembled already" in capsys.readouterr().out
    course = TrainingCurve(campaign, read_manifest(campaign.store), whole, [])
    assert course.ensemble()[0].weights[PRETRAIN_PART] == guide.card.weights_sha256 != whole.weights_sha256
    with pytest.raises(PartitionError, match="nobody signs checkpoints"):
        assemble(campaign, trusted=[])
    for wrong, what in (
        (["sampling.guide_share=0.3"], "pretraining is kept there"),
        (["sampling.guide_share=0.5", "train.milestones=0"], "pretraining is kept there"),
        (["sampling.guide_share=0.125", "train.milestones=8"], "no checkpoint of pretrain after 0.125"),
        (["sampling.guide_share=0.5", "trusted=[a]"], "trusted signatures"),
    ):
        with pytest.raises((ConfigError, PartitionError), match=what):
            assemble(Campaign.open(folder, wrong))
    shutil.rmtree(folder / "pretrain/run")
    with pytest.raises(PartitionError, match=r"no checkpoint of pretrain after 0\.5") as caught:
        assemble(campaign)
    assert "bring pretrain/run" in caught.value.fix
    assemble(Campaign.open(folder))
    assert Checkpoint(campaign.store, name).card == whole


def test_a_damaged_milestone_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit = next(e for e in entries(folder / "islands/1") if e["kind"] == "commit")
    path = folder / "islands/1/run" / commit["checkpoint"] / "ema.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(compare(capsys, folder, "compare.curve=true"), f"{commit['checkpoint']}/ema.safetensors")


def test_without_milestones_a_curve_is_refused_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str], draws: list[Any]
) -> None:
    for commit in [e for e in entries(folder / "islands/1") if e["kind"] == "commit"]:
        shutil.rmtree(folder / "islands/1/run" / commit["checkpoint"])
    refused(compare(capsys, folder, "compare.curve=true"), "compare.curve", "experts 1:", "train.milestones")
    assert draws == []


def test_milestones_of_another_run_do_not_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's folder whose network is not the one that was assembled."""
    shutil.move(folder / "islands/0/run", folder / "run")
    store = Store.open(folder)
    card = store.get_json("islands/0/expert/card.json")
    card["provenance"] = {**card["provenance"], "seed": 99}
    store.put_json("islands/0/expert/card.json", card)
    assemble(Campaign.open(folder))
    shutil.move(folder / "run", folder / "islands/0/run")
    refused(compare(capsys, folder, "compare.curve=true"), "experts 0:", "train.milestones")


# Where measuring departs from sampling.


def test_measuring_starts_from_the_campaigns_own_sampling(
    folder: Path,
    net: Path,
    capsys: pytest.CaptureFixture[str],
    draws: list[Drawing],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a campaign that samples by top-1 in 3 steps at guidance 1.5, all but what a stage says otherwise."""
    make, chosen = models.RowConditions.of, list[list[int]]()

    def noted(*given: Any) -> models.RowConditions:
        chosen.append(given[2].tolist())
        return make(*given)

    monkeypatch.setattr(models.RowConditions, "of", noted)
    own = ["sampling.steps=3", "sampling.guidance=1.5", "compare.strategies=null", "compare.steps=null"]
    first = compare(capsys, folder, *own, "compare.samples=12")
    assert "12 pictures each, 3 steps, guidance 1.5\n" in first.out and result(folder)["overrides"] == {}
    assert [row["name"] for row in result(folder)["rows"]][:2] == [
        "monolith",
        "top-1",
    ]  # its own strategy first
    assert {guidance for _, guidance, _ in draws} == {1.5} and result(folder)["metric"]["steps"] == 3
    said = compare(capsys, folder, *own, "compare.samples=12", "compare.guidance=2.5", "compare.steps=2")
    assert "2 steps (sampling: 3), guidance 2.5 (sampling: 1.5)" in said.out
    assert result(folder)["overrides"] == {"steps": [2, 3], "guidance": [2.5, 1.5]}
    few = [
        "diagnose.samples=8",
        "diagnose.probed=0",
        "diagnose.rows=8",
        "diagnose.extractor_size=28",
        f"diagnose.extractor={net}",
    ]
    settings = [*own[:2], *few, "diagnose.steps=2"]
    answer = command(capsys, "diagnose", folder, *(part for one in settings for part in ("--set", one)))
    assert answer.code == 0 and "8 pictures under top-1, 2 steps (sampling: 3), guidance 1.5" in answer.out
    why = json.loads((folder / "reports/diagnostics.json").read_text())
    assert why["strategies"] == ["top-1", "once"] and why["overrides"] == {"steps": [2, 3]}
    # Both stages draw at the same rows' conditions.
    assert len(chosen) == 3 and chosen[0] == chosen[1] and chosen[2] == chosen[0][:8]


def test_a_point_is_measured_once_for_all_who_ask(
    folder: Path, capsys: pytest.CaptureFixture[str], draws: list[Drawing]
) -> None:
    """Another table with the same models draws nothing: points are kept by what decides them."""
    compare(capsys, folder)
    points = sorted(path.name for path in (folder / "reports/points").glob("*.json"))
    assert len(points) == 4  # monolith, two strategies, real pictures
    draws.clear()
    assert compare(capsys, folder, "compare.strategies=[full]", "compare.shown=2").code == 0 and draws == []
    assert sorted(path.name for path in (folder / "reports/points").glob("*.json")) == points
