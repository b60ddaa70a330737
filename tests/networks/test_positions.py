"""Positions at another size: interpolated by each family's own means, and equal to the bit at scale 1."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.networks.families import FAMILIES, family
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig
from helpers_networks import random_weights

TINY = {"patch": 2, "depth": 1, "heads": 2, "head_width": 8}
NAMES = [*FAMILIES, "router"]


def network(name: str, size: int, scale: float | None, sizes: tuple[tuple[int, int], ...] = ()) -> nn.Module:
    """A tiny network for latents of this size, with random weights that do not depend on it."""
    config = NetworkConfig.parse(
        {**TINY, "family": "pixart" if name == "router" else name, "interpolation_scale": scale}, "a test"
    )
    shape = DataShape(4, size, 0 if name == "dit" else 8, 3, 5 if name == "dit" else 0, sizes=sizes)
    if name == "router":
        return random_weights(Router(2, 4, config.base_size(size, 2), attention_head_dim=8), 1)
    return random_weights(family(name).build(config, shape), 1)


def positions(name: str, made: Any, height: int, width: int) -> Tensor:
    """What tells patches of zeros apart, `(rows, columns, D)`: embedded positions, or Flux's rotary ones."""
    if name != "flux":
        embed = made.pos_embed
        with torch.no_grad():
            embed.proj.bias.zero_()
            return embed(torch.zeros(1, 4, height, width))[0].unflatten(0, (height // 2, width // 2))
    seen: list[Tensor] = []
    hook = made.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["img_ids"]), with_kwargs=True
    )
    cond = Condition(text=torch.zeros(1, 3, 8))
    family(name).predict(made, torch.zeros(1, 4, height, width), torch.ones(1), cond)
    hook.remove()
    return seen[0].unflatten(0, (height // 2, width // 2))


@pytest.mark.parametrize("name", NAMES)
def test_a_grid_twice_as_fine_meets_the_same_positions_at_even_indices(name: str) -> None:
    coarse = positions(name, network(name, 8, None), 8, 8)
    fine = positions(name, network(name, 16, 2), 16, 16)
    torch.testing.assert_close(fine[::2, ::2], coarse, rtol=0, atol=1e-6)
    assert (fine[1, 1] - fine[0, 0]).abs().max() > 1e-3
    # Not interpolated, the square of before lies within the new one; only SD3's published table moves it.
    further = positions(name, network(name, 16, 1), 16, 16)
    torch.testing.assert_close(further[:4, :4], coarse, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_network_at_scale_1_has_the_positions_of_its_class(name: str) -> None:
    plain = network(name, 8, None)
    assert torch.equal(positions(name, plain, 8, 8), positions(name, network(name, 8, 1), 8, 8))
    if name not in ("flux", "router"):
        stock = family(name).network_class().from_config(dict(plain.config))  # type: ignore[attr-defined, operator]
        assert torch.equal(stock.pos_embed.pos_embed, plain.pos_embed.pos_embed)  # type: ignore[union-attr]


def test_sd3_goes_on_beyond_its_square_at_both_ends() -> None:
    """A square campaign's positions are inside, whatever the longest side is."""
    square = positions("sd3", network("sd3", 8, None), 8, 8)
    sizes = ((8, 8), (4, 16), (16, 4))
    made = network("sd3", 8, None, sizes)
    torch.testing.assert_close(positions("sd3", made, 8, 8), square, rtol=0, atol=0)
    wide = positions("sd3", made, 4, 16)
    torch.testing.assert_close(wide[:, 2:6], square[1:3], rtol=0, atol=0)
    twice = network("sd3", 16, 2, tuple((2 * h, 2 * w) for h, w in sizes))
    torch.testing.assert_close(positions("sd3", twice, 8, 32)[::2, ::2], wide, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_holds_its_scale(name: str, tmp_path: Path) -> None:
    made = network(name, 16, 2)
    made.save_pretrained(tmp_path)  # type: ignore[operator]
    again: Any = family(name).load(json.loads((tmp_path / "config.json").read_text()))
    again.load_state_dict(made.state_dict())
    assert torch.equal(positions(name, again, 16, 16), positions(name, made, 16, 16))
    if name != "flux":  # the class itself reads it so
        stock: Any = family(name).network_class().from_pretrained(tmp_path)  # type: ignore[attr-defined]
        assert torch.equal(positions(name, stock, 16, 16), positions(name, made, 16, 16))
