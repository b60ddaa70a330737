"""The ensemble from what is published: partial, complete, with replaced and with foreign parts."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, PartitionError, StoreError
from atoll.base.hashing import digest_tensors
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.ensemble.ensemble import Ensemble
from atoll.ensemble.expert import Expert, read_part, write_part
from atoll.ensemble.model import Model
from atoll.ensemble.settings import Residency
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import partitioned
from helpers_networks import noise

K = 3
CHANGES = {"partition": {"k": K}, "budget": {"samples": 320}, "monolith": False}
SHAPE = DataShape(channels=1, size=8, classes=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts 0 to 2 and the router, not assembled."""
    folder = tmp_path_factory.mktemp("assemble") / "campaign"
    campaign = partitioned(folder, CHANGES)
    for k in range(K):
        train_run(campaign, "expert", k)
    train_run(campaign, "router")
    return folder


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "campaign"))


def load_ensemble(store: Store, residency: Residency | None = None) -> Ensemble:
    ensemble = Model.load(store, residency=residency).denoiser
    assert isinstance(ensemble, Ensemble)
    return ensemble


def say(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    capsys.readouterr()
    assemble(Campaign.open(folder))
    return capsys.readouterr().out


def test_the_parts_are_those_that_were_published(folder: Path) -> None:
    assert assemble(Campaign.open(folder)).experts == [0, 1, 2]
    ensemble = load_ensemble(Store.open(folder))
    assert ensemble.missing == ()
    x, t, cond = noise(4, SHAPE), torch.linspace(0.1, 0.9, 4), Condition(labels=torch.tensor([0, 1, 0, 2]))
    for k, expert in enumerate(ensemble.experts):
        own = Expert.load(Store.open(folder), f"islands/{k}/expert")
        assert torch.equal(expert.velocity(x, t, cond), own.velocity(x, t, cond))


def test_partial_then_complete(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(folder / "islands/1/expert", tmp_path / "later")
    out = say(capsys, folder)
    assert "experts 0, 2 of 3" in out and "warning: partial: experts 1 are missing" in out
    ensemble = load_ensemble(Store.open(folder))
    assert ensemble.missing == (1,) and ensemble.experts[1] is None
    bank = load_ensemble(Store.open(folder), Residency(experts=1)).experts
    with pytest.raises(ConfigError, match="expert 1 is missing"):
        bank[1]
    x, t, cond = noise(4, SHAPE), torch.full((4,), 0.5), Condition(labels=torch.tensor([0, 1, 0, 2]))
    posterior = ensemble.logits(x, t, cond).softmax(1)
    assert (posterior[:, 1] == 0).all() and (posterior[:, [0, 2]] > 0).all()

    shutil.move(tmp_path / "later", folder / "islands/1/expert")
    out = say(capsys, folder)
    assert "experts 0, 1, 2 of 3" in out and "warning" not in out
    whole = load_ensemble(Store.open(folder))
    assert whole.missing == () and (whole.logits(x, t, cond).softmax(1) > 0).all()
    assert say(capsys, folder) == "ensemble: assembled already, experts 0, 1, 2 of 3\n"


def test_a_replaced_expert_is_taken_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assemble(Campaign.open(folder))
    store = Store.open(folder)
    card, _, weights = read_part(store, "islands/1/expert")
    network = Expert.load(store, "islands/1/expert").network
    weights = {name: 0.5 * tensor for name, tensor in weights.items()}
    shutil.rmtree(folder / "islands/1/expert")
    write_part(
        store,
        "islands/1/expert",
        network,
        weights,
        card.model_copy(update={"weights_sha256": digest_tensors(weights)}),
    )
    assert "already" not in say(capsys, folder)
    _, _, now = read_part(store, "ensemble/experts/1")
    assert all(torch.equal(now[name], weights[name]) for name in weights)
    Model.load(store)


def test_an_expert_of_another_campaign_is_refused(folder: Path, tmp_path: Path) -> None:
    other = partitioned(tmp_path / "other", {**CHANGES, "seed": 4})
    train_run(other, "expert", 1)
    shutil.rmtree(folder / "islands/1/expert")
    shutil.copytree(tmp_path / "other/islands/1/expert", folder / "islands/1/expert")
    with pytest.raises(PartitionError, match="made with another partition than"):
        assemble(Campaign.open(folder))
    assert not (folder / "ensemble").exists()


def test_an_expert_in_the_place_of_another_is_refused(folder: Path) -> None:
    shutil.rmtree(folder / "islands/1/expert")
    shutil.copytree(folder / "islands/0/expert", folder / "islands/1/expert")
    with pytest.raises(PartitionError, match="islands/1 holds expert 0"):
        assemble(Campaign.open(folder))
    shutil.rmtree(folder / "islands/1/expert")
    shutil.copytree(folder / "router/expert", folder / "islands/1/expert")
    with pytest.raises(PartitionError, match="islands/1 holds router"):
        assemble(Campaign.open(folder))


def test_damaged_weights_are_not_assembled(folder: Path) -> None:
    path = folder / "islands/2/expert/diffusion_pytorch_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match="not what its card says"):
        assemble(Campaign.open(folder))
    assert not (folder / "ensemble/ensemble.json").exists()


def test_nothing_to_assemble(folder: Path) -> None:
    shutil.rmtree(folder / "router/expert")
    with pytest.raises(PartitionError, match="has no router yet"):
        assemble(Campaign.open(folder))
    for k in range(K):
        shutil.rmtree(folder / f"islands/{k}/expert")
    with pytest.raises(PartitionError, match="has no expert yet"):
        assemble(Campaign.open(folder))


def test_every_file_is_named_by_its_hash(folder: Path) -> None:
    assemble(Campaign.open(folder))
    content = json.loads((folder / "ensemble/ensemble.json").read_text())
    named = {entry["path"] for entry in content["files"]}
    there = {
        p.relative_to(folder / "ensemble").as_posix() for p in (folder / "ensemble").rglob("*") if p.is_file()
    }
    assert named == there - {"ensemble.json", "README.md"}
    for entry in content["files"]:
        (folder / "ensemble" / entry["path"]).write_bytes(b"{}")
        for residency in (None, Residency(experts=1)):
            with pytest.raises(StoreError, match=r"instead of|is of version None"):
                load_ensemble(Store.open(folder), residency)
        assemble(Campaign.open(folder))


def test_diffusers_reads_the_scheduler(folder: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    assemble(Campaign.open(folder))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "ensemble/scheduler")
    assert scheduler.config.shift == 1.0
