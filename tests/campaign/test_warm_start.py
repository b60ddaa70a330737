"""Experts that start from shared pretraining or from a published checkpoint."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.base.config import value_at
from atoll.base.errors import AtollError, ConfigError, PartitionError, StoreError
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import copy_initial_weights, initial_network
from atoll.campaign.partition import make_islands
from atoll.campaign.prepare import prepare
from atoll.campaign.runs import RunPlan
from atoll.launch.job import Job
from atoll.launch.submit import launch_campaign, plan_jobs
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.networks.settings import DataShape, NetworkConfig
from atoll.report.facts import Facts
from atoll.report.page import summary
from atoll.train.run import train_run
from atoll.train.tasks import DenoiserTask
from helpers import (
    Run,
    atoll,
    entries,
    metrics,
    newest_checkpoint,
    partitioned,
    refused,
    same_bits,
    start,
    until,
    write_campaign,
)
from helpers_export import text_tower

SEEDED = {"budget": {"samples": 1600, "pretrain": 0.3}}
INIT = f"init/{WEIGHTS}"
EXPERT = f"expert/{WEIGHTS}"


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign with shared pretraining, partitioned and not trained."""
    folder = tmp_path_factory.mktemp("untouched") / "campaign"
    partitioned(folder, {**SEEDED, "train": {"lr_schedule": "cosine", "log_every": 1}})
    return folder


@pytest.fixture(scope="module")
def seeded(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same after its shared pretraining."""
    folder = tmp_path_factory.mktemp("seeded") / "campaign"
    shutil.copytree(untouched, folder)
    train_run(Campaign.open(folder), "pretrain")
    return folder


def copied(folder: Path, to: Path) -> Campaign:
    shutil.copytree(folder, to)
    return Campaign.open(to)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def first_weights(campaign: Campaign, monkeypatch: pytest.MonkeyPatch, role: str, island: int | None) -> Any:
    """The parameters that a run's first step sees."""
    seen: dict[str, torch.Tensor] = {}

    def look(self: DenoiserTask, batch: object) -> object:
        seen.update({name: p.detach().clone() for name, p in self.network.named_parameters()})
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DenoiserTask, "step", look)
        with pytest.raises(KeyboardInterrupt):
            train_run(campaign, role, island)
    return seen


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The shared pretraining.


def test_experts_start_with_the_bits_of_the_seeds_average(
    seeded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = copied(seeded, tmp_path / "c")
    average = load_file(seeded / "pretrain" / EXPERT)
    assert not same(average, load_file(newest_checkpoint(seeded / "pretrain") / "weights.safetensors"))
    assert same(average, load_file(newest_checkpoint(seeded / "pretrain") / "ema.safetensors"))
    for island in range(2):
        assert same(average, first_weights(campaign, monkeypatch, "expert", island))
    monolith = first_weights(campaign, monkeypatch, "monolith", None)
    shape = RunPlan.read(campaign.store, "monolith/island.json").shape
    drawn = initial_network(campaign.config.network, shape, campaign.config.seed)
    assert same(monolith, dict(drawn.named_parameters())) and not same(monolith, average)


def test_the_seed_sees_all_rows_at_a_constant_rate(seeded: Path) -> None:
    """The experts go on at the peak, so by default the seed's rate does not fall where theirs does."""
    seed, monolith = (json.loads((seeded / n / "island.json").read_text()) for n in ("pretrain", "monolith"))
    assert seed["role"] == "pretrain" and seed["init"] == "scratch" and seed["rows"] == monolith["rows"]
    assert seed["steps"] == round(0.3 * monolith["steps"]) and seed["seed"] != monolith["seed"]
    data = [json.loads((seeded / n / "data/manifest.json").read_text()) for n in ("pretrain", "monolith")]
    assert data[0]["shards"] == data[1]["shards"]
    rates = learning_rates(seeded / "pretrain")
    assert rates[-1] == max(rates)


def learning_rates(run: Path) -> list[float]:
    return [line["lr"] for line in metrics(run) if "lr" in line]


@pytest.mark.slow
def test_the_ledger_adds_up_and_cards_say_where_weights_come_from(tmp_path: Path) -> None:
    """`atoll launch`: the seed first, the experts from it, and everything counted."""
    campaign = Campaign.open(write_campaign(tmp_path / "c", {"budget": {"samples": 3200, "pretrain": 0.3}}))
    launch_campaign(campaign, None, False, Path())
    store, runs = campaign.store, ("islands/0", "islands/1", "router", "pretrain")
    cards = {run: Checkpoint(store, f"{run}/expert").card for run in runs}
    monolith = Checkpoint(store, "monolith/expert").card
    assert sum(card.train_flops for card in cards.values()) == pytest.approx(monolith.train_flops, rel=0.02)
    ledger, seed = summary(Facts(store)).to_json(), cards["pretrain"]
    assert ledger["train_flops"]["pretrain"] == seed.train_flops > 0
    assert ledger["flops_ratio"] == pytest.approx(1, rel=0.02) and ledger["unfinished"] == []
    facts = {"samples": seed.samples, "train_flops": seed.train_flops, "weights_sha256": seed.weights_sha256}
    for island in ("islands/0", "islands/1"):
        origin = cards[island].provenance
        assert origin["initial_weights"] == seed.weights_sha256
        assert origin["init"] == {"kind": "pretrain", **facts}
    assert monolith.provenance["init"] == seed.provenance["init"] == {"kind": "scratch"}
    published = times(tmp_path / "c/pretrain", "publish")
    began = [time for k in range(2) for time in times(tmp_path / f"c/islands/{k}", "acquire")]
    assert max(published) <= min(began)
    assert plan_jobs(campaign) == []


def times(run: Path, kind: str) -> list[float]:
    """When the entries of a kind were written."""
    return [float(entry["time"]) for entry in entries(run) if entry.get("kind") == kind]


def test_an_expert_needs_its_own_folder_only(
    seeded: Path, tmp_path: Path, told_to_leave: Callable[[int], None]
) -> None:
    """And, interrupted, goes on from its own checkpoint."""
    whole, alone = copied(seeded, tmp_path / "whole"), tmp_path / "alone"
    train_run(whole, "expert", 0)
    alone.mkdir()
    shutil.copy(seeded / "campaign.json", alone)
    shutil.copytree(seeded / "islands/0", alone / "islands/0")
    told_to_leave(4)
    with pytest.raises(AtollError, match="left at step 4"):
        train_run(Campaign.open(alone), "expert", 0)
    train_run(Campaign.open(alone), "expert", 0)
    shutil.rmtree(alone / "islands/0/init")  # no longer needed
    train_run(Campaign.open(alone), "expert", 0)
    assert same_bits(alone / "islands/0", tmp_path / "whole/islands/0")
    assert sorted(path.name for path in alone.iterdir()) == ["campaign.json", "islands"]
    rates = learning_rates(alone / "islands/0")
    assert rates[-1] < 0.1 * max(rates)


def test_an_unfinished_seed(untouched: Path, tmp_path: Path, run: Run) -> None:
    """Only experts wait for it."""
    campaign = copied(untouched, tmp_path / "c")
    needs = {one.name: one.needs for one in plan_jobs(campaign)}
    seed = ("pretrain",)
    assert needs == {"pretrain": (), "expert 0": seed, "expert 1": seed, "router": (), "monolith": ()}
    answer = run("train", "expert", tmp_path / "c", "--expert", "1")
    refused(answer, "islands/1/init has no init.json", "run shared pretraining first: atoll train pretrain")
    assert not (tmp_path / "c/islands/1/run").exists()
    ledger = summary(Facts(campaign.store)).to_json()
    assert "shared pretraining" in ledger["unfinished"] and ledger["train_flops"]["pretrain"] is None
    with pytest.raises(StoreError, match=r"pretrain/expert/card\.json is missing"):
        copy_initial_weights(campaign)


def test_a_campaign_without_a_seed_has_none_to_train(tmp_path: Path, run: Run) -> None:
    campaign = partitioned(tmp_path / "c")
    assert not (tmp_path / "c/pretrain").exists()
    assert campaign.store.get_json("islands/0/island.json")["init"] == "scratch"
    answer = run("train", "pretrain", tmp_path / "c")
    refused(answer, "has no shared pretraining (budget.pretrain is 0)", "--set budget.pretrain=0.3")
    assert summary(Facts(campaign.store)).to_json()["train_flops"]["pretrain"] == 0


@pytest.mark.slow
def test_a_killed_seed_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """Killed in training and again before it has handed over: the islands get what they would have got."""
    often = {"train": {"checkpoint_every_s": 0.0}, "budget": {"samples": 4000, "pretrain": 0.4}}
    partitioned(tmp_path / "a", often)
    train_run(copied(tmp_path / "a", tmp_path / "b"), "pretrain")
    process = start("train", "pretrain", tmp_path / "a")
    until(lambda: times(tmp_path / "a/pretrain", "commit"), process.poll)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (tmp_path / "a/pretrain/expert/card.json").exists()
    assert not list((tmp_path / "a").glob("islands/*/init/*"))
    again = atoll("train", "pretrain", tmp_path / "a")
    assert again.returncode == 0 and "resumed at step" in again.stdout, again
    (tmp_path / "a/islands/1/init/init.json").unlink()  # as if it had died between the two islands
    finished = atoll("train", "pretrain", tmp_path / "a")
    assert "pretrain: finished already" in finished.stdout and "in init/ of 1 islands" in finished.stdout
    assert same_bits(tmp_path / "a/pretrain", tmp_path / "b/pretrain")
    for island in range(2):
        files = [p.relative_to(tmp_path / "b") for p in (tmp_path / f"b/islands/{island}/init").iterdir()]
        assert len(files) == 3
        assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_launch_hands_over_what_a_seed_left_behind(
    seeded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not to islands of another partition, or that have another seed's weights."""
    campaign = copied(seeded, tmp_path / "c")
    shutil.rmtree(tmp_path / "c/islands/0/init")
    started: list[Job] = []
    monkeypatch.setattr("atoll.launch.local.run", lambda jobs, gpus: started.extend(jobs))
    monkeypatch.setattr("atoll.campaign.assemble.assemble", lambda campaign: None)
    launch_campaign(campaign, None, False, Path())
    assert "pretrain" not in {job.name for job in started} and "expert 0" in {job.name for job in started}
    change(tmp_path / "c/islands/0/init/init.json", origin={"weights_sha256": "00" * 32})
    with pytest.raises(PartitionError, match="initial weights of another shared pretraining: remove it"):
        copy_initial_weights(campaign)
    change(tmp_path / "c/islands/0/island.json", partition="00" * 32)
    with pytest.raises(PartitionError, match="is of another partition than expert 0"):
        copy_initial_weights(campaign)


# Initial weights that do not belong to the run.


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"partition": "00" * 32}, "was made for another partition than this run's"),
        ({"network": "00" * 32}, "was made for another network than this run's"),
        ({"kind": "checkpoint"}, "was made for another start than this run's"),
        ({"format": "atoll/initial-weights 1"}, "init.json is of atoll/initial-weights 1, this Atoll reads"),
        ({}, "does not match its SHA-256"),
    ],
)
def test_weights_of_another_run_are_refused(
    fields: dict[str, Any], words: str, seeded: Path, tmp_path: Path, run: Run
) -> None:
    copied(seeded, tmp_path / "c")
    change(tmp_path / "c/islands/0/init/init.json", **fields)
    if not fields:
        path = tmp_path / "c/islands/0" / INIT
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused(run("train", "expert", tmp_path / "c", "--expert", "0"), words)
    assert fields == {} or not (tmp_path / "c/islands/0/run").exists()


# Islands that differ.


def test_an_expert_of_another_depth_takes_over_what_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed's rate falls, for once, as that is asked."""
    budget, islands = {**SEEDED["budget"], "pretrain_lr_schedule": "cosine"}, {1: {"network": {"depth": 2}}}
    campaign = partitioned(tmp_path / "c", {"budget": budget, "islands": islands, "train": {"log_every": 1}})
    train_run(campaign, "pretrain")
    rates = learning_rates(tmp_path / "c/pretrain")
    assert rates[-1] < 0.1 * max(rates)
    out = capsys.readouterr().out
    assert "initial weights from shared pretraining for expert 1: 25 of 44 tensors" in out
    assert "warning: 19 are drawn instead: transformer_blocks.1." in out and "and 16 more" in out
    average = load_file(tmp_path / "c/pretrain" / EXPERT)
    seen = first_weights(campaign, monkeypatch, "expert", 1)
    init = campaign.store.get_json("islands/1/init/init.json")
    assert init["kept"] == 25 and set(init["drawn"]) == seen.keys() - average.keys()
    assert all(torch.equal(seen[name], average[name]) for name in average)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"heads": 3, "head_width": 12, "patch": 2}, r"islands\.1\.network has no tensor of the pretrained"),
        ({"init": "elsewhere"}, r"islands\.1\.network\.init: with budget\.pretrain all start from shared"),
    ],
)
def test_an_island_that_cannot_start_from_the_seed(
    network: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """That is said before the seed is trained."""
    folder = write_campaign(tmp_path / "c", {**SEEDED, "islands": {1: {"network": network}}})
    with pytest.raises(ConfigError, match=words):
        prepare(Campaign.open(folder))


# Published checkpoints.


def published_checkpoint(folder: Path, classes: int = 2, **settings: Any) -> dict[str, torch.Tensor]:
    """A DiT as diffusers publishes it, of the test campaign's dimensions but for `settings`."""
    plain = {"family": "dit", "patch": 4, "depth": 1, "heads": 2, "head_width": 16}
    config = NetworkConfig.parse({**plain, **settings}, "a test")
    network = initial_network(config, DataShape(1, 8, classes=classes), 99)
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.05)
    network.save_pretrained(folder)  # type: ignore[operator]
    return {name: p.detach() for name, p in network.named_parameters()}


def test_every_denoiser_starts_from_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts and monolith alike, which keeps the comparison fair; the router is another network."""
    weights = published_checkpoint(tmp_path / "c/there", classes=20)
    campaign = partitioned(tmp_path / "c", {"network": {"init": "there"}})
    out = capsys.readouterr().out
    assert out.count("initial weights from 'there': 24 of 25 tensors") == 1
    assert out.count("1 are drawn instead: transformer_blocks.0.norm1.emb.class_embedder") == 1
    shutil.rmtree(tmp_path / "c/there")  # the runs have their own copy
    for role, island in (("expert", 0), ("expert", 1), ("monolith", None)):
        seen = first_weights(campaign, monkeypatch, role, island)
        other = {name for name in seen if not torch.equal(seen[name], weights[name])}
        assert other == {"transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"}
    plan = campaign.store.get_json("islands/0/island.json")
    assert plan["init"] == "checkpoint" and campaign.store.get_json("router/island.json")["init"] == "scratch"
    train_run(campaign, "expert", 0)
    origin = Checkpoint(campaign.store, "islands/0/expert").card.provenance
    assert origin["init"]["name"] == "there" and origin["init"]["class"] == "DiTTransformer2DModel"
    assert origin["initial_weights"] == plan["init_sha256"]


def test_the_seed_starts_from_the_checkpoint_and_the_experts_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = published_checkpoint(tmp_path / "there")
    campaign = partitioned(tmp_path / "c", {**SEEDED, "network": {"init": str(tmp_path / "there")}})
    for role in ("pretrain", "monolith"):
        assert same(weights, first_weights(campaign, monkeypatch, role, None))
    train_run(campaign, "pretrain")
    seen = first_weights(campaign, monkeypatch, "expert", 0)
    assert same(seen, load_file(tmp_path / "c/pretrain" / EXPERT)) and not same(seen, weights)


def test_copies_of_the_checkpoint(tmp_path: Path) -> None:
    """A partition that was cut short keeps those it wrote; one that is missing or of another is refused."""
    published_checkpoint(tmp_path / "c/there")
    islands = {2: {"network": {"init": "scratch"}}}
    changes = {"partition": {"k": 3}, "network": {"init": "there"}, "islands": islands}
    campaign = partitioned(tmp_path / "c", changes)
    assert not (tmp_path / "c/islands/2/init").exists()
    first, second = (tmp_path / f"c/islands/{k}/init/init.json" for k in range(2))
    before = (tmp_path / "c/islands/0" / INIT).stat().st_mtime_ns
    campaign.store.delete("partition/partition.json", "islands/1/init/init.json")
    make_islands(campaign)
    assert (tmp_path / "c/islands/0" / INIT).stat().st_mtime_ns == before and second.exists()
    change(tmp_path / "c/islands/1/island.json", init_sha256="00" * 32)
    with pytest.raises(PartitionError, match=r"holds other initial weights than island\.json names"):
        train_run(campaign, "expert", 1)
    campaign.store.delete("partition/partition.json")
    shutil.rmtree(tmp_path / "c/there")
    published_checkpoint(tmp_path / "c/there", classes=3)
    with pytest.raises(PartitionError, match="islands/0/init holds initial weights of another checkpoint"):
        make_islands(campaign)
    shutil.rmtree(first.parent)
    with pytest.raises(PartitionError, match=r"starts from a checkpoint, .*: copy the folder from where"):
        train_run(campaign, "expert", 0)


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("./nowhere", ("network.init", "there is no folder")),
        ("owner/nowhere", ("network.init", "as a hub name it cannot be had")),
        ("pixart", ("network.init", "is a PixArtTransformer2DModel, dit is a DiTTransformer2DModel")),
        ("wide", ("none of the 25 tensors of 'wide' fits the network",)),
    ],
)
def test_a_wrong_checkpoint_is_refused_before_any_work(
    init: str, words: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    published_checkpoint(tmp_path / "c/pixart")
    change(tmp_path / "c/pixart/config.json", _class_name="PixArtTransformer2DModel")
    published_checkpoint(tmp_path / "c/wide", heads=3, head_width=12, patch=2)
    write_campaign(tmp_path / "c", {"network": {"init": init}})
    refused(run("launch", tmp_path / "c"), *words)
    assert not (tmp_path / "c/partition/partition.json").exists()
    assert (tmp_path / "c/data").exists() == (init == "wide")  # the data say what shapes there are


@pytest.mark.parametrize("family", ["dit", "sd3"])
def test_a_checkpoint_of_other_positions_is_refused_but_for_a_scale_of_choice(
    family: str, tmp_path: Path, run: Run
) -> None:
    shape, text = DataShape(1, 16, classes=2), {"text_encoder": str(text_tower(tmp_path / "text"))}
    settings: dict[str, Any] = {"network": {"init": "there"}}
    if family == "sd3":
        shape = DataShape(1, 16, 16, 8)
        settings |= {"condition": "text", "data": text | {"text_length": 8}}
        settings["network"] |= {"family": "sd3"}
    config = NetworkConfig.parse({"family": family, "patch": 4, "depth": 1, "heads": 2, "head_width": 16}, "")
    initial_network(config, shape, 0).save_pretrained(tmp_path / "c/there")  # type: ignore[operator]
    (tmp_path / "c/there/card.json").write_text('{"shape": {"pooled_width": 0}}')
    write_campaign(tmp_path / "c", settings)
    assert run("data", "prepare", tmp_path / "c").code == 0
    words = {
        "dit": ("has positions up to 4 patches, the network up to 2: set network.interpolation_scale=0.5",),
        "sd3": ("has another table of positions (pos_embed.pos_embed)", "pos_embed_max_size"),
    }
    refused(run("partition", tmp_path / "c"), *words[family])
    settings["network"] |= {"interpolation_scale": 1}  # what was refused has frozen nothing
    write_campaign(tmp_path / "c", settings)
    assert run("partition", tmp_path / "c").code == 0


def test_a_folder_on_the_command_line_is_that_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published_checkpoint(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    folder = write_campaign(tmp_path / "c")
    there = str(tmp_path / "there")
    (tmp_path / "scratch").mkdir()
    for key, text, expected in (
        ("network.init", "there", there),
        ("network.init", "owner/model", "owner/model"),
        ("network.init", "scratch", "scratch"),
        ("data.text_encoder", "[there, minilm]", f"{there} + minilm"),
        ("data.text_encoder", "there + minilm", f"{there} + minilm"),
    ):
        assert value_at(Campaign.open(folder, [f"{key}={text}"]).config.model_dump(), key) == expected, text
    # In the file it lies beside that, and is what it was at the start, though all may have moved since.
    write_campaign(folder, {"data": {"vae": "../there", "text_encoder": ["c", "../there"]}})
    assert Campaign.open(folder).config.encoders == (there, f"c + {there}")
    write_campaign(folder, {"data": {"vae": "../there"}})
    Campaign.open(folder).freeze()
    (tmp_path / "there").rename(tmp_path / "away")
    assert Campaign.open(folder.rename(tmp_path / "moved")).config.data.vae == there
