"""The ensemble from what is published: partial, complete, with replaced and with foreign parts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError, PartitionError, StoreError
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.model.bank import Bank
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from helpers import assembled, command, refused
from helpers_networks import noise

K = 3
CHANGES = {"partition": {"k": K}, "budget": {"samples": 320}, "monolith": False}
X, T = noise(4, DataShape(channels=1, size=8, classes=2)), torch.linspace(0.1, 0.9, 4)
COND = Condition(labels=torch.tensor([0, 1, 0, 2]))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assembled(tmp_path_factory.mktemp("assemble") / "campaign", CHANGES)


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "campaign"))


def load_ensemble(folder: Path, residency: Residency | None = None) -> Bank:
    return Model.load(folder, residency=residency).bank


def said(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    capsys.readouterr()
    assemble(Campaign.open(folder))
    return capsys.readouterr().out


def test_the_parts_are_those_that_were_published(trained: Path) -> None:
    ensemble = load_ensemble(trained)
    assert ensemble.missing == () and len(ensemble.experts) == K
    for k, expert in enumerate(ensemble.experts):
        published = Checkpoint(Store.open(trained), f"islands/{k}/expert").expert()
        assert torch.equal(expert.velocity(X, T, COND), published.velocity(X, T, COND))
    assert FlowMatchEulerDiscreteScheduler.from_pretrained(trained / "ensemble/scheduler").config.shift == 1.0


def test_partial_then_complete(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.move(folder / "islands/1/expert", tmp_path / "later")
    out = said(capsys, folder)
    assert "experts 0, 2 of 3" in out and "warning: partial: experts 1 are missing" in out
    ensemble = load_ensemble(folder)
    assert ensemble.missing == (1,) and ensemble.experts[1] is None
    with pytest.raises(ConfigError, match="expert 1 is missing"):
        load_ensemble(folder, Residency(experts=1)).experts[1]
    posterior = ensemble.logits(X, T, COND).softmax(1)
    assert (posterior[:, 1] == 0).all() and (posterior[:, [0, 2]] > 0).all()

    shutil.move(tmp_path / "later", folder / "islands/1/expert")
    out = said(capsys, folder)
    assert "experts 0, 1, 2 of 3" in out and "warning" not in out
    whole = load_ensemble(folder)
    assert whole.missing == () and (whole.logits(X, T, COND).softmax(1) > 0).all()
    assert said(capsys, folder) == "ensemble: assembled already, experts 0, 1, 2 of 3\n"


def test_a_replaced_expert_is_taken_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store.open(folder)
    published = Checkpoint(store, "islands/1/expert")
    (_, weights), card, network = published.read(), published.card, published.network()
    weights = {name: 0.5 * tensor for name, tensor in weights.items()}
    shutil.rmtree(folder / "islands/1/expert")
    published.write(network, weights, card)
    with pytest.raises(StoreError, match="not the one that its run published"):
        assemble(Campaign.open(folder))
    shutil.rmtree(folder / "islands/1/run")  # carried here without the log of its training
    assert "already" not in said(capsys, folder)
    _, now = Checkpoint(store, "ensemble/experts/1").read()
    assert all(torch.equal(now[name], weights[name]) for name in weights)
    Model.load(store)


def test_what_does_not_belong_there_is_refused(folder: Path) -> None:
    shutil.rmtree(folder / "ensemble")
    place = folder / "islands/1/expert"
    other = json.dumps({**json.loads((place / "card.json").read_text()), "partition": "0" * 64})
    (place / "card.json").write_text(other)
    with pytest.raises(PartitionError, match="made with another partition than"):
        assemble(Campaign.open(folder))
    for source, words in (("islands/0", "islands/1 holds expert 0"), ("router", "islands/1 holds router")):
        shutil.rmtree(place)
        shutil.copytree(folder / source / "expert", place)
        with pytest.raises(PartitionError, match=words):
            assemble(Campaign.open(folder))
    shutil.rmtree(place)
    path = folder / "islands/2/expert" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(StoreError, match="not what its card says"):
        assemble(Campaign.open(folder))
    assert not (folder / "ensemble/ensemble.json").exists()


def test_an_expert_in_quarantine_is_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(capsys, "assemble", folder, "--quarantine", "1").code == 0
    assert load_ensemble(folder).missing == (1,)
    assert "experts 0, 1, 2 of 3" in said(capsys, folder)
    settings = folder / "campaign.yaml"
    settings.write_text(settings.read_text() + "\nquarantine: [0, 2]\n")
    for argv in (["sample", folder, "0"], ["export", folder, "--to", folder.parent / "b"]):
        refused(command(capsys, *argv), "holds experts 0, 2, which are in quarantine: assemble it without")
    assemble(Campaign.open(folder))
    assert load_ensemble(folder).missing == (0, 2)
    refused(command(capsys, "assemble", folder, "--quarantine", "x"), "--quarantine 'x' is no list of")
    for numbers in ([3], [0, 1, 2]):
        with pytest.raises(PartitionError, match="leave out some of 0 to 2, and not all of them"):
            assemble(Campaign.open(folder), numbers)
    settings.write_text(settings.read_text().replace("[0, 2]", "[0, 3]"))
    refused(command(capsys, "status", folder), "quarantine.3: there is no such island: use 0 to 2")


def test_without_a_router_nothing_is_assembled(folder: Path) -> None:
    shutil.rmtree(folder / "router/expert")
    with pytest.raises(PartitionError, match="has no router yet"):
        assemble(Campaign.open(folder))


def test_every_file_is_named_by_its_hash(folder: Path) -> None:
    place = folder / "ensemble"
    content = json.loads((place / "ensemble.json").read_text())
    named = {entry["path"] for entry in content["files"]}
    files = {p.relative_to(place).as_posix() for p in place.rglob("*") if p.is_file()}
    assert named == files - {"ensemble.json", "README.md"}
    for path in named - {"experts/experts.json"}:  # which only the pipeline reads
        (place / path).write_bytes(b"{}")
        for residency in (None, Residency(experts=1)):
            with pytest.raises(StoreError, match=r"instead of|not the one that|not what its card|damaged"):
                load_ensemble(folder, residency)
        assemble(Campaign.open(folder))
    content["files"] = [entry for entry in content["files"] if not entry["path"].startswith("scheduler")]
    (place / "ensemble.json").write_text(json.dumps(content))
    with pytest.raises(StoreError, match="is not listed in ensemble"):
        load_ensemble(folder)
