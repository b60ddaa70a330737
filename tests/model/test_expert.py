"""Experts: conversion at their edge, and publication."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.base.errors import PartitionError, StoreError
from atoll.model.card import WEIGHTS, Card, check_together
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.generation import Residency
from atoll.model.residency import ResidentExperts
from atoll.networks.families import FAMILIES, family, kept_buffers
from atoll.store.store import Conflict, Store
from helpers_networks import CLASSES, TEXT, card, conditions, denoiser, expert, noise, router

B = 8


def test_a_velocity_expert_is_its_network() -> None:
    e, x, t, cond = expert(0), noise(B), torch.linspace(0, 1, B), conditions(B)
    network = e.network(
        x, encoder_hidden_states=cond.text, encoder_attention_mask=cond.mask, timestep=1000 * t
    ).sample
    assert torch.equal(e.velocity(x, t, cond), network[:, :3])


def test_an_eps_expert_on_the_cosine_schedule_is_asked_at_its_own_time_and_scale() -> None:
    """`paper.md`, section 2: find tau of equal SNR, scale by alpha(tau) / (1 - t), then turn eps into v."""
    e = expert(1, prediction="eps", schedule="vp-cosine")
    x, t, cond = noise(B), torch.linspace(0.05, 0.95, B), conditions(B)
    tau = torch.atan(t / (1 - t)) * 2 / torch.pi
    alpha, one = torch.cos(torch.pi / 2 * tau).view(-1, 1, 1, 1), (1 - t).view(-1, 1, 1, 1)
    eps = family("pixart").predict(e.network, alpha / one * x, tau, cond)
    torch.testing.assert_close(e.velocity(x, t, cond), (eps - x) / one, rtol=1e-4, atol=5e-4)
    naive = family("pixart").predict(e.network, x, t, cond)  # neither re-timed nor re-scaled
    assert float(((naive - x) / one - e.velocity(x, t, cond)).abs().max()) > 0.1


def test_of_pixels_an_eps_expert_says_what_pixels_can_be() -> None:
    e, x, cond = expert(1, prediction="eps", schedule="vp-cosine"), noise(B), conditions(B)
    t = torch.linspace(0.5, 1, B)
    of_vae = {"name": "sd-vae", "hash": "1", "shift": 0.0, "scale": 0.18}
    wild = e.velocity(x, t, cond)
    assert torch.equal(replace(e, card=card(latents=of_vae)).velocity(x, t, cond), wild)
    own = replace(e, card=card())
    held = own.velocity(x, t, cond)
    reached = [x - t.view(-1, 1, 1, 1) * v for v in (wild, held)]
    assert float(reached[0].abs().max()) > 10 and float(reached[1].abs().max()) <= 1 + 1e-4
    assert torch.equal(replace(e, bound=1.0).velocity(x, t, cond), held), "a preview has no card yet"
    assert torch.equal(replace(own, card=None).velocity(x, t, cond), wild)
    inside = reached[0].abs() < 1
    torch.testing.assert_close(held[inside], wild[inside])
    flow = expert(0)
    assert torch.equal(replace(flow, card=card()).velocity(x, t, cond), flow.velocity(x, t, cond))


# Publication.


def write(store: Store) -> None:
    network = denoiser(3, CLASSES)
    Checkpoint(store, "a").write(network, dict(network.named_parameters()), card())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_published_expert_comes_back_in_all_of_its_forms(name: str, tmp_path: Path) -> None:
    shape = CLASSES if name == "dit" else TEXT
    store, e = Store.open(tmp_path), Expert(denoiser(0, shape, name=name), name, "v", "rectified-flow")
    weights = dict(e.network.named_parameters()) | kept_buffers(e.network)
    own = card(family=name, shape=vars(shape))
    assert not Checkpoint(store, "a").published
    Checkpoint(store, "a").write(e.network, weights, own)
    assert Checkpoint(store, "a").published
    x, t, cond = noise(B, shape), torch.linspace(0, 1, B), conditions(B, shape)
    back, expected = Checkpoint(store, "a").expert(), e.velocity(x, t, cond)
    assert torch.equal(back.velocity(x, t, cond), expected)
    assert not any(p.requires_grad for p in back.network.parameters()) and not back.network.training
    resident = ResidentExperts([Checkpoint(store, "a").open_lazily()], Residency(experts=1))
    assert torch.equal(resident[0].velocity(x, t, cond), expected)
    theirs = family(name).network_class().from_pretrained(tmp_path / "a")  # diffusers reads it too
    assert {n: v.shape for n, v in theirs.state_dict().items()} == {n: v.shape for n, v in weights.items()}
    assert all(torch.equal(v, weights[n]) for n, v in theirs.state_dict().items())
    with pytest.raises(Conflict, match=r"card\.json exists already"):
        Checkpoint(store, "a").write(e.network, weights, own)


def test_a_published_router_comes_back(tmp_path: Path) -> None:
    store, network = Store.open(tmp_path), router(1, 3)
    weights = dict(network.named_parameters())
    Checkpoint(store, "r").write(network, weights, card(role="router", island=None, shape=vars(TEXT)))
    x, t, cond = noise(B), torch.linspace(0, 1, B), conditions(B)
    assert torch.equal(Checkpoint(store, "r").router().logits(x, t, cond), network(x, t, cond))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1] + bytes([p.read_bytes()[-1] ^ 1])), "not what its card"),
        (lambda p: p.write_bytes(p.read_bytes()[:-8]), "not what its card|bytes instead of"),
        (lambda p: p.write_bytes(b"\x80\x04"), "not what its card|is damaged"),
        (lambda p: p.write_bytes(b"\xff" * 64), "not what its card|is damaged"),
        (lambda p: p.write_bytes((9).to_bytes(8, "little") + b'{"a": [1]}'), "not what its card|is damaged"),
        (lambda p: p.unlink(), "is missing"),
    ],
    ids=["flipped", "torn", "pickle", "foreign", "header", "missing"],
)
@pytest.mark.parametrize("read", [Checkpoint.expert, Checkpoint.open_lazily], ids=["whole", "in place"])
def test_weights_that_are_not_those_of_the_card_are_refused(read, harm, message: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    write(store)
    harm(tmp_path / "a" / WEIGHTS)
    with pytest.raises(StoreError, match=message):
        read(Checkpoint(store, "a"))


def test_a_card_of_another_schema_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    write(store)
    path = tmp_path / "a/card.json"
    other = json.dumps({**json.loads(path.read_text()), "format": "atoll/card 99"})
    for text, message in ((other, "is of atoll/card 99, this"), ("{", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(StoreError, match=message):
            _ = Checkpoint(store, "a").card


# What belongs together.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("partition", "q" * 64),
        ("latents", {"name": "sd-vae", "hash": "1", "shift": 0.0, "scale": 0.18}),
        ("latents", {"name": "none", "hash": "", "shift": 0.0, "scale": 0.5}),
        ("text", {"name": "minilm", "hash": "1", "max_length": 20}),
        ("condition", "none"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(field: str, value: object) -> None:
    parts: list[Card] = [card(), card(role="router", island=None), card(island=2, **{field: value})]
    with pytest.raises(PartitionError, match=f"expert 2 was made with another {field} than expert 0"):
        check_together(parts)
    check_together(parts[:2])
