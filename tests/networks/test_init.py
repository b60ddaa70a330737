"""The published initialisation: everything starts as nothing, from one seed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from atoll.networks.families import family, initialise
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig
from helpers_networks import CLASSES, TEXT, TINY, conditions, noise

SHAPES = {"dit": CLASSES, "pixart": TEXT, "sd3": TEXT, "flux": TEXT}
POOLED = "time_text_embed.text_embedder.linear_1.weight"  # its input is zero without `pooled`
# Nobody looks at what the text of SD3's last block has seen, so nothing asks what it looked for.
UNASKED = {
    f"transformer_blocks.1.attn.{name}"
    for name in ("add_q_proj.weight", "add_q_proj.bias", "norm_added_q.weight")
}
UNUSED = {"dit": set(), "pixart": set(), "sd3": {POOLED, *UNASKED}, "flux": {POOLED}}


def fresh(name: str, seed: int = 0, depth: int = 2) -> torch.nn.Module:
    config = NetworkConfig.parse({**TINY, "family": name, "depth": depth}, "")
    network = family(name).build(config, SHAPES[name])
    initialise(network, seed)
    return network


def fresh_router(seed: int = 0, shape: DataShape = TEXT) -> Router:
    network = Router(4, 3, 8, 4, 2, 2, 8, shape.text_width, shape.classes)
    initialise(network, seed)
    return network


def weights(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in network.named_parameters()}


def test_outputs_and_logits_start_at_exactly_zero() -> None:
    t = torch.linspace(0, 1, 8)
    for name, shape in SHAPES.items():
        assert (family(name).predict(fresh(name), noise(8, shape), t, conditions(8, shape)) == 0).all()
    for shape in (TEXT, CLASSES):
        assert (fresh_router(0, shape)(noise(8), t, conditions(8, shape)) == 0).all()


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_block_of_dit_starts_as_the_identity(name: str) -> None:
    network: Any = fresh(name, depth=3)
    seen: list[torch.Tensor] = []
    for block in network.single_transformer_blocks if name == "flux" else network.transformer_blocks:
        if name in ("sd3", "flux"):
            block.register_forward_hook(
                lambda m, args, kw, out: seen.extend([kw["hidden_states"], out[1]]), with_kwargs=True
            )
        else:
            block.register_forward_hook(lambda m, args, out: seen.extend([args[0], out]))
    family(name).predict(network, noise(8, SHAPES[name]), torch.rand(8), conditions(8, SHAPES[name]))
    assert len(seen) == 6
    if name in ("dit", "sd3", "flux"):
        assert all(torch.equal(seen[0], later) for later in seen[1:])
    else:  # PixArt's gates come from a table that is not zero; its cross-attention starts at nothing
        for block in network.transformer_blocks:
            assert (block.attn2.to_out[0].weight == 0).all()


@pytest.mark.parametrize("make", [*(functools.partial(fresh, name) for name in SHAPES), fresh_router])
def test_the_seed_alone_decides(make: Callable[[int], torch.nn.Module]) -> None:
    """Neither torch's generator nor what was in the weights before: nothing of its initialisation stays."""
    torch.manual_seed(1)
    first = weights(make(3))
    torch.manual_seed(2)
    network, other = make(3), weights(make(4))
    assert all(torch.equal(first[n], p) for n, p in network.named_parameters())
    assert any(not torch.equal(first[n], other[n]) for n in first)
    with torch.no_grad():
        for p in network.parameters():
            p.fill_(7.0)
    initialise(network, 3)
    assert all(torch.equal(first[n], p) for n, p in network.named_parameters())


def test_scales_are_those_of_the_papers() -> None:
    """Xavier for matrices, N(0, 0.02) for embeddings and the time embedder, zero biases."""
    config = NetworkConfig(family="dit", size="nano", patch=2)
    network = family("dit").build(config, DataShape(4, 32, classes=1000))
    initialise(network, 0)
    parts = weights(network)
    feed = parts["transformer_blocks.0.ff.net.0.proj.weight"]
    bound = (6 / sum(feed.shape)) ** 0.5
    assert float(feed.abs().max()) <= bound and float(feed.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    embedding = next(p for n, p in parts.items() if "class_embedder" in n)
    assert float(embedding.std()) == pytest.approx(0.02, rel=0.05)
    time = next(p for n, p in parts.items() if n.endswith("timestep_embedder.linear_1.weight"))
    assert float(time.std()) == pytest.approx(0.02, rel=0.05)
    assert all((p == 0).all() for n, p in parts.items() if n.endswith("bias"))
    patch = parts["pos_embed.proj.weight"].flatten(1)
    assert float(patch.abs().max()) <= (6 / sum(patch.shape)) ** 0.5


def test_scales_of_pixart_and_the_router() -> None:
    """arXiv 2310.00426's code: N(0, 0.02) for time, its modulation, and the captions' projection."""
    network = family("pixart").build(NetworkConfig(), DataShape(4, 32, text_width=64, text_length=9))
    initialise(network, 0)
    routing = Router(8, 3, 16, 4, 2, 4, 32, caption_channels=64)
    initialise(routing, 0)
    for parts in (weights(network), weights(routing)):
        for name in ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "adaln_single.linear"):
            (found,) = [p for n, p in parts.items() if n.endswith(f"{name}.weight")]
            assert float(found.std()) == pytest.approx(0.02, rel=0.05)
        assert float(parts["caption_projection.linear_1.weight"].std()) == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_weight_learns_within_a_few_steps(name: str) -> None:
    """Zero gates open: after some steps of the real objective every parameter has had a gradient."""
    network, shape = fresh(name), SHAPES[name]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    moved: set[str] = set()
    for step in range(4):
        out = family(name).predict(network, noise(8, shape, step), torch.rand(8), conditions(8, shape, step))
        (out - noise(8, shape, 50 + step)).square().mean().backward()
        moved |= {
            n for n, p in network.named_parameters() if p.grad is not None and float(p.grad.abs().max()) > 0
        }
        optimizer.step()
        optimizer.zero_grad()
    assert set(dict(network.named_parameters())) - moved == UNUSED[name]
