"""The recipes for GPUs pass their own plan, and train at tiny width with their parallel settings."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.base.safe_parse import read_yaml
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import make_islands
from atoll.campaign.prepare import prepare
from atoll.campaign.runs import RunPlan
from atoll.recipes import catalogue
from helpers import SMALL, Run, atoll, entries, environment, merged, metrics

pytestmark = pytest.mark.slow
SMALLER: dict[str, Any] = {
    "data": {**SMALL["data"], "text_encoder": "minilm", "text_length": 16},
    "partition": {"method": "random", "k": 2, "encoder": "efficientnet-lite0"},
    "network": {"size": "nano", "depth": 2, "heads": 2, "head_width": 16, "patch": 4},
    "router": {"depth": 1, "heads": 1, "head_width": 16, "patch": 4, "train": {"batch": 32}},
    "train": {"batch": 32, "log_every": 1, "threads": 1, "validations": 1, "previews": 0},
    "budget": {"samples": 32 * 21},  # a share of 4 % is the router's
}
# A published checkpoint is not here: experts change shared pretraining's network in its place, and the table
# of positions would be larger than the tiny networks.
PARTS: dict[str, Any] = {
    "flux-lora": {
        "network": {"init": "scratch", "arguments": {"num_layers": 1, "guidance_embeds": True}},
        "budget": {"samples": 32 * 90, "pretrain": 0.3},
    },
    "sd3-finetune": {
        "network": {"init": "scratch", "arguments": {"pos_embed_max_size": 8, "dual_attention_layers": [0]}},
        "router": {"share": 0.04},
        "budget": {"compute": "equal"},
    },
}


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("imagenet", ["--rows", "1281167"]),
        ("flux-lora", ["--gpus", "8", "--gpu", "h100", "--rows", "100000"]),
        ("sd3-finetune", ["--gpus", "8", "--gpu", "h100", "--rows", "500000"]),
    ],
)
def test_a_recipe_passes_its_own_plan(name: str, hardware: list[str], run: Run, tmp_path: Path) -> None:
    """Every network is built on meta for it. Nothing is left to set, and no GPU waits for its host.

    That of paper-3b is in `test_plan.py`.
    """
    run("new", tmp_path / "c", "--recipe", name)
    said = run("plan", tmp_path / "c", *hardware)
    assert said.code == 0 and "compare" in said.out
    for words in ("--set", "DOES NOT FIT", "to start it", "text states"):
        assert words not in said.out, said.out


@pytest.mark.parametrize("name", ["imagenet", "paper-3b", "flux-lora", "sd3-finetune"])
def test_a_recipe_trains_on_two_ranks_with_its_own_parallel_settings(name: str, tmp_path: Path) -> None:
    """But for compilation, which takes a CPU minutes: `tests/gpu` compiles."""
    recipe = read_yaml(catalogue.text(name), name)
    tree = merged(recipe, merged(SMALLER, PARTS.get(name, {})))
    tree["partition"].pop("fine")
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "campaign.yaml").write_text(yaml.safe_dump(tree))
    campaign = Campaign.open(folder)
    prepare(campaign)
    make_islands(campaign)
    if campaign.config.budget.pretrain:
        assert atoll("train", "pretrain", folder).returncode == 0
    parallel = campaign.config.train.parallel
    assert parallel.strategy == recipe["train"].get("parallel", {}).get("strategy", "ddp")
    assert campaign.config.train.precision == "bf16"
    assert (steps := RunPlan.read(campaign.store, "islands/0/island.json").steps) >= 20
    shutil.copytree(folder, tmp_path / "2")
    losses = []
    for ranks in (2, 1):
        folder = tmp_path / str(ranks)
        spread = ["-m", "atoll.launch.torchrun", "--nnodes", "1", "--standalone", "--nproc-per-node", "2"]
        words = ["train", "expert", str(folder), "--expert", "0", "--set", "train.parallel.compile=false"]
        argv = [sys.executable, *(spread if ranks > 1 else []), "-m", "atoll", *words]
        done = subprocess.run(argv, env=environment(), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        island = folder / "islands/0"
        assert [entry["ranks"] for entry in entries(island) if entry["kind"] == "acquire"] == [ranks]
        losses.append([line["loss"] for line in metrics(island) if "loss" in line])
    # In bf16, and by sums in another order.
    assert len(losses[0]) == steps and losses[0] == pytest.approx(losses[1], rel=0.02)
