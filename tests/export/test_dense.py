"""A dense model as a stock diffusers pipeline: the same pictures where there is no Atoll."""

import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.base.hashing import digest
from atoll.base.pictures import to_images
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import initial_network
from atoll.campaign.runs import RunPlan
from atoll.cli import main as cli
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.export.stock import STOCK
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.sampler import Row, Sampler
from atoll.networks.families import FAMILIES, kept_buffers, parameter_count
from atoll.networks.pipelines import limits_of
from atoll.store.store import Store
from helpers import SMALL, Run, merged, partitioned, refused, write_campaign
from helpers_export import LENGTH, small_vae, text_tower
from helpers_networks import card, random_weights

Students = Callable[[str], Path]
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
    settings = campaign.config.denoiser("student")[0]
    plan = RunPlan.read(campaign.store, "student/island.json")
    network = random_weights(initial_network(settings, plan.shape, 0), 5, std)
    weights = dict(network.named_parameters()) | kept_buffers(network)
    data = json.loads((folder / "islands/0/data/columns/latents/column.json").read_text())
    text = folder / "islands/0/data/columns/text/column.json"
    about: dict[str, Any] = {"role": "student", "island": None, "family": settings.family}
    about |= {"condition": campaign.config.condition, "latents": data["producer"]}
    about |= {"text": json.loads(text.read_text())["producer"] if text.exists() else None}
    about |= {name: getattr(plan, name) for name in ("partition", "shape", "train_flops")}
    about |= {"provenance": {"student": {"teacher": "cluster", "teachers": {"islands/0": "0" * 64}}}}
    told = card(**about, parameters=parameter_count(network))
    Checkpoint(campaign.store, "student/expert").write(network, weights, told)
    return campaign


@dataclass(frozen=True)
class Student:
    """How a campaign's student is made and exported.

    Attributes:
        settings: of its campaign.
        vae: settings of a small autoencoder; None for pixels.
        std: of its weights.
        export: options of the command.
    """

    settings: dict[str, Any]
    vae: dict[str, Any] | None = None
    std: float = 0.1
    export: tuple[str, ...] = ("--encoders", "copy", "--no-picture")


def _joint(name: str) -> dict[str, Any]:
    return merged(TEXTS, {"network": {"family": name, "patch": 2}})


WAYS = {"down": "DownEncoder", "up": "UpDecoder"}
PLAIN = {"shift_factor": None}
"""An autoencoder whose latents are not shifted."""
STUDENTS = {
    "texts": Student(TEXTS, export=("--encoders", "copy")),
    "labels": Student(LABELS, PLAIN, export=("--no-picture",)),
    "nothing": Student(merged(LABELS, {"condition": "none"}), PLAIN),
    "sd3": Student(_joint("sd3"), {}, 0.2, ("--encoders", "name")),
    "flux in pixels": Student(_joint("flux"), None, 0.2, ("--encoders", "copy")),
    "flux": Student(_joint("flux"), PLAIN, 0.2, ("--encoders", "name")),
}


@pytest.fixture(scope="module")
def students(tmp_path_factory: pytest.TempPathFactory) -> Students:
    """The folder of a student's campaign, made when it is first asked for; its encoders lie beside it."""

    @cache
    def made(name: str) -> Path:
        student, folder = STUDENTS[name], tmp_path_factory.mktemp("student")
        data = {}
        if student.settings.get("condition") == "text":
            data["text_encoder"] = str(text_tower(folder / "text"))
        if student.vae is not None:
            data["vae"] = str(small_vae(folder / "vae", **student.vae))
        with_student(folder / "campaign", merged(student.settings, {"data": data}), student.std)
        return folder / "campaign"

    return made


@pytest.fixture(scope="module")
def pictures(students: Students, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray[Any, Any]]:
    """What README.md of every student's export draws, as it stands, in a process that has no Atoll."""
    folder = tmp_path_factory.mktemp("stranger")
    for name, student in STUDENTS.items():
        (folder / name).mkdir()
        exported = folder / name / "a student"
        argv = ["export", students(name), "--model", "student", "--to", exported, *student.export]
        cli.atoll.main([str(part) for part in argv], standalone_mode=False)
        text = (exported / "README.md").read_text()
        (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        (folder / name / "snippet.py").write_text(snippet)
        assert (exported / "picture.png").is_file() == ("--no-picture" not in student.export)
        assert (exported / "vae").exists() == (name == "nothing")
        assert name != "labels" or str(students(name).parent / "vae") in text
    program = """
import os, pathlib, sys
sys.modules["atoll"] = None  # whatever imports it fails
for path in sorted(pathlib.Path.cwd().glob("*/snippet.py")):
    os.chdir(path.parent)
    exec(compile(path.read_text(), path, "exec"), {"__name__": "stranger"})
"""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    call, env = [sys.executable, "-c", program], {**inherited, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(call, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = {name: Image.open(folder / name / "picture.png") for name in STUDENTS}
    return {name: np.asarray(file).astype(float) for name, file in files.items()}


def own_pictures(
    folder: Path, cond: Condition, null: Condition, vae: str, guidance: float = GUIDANCE
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Atoll's picture from the noise of the snippet's generator: Euler's, and at the stock one's times."""
    student = Checkpoint(Campaign.open(folder).store, "student/expert").expert()
    assert student.card is not None
    shape = student.card.shape
    noise = torch.randn(1, shape.channels, shape.size, shape.size, generator=torch.Generator().manual_seed(0))
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
@pytest.mark.parametrize("name", STUDENTS)
def test_a_student_runs_where_there_is_no_atoll(
    name: str, students: Students, pictures: dict[str, np.ndarray[Any, Any]]
) -> None:
    """In levels of 255: one from the loop at the same times, and a few from Euler's where its times differ.

    Prompt and empty text have other lengths, so padding that was seen would show.
    """
    folder, picture, student = students(name), pictures[name], STUDENTS[name]
    vae = "none" if student.vae is None else str(folder.parent / "vae")
    cond, null = Condition(), Condition()
    if name == "labels":
        cond, null = (Condition(labels=torch.tensor([label])) for label in (0, 2))
    elif name != "nothing":
        cond, null = prompt_and_null(str(folder.parent / "text"))
    euler, same = own_pictures(folder, cond, null, vae, 1.0 if name == "nothing" else GUIDANCE)
    assert picture.shape == euler.shape and picture.std() > 5
    if "network" not in student.settings or student.settings["network"]["family"] == "pixart":
        assert np.abs(picture - same).max() <= 1
        assert np.abs(picture - euler).max() <= 6 and np.abs(picture - euler).mean() <= 1.5
        return
    # Euler's times are those of `atoll sample`, so there is no more than a level of rounding between the two.
    assert np.abs(picture - euler).max() <= 1 and np.abs(picture - euler).mean() <= 0.05
    # It differs from a picture without the prompt, and from one that saw the padding of the empty text.
    states, mask = text_encoder(str(folder.parent / "text"), LENGTH).encode(["a prompt", ""])
    for others in ((null, null), (cond, Condition(text=states[1:], mask=torch.ones_like(mask[1:])))):
        assert np.abs(picture - own_pictures(folder, *others, vae)[0]).max() > 5


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", ["texts", "labels", "sd3", "flux in pixels"])
def test_a_student_of_few_steps_draws_the_same_in_its_stock_pipeline(
    name: str, steps: int, students: Students, tmp_path: Path
) -> None:
    """README's program draws what `atoll sample` does, to 1e-4, though the campaign samples otherwise."""
    folder, to = Path(shutil.copytree(students(name), tmp_path / "c")), tmp_path / "out"
    path = folder / "student/expert/card.json"
    sampling = {"steps": steps, "guidance": 1.0, "shift": SHIFT}
    card = {**json.loads(path.read_text()), "sampling": sampling}
    path.write_text(json.dumps(card))
    argv = ["export", folder, "--model", "student", "--to", to, "--no-picture", "--encoders", "copy"]
    cli.atoll.main([str(part) for part in argv], standalone_mode=False)
    (snippet,) = re.findall(r"```python\n(.*?)```", (to / "README.md").read_text(), re.DOTALL)
    # Numbers in place of the picture: latents, or of DiT's pipeline what they are decoded to.
    call = "    generator=torch.Generator()"
    program = snippet[: snippet.index("images = ")].replace('"out"', repr(str(to)))
    if "output_type" not in program:
        program = program.replace(call, f'    output_type="latent",\n{call}')
    drawn: dict[str, Any] = {"__name__": "stranger"}
    exec(compile(program, "README.md", "exec"), drawn)
    images = torch.as_tensor(drawn["result"].images)
    if "unpacked" in drawn:
        images = drawn["unpacked"](images, card["shape"]["size"])

    model = Model.load(Store.open(folder), "student", encoders=Campaign.open(folder).config.encoders)
    assert (model.generation.steps, model.generation.guidance) == (steps, 1.0)
    conditions = model.conditions(["0" if name == "labels" else "a prompt"])
    noise = torch.randn((1, *model.shape), generator=torch.Generator().manual_seed(0))
    (batch,) = model.generate(conditions, noise=noise)
    own = batch.latents
    if name == "labels":
        decoded = autoencoder(str(students(name).parent / "vae")).decode(own)
        own = (decoded / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)
    assert torch.allclose(images, own, atol=1e-4)
    # Of another number of steps it is another picture.
    (other,) = model.generate(conditions, model.generation.with_(steps=steps + 1), noise=noise)
    assert (other.latents - batch.latents).abs().max() > 1e-2
    assert f"trained for {steps} sampling steps" in (to / "README.md").read_text()


def test_a_student_of_few_steps_and_sizes_as_conditions_is_refused(
    students: Students, tmp_path: Path, run: Run
) -> None:
    """Sigma's pipeline, which takes its scheduler, passes none; a config that says null has them at 128."""
    folder = Path(shutil.copytree(students("texts"), tmp_path / "c"))
    card, config = (folder / "student/expert" / name for name in ("card.json", "config.json"))
    settings = {**json.loads(config.read_text()), "use_additional_conditions": True}
    config.write_text(json.dumps(settings))
    few = {"sampling": {"steps": 1, "guidance": 1.0, "shift": SHIFT}, "config_sha256": digest(settings)}
    card.write_text(json.dumps({**json.loads(card.read_text()), **few}))
    argv = ["export", folder, "--model", "student", "--to", tmp_path / "out"]
    refused(run(*argv), "PixArtSigmaPipeline", "export the ensemble")
    assert not (tmp_path / "out").exists()


def test_the_moved_null_label_is_the_same_network(students: Students, tmp_path: Path, run: Run) -> None:
    labels = students("labels")
    assert run("export", labels, "--model", "student", "--to", tmp_path / "out", "--no-picture").code == 0
    stock = diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "out/transformer")
    student = Checkpoint(Campaign.open(labels).store, "student/expert").expert()
    x, t = torch.randn(3, 4, 4, 4), torch.tensor([0.1, 0.5, 0.9])
    expected = student.velocity(x, t, Condition(labels=torch.tensor([0, 1, 2])))
    with torch.no_grad():
        found = stock(x, timestep=1000 * t, class_labels=torch.tensor([0, 1, 1000])).sample
    assert torch.equal(found, expected)
    index = json.loads((tmp_path / "out/model_index.json").read_text())
    assert index["_class_name"] == "DiTPipeline" and "text_encoder" not in index


def test_the_readme_tells_what_it_is(students: Students, tmp_path: Path, run: Run) -> None:
    texts, to = students("texts"), tmp_path / "out"
    argv = ["export", texts, "--model", "student", "--to", to, "--no-picture", "--licence", "MIT"]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    full = run(*argv)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    refused(full, "cannot write", "File too large: check free space")
    answer = run(*argv)
    assert answer.code == 0 and "PixArtAlphaPipeline" in answer.out, answer
    text = (to / "README.md").read_text()
    words = ["library_name: atoll", "license: mit", "distilled from the 1 experts", "T5EncoderModel"]
    for word in (*words, "lower case", "0" * 64):
        assert word in text, word
    assert run(*argv).code == 0  # over an earlier one
    refused(run("export", texts, "--to", to), "holds something else")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_what_diffusers_alone_loads_is_the_hubs_to_load(tmp_path: Path, run: Run) -> None:
    """The hub's program for such a model is these two calls."""
    blocks = {f"{way}_block_types": (f"{kind}Block2D",) * 4 for way, kind in WAYS.items()}
    vae = small_vae(tmp_path / "vae", **PLAIN, **blocks, block_out_channels=(4,) * 4)
    data = {"vae": str(vae), "text_encoder": str(text_tower(tmp_path / "text")), "ingest": {"size": 256}}
    with_student(tmp_path / "c", merged(TEXTS, {"data": data}))
    argv = ["export", tmp_path / "c", "--model", "student", "--to", tmp_path / "out", "--no-picture"]
    assert run(*argv, "--encoders", "copy").code == 0
    head = yaml.safe_load((tmp_path / "out/README.md").read_text().split("---\n")[1])
    assert head["library_name"] == "diffusers" and "diffusers" in head["tags"]
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(tmp_path / "out"), low_cpu_mem_usage=False)
    assert pipe("a red square", num_inference_steps=2).images[0].size == (256, 256)


def test_what_no_stock_pipeline_runs_is_refused_before_training(tmp_path: Path, run: Run) -> None:
    folder, patches = tmp_path / "c", {"network": {"family": "flux", "patch": 4}}
    write_campaign(folder, LABELS)
    refused(run("plan", folder), "DiTPipeline needs a VAE", "student.stock=false")
    write_campaign(folder, merged(TEXTS, patches))
    refused(run("plan", folder), "FluxPipeline makes patches of 2", "patch: 2", "student.stock=false")
    write_campaign(folder, merged(LABELS, {"data": {"vae": str(small_vae(tmp_path / "vae"))}}))
    refused(run("launch", folder), "shifts by 0.1159")
    assert not (folder / "partition/partition.json").exists()


def test_flux_of_other_patches_is_refused_by_the_export(tmp_path: Path, run: Run) -> None:
    changes = {"network": {"family": "flux", "patch": 4}, "student": {"stock": False}}
    tower = str(text_tower(tmp_path / "text"))
    with_student(tmp_path / "c", merged(TEXTS, merged(changes, {"data": {"text_encoder": tower}})))
    argv = ["export", tmp_path / "c", "--model", "student", "--to", tmp_path / "out"]
    refused(run(*argv), "the network's are of 4")
    assert not (tmp_path / "out").exists()


def test_models_that_are_not_there_or_no_flows_are_refused(
    students: Students, tmp_path: Path, run: Run
) -> None:
    texts, argv = students("texts"), ["--to", tmp_path / "out", "--no-picture"]
    refused(run("export", texts, "--model", "monolith", *argv), "no monolith yet")
    refused(run("export", texts, "--model", "student", "--experts", "0", *argv), "--experts")
    folder = Path(shutil.copytree(texts, tmp_path / "copy"))
    path = folder / "student/expert/card.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prediction": "eps"}))
    refused(run("export", folder, "--model", "student", *argv), "predicts eps")
    assert not (tmp_path / "out").exists()


def test_every_family_has_an_entry() -> None:
    assert set(STOCK) == set(FAMILIES)
    for stock in STOCK.values():
        takes = inspect.signature(getattr(diffusers, stock.limits.pipeline)).parameters
        assert {*stock.components.values(), *stock.empty, "transformer", "scheduler"} <= set(takes)
    with pytest.raises(ConfigError, match="no stock diffusers pipeline is known for the unet family"):
        limits_of("unet")


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("name", ["texts", "sd3"])
def test_a_prompt_may_be_longer_than_a_training_caption(
    name: str, students: Students, tmp_path: Path
) -> None:
    """Two prompts that differ beyond training's length: each has an image of its own."""
    folder, to = students(name), tmp_path / "out"
    argv = ["export", folder, "--model", "student", "--to", to, "--no-picture", "--encoders", "copy"]
    cli.atoll.main([str(part) for part in argv], standalone_mode=False)
    (snippet,) = re.findall(r"```python\n(.*?)```", (to / "README.md").read_text(), re.DOTALL)
    images = []
    for last in ("red", "green"):
        prompt = " ".join(["a"] * (2 * LENGTH) + [last])
        program = snippet.replace('"out"', repr(str(to))).replace('"a prompt"', repr(prompt))
        program = program.replace('"picture.png"', repr(str(tmp_path / f"{last}.png")))
        exec(compile(program, "README.md", "exec"), {"__name__": "stranger"})
        images.append(np.asarray(Image.open(tmp_path / f"{last}.png")).astype(int))
    assert (images[0] != images[1]).any()  # the same prompt twice gives equal bytes
