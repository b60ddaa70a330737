"""What must hold on a GPU: families train and go on, routings draw, a campaign goes the whole way.

`make test-gpu` runs these; elsewhere GPUs are hidden from the tests (see conftest.py) and these skip.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.device import own_device
from atoll.base.preemption import Interrupted
from atoll.campaign.folder import Campaign
from atoll.campaign.plan import OVERHEAD, denoiser_footprint, mode
from atoll.data.samples import data_shape
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.encoders.vision import vision_encoder
from atoll.model import replay
from atoll.model.card import Card
from atoll.model.generation import Generation, Residency
from atoll.model.model import Model
from atoll.serve.engine import READY, Drawn, Engine, Event, Job
from atoll.serve.metrics import Metrics
from atoll.serve.settings import ServeSettings
from atoll.train.run import train_run
from helpers import Run, assembled, metrics, partitioned, until
from helpers_extractors import save_dinov2, save_pictures

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or hidden: run `make test-gpu`"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
# What `make test-pretended` runs too: all but what takes long there, or needs numbers of a real GPU.
both = pytest.mark.pretended
ROUTINGS = ["top-1", "top-2", "full", "once", "nucleus(0.9)", "sample-2", "threshold(0.2)", "top-1 every 2"]
STEPS = {"log_every": 1, "validations": 2, "previews": 1}


def changes(family: str, encoders: dict[str, Any], **train: Any) -> dict[str, Any]:
    settings = {"network": {"family": family}, "train": {**STEPS, **train}}
    if family == "dit":
        return settings
    return {**settings, "condition": "text", "data": {**encoders, "ingest": {"size": 16}}}


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in metrics(run) if "loss" in line]


@pytest.mark.parametrize(
    "parallel",
    [pytest.param({}, marks=both), {"checkpointing": True}, {"compile": True}, {"micro_batch": 5}],
    ids=str,
)
@pytest.mark.parametrize("family", ["dit", "pixart", "sd3", "flux"])
def test_a_family_trains(
    family: str, parallel: dict[str, Any], encoders: dict[str, Any], tmp_path: Path
) -> None:
    campaign = partitioned(tmp_path / "c", changes(family, encoders, parallel=parallel))
    card = train_run(campaign, "expert", 0)
    assert isinstance(card, Card)
    found = losses(tmp_path / "c/islands/0")
    assert len(found) == card.samples // card.batch and all(map(math.isfinite, found))
    assert sum(found[-3:]) < sum(found[:3])


@pytest.mark.parametrize("family", ["dit", "pixart"])
def test_a_run_that_was_told_to_leave_goes_on_as_if_it_had_not(
    family: str, encoders: dict[str, Any], tmp_path: Path, told_to_leave: Any
) -> None:
    train_run(partitioned(tmp_path / "whole", changes(family, encoders)), "expert", 0)
    parts = partitioned(tmp_path / "parts", changes(family, encoders))
    told_to_leave(7)
    with pytest.raises(Interrupted):
        train_run(parts, "expert", 0)
    train_run(parts, "expert", 0)
    ways = [losses(folder / "islands/0") for folder in (tmp_path / "whole", tmp_path / "parts")]
    # Kernels of a GPU may sum in another order, so this is not to the bit.
    assert ways[0] == pytest.approx(ways[1], rel=0.02)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign of three experts of class labels, a monolith and the network of shared pretraining."""
    settings = {
        "partition": {"k": 3},
        "budget": {"samples": 960, "pretrain": 0.2},
        "compare": {"strategies": ["top-1", "once", "full", "oracle"], "extractor": "pixels"},
        "diagnose": {"rows": 40, "samples": 8, "probed": 4, "extractor": "pixels"},
    }
    made = assembled(tmp_path_factory.mktemp("gpu") / "letters", settings)
    train_run(Campaign.open(made), "monolith")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder, device=own_device())


def pixels(model: Model, **how: Any) -> torch.Tensor:
    generation = Generation(**{"steps": 4, "guidance": 2.0, "seed": 1, **how})
    batches = model.generate(model.conditions(["0", "1", "0"], each=2), generation)
    return torch.cat([batch.latents.float().cpu() for batch in batches])


FLOAT32 = Residency(dtype="float32")


@both
@pytest.mark.parametrize("routing", [*ROUTINGS, "once null sample-1", "once null pretrain"])
def test_every_routing_draws_what_the_cpu_draws(routing: str, folder: Path) -> None:
    drawn = pixels(Model.load(folder, residency=FLOAT32, device=own_device()), routing=routing)
    expected = pixels(Model.load(folder, device="cpu"), routing=routing)
    # Products are in TF32, and where the router nearly ties, rounding decides: so most rows agree, not all.
    near = (drawn - expected).abs().amax(dim=(1, 2, 3)) < 0.1
    assert near.float().mean() >= 0.5, (drawn - expected).abs().amax(dim=(1, 2, 3))


@both
def test_networks_are_in_bf16_unless_the_settings_say_otherwise(folder: Path, model: Model) -> None:
    kinds = {p.dtype for expert in model.bank.experts for p in expert.network.parameters()}  # type: ignore[union-attr,attr-defined]
    assert kinds == {torch.bfloat16}
    short, whole = pixels(model), pixels(Model.load(folder, residency=FLOAT32, device=own_device()))
    assert not torch.equal(short, whole) and (short - whole).abs().median() < 0.05


@pytest.mark.parametrize("residency", [{}, {"prefetch": False}, {"host_experts": 1}], ids=str)
@pytest.mark.parametrize("routing", [pytest.param("once", marks=both), "top-2", "full"])
def test_experts_that_come_and_go_draw_the_same(
    routing: str, residency: dict[str, Any], model: Model, folder: Path
) -> None:
    one = Model.load(folder, residency=Residency(experts=1, **residency), device=own_device())
    assert torch.allclose(pixels(one, routing=routing), pixels(model, routing=routing), atol=0.02)


@pytest.mark.parametrize("residency", [{}, {"experts": 1}], ids=str)
def test_recorded_calls_draw_what_calls_draw(
    residency: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, record = list[Any](), replay.record
    monkeypatch.setattr(replay, "record", lambda run: made.append(run) or record(run))
    recorded = Model.load(folder, residency=Residency(**residency), device=own_device())
    first, *others = (pixels(recorded, routing="top-2", steps=6) for _ in range(3))
    count = len(made)
    monkeypatch.setattr(replay, "MOST", 0)  # nothing is kept, so nothing comes twice
    called = pixels(Model.load(folder, device=own_device()), routing="top-2", steps=6)
    assert count and len(made) == count
    for drawn in (first, *others):
        assert torch.allclose(drawn, called, atol=0.02)


@both
def test_a_student_learns_from_the_ensemble(tmp_path: Path) -> None:
    student = {"teacher": "routed", "routing": "top-1", "stock": False, "reuse": 2}
    campaign = partitioned(tmp_path / "c", {"student": student, "train": STEPS})
    for role, number in [("expert", 0), ("expert", 1), ("router", None), ("student", None)]:
        train_run(campaign, role, number)
    assert all(map(math.isfinite, losses(tmp_path / "c/student")))


# `oracle` is among the rows of `compare`: its labels once lay on the CPU, the router's logits on the GPU.
COMMANDS = [
    "sample {} 0 1 --out {}/sheet.png",
    "sample {} 0 --model monolith --out {}/sheet.png",
    "compare {}",
    "diagnose {}",
    "evaluate {} --samples 40 --split train --extractor pixels --metrics frechet,kid,precision,recall",
    "report {}",
    "export {} --to {}-exported",
]


@both
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_a_command_on_a_finished_campaign(command: str, folder: Path, run: Run) -> None:
    answer = run(*[word.format(folder) for word in command.split()])
    assert answer.code == 0, answer


@both
def test_served_pictures_are_the_models_own(folder: Path) -> None:
    """Requests that share a batch draw what each draws alone, within rounding."""
    events: dict[int, list[Event]] = {}

    def drawn(way: Generation) -> list[Drawn]:
        return [event for event in events[way.seed] if isinstance(event, Drawn) and event.index is None]

    engine = Engine({"ensemble": lambda: Model.load(folder, device=own_device())}, ServeSettings(), Metrics())
    engine.start()
    try:
        until(lambda: engine.state not in ("loading", "warming"))
        assert engine.state == READY, engine.error
        ways = [Generation(steps=steps, guidance=2.0, seed=steps) for steps in (3, 4, 5, 6)]
        for way in ways:
            engine.submit(Job("ensemble", ("1",), way, events.setdefault(way.seed, []).append, count=2))
        until(lambda: all(len(drawn(way)) == 2 for way in ways))
    finally:
        engine.drain(0)
    model = Model.load(folder, device=own_device())
    for way in ways:
        images = [event.image for event in drawn(way)]
        for mine, other in zip(images, model(["1"], 2, way).images, strict=True):
            assert np.median(np.abs(np.asarray(mine, np.int16) - np.asarray(other, np.int16))) <= 8


@both
def test_captions_and_pictures_are_encoded_as_on_the_cpu(encoders: dict[str, Any], tmp_path: Path) -> None:
    pictures = [
        Image.open(path).copy() for path in sorted(save_pictures(tmp_path / "p", 5, size=32).iterdir())
    ]
    judge = str(save_dinov2(tmp_path / "dino"))
    for make in (
        lambda device: vision_encoder(judge, device=device).encode(pictures),
        lambda device: autoencoder(encoders["vae"], device).encode(pictures),
        lambda device: text_encoder(encoders["text_encoder"], 8, device).encode(["a red square", ""])[0],
    ):
        assert torch.allclose(make("cuda"), make("cpu"), atol=0.02)


def test_memory_of_a_step_is_what_the_plan_says(tmp_path: Path) -> None:
    """A DiT-S in bf16 at a batch of 64: the plan is an upper bound, and not twice what is needed."""
    network = {"family": "dit", "size": "S", "patch": 1, "depth": 12, "heads": 6, "head_width": 64}
    train = {**STEPS, "batch": 64, "validations": 0, "previews": 0}
    campaign = partitioned(tmp_path / "c", {"network": network, "train": train})
    counted = denoiser_footprint(campaign.config.network, data_shape(campaign.dataset(), "class"), True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train_run(campaign, "expert", 0)
    used = torch.cuda.max_memory_allocated() - before
    assert 0.6 < used / (mode(counted, 1, 64).total - OVERHEAD) < 1.05
