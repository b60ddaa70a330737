"""Comparisons: models side by side, guidance sweeps, training curves, and pairs of the same noise."""

import csv
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, PartitionError
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.campaign.measured import CurveRow, GuidanceRow
from atoll.campaign.roles import BESIDE
from atoll.measure import models
from atoll.measure.comparison import TrainingCurve, best_table, crossing, reach_table
from atoll.measure.models import supported
from atoll.measure.same_noise import MOST, SIDE, SavedSamples, correlations, pair_table, partners
from atoll.measure.setup import CommonSetup
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.folder import PRETRAIN_PART
from atoll.model.model import Model
from atoll.model.residency import ResidentExperts
from atoll.store.signatures import sign, signer
from atoll.store.store import Store
from helpers import Answer, Run, atoll, entries, flip, of_no_number, refused, start
from keys import key_pair

Drawing = tuple[str | None, float, int]


def copied(folder: Path, run: str, **card: Any) -> None:
    """The published monolith as that of another run too."""
    shutil.copytree(folder / "monolith/expert", folder / run / "expert", dirs_exist_ok=True)
    store = Store.open(folder)
    store.put_json(f"{run}/expert/card.json", store.get_json("monolith/expert/card.json") | card)


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "reports/compare.json").read_text()))


def table(folder: Path, name: str) -> list[dict[str, Any]]:
    content = result(folder)["tables"][name]
    return [dict(zip(content["columns"], row, strict=True)) for row in content["rows"]]


def points(folder: Path, kind: str = "points") -> list[str]:
    return sorted(path.stem for path in (folder / "reports" / kind).glob("*.json"))


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Drawing]:
    """Every drawing: strategy, guidance and number of pictures."""
    return watched(monkeypatch)


def watched(monkeypatch: pytest.MonkeyPatch, stop: Drawing | None = None) -> list[Drawing]:
    """Drawings from now on; one of them is stopped, as by Ctrl-C."""
    seen: list[Drawing] = []
    real = models.Drawn.batches

    def noted(self: models.Drawn, part: range, batch: int) -> Any:
        if len(self) > 4 and not part.start:  # not the pictures to look at, and first shards alone
            drawing = (self.about["routing"], self.generation.guidance, len(self))
            if drawing == stop:
                raise KeyboardInterrupt
            seen.append(drawing)
        return real(self, part, batch)

    monkeypatch.setattr(models.Drawn, "batches", noted)
    return seen


# The table.


def test_rows_have_precision_and_recall_and_pairs(folder: Path, compare: Run, draws: list[Drawing]) -> None:
    assert compare(folder).code == 0
    content = result(folder)
    assert all(0 <= row[key] <= 1 for row in content["rows"] for key in ("precision", "recall"))
    about = content["metric"]["neighbours"]
    assert (about["k"], about["dimensions"], about["samples"]) == (3, 16, 24)
    assert about["references"] == content["metric"]["reference_rows"] and 0 <= about["real_recall"] <= 1
    pairs = table(folder, "pairs")
    assert [r["strategy"] for r in pairs] == ["top-1"] * 6 + ["full"] * 6
    assert {r["pairs"] for r in pairs if r["partner"] == "same noise"} == {24}
    assert all(-1 <= r["low"] <= r["mean"] <= r["high"] <= 1.5 for r in pairs if r["pairs"] > 1)
    lines = list(csv.DictReader((folder / "reports/compare/models.csv").read_text().splitlines()))
    assert [float(line["precision"]) for line in lines] == [row["precision"] for row in content["rows"]]
    before = (folder / "reports/compare/pairs.csv").read_bytes()
    assert before.startswith(b"strategy,space,partner,pairs,mean")
    assert not (folder / "reports/compare/curve.csv").exists()

    # Test rows judge apart.
    assert compare(folder, "compare.conditions=test").code == 0
    metric, rows = result(folder)["metric"], len(Campaign.open(folder).dataset().split("test"))
    assert metric["conditions"] == "of test rows" and metric["reference"] == "test pictures"
    assert metric["reference_rows"] == rows != about["references"]
    assert result(folder)["rows"][0]["distance"] != content["rows"][0]["distance"]

    # Damaged samples are drawn again.
    for path in (folder / "reports/points").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:50])
    draws.clear()
    assert compare(folder).code == 0 and len(draws) == 3
    assert (folder / "reports/compare/pairs.csv").read_bytes() == before


def test_a_value_is_measured_and_written_once(
    folder: Path, net: Path, run: Run, compare: Run, draws: list[Drawing]
) -> None:
    """Points are kept by what decides them: another table with the same models draws nothing, and no point
    stands in the folders of both stages."""
    compare(folder)
    compared = points(folder)
    assert len(compared) == 4  # monolith, two strategies, real pictures
    draws.clear()
    assert compare(folder, "compare.strategies=[full]", "compare.shown=2").code == 0 and draws == []
    assert points(folder) == compared
    small = ["--set", "evaluate.extractor_size=28", "--samples", "24", "--steps", "2", "--metrics", "frechet"]
    argv = ["evaluate", folder, "--model", "monolith", "--extractor", net, *small]
    assert "wrote " in run(*argv).out
    (evaluated,) = points(folder, "evaluate")
    assert points(folder) == compared and evaluated not in compared and len(draws) == 1
    path = folder / f"reports/evaluate/{evaluated}.json"
    before = path.read_bytes()
    assert "finished already" in run(*argv).out
    assert path.read_bytes() == before and points(folder, "evaluate") == [evaluated] and len(draws) == 1
    known = [
        json.loads(path.read_text())
        for kind in ("points", "evaluate")
        for path in (folder / "reports" / kind).glob("*.json")
    ]
    values = [
        json.dumps([point["subject"], {**point["protocol"], "code": ""}, name, value["settings"]])
        for point in known
        for name, value in point["values"].items()
    ]
    assert len(values) == len(set(values))


def test_two_of_the_same_weights_draw_the_same_pictures(folder: Path, run: Run, compare: Run) -> None:
    """With the monolith's weights in every expert and in a student, guidance 1: the same noise gives the same
    picture."""
    copied(folder, "student", role="student")
    for number in range(2):
        copied(folder, f"islands/{number}", role="expert", island=number)
        shutil.rmtree(folder / f"islands/{number}/run")
    assemble(Campaign.open(folder))
    assert compare(folder, "compare.guidance=1.0", "compare.guidances=[3]").code == 0
    for row in table(folder, "pairs"):
        if row["partner"] == "same noise":
            assert row["mean"] == pytest.approx(1, abs=1e-6)
        else:
            assert row["mean"] < 0.999 and row["effect"] > 0
    distances = {row["name"]: row["distance"] for row in result(folder)["rows"]}
    assert distances["top-1"] == pytest.approx(distances["monolith"], rel=1e-3)
    assert result(folder)["sweep"]["models"] == ["monolith", "student", "top-1"]
    swept = [[r["distance"] for r in table(folder, "guidance") if r["model"] == name] for name in BESIDE]
    assert swept[0] == swept[1] and len(swept[0]) == 2
    assert [r["ratio"] for r in table(folder, "best")][:2] == [None, 1.0]
    assert run("report", folder).code == 0
    page = (folder / "reports/index.html").read_text()
    assert '<th scope="row">Student</th><td data-label="of">pixels</td>' in page


def test_a_comparison_that_was_stopped_goes_on(
    folder: Path, compare: Run, monkeypatch: pytest.MonkeyPatch, draws: list[Any]
) -> None:
    """Stopped after two of three models: the third alone is drawn, and the result is the same."""
    whole = Path(shutil.copytree(folder, folder.parent / "whole"))
    compare(whole)
    assert [name for name, _, _ in draws] == [None, "top-1", "full"]
    draws.clear()
    with monkeypatch.context() as patch:
        watched(patch, stop=("full", 2.0, 24))
        assert compare(folder).code != 0 and not (folder / "reports/compare.json").exists()
    (folder / "reports/compare.json").write_text("[]")  # what is no comparison is measured anew
    assert compare(folder).code == 0
    assert [name for name, _, _ in draws] == [None, "top-1", "full"]
    one, other = (
        {key: value for key, value in result(place).items() if key not in ("seconds", "code", "rows")}
        for place in (folder, whole)
    )
    assert one == other
    distances = [[row["distance"] for row in result(place)["rows"]] for place in (folder, whole)]
    assert distances[0] == distances[1]


def test_measuring_starts_from_the_campaigns_own_sampling(
    folder: Path, net: Path, staged: Run, draws: list[Drawing], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a campaign that samples by top-1 in 3 steps at guidance 1.5, all but what a stage says otherwise."""
    make, chosen = models.RowConditions.drawn, list[list[int]]()

    def noted(*given: Any) -> models.RowConditions:
        conditions = make(*given)
        chosen.append(conditions.index.tolist())
        return conditions

    monkeypatch.setattr(models.RowConditions, "drawn", noted)
    own = ["sampling.steps=3", "sampling.guidance=1.5", "compare.strategies=null", "compare.steps=null"]
    own.append("compare.samples=12")
    first = staged("compare", folder, *own)
    assert "12 pictures each, 3 steps, guidance 1.5\n" in first.out and result(folder)["overrides"] == {}
    # Its own strategy first.
    assert [row["name"] for row in result(folder)["rows"]][:2] == ["monolith", "top-1"]
    assert {guidance for _, guidance, _ in draws} == {1.5} and result(folder)["metric"]["steps"] == 3
    said = staged("compare", folder, *own, "compare.guidance=2.5", "compare.steps=2")
    assert "2 steps (sampling: 3), guidance 2.5 (sampling: 1.5)" in said.out
    assert result(folder)["overrides"] == {"steps": [2, 3], "guidance": [2.5, 1.5]}
    few = {"samples": 8, "probed": 0, "rows": 8, "extractor_size": 28, "extractor": net, "steps": 2}
    answer = staged("diagnose", folder, *own[:2], *(f"diagnose.{name}={v}" for name, v in few.items()))
    assert answer.code == 0 and "8 pictures under top-1, 2 steps (sampling: 3), guidance 1.5" in answer.out
    why = json.loads((folder / "reports/diagnostics.json").read_text())
    assert why["strategies"] == ["top-1", "once"] and why["overrides"] == {"steps": [2, 3]}
    # Both stages draw at the same rows' conditions.
    assert len(chosen) == 3 and chosen[0] == chosen[1] and chosen[2] == chosen[0][:8]


# Guidance.


def test_a_sweep_draws_what_is_new_and_nothing_twice(folder: Path, compare: Run, draws: list[Any]) -> None:
    compare(folder)
    before, rows = result(folder), {row["name"]: row for row in result(folder)["rows"]}
    draws.clear()
    answer = compare(folder, "compare.guidances=[3, 1]")
    assert answer.code == 0 and "best at guidance" in answer.out
    new = [(name, scale, 24) for name in (None, "top-1") for scale in (1.0, 3.0)]
    assert sorted(draws, key=str) == sorted(new, key=str)
    swept = table(folder, "guidance")
    assert [(r["model"], r["guidance"]) for r in swept] == [
        (name, scale) for name in ("monolith", "top-1") for scale in (1.0, 2.0, 3.0)
    ]
    assert all(r["distance"] == rows[r["model"]]["distance"] for r in swept if r["guidance"] == 2.0)
    mono, top = table(folder, "best")
    least = {name: min(r["distance"] for r in swept if r["model"] == name) for name in ("monolith", "top-1")}
    assert (mono["distance"], top["distance"]) == (least["monolith"], least["top-1"])
    assert top["ratio"] == pytest.approx(least["top-1"] / least["monolith"])
    after = result(folder)
    assert after["sweep"] == {"models": ["monolith", "top-1"], "guidances": [1.0, 2.0, 3.0]}
    assert after["key"] == before["key"] and after["rows"] == before["rows"]
    draws.clear()
    assert compare(folder, "compare.guidances=[1, 3]").out == "compare: finished already\n"
    assert compare(folder).out == "compare: finished already\n"  # what was measured beyond stays
    assert compare(folder, "compare.guidances=[1, 3, 5]").code == 0
    assert sorted(draws, key=str) == [("top-1", 5.0, 24), (None, 5.0, 24)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["compare.sweep=[onec]"], ["'onec'", "did you mean 'once'?"]),
        (["compare.sweep=[]"], ["compare.sweep names no strategy"]),
        (["compare.guidances=[1, -2]"], ["compare.guidances.1", "greater than or equal to 0"]),
        (["compare.sweep=[top-9]", "compare.guidances=[1]"], ["strategies top-9 none is possible"]),
        (["compare.strategies=[top-8, top-9]"], ["strategies top-8, top-9 none is possible"]),
    ],
)
def test_wrong_settings_are_one_line(
    made: Path, compare: Run, settings: list[str], words: list[str], draws: list[Any]
) -> None:
    refused(compare(made, *settings), *words)
    assert draws == []


def test_without_test_rows_they_do_not_judge(whole: Path, compare: Run) -> None:
    refused(compare(whole, "compare.conditions=test"), "the data set has no test rows")


def test_pictures_that_are_no_numbers_are_not_measured(
    folder: Path, net: Path, run: Run, staged: Run
) -> None:
    """They would be grey, and a broken model would have a distance like any other."""
    of_no_number(folder / "islands/1/expert")
    shutil.rmtree(folder / "islands/1/run")
    assert run("assemble", folder).code == 0
    for stage, words in (("compare", "holds NaN"), ("diagnose", "expert 1 gives NaN or infinity")):
        sets = "diagnose.rows=8", f"diagnose.extractor={net}", "diagnose.extractor_size=28"
        refused(staged(stage, folder, *sets), words)
    assert not (folder / "reports/compare.json").exists()


# The way of the training.


def test_the_course_adds_up(made: Path) -> None:
    campaign = Campaign.open(made)
    course = TrainingCurve(CommonSetup(campaign))
    places: dict[str | int, str] = {name: name for name in ("pretrain", "monolith", "router")}
    places |= {n: f"islands/{n}" for n in range(2)}
    cards = {name: Checkpoint(campaign.store, f"{place}/expert").card for name, place in places.items()}
    spent = {name: card.train_flops for name, card in cards.items()}
    # A milestone is the first step after a quarter of the run's own, or more of them.
    steps = {name: card.samples // card.batch for name, card in cards.items()}
    shares = {name: [-(-n * count // 4) / count for n in (1, 2, 3, 4)] for name, count in steps.items()}
    stages = course.ensemble()
    assert [stage.share for stage in stages] == shares[0]
    for number, stage in enumerate(stages):
        own = sum(shares[n][number] * spent[n] for n in range(2))
        assert stage.train_flops == pytest.approx(own + spent["pretrain"] + spent["router"], rel=1e-12)
    assert stages[-1].train_flops == pytest.approx(spent["monolith"], rel=0.02)
    for name in ("monolith", "pretrain"):
        points = [(share, spent[name] * share) for share in shares[name]]
        assert [(point.share, point.train_flops) for point in course.dense(name)] == points


def test_an_ensemble_on_its_way_has_the_averaged_weights_of_that_step(made: Path) -> None:
    campaign = Campaign.open(made)
    course = TrainingCurve(CommonSetup(campaign))
    stage = course.ensemble()[1]
    for number in range(2):
        commits = [e for e in entries(made / f"islands/{number}") if e["kind"] == "commit" and e["milestone"]]
        expected = load_file(made / f"islands/{number}/run" / commits[1]["checkpoint"] / "ema.safetensors")
        loaded = course.experts[number].stored(stage.chosen[f"experts/{number}"]).expert()
        assert all(torch.equal(p, expected[name]) for name, p in loaded.network.named_parameters())

        # One at a time, where no more may be on the device.
        one = ["sampling.residency.experts=1", "sampling.residency.prefetch=false"]
        bank = TrainingCurve(CommonSetup(Campaign.open(made, one))).candidate(stage, "top-1").model.bank
        states = torch.rand(4, 1, 8, 8), torch.rand(4), Condition(labels=torch.tensor([0, 1, 0, 1]))
        assert bank.capacity == 1 and isinstance(bank.experts, ResidentExperts)
        with torch.inference_mode():
            assert torch.equal(bank.experts[number].velocity(*states), loaded.velocity(*states))
        final = Checkpoint(campaign.store, f"islands/{number}/expert").expert().network.named_parameters()
        assert any(not torch.equal(p, expected[name]) for name, p in final)  # it has learned since
    last = course.experts[0].stored(course.experts[0].milestones[-1]).expert()
    done = Model.load(campaign.store).bank
    assert isinstance(done.experts, list) and isinstance(done.experts[0], Expert)
    for one, other in zip(last.network.parameters(), done.experts[0].network.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_curve_is_drawn_once_and_its_ends_are_those_of_the_table(
    folder: Path, compare: Run, draws: list[Any]
) -> None:
    compare(folder)
    rows = {row["name"]: row["distance"] for row in result(folder)["rows"]}
    draws.clear()
    answer = compare(folder, "compare.curve=true")
    assert answer.code == 0 and ("of its FLOPs" in answer.out or "does not reach" in answer.out)
    # Pretraining's end is new.
    assert sorted(draws, key=str) == [("top-1", 2.0, 24)] * 3 + [(None, 2.0, 24)] * 7
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
    assert compare(folder, "compare.curve=true").out == "compare: finished already\n"
    # Fewer pictures: all is new, also the ends, and nothing else is touched.
    assert compare(folder, "compare.curve=true", "compare.curve_samples=12").code == 0
    assert {count for _, _, count in draws} == {12} and len(draws) == 12
    assert (folder / "reports/compare/reach.csv").read_text().startswith("model,target,train_flops")


def test_an_earlier_network_of_shared_pretraining_guides(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half, name = ["sampling.guide_share=0.5"], f"ensemble/{PRETRAIN_PART}"
    campaign = Campaign.open(folder, half)
    sign(campaign.store, "pretrain/expert", {}, key_pair(folder.parent / "key")[0])
    assemble(Campaign.open(folder))
    whole = Checkpoint(campaign.store, name).card
    assert signer(campaign.store, name) is not None
    assemble(campaign)
    assert signer(campaign.store, name) is None
    (commit,) = [e for e in entries(folder / "pretrain") if e.get("milestone") and e["step"] == 8]
    guide = Checkpoint(campaign.store, name).expert()
    average = load_file(folder / "pretrain/run" / commit["checkpoint"] / "ema.safetensors")
    assert all(torch.equal(p, average[key]) for key, p in guide.network.named_parameters())
    assert guide.card is not None and (guide.card.samples, whole.samples) == (8 * 16, 15 * 16)
    assert guide.card.train_flops == pytest.approx(whole.train_flops * 8 / 15)
    capsys.readouterr()
    assemble(campaign)
    assert "assembled already" in capsys.readouterr().out
    weights = TrainingCurve(CommonSetup(campaign)).ensemble()[0].weights
    assert weights[PRETRAIN_PART] == guide.card.weights_sha256 != whole.weights_sha256
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


def test_a_curve_that_is_not_possible_is_refused_at_once(
    folder: Path, compare: Run, draws: list[Any]
) -> None:
    """A damaged milestone, a run's folder whose network is not the one assembled, and no milestones."""
    commits = [e for e in entries(folder / "islands/1") if e["kind"] == "commit"]
    path = folder / "islands/1/run" / commits[0]["checkpoint"] / "ema.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])

    def asked() -> Answer:
        return compare(folder, "compare.curve=true")

    refused(asked(), f"{commits[0]['checkpoint']}/ema.safetensors")
    path.write_bytes(content)
    draws.clear()

    shutil.move(folder / "islands/0/run", folder / "run")
    store = Store.open(folder)
    card = store.get_json("islands/0/expert/card.json")
    card["provenance"] = {**card["provenance"], "seed": 99}
    store.put_json("islands/0/expert/card.json", card)
    assemble(Campaign.open(folder))
    shutil.move(folder / "run", folder / "islands/0/run")
    refused(asked(), "experts 0:", "train.milestones")
    for commit in commits:
        shutil.rmtree(folder / "islands/1/run" / commit["checkpoint"])
    refused(asked(), "compare.curve", "experts 0, 1:", "train.milestones")
    assert draws == []


def swept(name: str, distances: dict[float, float]) -> list[GuidanceRow]:
    beside = {"model": name, "precision": 0.5, "recall": None}
    return [GuidanceRow(guidance=scale, distance=d, **beside) for scale, d in distances.items()]


def test_each_model_has_its_own_best_guidance() -> None:
    rows = swept("monolith", {1: 9.0, 2: 4.0, 3: 5.0}) + swept("top-1", {3: 2.0, 1: 7.0, 2: 3.0})
    mono, top = best_table(rows)
    assert (mono.guidance, mono.distance, mono.edge, mono.ratio) == (2.0, 4.0, "", None)
    assert (top.guidance, top.distance, top.edge, top.ratio) == (3.0, 2.0, "high", 0.5)


def test_strategies_whose_networks_are_not_there_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["top-1", "top-9", "once null pretrain", "oracle"]
    assert supported(names, 8, [3], pretrained=False) == ["top-1"]
    assert capsys.readouterr().out.count(" is left out: ") == 3
    assert supported(names, 9, [], pretrained=True) == names


@pytest.mark.parametrize(
    ("distances", "scale", "edge"),
    [
        ({1: 3.0, 2: 3.0}, 1.0, "low"),  # of equal ones the smaller
        ({0: 1.0, 2: 3.0}, 0.0, ""),  # there is nothing below 0
        ({2: 3.0}, 2.0, ""),
    ],
)
def test_a_best_at_the_end_of_the_scales_is_marked(
    distances: dict[float, float], scale: float, edge: str
) -> None:
    (found,) = best_table(swept("once", distances))
    assert (found.guidance, found.edge, found.ratio) == (scale, edge, None)


@pytest.mark.parametrize(
    ("path", "target", "flops", "how"),
    [
        ([(10, 8.0), (20, 4.0), (30, 1.0)], 5.0, 17.5, "between points"),
        ([(10, 8.0), (20, 4.0)], 4.0, 20.0, "between points"),
        ([(10, 8.0), (20, 4.0)], 9.0, 10.0, "at the first point"),
        ([(10, 8.0), (20, 4.0)], 3.0, None, "never"),
        # Down, up and down again: the first time counts.
        ([(10, 8.0), (20, 2.0), (30, 6.0), (40, 1.0)], 5.0, 15.0, "between points"),
    ],
)
def test_the_target_is_reached_between_points(
    path: list[tuple[float, float]], target: float, flops: float | None, how: str
) -> None:
    assert crossing(path, target) == (flops if flops is None else pytest.approx(flops), how)


def course(name: str, *points: tuple[float, float]) -> list[CurveRow]:
    beside = {"share": 1.0, "of_monolith": None, "precision": None, "recall": None}
    return [CurveRow(model=name, train_flops=f, distance=d, **beside) for f, d in points]


def test_the_ensembles_path_begins_with_the_seed() -> None:
    rows = [
        *course("pretrain", (10, 20.0), (40, 12.0)),
        *course("monolith", (50, 14.0), (100, 8.0)),
        *course("once", (60, 4.0), (100, 2.0)),
        *course("top-1", (60, 10.0), (100, 9.0)),
    ]
    base, once, top = reach_table(rows, "pretrain")
    assert (base.model, base.of_monolith, base.how) == ("monolith", 1.0, "between points")
    assert (once.model, once.target, once.how) == ("once", 8.0, "between points")
    assert once.train_flops == pytest.approx(50) and once.of_monolith == pytest.approx(0.5)
    assert (top.train_flops, top.of_monolith, top.how) == (None, None, "never")
    once = reach_table([row for row in rows if row.model != "pretrain"])[1]
    assert (once.of_monolith, once.how) == (0.6, "at the first point")
    assert reach_table(course("once", (1, 2.0))) == []  # no monolith, no target


def test_a_monolith_that_no_longer_improves_reaches_its_own_distance_early() -> None:
    rows = [*course("monolith", (50, 6.0), (75, 4.0), (100, 5.0)), *course("once", (50, 7.0), (90, 3.0))]
    base, once = reach_table(rows)
    assert (base.train_flops, once.train_flops) == (pytest.approx(62.5), pytest.approx(70))


def test_correlations_have_known_answers() -> None:
    line = np.arange(8.0)
    one = np.stack([line, line, line, np.ones(8), [1, -1] * 4])
    found = correlations(one, np.stack([3 * line + 7, -line, np.abs(line - 3.5), line, [1, 1, -1, -1] * 2]))
    assert found[:2] == pytest.approx([1, -1]) and found[2] == pytest.approx(0, abs=1e-12)
    assert np.isnan(found[3]) and found[4] == pytest.approx(0, abs=1e-12)
    a, b = np.random.default_rng(0).normal(size=(2, 5, 30))
    expected = [np.corrcoef(x, y)[0, 1] for x, y in zip(a, b, strict=True)]
    assert correlations(a, b) == pytest.approx(expected, abs=1e-12)
    dark = np.array([[0, 255, 0, 255]], dtype=np.uint8)
    assert correlations(dark, dark[:, ::-1]) == pytest.approx([-1])  # unsigned bytes do not wrap around


def test_partners_are_others_of_the_group_and_nobody_is_taken_twice() -> None:
    groups = np.array([0, 1, 0, 2, 1, 0, 1])
    found = partners(groups, seed=3)
    assert found[3] == -1  # alone
    rest = [n for n in range(7) if n != 3]
    assert all(found[n] != n and groups[found[n]] == groups[n] for n in rest)
    assert sorted(found[rest]) == rest
    assert (partners(groups, seed=3) == found).all()


def made(pixels: np.ndarray) -> SavedSamples:
    return SavedSamples(pixels, pixels.astype(np.float32))


def test_the_same_noise_is_told_from_other_samples() -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, size=(60, 48), dtype=np.uint8)
    noisy = (base * 0.5 + rng.integers(0, 128, size=base.shape)).astype(np.uint8)
    others = {"near": made(noisy), "far": made(rng.integers(0, 256, size=base.shape, dtype=np.uint8))}
    table = pair_table(made(base), others, np.arange(60) % 3, np.arange(60), seed=0)
    found = {(r["strategy"], r["space"], r["partner"]): r for r in (row.model_dump() for row in table)}
    assert len(found) == 2 * 2 * 3
    near, far = found["near", "pixels", "same noise"], found["far", "pixels", "same noise"]
    expected = correlations(base, noisy)
    assert near["mean"] == pytest.approx(expected.mean()) and near["pairs"] == 60
    half = 1.96 * expected.std(ddof=1) / np.sqrt(60)
    assert (near["low"], near["high"]) == pytest.approx((near["mean"] - half, near["mean"] + half), rel=1e-4)
    assert near["effect"] is near["higher"] is None
    for partner in ("same cluster", "any"):
        apart = found["near", "features", partner]
        assert apart["pairs"] == 60 and abs(apart["mean"]) < 0.1
        assert apart["effect"] > 3 and apart["higher"] > 0.95
        nothing = found["far", "pixels", partner]
        assert abs(nothing["effect"]) < 0.5 and 0.3 < nothing["higher"] < 0.7
    assert far["low"] < 0 < far["high"]


def test_the_effect_is_cohens_d() -> None:
    """Two pictures of one value each way: +1 with the same noise, -1 with any other, no spread but in one."""
    base = np.array([[0, 9, 0, 9], [9, 0, 9, 0], [0, 9, 0, 9], [9, 0, 9, 0]], dtype=np.uint8)
    table = pair_table(made(base), {"a": made(base)}, np.zeros(4, int), np.arange(4), seed=0)
    same, _, apart = (r for r in (row.model_dump() for row in table) if r["space"] == "pixels")
    values = correlations(base, base[partners(np.zeros(4, dtype=np.int64), 0)])
    assert same["mean"] == 1 and same["deviation"] == 0
    assert apart["effect"] == pytest.approx((1 - values.mean()) / np.sqrt(values.var(ddof=1) / 2))
    assert apart["higher"] == pytest.approx((values < 1).mean())


def test_pairs_of_equal_conditions_and_of_nobody_do_not_count() -> None:
    base = np.random.default_rng(2).integers(0, 256, size=(4, 12), dtype=np.uint8)
    table = pair_table(made(base), {"a": made(base)}, np.array([0, 1, 2, 3]), np.zeros(4, int), seed=0)
    counts = {(row.space, row.partner): (row.pairs, row.mean) for row in table}
    assert counts["pixels", "same noise"][0] == 4
    assert counts["pixels", "same cluster"] == (0, None) and counts["features", "any"] == (0, None)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_large_pictures_are_reduced_before_they_are_kept(mode: str, channels: int) -> None:
    half = np.tile(np.array([0, 200], np.uint8), (2 * SIDE, 2 * SIDE))  # every other column
    pixels = SavedSamples.pixels_of(range(3), [Image.fromarray(half).convert(mode)] * 3)
    kept = SavedSamples(np.stack([*pixels.values()]), np.zeros((3, 5), dtype=np.float32))
    assert kept.pixels.shape == (3, channels * SIDE * SIDE // 2) and (kept.pixels == 100).all()
    pixels = SavedSamples.pixels_of(range(MOST + 1), [Image.new(mode, (4, 4))] * (MOST + 1))
    many = SavedSamples(np.stack([*pixels.values()]), np.zeros((MOST, 2), dtype=np.float32))
    assert many.pixels.shape == (MOST, 16 * channels) and len(many.features) == MOST
    again = SavedSamples.read(many.tensors())
    assert (again.pixels == many.pixels).all() and (again.features == many.features).all()


# In parts. `PARTED` makes three shards of a point.

PARTED = "samples=40 batch=4 steps=3 guidances=[1,3] sweep=[top-1,once] curve=true shown=2"
SET = [word for setting in PARTED.split() for word in ("--set", f"compare.{setting}")]


def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """All that a comparison wrote but what it took: the JSON, and bytes of tables, samples and pictures."""
    tree = json.loads((folder / "reports/compare.json").read_text())
    del tree["seconds"]
    for row in tree["rows"]:
        del row["seconds"]
    files = [
        path for path in (folder / "reports").rglob("*") if path.suffix in (".safetensors", ".png", ".csv")
    ]
    return tree, {
        str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "models.csv"
    }


def shards(folder: Path) -> dict[Path, int]:
    """Shards that lie there, and when they were written."""
    return {path: path.stat().st_mtime_ns for path in (folder / "reports/work").glob("*/*.safetensors")}


@pytest.fixture(scope="module")
def serial(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compared by one process."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("serial") / "c"))
    done = atoll("compare", folder, *SET)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_three_workers_compare_to_the_bit_what_one_process_compares(
    made: Path, serial: Path, tmp_path: Path
) -> None:
    """Points, samples, table, guidance sweep, curve and pictures; by-expert batches and a shorter shard."""
    folder = Path(shutil.copytree(made, tmp_path / "c"))
    done = atoll("compare", folder, *SET, "--workers", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compare: 40 pictures each") == 1, done.stdout
    tree, files = outcome(folder)
    assert len(tree["tables"]) >= 4 and len(files) > 10 and (tree, files) == outcome(serial)
    assert not list((folder / "reports/work").iterdir())


@pytest.mark.slow
def test_a_killed_worker_loses_one_shard(
    made: Path, serial: Path, tmp_path: Path, run: Run, draws: list[Drawing]
) -> None:
    """Killed in the middle and run again: what was there stays as it was, but for a damaged file, and who
    finishes draws nothing."""
    folder = Path(shutil.copytree(made, tmp_path / "c"))
    worker = start("compare", folder, *SET, "--part", "1/1")
    try:
        while len(shards(folder)) < 3 and worker.poll() is None:
            time.sleep(0.02)
        worker.kill()
    finally:
        worker.kill()
        worker.communicate()
    assert worker.returncode == -signal.SIGKILL
    before = shards(folder)
    spoilt = min(before, key=before.__getitem__)
    flip(spoilt)
    again = atoll("compare", folder, *SET, "--part", "1/1")
    assert again.returncode == 0 and not (folder / "reports/compare.json").exists(), again.stderr
    after = shards(folder)
    # It has another name now: a shard of drawings holds the seconds that they took.
    assert {path for path, written in before.items() if after.get(path) != written} == {spoilt}
    places = [{(path.parent, path.name.partition("-")[0]) for path in some} for some in (before, after)]
    assert len(before) >= 3 and places[0] < places[1]
    assert run("compare", folder, *SET).code == 0 and draws == []
    assert outcome(folder) == outcome(serial)
