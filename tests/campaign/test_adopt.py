"""A published checkpoint as an expert: converted exactly, published like a trained one, or refused."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file, save_file
from torch import nn

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.campaign.adopt import adopt
from atoll.campaign.folder import Campaign
from atoll.campaign.status import Observer
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.model import Model
from atoll.networks.families import family
from atoll.networks.settings import DataShape, NetworkConfig
from atoll.train.run import train_run
from helpers import Run, partitioned, refused
from helpers_networks import random_weights

LINEAR: dict[str, Any] = {}
STABLE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}
SHORT = {"num_train_timesteps": 250, "beta_start": 0.0004, "beta_end": 0.08}


def checkpoint(folder: Path, noise: dict[str, Any] = LINEAR, **settings: Any) -> nn.Module:
    """A DiT as diffusers publishes it, with a variance that it predicts too, and its scheduler."""
    plain = {"family": "dit", "patch": 4, "depth": 2, "heads": 2, "head_width": 8}
    config = NetworkConfig.parse(plain, "a test")
    arguments = family("dit").arguments(config, DataShape(1, 8, classes=2)) | {"out_channels": 2} | settings
    network = random_weights(family("dit").load(arguments), 5)
    network.save_pretrained(folder / "transformer")  # type: ignore[operator]
    DDPMScheduler(**noise).save_pretrained(folder / "scheduler")
    return network


@pytest.fixture
def campaign(made: Path, tmp_path: Path) -> Campaign:
    shutil.copytree(made, tmp_path / "c")
    return Campaign.open(tmp_path / "c")


def test_it_joins_a_trained_expert(campaign: Campaign, tmp_path: Path, run: Run) -> None:
    folder, there = Path(campaign.store.location), tmp_path / "there"
    theirs = checkpoint(there).state_dict()
    refused(run("adopt", folder, there, "--expert", "2"), "no expert 2: give an expert from 0 to 1")
    said = run("adopt", folder, there, "--expert", "1")
    assert said.code == 0 and said.err == ""
    assert ": dit of 0.0 M parameters, eps on ddpm-linear" in said.out
    assert "taken on trust: its latents are those of none, its labels mean what" in said.out
    refused(run("adopt", folder, there, "--expert", "1"), "there is an expert 1 already")
    assert re.search(r"expert 1 +published +0/\d+ +100% ", run("status", folder).out)
    card = Checkpoint(campaign.store, "islands/1/expert").card
    assert (card.role, card.island, card.prediction, card.schedule) == ("expert", 1, "eps", "ddpm-linear")
    assert card.partition == campaign.store.get_json("partition/partition.json")["hash"]
    assert card.train_flops == card.samples == 0 and card.forward_flops > 0
    assert card.provenance["init"]["kind"] == "adopted"
    train_run(campaign, "expert", 0)
    train_run(campaign, "router")
    assert "expert 1: finished already" in run("train", "expert", folder, "--expert", "1").out
    assert run("assemble", folder).code == 0
    mine = Model.load(campaign.store).bank.experts[1]
    assert isinstance(mine, Expert)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.network.state_dict().items())
    text = (folder / "ensemble/README.md").read_text()
    assert "| 1 | dit | eps, ddpm-linear |" in text and "| adopted |" in text
    assert run("sample", folder, "0", "1", "--out", tmp_path / "a.png", "--steps", "3").code == 0
    one = Observer(campaign).read().runs[1]
    assert one.state == "published" and one.error is None and one.step == 0 == one.train_flops
    assert run("report", folder).code == 0
    shutil.rmtree(folder / "islands/0/expert")
    assert Observer(campaign).read().runs[0].state == "training", "as before the network was copied there"
    refused(run("adopt", folder, there, "--expert", "0"), "expert 0 has begun to train")
    shutil.rmtree(folder / "islands/0/run")
    assert run("adopt", folder, there, "--expert", "0").code == 0


@pytest.mark.parametrize("noise", [LINEAR, STABLE, COSINE, SHORT])
def test_its_velocity_is_the_exact_conversion(
    noise: dict[str, Any], campaign: Campaign, tmp_path: Path
) -> None:
    """At levels of its own grid: the network is told their numbers, and alpha is that of diffusers."""
    network = checkpoint(tmp_path / "there", noise).double()
    adopt(campaign, str(tmp_path / "there"), 0)
    expert = Checkpoint(campaign.store, "islands/0/expert").expert()
    expert.network.double()
    kept = DDPMScheduler(**noise).alphas_cumprod.double()
    levels = torch.linspace(0.05, 0.85, 6).mul(len(kept)).long()
    alpha, sigma = kept[levels].sqrt().view(-1, 1, 1, 1), (1 - kept[levels]).sqrt().view(-1, 1, 1, 1)
    t = (sigma / (alpha + sigma)).flatten()
    source = torch.Generator().manual_seed(1)
    x = torch.randn(6, 1, 8, 8, generator=source, dtype=torch.float64)  # the state as the checkpoint knows it
    x_t = x / (alpha + sigma)
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    x0 = (x - sigma * network(x, timestep=levels, class_labels=labels).sample[:, :1]) / alpha
    expected = (x_t - x0.clamp(-1, 1)) / t.view(-1, 1, 1, 1)  # of pixels; else (eps - x_t) / (1 - t)
    found = expert.velocity(x_t, t, Condition(labels=labels))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert 0.1 < float((x0.abs() > 1).float().mean()) < 0.9


def test_what_it_was_trained_on_may_be_said(campaign: Campaign, tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "there")
    shutil.rmtree(tmp_path / "there/scheduler")
    asked = ("adopt", campaign.store.location, tmp_path / "there", "--expert", "0")
    refused(run(*asked[:2], tmp_path / "nowhere", *asked[3:]), "there is no folder")
    refused(run(*asked), "no scheduler_config.json", "--prediction eps --schedule ddpm-linear")
    said = ("--prediction", "x0", "--schedule")
    refused(run(*asked, *said, "vp-cos"), "did you mean 'vp-cosine'")
    assert not Checkpoint(campaign.store, "islands/0/expert").published
    assert run(*asked, *said, "vp-cosine").code == 0
    card = Checkpoint(campaign.store, "islands/0/expert").card
    assert (card.prediction, card.schedule) == ("x0", "vp-cosine")


DIT, VAE = "transformer/config.json", "vae/config.json"


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        (DIT, {"in_channels": 3}, "made for latents of 3 channels, the campaign's data have 1"),
        (DIT, {"sample_size": 16}, "made for latents of 16 px, the campaign's data have 8"),
        (DIT, {"num_embeds_ada_norm": 10}, "made for 10 classes, the campaign's data have 2"),
        (DIT, {"_class_name": "PixArtTransformer2DModel"}, "which takes text; the campaign's condition is"),
        (DIT, {"_class_name": "UNet2DModel"}, "is a UNet2DModel: DiT, PixArt, SD3 and Flux transformers can"),
        (VAE, {"scaling_factor": 0.18215}, "shift 0 and scale 0.18215, the campaign's are pixels"),
        (VAE, {}, "latents with shift 0 and scale 1, the campaign's are pixels"),
        (VAE, {"_class_name": "AutoencoderKL"}, "shift 0 and scale 0.18215, the campaign's are pixels"),
        (VAE, {"scaling_factor": "x"}, "of the VAE are no constants of latents"),
        (DIT, {"activation_fn": "silu"}, "config.json makes no network"),
        (DIT, {"norm_type": "layer_norm"}, "config.json makes no network"),
        (DIT, {"num_layers": 10**9}, "says that num_layers is 1,000,000,000"),
    ],
)
def test_one_for_other_data_is_refused(
    file: str, fields: dict[str, Any], words: str, campaign: Campaign, tmp_path: Path
) -> None:
    checkpoint(tmp_path / "there")
    path = tmp_path / "there" / file
    path.parent.mkdir(exist_ok=True)
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **fields}))
    with pytest.raises(ConfigError, match=re.escape(words)):
        adopt(campaign, str(tmp_path / "there"), 0)
    assert not list((Path(campaign.store.location) / "islands/0/run").rglob("*.json"))


def test_data_that_does_not_say_what_made_it_is_refused(campaign: Campaign, tmp_path: Path, run: Run) -> None:
    checkpoint(tmp_path / "there")
    path = tmp_path / "c/islands/0/data/columns/latents/column.json"
    column = json.loads(path.read_bytes())
    del column["producer"]["hash"]
    path.write_text(json.dumps(column))
    asked = ("adopt", tmp_path / "c", tmp_path / "there", "--expert", "0")
    refused(run(*asked), "the column latents", "'hash' in it")
    assert not (tmp_path / "c/islands/0/expert").exists()


def test_weights_that_are_not_the_networks_are_refused(campaign: Campaign, tmp_path: Path) -> None:
    checkpoint(tmp_path / "there")
    path = tmp_path / "there/transformer" / WEIGHTS
    whole = {name: value.clone() for name, value in load_file(path).items()}
    first = next(iter(whole))
    for tensors, words in (
        ({n: v for n, v in whole.items() if n != first}, f"it has no {first}"),
        ({**whole, "extra": torch.zeros(1)}, "it has, and its class does not, extra"),
        ({**whole, first: whole[first][:1]}, f"it has in another shape {first}"),
        ({**whole, first: whole[first] * torch.nan}, f"not finite in {first}"),
    ):
        save_file({n: v.contiguous() for n, v in tensors.items()}, path)
        with pytest.raises(ConfigError, match=words):
            adopt(campaign, str(tmp_path / "there"), 0)
    assert not Checkpoint(campaign.store, "islands/0/expert").published
    small = {n: v.to(torch.float8_e4m3fn) for n, v in whole.items()}  # torch has no `isfinite` of these
    save_file(small, path)
    adopt(campaign, str(tmp_path / "there"), 0)
    read = Checkpoint(campaign.store, "islands/0/expert").read()[1]
    assert all(torch.equal(read[name], value.float()) for name, value in small.items())


def test_training_may_go_on_from_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`network.init` with the objective it knows; with another one, that is said before any work."""
    checkpoint(tmp_path / "there", out_channels=1)
    network = {"network": {"init": str(tmp_path / "there"), "depth": 2, "head_width": 8}}
    partitioned(tmp_path / "a", network | {"objective": {"prediction": "eps", "schedule": "ddpm-linear"}})
    out = capsys.readouterr().out
    assert "100.0% of the numbers" in out and "warning: network.init" not in out
    (tmp_path / "there/vae").mkdir()
    (tmp_path / "there" / VAE).write_text("{}")
    other = partitioned(tmp_path / "b", network)
    out = capsys.readouterr().out
    assert "was trained to give eps on ddpm-linear, and goes on with v on rectified-flow" in out
    assert "warning: network.init:" in out and "the campaign's are pixels" in out
    train_run(other, "expert", 0)
    assert Checkpoint(other.store, "islands/0/expert").card.provenance["init"]["kind"] == "checkpoint"
