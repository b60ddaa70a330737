"""Settings: what is fixed, what may change, and how islands differ."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atoll.base.config import set_value
from atoll.base.errors import ConfigError, StoreError
from atoll.base.safe_parse import read_yaml
from atoll.campaign.folder import Campaign, new
from atoll.campaign.prepare import prepare
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.flow.settings import TimeConfig
from atoll.recipes import catalogue
from helpers import SMALL, Run, merged, refused, write_campaign

FURTHER = ["high-resolution"]
"""Recipes by which a finished campaign goes on: tests/campaign/test_origin.py."""
EPS = {"objective": {"prediction": "eps"}}
AVERAGE = {"start": "average", "stock": False}


def parse(**changes: object) -> CampaignConfig:
    return CampaignConfig.parse(merged(SMALL, changes), "a test")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"islands": {1: {"objective": {"schedule": "vp-cos"}}}}, r"'schedule' in islands\.1.*'vp-cosine'"),
        ({"islands": {1: {"objective": {"predicts": "eps"}}}}, r"unknown key 'predicts' in islands\.1\.obj"),
        ({"islands": {1: EPS}, "student": AVERAGE}, "equal networks, schedules and pred.* expert 1's differ"),
        ({**EPS, "student": AVERAGE}, "expert 0's differ from the student's: .* rectified-flow and v"),
        ({"student": {"routing": "full"}}, "student.routing: the teacher .*: set student.teacher: routed"),
        ({"islands": {1: {"objective": {"prediction": "noise"}}}}, r"'prediction' in islands\.1\.objective"),
        ({"islands": {1: {"network": {"dept": 3}}}}, r"unknown key 'dept' in islands.1.network: .* 'depth'"),
        ({"islands": {1: {"nettwork": {}}}}, r"unknown key 'islands.1.nettwork' .*did you mean 'network'"),
        (
            {"sampling": {"routing": "once null pretrain"}},
            r"there is no network of shared pretraining.*budget\.pretrain",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(**changes)


def test_islands_may_learn_something_else() -> None:
    own = {"schedule": "vp-cosine", "prediction": "eps"}
    config = parse(objective={"condition_dropout": 0.2}, islands={1: {"objective": own}})
    inner = parse(train={"guard": {"window": 64}}, islands={1: {"train": {"guard": {"factor": 9}}}})
    assert (inner.island(1)[1].guard.window, inner.island(1)[1].guard.factor) == (64, 9)
    assert config.objective_of("monolith") == config.objective_of("expert", 0) == config.objective
    learned = config.objective_of("expert", 1).model_dump(include={*own, "condition_dropout"})
    assert learned == {**own, "condition_dropout": 0.2}
    assert config.frozen()["islands"]["1"]["objective"] == own
    parse(sampling={"routing": "once null pretrain"}, budget={"pretrain": 0.3})


def test_the_router_learns_at_the_times_of_the_experts_unless_it_is_set_apart() -> None:
    time = {"distribution": "logit-normal", "shift": 3.0}
    tied = parse(objective={"time": time})
    assert tied.router.time == tied.objective.time == TimeConfig(distribution="logit-normal", shift=3.0)
    assert parse(objective={"time": time}, router={"time": {}}).router.time == TimeConfig()


@pytest.mark.parametrize("name", [name for name in catalogue.names() if name not in FURTHER])
def test_every_recipe_is_valid_and_says_what_it_is(name: str, tmp_path: Path) -> None:
    text, recipe = Path(new(tmp_path / "c", catalogue.text(name), [])).read_text(), catalogue.text(name)
    assert read_yaml(text, "new") == read_yaml(recipe, "recipe")
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert head == [line for line in recipe.splitlines() if line.startswith("#")]
    assert "\nseed: 0  # " in text and re.search(r"\n  k: \d+  # Number of clusters and experts", text)
    assert head[0].startswith(f"# {name}: ") and any("ardware" in line for line in head)
    assert Campaign.open(tmp_path / "c").config.seed == 0


def test_set_in_all_its_forms(tmp_path: Path) -> None:
    sets = ["partition.k=2", "train.lr=2.5e-4", "train.clip=null", "monolith=false"]
    sets += ["islands.1.train.batch=4", "islands.1.network={depth: 2}", 'compare.prompts=["a, b", c]']
    new(tmp_path / "c", catalogue.text("quickstart"), [*sets, "train.betas=[0.8, 0.95]", "data.source=tests"])
    config = Campaign.open(tmp_path / "c").config
    assert config.partition.k == 2 and config.train.lr == 2.5e-4 and config.train.clip is None
    assert not config.monolith and config.train.betas == (0.8, 0.95)
    assert config.island(1)[1].batch == 4 and config.island(1)[0].depth == 2
    assert config.island(0) == (config.network, config.train)
    assert config.compare.prompts == ["a, b", "c"]
    assert config.data.source == str(Path.cwd() / "tests")
    assert (tmp_path / "c/campaign.yaml").read_text().startswith("# quickstart: ")
    new(tmp_path / "d", catalogue.text("quickstart"), ["data.source=null"])
    assert Campaign.open(tmp_path / "d").config.data.source is None
    # YAML reads `0` as a number and --set as text; both mean the same island.
    folder = write_campaign(tmp_path / "e", {"islands": {0: {"network": {"depth": 2}}}})
    config = Campaign.open(folder, ["islands.0.train.batch=4"]).config
    assert config.island(0)[0].depth == 2 and config.island(0)[1].batch == 4
    set_value(tree := {"student": None}, "student.steps=4")
    assert tree == {"student": {"steps": 4}}


def test_all_settings_are_printed_with_what_they_mean(tmp_path: Path, run: Run) -> None:
    defaults = run("config").out
    parsed = CampaignConfig.parse(read_yaml(defaults, "config"), "config")
    assert parsed.frozen() == CampaignConfig.parse({"data": {"path": "data"}}, "here").frozen()
    lines = defaults.splitlines()
    # A group that is not there is written out too, to be uncommented.
    for line in (
        "student: null  # One network",
        "#   teacher: cluster  # `cluster`: the expert of the image's",
    ):
        assert any(shown.startswith(line) for shown in lines), line
    assert [line for line in lines if "  # " not in line] == []  # every key is explained
    folder = write_campaign(tmp_path / "c", {"sampling": {"steps": 9}})
    assert "\n  steps: 9  # Sampling steps" in run("config", folder).out
    refused(run("config", tmp_path / "none"), "there is no folder")


def test_a_source_must_be_there_and_must_not_hold_the_campaign(tmp_path: Path) -> None:
    (images := tmp_path / "images").mkdir()
    own, fix = f"data.source={images}", "lies in the folder of images: choose a folder outside it"
    for folder, sets, words in (
        ("c", [f"data.source={tmp_path}/nowhere"], "there is no .*nowhere: set data.source to a folder of"),
        ("images", [own], f"images {fix}"),
        ("c", [own, f"data.path={images}/d"], f"images/d {fix}"),
        ("c", ["data.source={a: {source: nowhere}}"], "there is no .*nowhere"),
    ):
        with pytest.raises(ConfigError, match=words):
            new(tmp_path / folder, catalogue.text("cpu"), sets)
    assert not (tmp_path / "c").exists() and not any((tmp_path / "images").iterdir())
    new(tmp_path / "c", catalogue.text("cpu"), [own])
    new(tmp_path / "d", catalogue.text("cpu"), ["data.source=hf://datasets/a/b"])


def test_words_of_yaml_1_1_are_no_booleans(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a' is written twice"):
        read_yaml("{a: 1, b: 2, a: 3}", "here")
    words = read_yaml("{on: yes, off: no, y: true, n: FALSE}", "here")
    assert words == {"on": "yes", "off": "no", "y": True, "n": False}
    folder = write_campaign(tmp_path / "c", {})
    with (folder / "campaign.yaml").open("a") as file:
        file.write("launch: {on: slurm, islands: {0: {on: local}}}\n")
    launch = Campaign.open(folder, ["monolith=no"]).config.launch
    assert (launch.on, launch.islands[0].on) == ("slurm", "local")
    assert not Campaign.open(folder, ["monolith=no"]).config.monolith


def test_settings_come_back_from_campaign_json(tmp_path: Path) -> None:
    changes = {"islands": {1: {"train": {"lr": 0.5}}}, "sampling": {"steps": 9}}
    folder = write_campaign(tmp_path / "c", changes)
    prepare(Campaign.open(folder, ["sampling.steps=8", "train.batch=4"]))
    assert json.loads((folder / "campaign.json").read_text())["overrides"] == ["train.batch=4"]
    assert json.loads((folder / "islands/0/island.json").read_text())["batch"] == 4
    with pytest.raises(ConfigError, match=r"train\.batch is 5, .* was started with 4"):
        Campaign.open(folder, ["train.batch=5"])
    Campaign.open(folder).freeze()
    config = Campaign.open(folder).config
    assert config.train.batch == 4 and config.sampling.steps == 9
    (folder / "campaign.yaml").unlink()
    again = Campaign.open(folder).config
    assert again.island(1)[1].lr == 0.5 and again.island(0)[1].lr == SMALL["train"]["lr"]
    assert again.sampling.steps == 50  # not frozen, so its default without campaign.yaml


def test_a_frozen_key_is_named_and_what_is_loose_may_change(tmp_path: Path) -> None:
    folder = write_campaign(tmp_path / "c")
    first, second = Campaign.open(folder), Campaign.open(folder, ["seed=9"])
    first.freeze()
    with pytest.raises(ConfigError, match="seed is 9"):
        second.freeze()
    for change, key in (
        ({"train": {"lr": 0.5}}, "train.lr"),
        ({"partition": {"k": 3}}, "partition.k"),
        ({"islands": {0: {"train": {"batch": 3}}}}, "islands"),
        ({"data": {"ingest": {"glyphs": {"limit": 7}}}}, "data.ingest.glyphs.limit"),
        ({"objective": {"prediction": "eps"}}, "objective.prediction"),
        ({"monolith": False}, "monolith"),
    ):
        write_campaign(folder, change)
        words = rf"^{key}[.\w]* is .* was started with .*: put it back"
        with pytest.raises(ConfigError, match=words) as caught:
            Campaign.open(folder)
        assert "\n" not in str(caught.value)
    compare = {"samples": 9, "strategies": ["full"]}
    for change in ({"sampling": {"steps": 9, "guidance": 4.0}}, {"compare": compare}):
        write_campaign(folder, change)
        config = Campaign.open(folder, ["sampling.routing=full"]).config
        assert str(config.sampling.routing) == "full" and config.seed == SMALL["seed"]
        assert merged(config.model_dump(), change) == config.model_dump()
    Campaign.open(folder, ["student={stock: false}"]).freeze_student()
    with pytest.raises(ConfigError, match=r"student\.steps is 2, .*: put it back, or remove student/"):
        Campaign.open(folder, ["student.steps=2"])


@pytest.mark.parametrize(
    ("path", "campaign", "expected"),
    [
        ("data", "/c", "/c/data"),
        ("/elsewhere", "/c", "/elsewhere"),
        ("data", "s3://bucket/c", "s3://bucket/c/data"),
        ("../data", "s3://bucket/c", "s3://bucket/data"),
        ("gs://other/data", "s3://bucket/c", "gs://other/data"),
        ("/elsewhere", "s3://bucket/c", "/elsewhere"),
    ],
)
def test_the_data_lie_beside_the_campaign_or_where_it_says(path: str, campaign: str, expected: str) -> None:
    assert parse(data={"path": path}).data_path(campaign) == expected
    with pytest.raises(StoreError, match="leads out of s3://bucket"):
        parse(data={"path": "../../data"}).data_path("s3://bucket/c")
