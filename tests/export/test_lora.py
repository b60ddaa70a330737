"""Experts as LoRA files: stock diffusers, or peft, computes with them what the experts do."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import FluxPipeline, StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from peft import PeftModel
from safetensors.torch import load_file

from atoll.base.hashing import sha256
from atoll.campaign.folder import Campaign
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint, serialised
from atoll.networks.families import FAMILIES, family
from atoll.networks.lora import own
from atoll.networks.settings import TAKES_TEXT, NetworkConfig
from helpers import Run, refused, write_campaign
from helpers_networks import CLASSES, TEXT, TINY, card, conditions, denoiser, noise, random_weights
from keys import key_pair

B, T = 3, torch.tensor([0.1, 0.5, 0.9])
PIPELINES = {"sd3": StableDiffusion3Pipeline, "flux": FluxPipeline}


def published(folder: Path, name: str, lora: dict[str, object] | None, std: float = 0.15) -> Campaign:
    """A campaign whose expert 0 started from a network, and is a change of it or a whole one near it."""
    campaign, shape = Campaign.open(write_campaign(folder)), TEXT if TAKES_TEXT[name] else CLASSES
    config = NetworkConfig.parse({**TINY, "family": name, "lora": lora}, "a test")
    network = random_weights(family(name).build(config, shape), 3, std)
    whole = denoiser(1, shape, name=name).state_dict()
    data = serialised(whole)
    campaign.store.put(f"islands/0/init/{WEIGHTS}", data)
    if lora is None:  # a low-rank change, and of one layer's bias
        state = {n: v.clone() for n, v in whole.items()}
        for layer in [n for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)]:
            weight = state[f"{layer}.weight"]
            weight += torch.outer(torch.randn(len(weight)), torch.randn(weight.shape[1])) * std
        network.load_state_dict(state)
    else:
        network.load_state_dict({**network.state_dict(), **whole})
    about = {"provenance": {"init": {"kind": "pretrain"}, "initial_weights": sha256(data)}}
    about |= {"family": name, "condition": "text" if shape.text_width else "class", "shape": vars(shape)}
    told = card(**about, base=sha256(data) if lora else "")
    Checkpoint(campaign.store, "islands/0/expert").write(network, own(network, network.state_dict()), told)
    return campaign


@pytest.mark.parametrize("lora", [{"rank": 3, "alpha": 7, "targets": ["to_q", "to_v"]}, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_stock_software_computes_what_the_expert_does(
    name: str, lora: dict[str, object] | None, tmp_path: Path, run: Run
) -> None:
    campaign = published(tmp_path / "c", name, lora)
    said = run("export", tmp_path / "c", "--to", tmp_path / "out", "--lora", "3")
    assert said.code == 0 and "100.0% of the norm of its change at rank 3" in said.out, said
    shape, folder = TEXT if TAKES_TEXT[name] else CLASSES, str(tmp_path / "out")
    stock = denoiser(1, shape, name=name)
    x, cond = noise(B, shape), conditions(B, shape)
    with torch.no_grad():
        before = family(name).predict(stock, x, T, cond)
        if name in PIPELINES:
            kind = PIPELINES[name]
            given = {"transformer": stock, "scheduler": FlowMatchEulerDiscreteScheduler()}
            pipe = kind(**given, **dict.fromkeys({*kind.__init__.__annotations__} - {"return", *given}))
            pipe.load_lora_weights(folder, subfolder="expert-0")
        else:
            PeftModel.from_pretrained(stock, folder, subfolder="expert-0")
        after = family(name).predict(stock, x, T, cond)
        expert = Checkpoint(campaign.store, "islands/0/expert").expert()
        mine = family(name).predict(expert.network, x, T, cond)
    assert (after - mine).abs().max() < 1e-5 * mine.abs().max()
    assert (before - mine).abs().max() > 1e-2
    program = (tmp_path / "out/README.md").read_text()
    assert "from_pretrained(pipe.transformer" in program or "load_lora_weights(" in program
    assert 'out", subfolder="expert-0")' in program


def test_a_rank_under_the_change_keeps_a_share_of_its_norm(tmp_path: Path, run: Run) -> None:
    published(tmp_path / "c", "pixart", {"rank": 8})
    shares = []
    for rank in (1, 4, 8, 16):
        (tmp_path / "out/expert-7").mkdir(parents=True)  # of an earlier export, as those of smaller ranks are
        assert run("export", tmp_path / "c", "--to", tmp_path / "out", "--lora", f"{rank}").code == 0
        settings = json.loads((tmp_path / "out/expert-0/adapter_config.json").read_text())
        assert settings["r"] == settings["lora_alpha"] == min(rank, 8)
        assert f"files of rank {settings['r']}\n" in (tmp_path / "out/README.md").read_text()
        change = load_file(tmp_path / "out/expert-0/adapter_model.safetensors")
        products = {
            name.removesuffix(".lora_B.weight"): up @ change[name.replace("lora_B", "lora_A")]
            for name, up in change.items()
            if "lora_B" in name
        }
        shares.append(sum(float(product.square().sum()) for product in products.values()) ** 0.5)
    assert shares == sorted(shares) and shares[2] == pytest.approx(shares[3], rel=1e-5)
    assert 0.3 * shares[3] < shares[0] < shares[1] < shares[2]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"README.md", "expert-0"}
    (tmp_path / "out/expert-0/mine").touch()
    refused(run("export", tmp_path / "c", "--to", tmp_path / "out", "--lora", "1"), "holds something else")


def test_what_is_no_change_is_refused(tmp_path: Path, run: Run) -> None:
    published(tmp_path / "c", "dit", None)
    words = ("export", tmp_path / "c", "--to", tmp_path / "out", "--lora")
    refused(run(*words, "17"), "--lora 17", "width, 16")
    for more in ("0", "2 --model monolith", "2 --encoders copy"):
        refused(run(*words, *more.split()), "--lora", *more.split()[1:2])
    refused(run(*words, "2", "--experts", "1"), "experts 1 are not there")
    settings = tmp_path / "c/campaign.yaml"
    written = settings.read_text()
    settings.write_text(f"{written}\nquarantine: [0]\n")
    refused(run(*words, "2"), "experts 0 are in quarantine")
    settings.write_text(f"{written}\ntrusted: ['{key_pair(tmp_path / 'key')[1]}']\n")
    refused(run(*words, "2"), "expert is unsigned")
    settings.write_text(written)
    path = tmp_path / "c/islands/0/expert/card.json"
    tree = json.loads(path.read_text())
    path.write_text(json.dumps({**tree, "provenance": {"init": {"kind": "scratch"}}}))
    refused(run(*words, "2"), "expert 0 started from scratch", "budget.pretrain")
    path.write_text(json.dumps(tree))
    (tmp_path / "c/islands/0/init" / WEIGHTS).unlink()
    refused(run(*words, "2"), "expert 0", "does not lie in")
    path.unlink()
    refused(run(*words, "2"), "no expert yet")
    assert not (tmp_path / "out").exists()
