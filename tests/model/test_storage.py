"""Experts' weights in one byte a number: fewer bytes, close to whole ones, and refused where they are not."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN
from PIL import Image

from atoll.base.errors import ConfigError
from atoll.campaign.folder import Campaign
from atoll.campaign.sample import campaign_model
from atoll.export.pipeline import AtollPipeline
from atoll.model.expert import Expert, StoredExpert
from atoll.model.generation import Residency
from atoll.model.model import Model
from atoll.model.pictures import dissimilarity
from atoll.model.residency import ResidentExperts
from atoll.networks.settings import FamilyName
from atoll.networks.storage import KEPT, STORED, brought_back, stored_layers, write_stored
from atoll.train.run import train_run
from helpers import Run, assembled, refused
from helpers_networks import CLASSES, TEXT, conditions, denoiser, expert, noise

T = torch.linspace(0.1, 0.9, 4)


@pytest.mark.parametrize("name", STORED)
def test_a_weight_comes_back_within_a_step_of_its_row(name: str) -> None:
    value = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    value *= torch.tensor([1e-6, 1e-2, 1.0, 1e3, 0.0]).view(5, 1, 1, 1)
    stored, scales = torch.empty_like(value, dtype=STORED[name]), torch.empty(5)
    write_stored(value, stored, scales)
    back = brought_back(stored, scales, torch.float32)
    most = value.abs().amax((1, 2, 3), keepdim=True)
    step = most / 254 if name == "int8" else value.abs() / 16 + most / 2**17
    # The largest of a row may be cut by as much as bf16 rounds its scale.
    assert bool(((back - value).abs() <= step + most / 2**8).all())
    assert torch.equal(brought_back(stored, scales, torch.bfloat16), back.bfloat16())


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("family", get_args(FamilyName))
def test_every_family_draws_nearly_the_same(family: str, name: str) -> None:
    shape = CLASSES if family == "dit" else TEXT
    whole = Expert(denoiser(0, shape, name=family), family, "v", "rectified-flow")
    bank = ResidentExperts([StoredExpert.of(whole)], Residency(dtype=name))
    x, cond = noise(len(T), shape), conditions(len(T), shape)
    v, near = whole.velocity(x, T, cond), bank[0].velocity(x, T, cond)
    change = float((near - v).norm() / v.norm())
    assert 0 < change < (0.02 if name == "int8" else 0.1), change
    assert torch.equal(near, bank[0].velocity(x, T, cond))


def test_what_diffusers_keeps_stays_whole() -> None:
    network = expert(0, CLASSES).network
    taken = stored_layers(network)
    assert taken and not any("norm" in name or "pos_embed" in name for name in taken)
    assert KEPT == DEFAULT_SKIP_MODULES_PATTERN
    one = next(iter(taken))
    assert stored_layers(network, [f"^{one}$"]).keys() == taken.keys() - {one}
    with pytest.raises(ConfigError, match="no layer's name has 'nothing'"):
        stored_layers(network, ["nothing"])
    with pytest.raises(ConfigError, match="is no pattern"):
        Residency.parse({"keep": ["*proj_out"]}, "here")


def test_images_that_are_equal_have_no_distance() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    image, other = Image.fromarray(pixels), Image.fromarray(255 - pixels)
    assert dissimilarity(image, image) == 0
    assert dissimilarity(image, other) > 1 > dissimilarity(image, image.point(lambda v: v * 0.9)) > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return assembled(tmp_path_factory.mktemp("stored"), {"budget": {"samples": 64}})


@pytest.mark.parametrize("name", STORED)
def test_a_campaign_is_drawn_from_stored_weights(name: str, trained: Path) -> None:
    sizes = {}
    for dtype, experts in (("auto", 2), (name, None), (name, 1)):
        model = campaign_model(Campaign.open(trained), residency=Residency(dtype=dtype, experts=experts))
        pictures = model(["0", "1"], each=2)
        sizes[dtype] = model.bank.experts.place_bytes
        if dtype == name and experts is None:
            first = pictures
    assert [image.tobytes() for image in first] == [image.tobytes() for image in pictures]
    assert sizes[name] < 0.7 * sizes["auto"]


def test_images_beyond_the_bound_are_refused(trained: Path, run: Run, tmp_path: Path) -> None:
    sets = ("--set", "sampling.residency.dtype=fp8", "--set", "sampling.residency.bound=0.0000001")
    out = ("--out", tmp_path / "x.png")
    said = run("sample", trained, "0", *sets, *out)
    line = refused(said, "fp8", "residency.keep=[", "over residency.bound")
    assert not (tmp_path / "x.png").exists()
    kept = line.split("residency.keep=[")[1].split("]")[0]
    assert kept.split(",")[0] in stored_layers(Model.load(trained).bank.experts[0].network)
    assert run("sample", trained, "0", *sets[:3], "sampling.residency.bound=1", *out).code == 0
    # A pipeline may hold some experts only, and go to a GPU later: it compares nothing.
    stored = {"residency": Residency(dtype="fp8", bound=1e-7), "experts": [0]}
    AtollPipeline.from_pretrained(trained / "ensemble", **stored)(class_labels=[0])


@pytest.mark.parametrize("name", STORED)
def test_a_single_network_is_stored_so_too(name: str, trained: Path) -> None:
    train_run(Campaign.open(trained), "monolith")
    plain, stored = (
        campaign_model(Campaign.open(trained), "monolith", residency=Residency(dtype=dtype))
        for dtype in ("auto", name)
    )
    assert dissimilarity(*(model(["0"], seed=1).images[0] for model in (plain, stored))) < 0.05
    whole = sum(weight.nbytes for weight in plain.bank.experts[0].network.parameters())
    assert stored.bank.experts.place_bytes < 0.7 * whole
    if name == "fp8":
        far = campaign_model(Campaign.open(trained), "monolith", residency=Residency(dtype=name, bound=1e-9))
        with pytest.raises(ConfigError, match=r"residency\.keep=\["):
            far(["0"])


def test_plan_counts_the_bytes(trained: Path, run: Run) -> None:
    held = dict[str, float]()
    for name in ("bf16", "int8"):
        said = run("plan", trained, "--json", "--set", f"sampling.residency.dtype={name}")
        held[name] = next(row["state"] for row in json.loads(said.out)["drawing"] if row["run"] == "sample")
    assert 0.5 < held["int8"] / held["bf16"] < 0.9
