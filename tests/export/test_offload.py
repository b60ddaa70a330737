"""A pipeline whose experts are brought to the device within a budget."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import AtollPipeline, Residency
from atoll.base.errors import ConfigError
from atoll.export.bank import ExpertBank
from helpers_export import LABELS, expert, generators, load, pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pipeline(k=4).save_pretrained(folder)
    return folder


def draw(pipe: AtollPipeline, routing: str) -> Any:
    call = {"class_labels": [0, 1, 2, 3] * 3, "generator": generators(12), "output_type": "latent"}
    return pipe(routing=routing, **call)


@pytest.mark.parametrize("routing", ["once", "top-1", "full"])
@pytest.mark.parametrize("budget", [{"experts": 1}, {"experts": 1, "prefetch": False}, {"experts": 3}])
def test_the_same_pictures_to_the_bit(saved: Path, routing: str, budget: dict[str, Any]) -> None:
    pipe, plain = load(saved, residency=Residency(**budget)), load(saved)
    made, expected = draw(pipe, routing), draw(plain, routing)
    assert torch.equal(made.images, expected.images)
    assert torch.equal(made.routing.stacked(), expected.routing.stacked())
    assert 0 < len(pipe.experts.resident().resident) <= budget["experts"] + budget.get("prefetch", True)
    assert not list(pipe.experts.parameters())
    trace = expected.routing
    assert trace.router_flops == trace.router_calls * plain.card.forward_flops
    assert 0 < trace.router_flops < trace.expert_flops


@pytest.mark.parametrize("residency", [None, Residency(experts=1)])
def test_with_the_offloading_of_diffusers(saved: Path, residency: Residency | None) -> None:
    """Also where the bank has no parameter that its hooks could ask for the device."""
    pipe = load(saved, residency=residency)
    pipe.enable_model_cpu_offload(device="cpu")
    assert torch.equal(draw(pipe, "top-1").images, draw(load(saved), "top-1").images)


def test_a_type_of_numbers(saved: Path, tmp_path: Path) -> None:
    budget = Residency(experts=1)
    whole = draw(load(saved, torch_dtype=torch.bfloat16), "top-1").images
    pipe = load(saved, torch_dtype=torch.bfloat16, residency=budget)
    assert pipe.experts.dtype == torch.bfloat16
    assert torch.equal(draw(pipe, "top-1").images, whole)
    pipe.save_pretrained(tmp_path)
    again = load(tmp_path, residency=budget)
    assert again.experts.dtype == torch.bfloat16 and torch.equal(draw(again, "top-1").images, whole)


def test_saved_again_the_files_are_the_same(saved: Path, tmp_path: Path) -> None:
    load(saved, residency=Residency(experts=1)).save_pretrained(tmp_path)
    for file in saved.rglob("*"):
        if file.is_file():
            assert (tmp_path / file.relative_to(saved)).read_bytes() == file.read_bytes(), file
    with pytest.raises(ConfigError, match=r"residency\.bytes is 10, and an expert takes"):
        load(saved, residency=Residency(bytes=10))


def test_experts_come_and_go(saved: Path) -> None:
    pipe = load(saved, experts=[0, 1], residency=Residency(experts=1))
    pipe.experts.add(saved / "experts/3")
    assert pipe.experts.present == (0, 1, 3)
    assert torch.equal(draw(pipe, "top-1").images, draw(load(saved, experts=[0, 1, 3]), "top-1").images)
    pipe.experts.drop(0)
    assert torch.equal(draw(pipe, "full").images, draw(load(saved, experts=[1, 3]), "full").images)


def test_experts_that_are_in_memory(saved: Path) -> None:
    bank = ExpertBank({number: expert(number, LABELS) for number in range(4)}, 4, Residency(experts=1))
    pipe = load(saved)
    offloaded = AtollPipeline(bank, pipe.router, pipe.scheduler, num_inference_steps=4)
    offloaded.set_progress_bar_config(disable=True)
    assert torch.equal(draw(offloaded, "top-1").images, draw(pipe, "top-1").images)
