"""Experts of several families, sizes, schedules and predictions in one campaign, from training to picture."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from atoll.base.condition import Condition
from atoll.campaign.folder import Campaign
from atoll.export.pipeline import AtollPipeline
from atoll.flow.prediction import flow_velocity
from atoll.flow.schedule import VPCosine
from atoll.measure.comparison import compare
from atoll.model.card import WEIGHTS
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.networks.families import family
from atoll.report.facts import Facts
from atoll.report.page import summary
from atoll.store.store import Store
from atoll.train.run import train_run
from helpers import Run, atoll, partitioned, python, write_campaign

TEXT: dict[str, Any] = {"condition": "text", "network": {"family": "pixart"}, "data": {"text_length": 12}}
NOISE = {"schedule": "vp-cosine", "prediction": "eps"}
PROMPTS = ["latin small letter a", "digit one"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_sharded_over_processes_it_learns_the_same(name: str, tmp_path: Path) -> None:
    changes = {**TEXT, "network": {"family": name, "depth": 2}, "budget": {"samples": 160}}
    one = partitioned(tmp_path / "one", changes)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    train_run(one, "expert", 0)
    argv = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "atoll", "train"]
    argv += ["expert", str(tmp_path / "two"), "--expert", "0", "--set", "train.parallel.strategy=fsdp"]
    said = (sharded := python(*argv)).communicate()
    assert sharded.returncode == 0, said
    plain, parts = (load_file(tmp_path / n / "islands/0/expert" / WEIGHTS) for n in ("one", "two"))
    assert plain.keys() == parts.keys() and ("pos_embed.pos_embed" in plain) == (name == "sd3")
    assert max(float((plain[key] - parts[key]).abs().max()) for key in plain) < 1e-4


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four islands: flow and noise, three families, two sizes; launched as processes and assembled."""
    changes = {
        **TEXT,
        "partition": {"k": 4},
        "islands": {
            1: {"objective": NOISE},
            2: {"network": {"family": "sd3"}, "objective": {"time": {"distribution": "logit-normal"}}},
            3: {"network": {"family": "flux", "depth": 2}, "objective": NOISE},
        },
        "budget": {"samples": 3200},
        "router": {"share": 0.05},
    }
    folder = write_campaign(tmp_path_factory.mktemp("mixed") / "campaign", changes)
    done = atoll("launch", folder, "--on", "local")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_expert_is_what_its_island_says(mixed: Path) -> None:
    """And operations, not steps, are in proportion to the cluster; all together cost the monolith."""
    store, flow, noise = Store.open(mixed), ("v", "rectified-flow"), ("eps", "vp-cosine")
    cards = [Checkpoint(store, f"islands/{k}/expert").card for k in range(4)]
    assert [card.family for card in cards] == ["pixart", "pixart", "sd3", "flux"]
    assert [(card.prediction, card.schedule) for card in cards] == [flow, noise, flow, noise]
    for role in ("router", "monolith"):
        card = Checkpoint(store, f"{role}/expert").card
        assert (card.prediction, card.schedule) == flow
    assert len({card.forward_flops for card in cards}) == 3  # two PixArts alike
    rows, spent = sum(card.rows for card in cards), sum(card.train_flops for card in cards)
    for card in cards:
        assert card.train_flops / spent == pytest.approx(card.rows / rows, rel=0.1)
    ledger = summary(Facts(store)).to_json()
    assert ledger["flops_ratio"] == pytest.approx(1, rel=0.02) and ledger["unfinished"] == []
    # Diffusers alone reads an island's network, positions and all.
    theirs = family("sd3").network_class().from_pretrained(mixed / "islands/2/expert")  # type: ignore[attr-defined]
    assert all(value.isfinite().all() for value in theirs.state_dict().values())


@pytest.mark.slow
def test_each_one_is_asked_in_its_own_terms(mixed: Path) -> None:
    """The ensemble's velocity is that of networks that are converted by hand, at all of them."""
    ensemble = Model.load(Store.open(mixed)).bank
    source = torch.Generator().manual_seed(0)
    x, t = torch.randn(6, 1, 8, 8, generator=source), torch.linspace(0.1, 0.9, 6)
    text = torch.randn(6, 9, 384, generator=source)
    mask = torch.arange(9) < torch.tensor([[1], [9], [4], [2], [7], [5]])  # lengths differ within a batch
    cond = Condition(text=text * mask[..., None], mask=mask)
    weights = ensemble.logits(x, t, cond).softmax(1)
    parts = []
    for number in range(4):
        expert = ensemble.experts[number]
        assert isinstance(expert, Expert)
        adapter, network = family(expert.family), expert.network

        def ask(z: torch.Tensor, tau: torch.Tensor, adapter: Any = adapter, network: Any = network) -> Any:
            return adapter.predict(network, z, tau, cond)

        eps = number in (1, 3)  # held to the range of pixels
        parts.append(flow_velocity(ask, "eps", VPCosine(), x, t, bound=1.0) if eps else ask(x, t))
    expected = torch.einsum("bk,bkchw->bchw", weights, torch.stack(parts, 1))
    torch.testing.assert_close(ensemble.velocity(x, t, cond), expected, rtol=1e-4, atol=1e-4)
    offloaded = Model.load(mixed, residency=Residency(experts=1, prefetch=False)).bank
    assert torch.equal(ensemble.velocity(x, t, cond), offloaded.velocity(x, t, cond))
    # A sample's velocity is its own, whichever texts are beside it: padding is nothing to any of them.
    for row in range(6):
        length = int(mask[row].sum())
        alone = Condition(text=text[row : row + 1, :length], mask=mask[row : row + 1, :length])
        v = ensemble.velocity(x[row : row + 1], t[row : row + 1], alone)
        torch.testing.assert_close(v, expected[row : row + 1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_it_is_sampled_exported_and_reloaded(mixed: Path, tmp_path: Path, run: Run) -> None:
    sheets = []
    for routing in ("top-1", "full"):
        out = tmp_path / f"{routing}.png"
        assert run("sample", mixed, *PROMPTS, "--routing", routing, "--out", out).code == 0
        sheets.append(out.read_bytes())
    assert sheets[0] != sheets[1]
    assert run("export", mixed, "--to", tmp_path / "out", "--no-picture").code == 0
    there, back = (AtollPipeline.from_pretrained(p) for p in (mixed / "ensemble", tmp_path / "out"))
    names = [type(n).__name__.removesuffix("Transformer2DModel") for n in back.experts.networks.values()]
    assert names == ["PixArt", "PixArt", "SD3", "Flux"]
    call = {"prompt": PROMPTS, "num_images_per_prompt": 3, "routing": "top-2", "output_type": "latent"}
    one, other = (pipe(generator=torch.Generator().manual_seed(1), **call).images for pipe in (there, back))
    assert torch.equal(one, other) and one.isfinite().all()
    text = (tmp_path / "out/README.md").read_text()
    assert "| 1 | pixart | eps, vp-cosine |" in text and "| 2 | sd3 | v, rectified-flow |" in text


@pytest.mark.slow
def test_it_is_compared_and_costs_are_those_of_each_expert(mixed: Path) -> None:
    campaign = Campaign.open(mixed, ["compare.strategies=[top-1, full]"])
    compare(campaign)
    rows = {row["name"]: row for row in campaign.store.get_json("reports/compare.json")["rows"]}
    cards = [Checkpoint(campaign.store, f"islands/{k}/expert").card for k in range(4)]
    router, monolith = (Checkpoint(campaign.store, f"{role}/expert").card for role in ("router", "monolith"))
    # `full` with guidance asks the router once for each branch, and a branch is what the table counts.
    every = sum(card.forward_flops for card in cards) + router.forward_flops
    assert rows["full"]["gflops_per_step"] == pytest.approx(every / 1e9, rel=1e-6)
    assert rows["monolith"]["gflops_per_step"] == pytest.approx(monolith.forward_flops / 1e9, rel=1e-6)
    low, high = min(c.forward_flops for c in cards), max(c.forward_flops for c in cards)
    assert low / 1e9 < rows["top-1"]["gflops_per_step"] < 1.5 * high / 1e9
