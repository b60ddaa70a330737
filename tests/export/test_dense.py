"""A dense model as a stock diffusers pipeline: the same pictures where there is no Atoll."""

import inspect
import json
import os
import re
import shutil
import site
import subprocess
import venv
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.base.pictures import to_images
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import initial_network
from atoll.campaign.runs import RunPlan
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.export.stock import STOCK, stock_of
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Generation
from atoll.model.sampler import Row, Sampler
from atoll.networks.families import FAMILIES, kept_buffers, parameter_count
from helpers import SMALL, atoll, command, merged, partitioned, refused, write_campaign
from helpers_export import LENGTH, small_vae, text_tower
from helpers_networks import card, random_weights

STEPS, GUIDANCE, SHIFT = 50, 2.0, 1.5
LABELS = {
    "student": {"train": {"lr": 1e-3}},
    "sampling": {"steps": STEPS, "guidance": GUIDANCE, "shift": SHIFT},
}
TEXTS = {
    **LABELS,
    "condition": "text",
    "network": {**SMALL["network"], "family": "pixart"},
    "data": {"text_length": LENGTH},
}


def with_student(folder: Path, changes: dict[str, Any], std: float = 0.1) -> Campaign:
    """A campaign whose student is published: its weights are drawn, all of them far from zero."""
    campaign = partitioned(folder, changes)
    settings, plan = (
        campaign.config.denoiser("student")[0],
        RunPlan.read(campaign.store, "student/island.json"),
    )
    network = random_weights(initial_network(settings, plan.shape, 0), 5, std)
    weights = dict(network.named_parameters()) | kept_buffers(network)
    data = json.loads((folder / "islands/0/data/columns/latents/column.json").read_text())
    text = folder / "islands/0/data/columns/text/column.json"
    about = card(
        role="student",
        island=None,
        family=settings.family,
        condition=campaign.config.condition,
        partition=plan.partition,
        latents=data["producer"],
        text=json.loads(text.read_text())["producer"] if text.exists() else None,
        shape=plan.shape,
        parameters=parameter_count(network),
        train_flops=plan.train_flops,
        provenance={"student": {"teacher": "cluster", "teachers": {"islands/0": "0" * 64}}},
    )
    Checkpoint(campaign.store, "student/expert").write(network, weights, about)
    return campaign


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PixArt in pixels, with a text encoder of ten words."""
    folder = tmp_path_factory.mktemp("texts")
    tower = str(text_tower(folder / "text"))
    with_student(folder / "campaign", merged(TEXTS, {"data": {"text_encoder": tower}}))
    return folder / "campaign"


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DiT of class labels in the latents of a small VAE."""
    folder = tmp_path_factory.mktemp("labels")
    vae = small_vae(folder / "vae", shift_factor=None)
    with_student(folder / "campaign", merged(LABELS, {"data": {"vae": str(vae)}}))
    return folder / "campaign"


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a virtual environment with everything that is installed here but Atoll."""
    folder = tmp_path_factory.mktemp("stranger") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for place in site.getsitepackages():
        for path in Path(place).iterdir():
            own = path.name.startswith(("atoll", "__editable__")) or path.suffix == ".pth"
            if not own and not (packages / path.name).exists():
                (packages / path.name).symlink_to(path)
    return folder / "bin/python"


def run_readme(python: Path, exported: Path, more: str = "") -> np.ndarray[Any, Any]:
    """Run the snippet of a folder's README.md as it stands, without Atoll; its picture."""
    text = (exported / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    head = "try:\n    import atoll\nexcept ImportError:\n    print('no atoll here')\n\n"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-c", head + snippet + more],
        cwd=exported.parent,
        env={**inherited, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no atoll here")
    return np.asarray(Image.open(exported.parent / "picture.png")).astype(float)


def own_pictures(
    folder: Path, cond: Condition, null: Condition, vae: str, guidance: float = GUIDANCE
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Atoll's picture from the noise of the snippet's generator: Euler's, and at the stock one's times."""
    student = Checkpoint(Campaign.open(folder).store, "student/expert").expert()
    assert student.card is not None
    shape = student.card.shape
    noise = torch.randn(
        (1, shape.channels, shape.size, shape.size), generator=torch.Generator().manual_seed(0)
    )
    how = Generation(steps=STEPS, shift=SHIFT, guidance=guidance)
    sampler = Sampler(Bank([student]), cond, null, Row.each(how, [0]), noise)
    plain = sampler.run()
    # Its sigmas go from 0.999, and it tells the network whole thousandths.
    x = noise
    even = [0.999 * (STEPS - n) / STEPS for n in range(STEPS)]
    sigmas = [SHIFT * sigma / (1 + (SHIFT - 1) * sigma) for sigma in even]
    for now, then in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
        x = x + (then - now) * sampler.velocity(x, torch.tensor([int(1000 * now + 1e-9) / 1000]))
    decode = autoencoder(vae).decode
    both = [np.asarray(to_images(decode(latents))[0]).astype(float) for latents in (plain, x)]
    return both[0], both[1]


def close(found: np.ndarray[Any, Any], plain: np.ndarray[Any, Any], same: np.ndarray[Any, Any]) -> None:
    """In levels of 255: one from the loop at the same times, and a few from Euler's, whose times differ."""
    assert found.shape == plain.shape and found.std() > 5
    assert np.abs(found - same).max() <= 1
    assert np.abs(found - plain).max() <= 6 and np.abs(found - plain).mean() <= 1.5


@pytest.mark.slow
def test_a_pixart_student_runs_where_there_is_no_atoll(texts: Path, stranger: Path, tmp_path: Path) -> None:
    exported = tmp_path / "a student"
    done = atoll("export", texts, "--model", "student", "--to", exported, "--encoders", "copy")
    assert done.returncode == 0, done.stderr
    assert (exported / "picture.png").is_file()
    picture = run_readme(stranger, exported)
    close(picture, *own_pictures(texts, *prompt_and_null(str(texts.parent / "text")), "none"))


@pytest.mark.slow
@pytest.mark.parametrize("condition", ["class", "none"])
def test_a_dit_student_runs_where_there_is_no_atoll(
    condition: str, labels: Path, stranger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of labels with its VAE outside, which is fetched by name; without a condition, its VAE inside."""
    vae, exported = str(labels.parent / "vae"), tmp_path / "student"
    argv = ["export", labels, "--model", "student", "--to", exported, "--no-picture"]
    if condition == "none":
        with_student(tmp_path / "c", merged(LABELS, {"condition": "none", "data": {"vae": vae}}))
        argv = ["export", tmp_path / "c", "--model", "student", "--to", exported, "--encoders", "copy"]
    assert command(capsys, *argv).code == 0
    inside = (exported / "vae").exists()
    assert inside == (condition == "none") and (inside or vae in (exported / "README.md").read_text())
    picture = run_readme(stranger, exported)
    if condition == "none":
        close(picture, *own_pictures(tmp_path / "c", Condition(), Condition(), vae, 1.0))
    else:
        cond, null = (Condition(labels=torch.tensor([label])) for label in (0, 2))
        close(picture, *own_pictures(labels, cond, null, vae))


def prompt_and_null(tower: str) -> tuple[Condition, Condition]:
    """The conditions of a prompt and of the empty text, which is shorter, without padding."""
    states, mask = text_encoder(tower, LENGTH).encode(["a prompt", ""])
    length = int(mask[1].sum())
    assert length < states.shape[1] == int(mask[0].sum())
    return (
        Condition(text=states[:1], mask=mask[:1]),
        Condition(text=states[1:, :length], mask=mask[1:, :length]),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "outside"), [("sd3", True), ("flux", False), ("flux", True)])
def test_a_student_of_text_and_picture_together_runs_where_there_is_no_atoll(
    name: str, outside: bool, tmp_path: Path, stranger: Path
) -> None:
    """In pixels with the text encoder in the folder, or in latents with both encoders outside.

    Prompt and empty text have other lengths, so padding that was seen would show. Euler's times are those of
    `atoll sample`, so there is no more than a level of rounding between the two.
    """
    tower = str(text_tower(tmp_path / "text"))
    vae = "none"
    if outside:  # SD3's VAE shifts, Flux's says nothing of it
        vae = str(small_vae(tmp_path / "vae", **({} if name == "sd3" else {"shift_factor": None})))
    folder, exported = tmp_path / "campaign", tmp_path / "out"
    settings = {"network": {"family": name, "patch": 2}, "data": {"text_encoder": tower, "vae": vae}}
    with_student(folder, merged(TEXTS, settings), 0.2)
    how = "name" if outside else "copy"
    done = atoll("export", folder, "--model", "student", "--to", exported, "--encoders", how)
    assert done.returncode == 0, done.stderr
    assert (exported / "picture.png").is_file()
    picture = run_readme(stranger, exported)
    cond, null = prompt_and_null(tower)
    plain, _ = own_pictures(folder, cond, null, vae)
    assert picture.shape == plain.shape and picture.std() > 5
    assert np.abs(picture - plain).max() <= 1 and np.abs(picture - plain).mean() <= 0.05
    # It differs from a picture without the prompt, and from one that saw the padding of the empty text.
    states, mask = text_encoder(tower, LENGTH).encode(["a prompt", ""])
    padded = Condition(text=states[1:], mask=torch.ones_like(mask[1:]))
    for others in ((null, null), (cond, padded)):
        assert np.abs(picture - own_pictures(folder, *others, vae)[0]).max() > 5


def test_the_moved_null_label_is_the_same_network(
    labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["export", labels, "--model", "student", "--to", tmp_path / "out", "--no-picture"]
    assert command(capsys, *argv).code == 0
    stock = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "out/transformer")
    student = Checkpoint(Campaign.open(labels).store, "student/expert").expert()
    x, t = torch.randn(3, 4, 4, 4), torch.tensor([0.1, 0.5, 0.9])
    expected = student.velocity(x, t, Condition(labels=torch.tensor([0, 1, 2])))
    with torch.no_grad():
        assert torch.equal(
            stock(x, timestep=1000 * t, class_labels=torch.tensor([0, 1, 1000])).sample, expected
        )
    index = json.loads((tmp_path / "out/model_index.json").read_text())
    assert index["_class_name"] == "DiTPipeline" and "text_encoder" not in index


def test_the_readme_tells_what_it_is(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "out"
    argv = ["export", texts, "--model", "student", "--to", to, "--no-picture", "--licence", "MIT"]
    answer = command(capsys, *argv)
    assert answer.code == 0 and "PixArtAlphaPipeline" in answer.out, answer
    text = (to / "README.md").read_text()
    for word in ("license: MIT", "distilled from the 1 experts", "T5EncoderModel", "lower case", "0" * 64):
        assert word in text, word
    assert command(capsys, *argv).code == 0  # over an earlier one
    whole = ["export", texts, "--to", to]
    refused(command(capsys, *whole), "holds something else")
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text(json.dumps({"_class_name": "AtollPipeline"}))
    refused(command(capsys, *argv[:5], other), "holds something else")


def test_what_no_stock_pipeline_runs_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, patches = tmp_path / "c", {"network": {"family": "flux", "patch": 4}}
    write_campaign(folder, LABELS)
    refused(command(capsys, "plan", folder), "DiTPipeline needs a VAE", "student.stock=false")
    write_campaign(folder, merged(TEXTS, patches))
    words = "FluxPipeline makes patches of 2", "patch: 2", "student.stock=false"
    refused(command(capsys, "plan", folder), *words)
    vae = str(small_vae(tmp_path / "vae"))
    write_campaign(folder, merged(LABELS, {"data": {"vae": vae}}))
    refused(command(capsys, "launch", folder), "shifts by 0.1159")
    assert not (folder / "partition/partition.json").exists()


def test_flux_of_other_patches_is_refused_by_the_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"network": {"family": "flux", "patch": 4}, "student": {"stock": False}}
    tower = str(text_tower(tmp_path / "text"))
    with_student(tmp_path / "c", merged(TEXTS, merged(changes, {"data": {"text_encoder": tower}})))
    argv = ["export", tmp_path / "c", "--model", "student", "--to", tmp_path / "out"]
    refused(command(capsys, *argv), "the network's are of 4")
    assert not (tmp_path / "out").exists()


def test_models_that_are_not_there_or_no_flows_are_refused(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--to", tmp_path / "out", "--no-picture"]
    refused(command(capsys, "export", texts, "--model", "monolith", *argv), "no monolith yet")
    refused(command(capsys, "export", texts, "--model", "student", "--experts", "0", *argv), "--experts")
    folder = Path(shutil.copytree(texts, tmp_path / "copy"))
    path = folder / "student/expert/card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction": "eps"}))
    refused(command(capsys, "export", folder, "--model", "student", *argv), "predicts eps")
    assert not (tmp_path / "out").exists()


def test_every_family_has_an_entry() -> None:
    assert set(STOCK) == set(FAMILIES)
    for stock in STOCK.values():
        takes = inspect.signature(getattr(diffusers, stock.limits.pipeline)).parameters
        assert {*stock.components.values(), *stock.empty, "transformer", "scheduler"} <= set(takes)
    with pytest.raises(ConfigError, match="no stock diffusers pipeline is known for the unet family"):
        stock_of("unet")
