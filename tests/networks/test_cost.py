"""Operations, counted on the meta device: by hand, and against torch's counter on the CPU."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from atoll.campaign.budget import denoiser_flops
from atoll.networks.cost import count
from atoll.networks.families import family
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig
from helpers_networks import TEXT, TINY, conditions, noise


def linear(rows: int, i: int, o: int) -> int:
    return 2 * rows * i * o


def attention(queries: int, keys: int, width: int) -> int:
    """Scores and their sum over values, 2 n m d each."""
    return 2 * 2 * queries * keys * width


def pixart_by_hand(shape: DataShape, depth: int, d: int, patch: int) -> int:
    """A forward pass of one sample through diffusers' PixArt with one block counted by hand."""
    n, m = (shape.size // patch) ** 2, shape.text_length
    block = 4 * linear(n, d, d) + attention(n, n, d)  # self-attention
    block += 2 * linear(n, d, d) + 2 * linear(m, d, d) + attention(n, m, d)  # cross-attention
    block += 2 * linear(n, d, 4 * d)
    around = linear(n, shape.channels * patch**2, d) * 2  # patches in, and out
    around += linear(m, shape.text_width, d) + linear(m, d, d)
    around += linear(1, 256, d) + linear(1, d, d) + linear(1, d, 6 * d)
    return depth * block + around


def sd3_by_hand(shape: DataShape, depth: int, d: int, patch: int) -> int:
    """A forward pass of one sample through diffusers' SD3."""
    n, m = (shape.size // patch) ** 2, shape.text_length
    stream = [linear(1, d, 6 * d) + 4 * linear(k, d, d) + 2 * linear(k, d, 4 * d) for k in (n, m)]
    blocks = depth * (sum(stream) + attention(n + m, n + m, d))
    # In the last block the text is only looked at.
    blocks -= linear(1, d, 4 * d) + linear(m, d, d) + 2 * linear(m, d, 4 * d)
    around = 2 * linear(n, shape.channels * patch**2, d) + linear(m, shape.text_width, d)
    around += linear(1, 256, d) + linear(1, 2048, d) + 2 * linear(1, d, d) + linear(1, d, 2 * d)
    return blocks + around


def flux_by_hand(shape: DataShape, depth: int, d: int, patch: int) -> int:
    """A forward pass of one sample through diffusers' Flux of single-stream blocks."""
    n, m = (shape.size // patch) ** 2, shape.text_length
    block = linear(1, d, 3 * d) + 3 * linear(n + m, d, d) + attention(n + m, n + m, d)
    block += linear(n + m, d, 4 * d) + linear(n + m, 5 * d, d)
    around = 2 * linear(n, shape.channels * patch**2, d) + linear(m, shape.text_width, d)
    around += linear(1, 256, d) + linear(1, 768, d) + 2 * linear(1, d, d) + linear(1, d, 2 * d)
    return depth * block + around


BY_HAND = {"pixart": pixart_by_hand, "sd3": sd3_by_hand, "flux": flux_by_hand}
LATENTS = DataShape(channels=16, size=64, text_width=4096, text_length=77)


@pytest.mark.parametrize(
    ("name", "size"),
    [("sd3", "nano"), ("sd3", "2B"), ("flux", "nano"), ("flux", "3B"), ("pixart", "nano"), ("pixart", "XL")],
)
def test_the_large_sizes_counted_by_hand(name: str, size: str) -> None:
    config = NetworkConfig.parse({"family": name, "size": size}, "")
    depth, heads, width = config.dimensions()
    expected = BY_HAND[name](LATENTS, depth, heads * width, config.patch)
    assert denoiser_flops(config, LATENTS).forward == expected


def test_the_dit_of_the_paper() -> None:
    """DiT-XL/2 at 256 px: 118.6 billion multiply-adds in arXiv 2212.09748, which does not count attention."""
    shape = DataShape(channels=4, size=32, classes=1000)
    flops = denoiser_flops(NetworkConfig(family="dit", size="XL", patch=2), shape)
    inside = 28 * attention(256, 256, 1152)
    assert flops.forward / 2 == pytest.approx(118.6e9, rel=0.01)
    assert 0.03 < inside / flops.forward < 0.06


def test_the_cpu_counts_the_same_but_for_attention() -> None:
    config = NetworkConfig.parse({**TINY, "depth": 2, "patch": 2}, "")
    adapter = family("pixart")
    network = adapter.build(config, TEXT)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        adapter.predict(network, noise(1), torch.rand(1), conditions(1))
    unseen = 2 * (attention(16, 16, 16) + attention(16, TEXT.text_length, 16))
    assert denoiser_flops(config, TEXT).forward == counter.get_total_flops() + unseen


def test_the_count_is_per_sample_and_training_costs_about_three_times() -> None:
    config = NetworkConfig.parse(TINY, "")
    adapter = family("pixart")
    one, many = (count(lambda: adapter.build(config, TEXT), adapter.predict, TEXT, b) for b in (1, 16))
    assert one == many
    assert 2.5 < one.train / one.forward < 3.5


def test_the_router_is_counted_with_its_class_token() -> None:
    shape = DataShape(channels=3, size=8, classes=4)
    flops = count(lambda: Router(4, 3, 8, 4, 1, 2, 8, 0, 4), lambda net, x, t, c: net(x, t, c), shape)
    n, d = 4, 16
    block = 4 * linear(n + 1, d, d) + attention(n + 1, n + 1, d) + 2 * linear(n + 1, d, 4 * d)
    around = (
        linear(n, 3 * 16, d) + linear(1, 256, d) + linear(1, d, d) + linear(1, d, 6 * d) + linear(1, d, 4)
    )
    assert flops.forward == block + around
