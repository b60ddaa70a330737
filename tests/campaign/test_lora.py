"""Experts that are low-rank changes of one network: trained, published, assembled, sampled, refused."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.base.condition import Condition
from atoll.base.errors import StoreError
from atoll.base.hashing import sha256
from atoll.base.preemption import Interrupted
from atoll.campaign.assemble import assemble
from atoll.campaign.folder import Campaign
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.model.residency import ResidentExperts
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import (
    Run,
    assembled,
    entries,
    newest_checkpoint,
    partitioned,
    refused,
    same_bits,
    write_campaign,
)
from helpers_export import load

LORA = {
    "budget": {"samples": 640, "pretrain": 0.4},
    "network": {"lora": {"rank": 4}},
    "sampling": {"routing": "once null pretrain"},
    "train": {"milestones": 4},
    "islands": {0: {"objective": {"prediction": "x0"}}},
}
BASE = f"experts/base/{WEIGHTS}"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assembled(tmp_path_factory.mktemp("lora") / "c", LORA)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def test_only_the_change_is_trained_saved_and_published(campaign: Path) -> None:
    pretrain = campaign / "pretrain/expert" / WEIGHTS
    for island in (campaign / "islands/0", campaign / "islands/1"):
        published = load_file(island / "expert" / WEIGHTS)
        card = Checkpoint(Store.open(island), "expert").card
        assert all(".lora_" in name for name in published) and card.base == sha256(pretrain)
        assert card.parameters == sum(value.numel() for value in published.values())
        ema = load_file(newest_checkpoint(island) / "ema.safetensors")
        assert ema.keys() == published.keys() and all(torch.equal(ema[n], published[n]) for n in ema)
        assert any(value.any() for name, value in published.items() if ".lora_B" in name)
        assert (island / "init" / WEIGHTS).read_bytes() == pretrain.read_bytes()
        plan = json.loads((island / "island.json").read_text())
        assert plan["parameters"] == card.parameters and plan["frozen"] > plan["parameters"]
    # The other runs are whole networks.
    for run in ("pretrain", "router"):
        assert not any(".lora_" in name for name in load_file(campaign / run / "expert" / WEIGHTS))


def test_the_ensemble_holds_the_network_once(campaign: Path) -> None:
    """Shared pretraining's, which guides; and where an earlier one guides, in a folder of its own."""
    folder = campaign / "ensemble/experts"
    files = {path.parent.name: path.stat().st_size for path in folder.glob("*/*.safetensors")}
    assert files.keys() == {"0", "1", "pretrain"} and files["0"] < files["pretrain"] / 2


def test_experts_share_one_network_in_memory(campaign: Path) -> None:
    model = Model.load(campaign)
    experts = model.bank.experts
    assert isinstance(experts, ResidentExperts) and experts.capacity == 2
    pictures = model([0, 1], each=3, seed=5)
    (module,) = experts._modules.values()
    own = sum(value.nbytes for value in load_file(campaign / "islands/0/expert" / WEIGHTS).values())
    assert own <= experts.place_bytes < 2 * own and experts.device_bytes == 2 * experts.place_bytes
    assert sum(p.numel() for p in module.network.parameters()) == sum(
        value.numel()
        for path in ("pretrain/expert", "islands/0/expert")
        for value in load_file(campaign / path / WEIGHTS).values()
    )
    # The same as networks of their own, each put together.
    store = Store.open(campaign)
    for number in range(2):
        alone = Checkpoint(store, f"ensemble/experts/{number}").expert()
        x, t = torch.randn(4, *model.shape), torch.rand(4)
        cond = Condition(labels=torch.tensor([0, 1, 0, 1]))
        with torch.inference_mode():
            assert torch.equal(experts[number].velocity(x, t, cond), alone.velocity(x, t, cond))
    model.bank.pretrain = Checkpoint(store, "ensemble/experts/pretrain").expert()
    assert [p.tobytes() for p in model([0, 1], each=3, seed=5)] == [p.tobytes() for p in pictures]

    # Threads take turns at it.
    def draw(number: int) -> bytes:
        routing = f"once without {number % 2}"
        return b"".join(p.tobytes() for p in model([0, 1], steps=20, seed=5, routing=routing))

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(draw, range(6))] == [draw(0), draw(1)] * 3


@pytest.mark.parametrize(("name", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_the_shared_network_is_stored_in_one_byte_a_number(
    name: Any, dtype: torch.dtype, campaign: Path, run: Run
) -> None:
    """What stays is stored so; the changes, which are small, are whole."""
    whole, stored = (
        Model.load(campaign, residency=Residency(experts=1, **how))
        for how in ({}, {"dtype": name, "bound": 1})
    )
    pictures = [np.asarray(model("0", 4).images[0], np.float64) for model in (whole, stored)]
    assert np.abs(pictures[0] - pictures[1]).mean() < 8
    experts = stored.bank.experts
    assert isinstance(experts, ResidentExperts)
    kinds = {name: value.dtype for name, value in experts[0].network.state_dict().items()}
    assert {kind for name, kind in kinds.items() if ".lora_" in name} == {torch.float32}
    assert dtype in {kind for name, kind in kinds.items() if name.endswith(".attn1.to_q.weight")}
    state = [
        json.loads(run("plan", campaign, "--json", "--set", f"sampling.residency.dtype={d}").out)
        for d in ("bf16", name)
    ]
    held = [next(row["state"] for row in plan["drawing"] if row["run"] == "sample") for plan in state]
    assert 0 < held[1] < held[0]


def test_a_run_that_was_stopped_ends_with_the_same_change(
    campaign: Path, tmp_path: Path, told_to_leave: Callable[[int], None]
) -> None:
    """The network comes from `init/`, and the change from the checkpoint."""
    stopped = copied(campaign, tmp_path / "c")
    island = stopped / "islands/0"
    for part in ("expert", "run"):
        shutil.rmtree(island / part)
    told_to_leave(5)
    with pytest.raises(Interrupted, match="left at step 5 of"):
        train_run(Campaign.open(stopped), "expert", 0)
    # In a thread, where Python lets nobody listen for signals.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(train_run, Campaign.open(stopped), "expert", 0).result()
    assert [entry["step"] for entry in entries(island) if entry["kind"] == "resume"] == [5]
    assert same_bits(island, campaign / "islands/0")


def test_an_early_guide_lies_beside_the_network(campaign: Path, tmp_path: Path) -> None:
    """The guide is a checkpoint of shared pretraining, so the network has a folder of its own."""
    held = Model.load(folder := copied(campaign, tmp_path / "c"))
    assert held.bank.pretrain is not None  # this process reads the network where the guide comes to lie
    assemble(Campaign.open(folder, ["sampling.guide_share=0.5"]))
    pretrain = (folder / "pretrain/expert" / WEIGHTS).read_bytes()
    assert (folder / "ensemble" / BASE).read_bytes() == pretrain
    assert (folder / "ensemble/experts/pretrain" / WEIGHTS).read_bytes() != pretrain
    first = [p.tobytes() for p in Model.load(folder)([0, 1], seed=2)]

    # Saved, loaded and saved again: the network lies there once, and the images are the same.
    load(folder / "ensemble").save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / BASE).read_bytes() == pretrain
    shutil.move(tmp_path / "saved", tmp_path / "moved")
    assert [p.tobytes() for p in Model.load(tmp_path / "moved")([0, 1], seed=2)] == first
    # In 16 bits it is another file, and cards say which.
    load(folder / "ensemble", torch_dtype=torch.bfloat16).save_pretrained(tmp_path / "short")
    short = Checkpoint(Store.open(tmp_path / "short"), "experts/0")
    assert short.card.base == sha256(tmp_path / "short" / BASE)
    assert {value.dtype for value in short.read()[1].values()} == {torch.bfloat16}


def test_a_change_of_another_network_is_refused(campaign: Path, tmp_path: Path, run: Run) -> None:
    other = copied(campaign, tmp_path / "c")
    path = other / "islands/1/expert/card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base": "ab" * 32}))
    shutil.rmtree(other / "islands/1/run")
    refused(run("assemble", other), "expert 1", "change (LoRA) of another network than expert 0")
    # Its network was exchanged: in the ensemble, and on the island that starts from it.
    other = copied(campaign, tmp_path / "d")
    weights = other / "ensemble/experts/pretrain" / WEIGHTS
    tensors = {name: value + 1 for name, value in load_file(weights).items()}
    for path in (weights, other / "islands/0/init" / WEIGHTS):
        save_file(tensors, path)
    for folder in ("ensemble/experts/0", "islands/0/expert"):
        with pytest.raises(StoreError) as refusal:
            Checkpoint(Store.open(other), folder).base()
        assert "expert 0 is a change (LoRA) of a network" in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network": {"lora": {"rank": 4}}}, ["network.lora", "budget.pretrain", "network.init"]),
        ({"network": {"lora": {}, "init": "x"}, "origin": "y"}, ["network.lora", "leave origin out"]),
        ({"budget": {"pretrain": 0.2}, "origin": "y"}, ["budget.pretrain: with origin", "budget.pretrain=0"]),
        ({**LORA, "network": {"lora": {"rank": 33}}}, ["rank 33 is over the width of", "32"]),
        ({**LORA, "islands": {1: {"network": {"depth": 2}}}}, ["islands.1.network", "one network"]),
        ({**LORA, "student": {"network": {"lora": {"rank": 2}}}}, ["student.network.lora", "whole network"]),
        ({**LORA, "network": {"lora": {"rank": 4, "alfa": 1}}}, ["alfa", "alpha"]),
        ({**LORA, "network": {"lora": {"targets": ["to_w"]}}}, ["lora.targets", "'to_w'", "attn1.to_q"]),
    ],
)
def test_settings_that_make_no_change_are_refused(
    changes: dict[str, object], words: list[str], run: Run, tmp_path: Path
) -> None:
    refused(run("plan", write_campaign(tmp_path / "c", changes), "--rows", "100"), *words)


def test_the_plan_counts_what_a_change_takes(run: Run, tmp_path: Path) -> None:
    plans = []
    for name, lora in (("change", LORA), ("whole", {**LORA, "network": {}})):
        said = run("plan", write_campaign(tmp_path / name, lora), "--rows", "1000", "--json")
        plans.append(json.loads(said.out))
    change, whole = ({line["name"]: line for line in plan["runs"]} for plan in plans)
    assert change["pretrain"] == whole["pretrain"]
    mine, all_of_it = (plan["expert 0"]["memory"]["footprint"] for plan in (change, whole))
    assert mine["frozen"] == all_of_it["parameters"] and mine["parameters"] < mine["frozen"]
    assert mine["state"] == 20 * mine["parameters"] + 4 * mine["frozen"]
    # No gradient of frozen weights is computed, so the same operations are more steps.
    assert change["expert 0"]["steps"] > whole["expert 0"]["steps"]
    sent, all_sent = (plan["bytes"] for plan in plans)
    assert sent["experts_in"] < all_sent["experts_in"]
    assert sent["weights_out"] == all_sent["weights_out"] == 2 * 4 * all_of_it["parameters"]


def test_experts_change_a_published_checkpoint(tmp_path: Path) -> None:
    """Without shared pretraining: the network of `network.init`, which the partition lays on every island."""
    train_run(partitioned(tmp_path / "first"), "monolith")
    init, lora = tmp_path / "first/monolith/expert", {"rank": 2, "targets": ["to_q", "to_v"]}
    folder = assembled(tmp_path / "c", {"network": {"init": str(init), "lora": lora}})
    assert (folder / "ensemble" / BASE).read_bytes() == (init / WEIGHTS).read_bytes()
    assert len(Model.load(folder)([0, 1])) == 2
    assert assemble(Campaign.open(folder)) == []
