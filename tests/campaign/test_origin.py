"""A finished campaign goes on at larger pictures of several aspects: partition and weights are taken over."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign, going_on, interpolation, new
from atoll.campaign.prepare import prepare
from atoll.campaign.runs import RunPlan, runs_of
from atoll.data.dataset import DataSet
from atoll.data.partition import load
from atoll.model.checkpoint import Checkpoint
from atoll.model.model import Model
from atoll.recipes import catalogue
from atoll.train.run import train_run
from helpers import Run, command, merged, metrics, partitioned, refused
from helpers_data import aspects
from helpers_export import LENGTH, text_tower

WEIGHTS = "diffusion_pytorch_model.safetensors"
SETS = [
    "data.ingest.size=32",
    "data.ingest.buckets={sizes: [32x32, 48x24, 24x48], multiple: 8, min_rows: 4, max_upscale: 9}",
    "data.ingest.heldout=0.3",
    "budget.samples=320",
]
FLAGS = [word for each in SETS for word in ("--set", each)]


def train(campaign: Campaign) -> None:
    for run in runs_of(campaign.config):
        train_run(campaign, *run)
    assemble(campaign)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished square campaign with shared pretraining, a monolith and a student."""
    folder = tmp_path_factory.mktemp("origin")
    data = {
        "source": str(aspects(folder / "pictures", {(40, 40): 60, (60, 30): 40, (30, 60): 16})),
        "text_encoder": str(text_tower(folder / "text")),
        "text_length": LENGTH,
        "ingest": {"size": 16, "mode": "rgb", "glyphs": {"faces": "core", "limit": None}, "shard_rows": 50},
    }
    settings: dict[str, Any] = {
        "condition": "text",
        "data": data,
        "network": {"family": "pixart"},
        "budget": {"samples": 640, "pretrain": 0.3},
        "student": {"start": "average"},
        "sampling": {"routing": "once null pretrain", "size": "16x16"},
        "islands": {1: {"train": {"lr": 0.002}}},
    }
    train(partitioned(folder / "base", settings))
    return folder / "base"


@pytest.fixture(scope="module")
def further(base: Path) -> Path:
    """The campaign that goes on from it, partitioned."""
    folder = base.parent / "further"
    new(folder, catalogue.text("high-resolution"), SETS, str(base))
    prepare(Campaign.open(folder))
    return folder


def clusters_of(campaign: Campaign, k: int) -> tuple[set[str], set[str]]:
    """Ids of an island's rows, and of those that are held out."""
    data = DataSet.open(campaign.store, f"islands/{k}/data")
    return {*data.ids}, {data.ids[row] for row in data.split("heldout")}


def test_rows_stay_in_their_clusters_and_splits(base: Path, further: Path) -> None:
    before, after = Campaign.open(base), Campaign.open(further)
    for k in (0, 1):
        assert clusters_of(before, k) == clusters_of(after, k)
    assert len(after.dataset().manifest.config["buckets"]["sizes"]) == 3
    assert after.clustered()[1].about.buckets.keys() == {"32x32", "48x24", "24x48"}
    assert load(before.store).hash == load(after.store).hash


def test_what_the_recipe_does_not_say_is_as_there(base: Path, further: Path) -> None:
    before, after = Campaign.open(base).config, Campaign.open(further).config
    assert after.network == before.network.model_copy(update={"interpolation_scale": 2.0})
    assert after.objective.time.shift == after.router.time.shift == after.sampling.shift == 2
    own, first = ((each.islands, each.partition, each.data.text_encoder) for each in (after, before))
    assert own == first
    assert after.student is not None and after.student.start == "scratch" and after.train.lr == 5e-5
    text = (further / "campaign.yaml").read_text()
    assert f"origin: {base}" in text and "interpolation_scale: 2.0" in text
    # A third campaign that goes on from the second would interpolate by 4.
    assert interpolation(Campaign.open(further), 64) == 4


def test_every_run_starts_from_the_same_run(base: Path, further: Path) -> None:
    campaign = Campaign.open(further)
    runs = runs_of(campaign.config)
    assert [run.name for run in runs] == ["expert 0", "expert 1", "router", "monolith", "student"]
    for run in runs:
        folders = base / run.network, further / run.folder / "init"
        trained, first = (load_file(folder / WEIGHTS) for folder in folders)
        assert all(torch.equal(first[name], trained[name]) for name in first)
        origin = campaign.store.get_json(f"{run.folder}/init/init.json")
        assert origin["drawn"] == {} and origin["origin"]["name"] == f"{base}/{run.network}"
        plan = RunPlan.read(campaign.store, run.plan)
        assert plan.init == "checkpoint" and plan.init_sha256 == origin["files"][1]["sha256"]


def test_a_checkpoint_of_the_settings_is_not_looked_at(base: Path, tmp_path: Path) -> None:
    """Nor the first campaign's monolith, where none is to be trained."""
    origin = shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("monolith"))
    sets = [*SETS, "monolith=false", "network.init=nowhere"]
    new(tmp_path / "c", catalogue.text("high-resolution"), sets, str(origin))
    prepare(campaign := Campaign.open(tmp_path / "c"))
    inits = [RunPlan.read(campaign.store, f"{name}/island.json").init for name in ("router", "monolith")]
    assert inits == ["checkpoint", "scratch"]


@pytest.mark.slow
def test_it_takes_a_tenth_of_the_images_unless_told(base: Path) -> None:
    recipe, origin = catalogue.text("high-resolution"), Campaign.open(base)
    tenth = going_on(origin, yaml.safe_load(recipe))["budget"]["samples"]
    assert tenth == origin.config.budget.samples // 10 > 0
    assert going_on(origin, {"budget": {"samples": 7}})["budget"]["samples"] == 7


def test_it_trains_and_draws_every_size(base: Path, further: Path) -> None:
    """Also where the first campaign is gone by then: every run has its own copy of its first weights."""
    moved = base.rename(base.with_name("gone"))
    try:
        train(Campaign.open(further))
    finally:
        moved.rename(base)
    assert "continue from those of another campaign" in (further / "ensemble/README.md").read_text()
    model = Model.load(further, encoders=Campaign.open(further).config.encoders)
    assert model.generation.shift == 2
    for size in ("32x32", "48x24", "24x48"):
        assert "x".join(map(str, model("a red square", size=size, steps=2).images[0].size)) == size
    card = Checkpoint(Campaign.open(further).store, "islands/0/expert").card
    assert card.provenance["init"]["name"] == f"{base}/islands/0/expert"
    rates = [line["lr"] for line in metrics(further / "monolith") if "lr" in line]
    assert 0 < max(rates) <= 5e-5 and rates[-1] < 0.1 * max(rates)


@pytest.mark.slow
def test_rows_on_no_island_are_left_out(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that opted out would else come back."""
    shutil.copytree(base, tmp_path / "base")
    first = DataSet.open(Campaign.open(base).store, "islands/0/data").ids[:3]
    gone = tmp_path / "gone.txt"
    gone.write_text("\n".join(first))
    opted = command(capsys, "partition", tmp_path / "base", "--opt-out", gone, "--retrain")
    assert opted.code == 0, opted
    train(Campaign.open(tmp_path / "base"))
    new(tmp_path / "c", catalogue.text("high-resolution"), SETS, str(tmp_path / "base"))
    prepare(campaign := Campaign.open(tmp_path / "c"))
    assert "3 rows on no island" in capsys.readouterr().out
    assert not {*clusters_of(campaign, 0)[0], *clusters_of(campaign, 1)[0]} & {*first}
    dataset = campaign.dataset()
    assert {dataset.ids[row] for row in range(len(dataset)) if not dataset.weights[row]} == {*first}


@pytest.mark.parametrize(
    ("changes", "sets", "words"),
    [
        ({}, ["partition.k=3"], ("partition.k is 3, but", "has 2")),
        ({}, ["data.source=glyphs"], ("data.source is 'glyphs', but", "has '")),
        ({"router/expert/card.json": None}, [], ("has not finished router", "atoll launch")),
        ({"student/expert/card.json": None}, [], ("has not finished student", "student=null")),
        ({"campaign.yaml": "quarantine: [1]"}, [], ("student in", "learned from expert 1, in quarantine")),
    ],
)
def test_a_campaign_that_cannot_be_gone_on_from_is_refused_in_a_line(
    changes: dict[str, Any], sets: list[str], words: tuple[str, ...], base: Path, tmp_path: Path, run: Run
) -> None:
    shutil.copytree(base, tmp_path / "base", ignore=shutil.ignore_patterns("data", "checkpoints"))
    for name, line in changes.items():
        path = tmp_path / "base" / name
        path.write_text(f"{path.read_text()}\n{line}\n") if line else path.unlink()
    flags = [*FLAGS, *(word for each in sets for word in ("--set", each))]
    argv = ["new", tmp_path / "c", "--recipe", "high-resolution", "--from", tmp_path / "base", *flags]
    refused(run(*argv), *words)
    assert not (tmp_path / "c").exists()


def test_another_origin_is_refused_before_any_work(further: Path, tmp_path: Path, run: Run) -> None:
    refused(run("new", tmp_path / "a", "--recipe", "high-resolution"), "origin: there is no folder", "--from")
    refused(run("new", tmp_path / "a", "--from", tmp_path / "nowhere"), "nowhere")
    # The same settings, and a source whose files are others by now.
    tree = yaml.safe_load((further / "campaign.yaml").read_text())
    (tmp_path / "b").mkdir()
    other = aspects(tmp_path / "pictures", {(40, 40): 30})
    dataset = {"path": "data", "source": None}
    tree = merged(tree, {"data": {"source": str(other)}})
    (tmp_path / "b/campaign.yaml").write_text(yaml.safe_dump(tree))
    refused(run("data", "prepare", tmp_path / "b"), "data.source is", str(other))
    text = {"condition": "text", "network": {"family": "pixart"}}
    made = partitioned(tmp_path / "made", {"data": {**tree["data"]}, **text})
    tree = merged(tree, {"data": {**dataset, "path": made.data_store().location}})
    (tmp_path / "b/campaign.yaml").write_text(yaml.safe_dump(tree))
    refused(run("partition", tmp_path / "b"), "is of another source than the data of")
    assert not (tmp_path / "b/campaign.json").exists()


@pytest.mark.slow
def test_the_recipe_passes_its_own_plan(base: Path, tmp_path: Path, run: Run) -> None:
    """All networks are built on meta for it, before there are data."""
    assert run("new", tmp_path / "c", "--recipe", "high-resolution", "--from", base, *FLAGS).code == 0
    said = run("plan", tmp_path / "c")
    assert said.code == 0 and "student" in said.out and "DOES NOT FIT" not in said.out, said
