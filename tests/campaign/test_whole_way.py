"""From pictures to one model, through the commands that a user types."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.campaign.folder import Campaign
from atoll.data.dataset import DataSet
from atoll.model.checkpoint import Checkpoint
from atoll.store.store import Store
from helpers import assembled, merged
from helpers import command as answer
from whole import run, sets

PROMPTS = ("latin small letter a, serif", "greek capital letter omega, sans bold")
RUNS = ("islands/0", "islands/1", "router", "monolith")


def width(path: Path) -> int:
    """Of a picture that can be read to its end."""
    with Image.open(path) as image:
        image.load()
        return image.width


# What `atoll launch` leaves.


def test_every_run_was_a_process_of_its_own(whole: Path) -> None:
    holders = set()
    for name in RUNS:
        entries = [json.loads(p.read_text()) for p in sorted((whole / name / "run/log").glob("*.json"))]
        assert [e["kind"] for e in entries] == ["acquire", "commit", "publish"]
        holders |= {int(e["holder"].split("-")[-2]) for e in entries}
    assert len(holders) == 4 and os.getpid() not in holders


def test_islands_share_no_row_and_rows_keep_their_columns(whole: Path) -> None:
    store, source = Store.open(whole), Campaign.open(whole).dataset()
    where = {name: row for row, name in enumerate(source.ids)}
    islands = [DataSet.open(store, f"islands/{k}/data") for k in range(2)]
    ids = [set(island.ids) for island in islands]
    assert ids[0].isdisjoint(ids[1]) and ids[0] | ids[1] == set(source.ids)
    for name in ("router", "monolith"):
        assert set(DataSet.open(store, f"{name}/data").ids) == set(source.ids)
    made = json.loads((whole / "partition/partition.json").read_text())
    for k, island in enumerate(islands):
        rows, own = [where[name] for name in island.ids], range(len(island))
        assert (island.column("latents").read(own) == source.column("latents").read(rows)).all()
        texts = island.column("text").read_ragged(own), source.column("text").read_ragged(rows)
        for mine, theirs in zip(*texts, strict=True):
            assert (mine[:, : theirs.shape[1]] == theirs[:, : mine.shape[1]]).all()
        assert len(island.split("train")) == made["sizes"][k]
        assert len(island.split("heldout")) == made["heldout"][k]
    union = DataSet.open(store, "router/data")
    counts = [size + heldout for size, heldout in zip(made["sizes"], made["heldout"], strict=True)]
    assert union.column("clusters").read(range(len(union))).tolist() == [0] * counts[0] + [1] * counts[1]
    # No character is trained on and held out.
    groups = source.table(["group"]).column("group").to_pylist()
    train, heldout = ({groups[i] for i in source.split(s)} for s in ("train", "heldout"))
    assert train and heldout and train.isdisjoint(heldout)


def test_experts_and_router_cost_what_the_monolith_costs(whole: Path) -> None:
    cards = {name: Checkpoint(Store.open(whole), f"{name}/expert").card for name in RUNS}
    spent = sum(cards[name].train_flops for name in RUNS[:3])
    assert spent == pytest.approx(cards["monolith"].train_flops, rel=0.01)
    assert len({cards[name].partition for name in RUNS}) == 1
    initial = {c.provenance["initial_weights"] for n, c in cards.items() if n != "router"}
    assert initial == {cards["monolith"].provenance["initial_weights"]}


def test_the_monolith_learns_and_shows_it(whole: Path) -> None:
    """The loss of the averaged weights on held-out rows falls from the first validation to the last."""
    lines = [json.loads(line) for line in (whole / "monolith/run/metrics.jsonl").read_text().splitlines()]
    losses = [line["validation_loss"] for line in lines if "validation_loss" in line]
    assert len(losses) == 2 and losses[1] < losses[0]
    for k in range(2):
        assert width(whole / f"partition/sheets/{k}.png") > 100
        (preview,) = (whole / f"islands/{k}/run/previews").glob("*.png")
        assert width(preview) > 100


def test_a_finished_stage_changes_nothing_and_says_so(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()}
    for stage in (["data", "ingest"], ["data", "embed"], ["data", "encode"], ["partition"]):
        assert answer(capsys, *stage, whole).code == 0
    said = answer(capsys, "launch", whole, "--on", "local")
    assert said.code == 0 and said.err == ""
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["partition", "training", "ensemble"]
    assert said.out.count("already") == 3 and "started" not in said.out
    assert answer(capsys, "data", "audit", whole).out == "no problems\n"
    shown = answer(capsys, "data", "show", whole).out
    assert "320 rows of glyphs, 16 px gray" in shown and "column text: float16 ragged 384" in shown
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*") if p.is_file()} == before


# `atoll sample`.


def sampled(whole: Path, out: Path, *options: str) -> np.ndarray:
    run("sample", whole, *PROMPTS, "--out", out, "--count", "3", *options)
    with Image.open(out) as image:
        return np.asarray(image)


def test_prompts_become_pictures(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = sampled(whole, tmp_path / "a.png", "--seed", "1")
    assert first.shape[2] == 3 and first.shape[1] >= 3 * 64 and first.shape[0] >= 2 * 64
    assert first.std() > 5
    assert (sampled(whole, tmp_path / "b.png", "--seed", "1") == first).all()
    assert (sampled(whole, tmp_path / "c.png", "--seed", "2", "--guidance", "5") != first).any()
    monolith = sampled(whole, tmp_path / "m.png", "--seed", "1", "--model", "monolith")
    assert first.shape == monolith.shape and (first != monolith).any()
    sampled(whole, tmp_path / "d.png", "--routing", "Threshold(.1)")
    assert capsys.readouterr().out.strip().endswith("3 steps, guidance 2, seed 0, ensemble, threshold(0.1)")


# `atoll compare`.


@pytest.fixture(scope="module")
def compared(whole: Path) -> dict:  # type: ignore[type-arg]
    run("compare", whole)
    return json.loads((whole / "reports/compare.json").read_text())


def test_every_strategy_is_measured(compared: dict) -> None:  # type: ignore[type-arg]
    rows = {row["name"]: row for row in compared["rows"]}
    assert list(rows) == ["monolith", "once", "top-1", "top-2", "full", "oracle"]
    assert all(0 < row["distance"] < float("inf") for row in rows.values())
    experts = {name: row["experts_per_step"] for name, row in rows.items()}
    assert experts == {"monolith": 1, "once": 1, "top-1": 1, "top-2": 2, "full": 2, "oracle": 1}
    # one call per picture for commit (2 steps), one per step and branch otherwise
    calls = {name: row["router_calls_per_step"] for name, row in rows.items()}
    assert calls == {"monolith": 0, "once": 0.5, "top-1": 1, "top-2": 1, "full": 2, "oracle": 0}
    shares = {name: row["router_share"] for name, row in rows.items()}
    assert shares["monolith"] == shares["oracle"] == 0 < shares["once"] < shares["top-1"] < 1
    assert rows["full"]["gflops_per_step"] > 1.5 * rows["monolith"]["gflops_per_step"]
    assert rows["top-2"]["distance"] != rows["top-1"]["distance"]


def test_the_comparison_says_what_it_measured(compared: dict, whole: Path) -> None:  # type: ignore[type-arg]
    metric = compared["metric"]
    assert metric["distance"].endswith("principal components of efficientnet-lite2")
    assert metric["name"] == "efficientnet-lite2" and len(metric["hash"]) == 64
    assert metric["samples"] == 24 and not metric["same_features_as_partition"]
    assert metric["reference_rows"] == len(Campaign.open(whole).dataset().split("heldout"))
    flops = compared["train_flops"]
    assert flops["experts"] + flops["router"] == pytest.approx(flops["monolith"], rel=0.01)
    for name in [row["name"] for row in compared["rows"]] + ["data"]:
        assert len(list((whole / "reports/compare" / name).glob("*.png"))) == 4
    assert {name: np.shape(trace) for name, trace in compared["routing"].items()} == dict.fromkeys(
        ["once", "top-1", "top-2", "full", "oracle"], (2, 4, 2)
    )


# Own data.


COLOURS = {"red": (220, 40, 30), "green": (30, 160, 60), "blue": (40, 60, 210), "black": (20, 20, 20)}


def pictures(folder: Path, count: int = 200) -> Path:
    """Squares and bars in four colours on white, with `metadata.jsonl` as Hugging Face has it."""
    from PIL import ImageDraw

    folder.mkdir()
    draws = np.random.default_rng(0)
    lines = []
    for number in range(count):
        colour = list(COLOURS)[number % 4]
        shape = ("square", "bar")[number // 4 % 2]
        image = Image.new("RGB", (40, 30 + number % 3), "white")
        x, y = draws.integers(2, 14, 2).tolist()
        width, height = (14, 14) if shape == "square" else (20, 5)
        ImageDraw.Draw(image).rectangle((x, y, x + width, y + height), fill=COLOURS[colour])
        image.save(folder / f"{number:03d}.png")
        lines.append(json.dumps({"file_name": f"{number:03d}.png", "text": f"a {colour} {shape}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


SMALL_BUDGET: dict[str, object] = {"data.ingest.size": 16, "partition.k": 2, "monolith": "false"}
SMALL_BUDGET |= {"network.depth": 1, "network.heads": 2, "network.head_width": 16, "train.batch": 16}
SMALL_BUDGET |= {"router.depth": 1, "router.patch": 4, "router.train.batch": 16, "budget.samples": 640}
SMALL_BUDGET |= {"train.validations": 1, "train.previews": 0, "router.train.validations": 1}


def test_a_folder_of_pictures_goes_the_whole_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three commands of the README, with a smaller budget, from the folder above the pictures."""
    pictures(tmp_path / "pictures")
    monkeypatch.chdir(tmp_path)
    run("new", "mine", "--recipe", "cpu", "--set", "data.source=pictures", *sets(SMALL_BUDGET))
    run("launch", "mine")
    run("sample", "mine", "a red square")
    assert width(tmp_path / "samples.png") >= 4 * 64
    dataset = Campaign.open(tmp_path / "mine").dataset()
    assert len(dataset) == 200 and dataset.manifest.mode == "rgb" and dataset.manifest.rejects == {}
    assert not (tmp_path / "mine/monolith/expert").exists()
    assert dataset.take([5]).column("caption")[0].as_py() == "a green bar"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_emoji_go_the_whole_way(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "emoji64" / "twitter.parquet"
    if not source.is_file():
        pytest.skip(f"no {source}")
    folder = tmp_path / "emoji"
    run("new", folder, "--recipe", "cpu", "--set", f"data.source={source}", *sets(SMALL_BUDGET))
    run("launch", folder)
    dataset = Campaign.open(folder).dataset()
    assert len(dataset) > 3000
    run("sample", folder, dataset.take([0]).column("caption")[0].as_py(), "--out", tmp_path / "a.png")
    assert width(tmp_path / "a.png") >= 4 * 64


@pytest.mark.slow
def test_text_encoded_in_training_trains_the_same_weights(tmp_path: Path) -> None:
    changes = {"condition": "text", "network": {"family": "pixart"}, "router": {"sees_condition": True}}
    cards = []
    for precompute in (True, False):
        own = merged(changes, {"data": {"precompute_text": precompute}})
        folder = assembled(tmp_path / str(precompute), own)
        columns = {path.name for path in folder.glob("islands/*/data/columns/*")}
        assert columns == {"latents", "split", "text" if precompute else "tokens"}
        places = (folder / name for name in ("islands/0", "islands/1", "router"))
        cards.append([Checkpoint(Store.open(place), "expert").card for place in places])
    for stored, encoded in zip(*cards, strict=True):
        assert (stored.weights_sha256, stored.text) == (encoded.weights_sha256, encoded.text)
    run("compare", folder, "--set", "evaluate.samples=8", "--set", "evaluate.components=4")
