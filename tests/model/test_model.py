"""A model as one object: one seed is one picture everywhere, and no guidance without a condition."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.campaign.folder import Campaign
from atoll.export.ensemble import ExportRequest, export_campaign
from atoll.export.pipeline import AtollPipeline
from atoll.model import model as model_module
from atoll.model.checkpoint import Checkpoint
from atoll.model.generation import Generation, Residency
from atoll.model.model import Model
from atoll.model.routing import STRATEGIES, Routing, Strategy
from helpers import assembled, command

K, SEED, EACH = 3, 7, 2


@pytest.fixture(scope="module", params=["class", "none"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign of class labels, and an unconditional one, both with a time shift."""
    settings = {"condition": request.param, "partition": {"k": K}, "budget": {"samples": 320}}
    settings["sampling"] = {"shift": 3.0}
    return assembled(tmp_path_factory.mktemp("model") / request.param, {**settings, "monolith": False})


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model.load(folder)


def prompts(model: Model) -> list[str]:
    return ["0", "1"] if model.card.condition == "class" else []


def drawn(model: Model, **changes: object) -> list[Image.Image]:
    each = EACH if prompts(model) else 2 * EACH
    return model(prompts(model), each, **{"seed": SEED, **changes}).images  # type: ignore[arg-type]


def same(images: list[Image.Image], expected: list[Image.Image]) -> None:
    """But for rounding: other batches give matrix products whose sums are taken in another order."""
    assert len(images) == len(expected)
    for one, other in zip(images, expected, strict=True):
        assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1


def of_pipeline(folder: Path, model: Model, routing: str) -> list[Image.Image]:
    pipe = AtollPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    call: dict[str, object] = {"num_images_per_prompt": 2 * EACH}
    if prompts(model):
        call = {"num_images_per_prompt": EACH, "class_labels": [int(label) for label in prompts(model)]}
    return list(pipe(**call, generator=torch.Generator().manual_seed(SEED), routing=routing).images)


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    request = ExportRequest(to=tmp_path_factory.mktemp("exported") / "out", picture=False)
    return Path(export_campaign(Campaign.open(folder), request))


@pytest.mark.parametrize("routing", ["full", "once null sample-1"])
def test_one_seed_is_one_picture_everywhere(
    routing: str,
    folder: Path,
    exported: Path,
    model: Model,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = drawn(model, routing=routing)
    others = drawn(model, routing=routing, seed=SEED + 1)
    assert all(one.tobytes() != other.tobytes() for one, other in zip(expected, others, strict=True))
    unshifted = drawn(model, routing=routing, shift=1.0)
    assert any(one.tobytes() != other.tobytes() for one, other in zip(expected, unshifted, strict=True))
    same(drawn(model, routing=routing, batch=3), expected)
    same(drawn(Model.load(folder, residency=Residency(experts=1)), routing=routing), expected)
    same(drawn(Model.load(exported), routing=routing), expected)
    assert Model.load(exported).generation.shift == 3
    for pipeline in (folder / "ensemble", exported):
        same(of_pipeline(pipeline, model, routing), expected)
    sheets: list[list[Image.Image]] = []
    grid = model_module.Pictures

    def watched(images: list[Image.Image], *rest: object) -> object:
        sheets.append(images)
        return grid(images, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(model_module, "Pictures", watched)
    count = EACH if prompts(model) else 2 * EACH
    options = ["--routing", routing, "--seed", str(SEED), "--count", str(count)]
    answer = command(capsys, "sample", folder, *prompts(model), *options, "--out", tmp_path / "sheet.png")
    assert answer.code == 0 and (tmp_path / "sheet.png").is_file()
    same(sheets[0], expected)


@pytest.mark.parametrize("routing", ["full", "once null sample-1"])
def test_only_a_condition_is_paid_for_twice(routing: str, model: Model) -> None:
    """Without one both branches are the same: one is evaluated, and guidance changes no picture."""
    rows = model.conditions(prompts(model), each=4)
    guided, plain = (
        list(model.generate(rows, Generation(steps=3, guidance=scale, routing=routing)))
        for scale in (2.0, 1.0)
    )
    calls = [
        [sum(getattr(part.trace, name) for part in parts) for parts in (guided, plain)]
        for name in ("expert_calls", "router_calls")
    ]
    equal = [torch.equal(a.latents, b.latents) for a, b in zip(guided, plain, strict=True)]
    if model.card.condition == "none":
        assert all(equal) and all(both[0] == both[1] for both in calls)
    else:
        assert not any(equal) and calls[0][0] == 2 * calls[0][1]


def likeliest(logits: Tensor, uniforms: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]).float()


def test_a_function_of_the_users_own_is_a_routing(model: Model) -> None:
    same(drawn(model, routing=likeliest), drawn(model, routing="top-1"))
    assert str(Generation(routing=likeliest).routing) == "likeliest"
    with pytest.raises(ConfigError, match="weights that do not sum to 1: normalise them"):
        drawn(model, routing=lambda logits, uniforms: logits.exp())
    with pytest.raises(ConfigError, match=r"gave no weights of shape \(4, 3\)"):
        drawn(model, routing=lambda logits, uniforms: logits.argmax(1))


def test_a_new_strategy_is_one_entry(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def weakest(routing: Routing, p: Tensor, uniforms: Tensor) -> Tensor:
        return torch.zeros_like(p).scatter(1, p.argmin(1, keepdim=True), 1)

    entry = Strategy("weakest", lambda r: "the least likely expert", weakest, experts=lambda r: 1)
    monkeypatch.setitem(STRATEGIES, "weakest", entry)
    routing = Routing.named("weakest every 2 null weakest")
    assert str(routing) == "weakest every 2 null weakest" and routing.experts_per_step(K) == 1
    assert Routing.named("once null pretrain").describe().endswith("the network of shared pretraining")
    assert routing.describe().startswith("the least likely expert, asked every 2 steps; ")
    assert [one.tobytes() for one in drawn(model, routing="weakest")] != [
        one.tobytes() for one in drawn(model, routing="top-1")
    ]


def test_prompts_that_do_not_fit_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("weights were read"))
    model = Model.load(folder)
    if model.card.condition == "none":
        wrong = {"this model is unconditional: leave the prompts out": ["0"]}
    else:
        wrong = {
            r"needs prompts \(class\)": [],
            "'9' is no class label: give a number from 0 to 1": ["0", "9"],
        }
    for message, given in wrong.items():
        with pytest.raises(ConfigError, match=message):
            model(given)
