"""Real networks at tiny size with random weights, and conditions for them."""

import torch

from atoll.base.batch_invariant import make_batch_invariant
from atoll.base.condition import Condition
from atoll.model.card import Card
from atoll.model.expert import Expert
from atoll.networks.families import family, initialise
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig

TEXT = DataShape(channels=3, size=8, text_width=12, text_length=5)
CLASSES = DataShape(channels=3, size=8, classes=4)
TINY = {"patch": 4, "depth": 1, "heads": 2, "head_width": 8}


def random_weights(network: torch.nn.Module, seed: int, std: float = 0.15) -> torch.nn.Module:
    """All weights drawn anew, none zero, so that everything in the network counts."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=source) * std)
    return network.eval().requires_grad_(False)


def denoiser(seed: int, shape: DataShape = TEXT, depth: int = 1, name: str = "") -> torch.nn.Module:
    """A PixArt (text) or DiT (labels or none), or the named family, of a few thousand weights."""
    name = name or ("pixart" if shape.text_width else "dit")
    config = NetworkConfig.parse({**TINY, "family": name, "depth": depth}, "a test")
    network = family(name).build(config, shape)
    initialise(network, seed)
    return random_weights(network, seed)


def expert(seed: int, shape: DataShape = TEXT, prediction: str = "v", schedule: str = "rectified-flow"):
    """An expert that was not trained."""
    return Expert(denoiser(seed, shape), "pixart" if shape.text_width else "dit", prediction, schedule)  # type: ignore[arg-type]


def router(seed: int, experts: int, shape: DataShape = TEXT, depth: int = 1) -> Router:
    """A router that was not trained, and is far from even."""
    sizes = {"patch_size": 4, "num_layers": depth, "num_attention_heads": 2, "attention_head_dim": 8}
    sizes |= {"caption_channels": shape.text_width, "num_classes": shape.classes}
    return random_weights(Router(experts, shape.channels, shape.size, **sizes), seed, 0.2)  # type: ignore[return-value]


class Logits:
    """A router network as the ensemble asks it, counting."""

    def __init__(self, network: Router) -> None:
        self.network, self.calls = network, 0
        make_batch_invariant(network)

    def logits(self, x_t: torch.Tensor, t: torch.Tensor, cond: Condition) -> torch.Tensor:
        self.calls += 1
        return self.network(x_t, t, cond)


def conditions(batch: int, shape: DataShape = TEXT, seed: int = 0) -> Condition:
    """Conditions of a batch; texts of different length."""
    source = torch.Generator().manual_seed(seed)
    if shape.classes:
        return Condition(labels=torch.randint(0, shape.classes, (batch,), generator=source))
    if not shape.text_width:
        return Condition()
    text = torch.randn(batch, shape.text_length, shape.text_width, generator=source)
    lengths = torch.randint(1, shape.text_length + 1, (batch, 1), generator=source)
    mask = torch.arange(shape.text_length) < lengths
    return Condition(text=text * mask[..., None], mask=mask)


def null(shape: DataShape = TEXT) -> Condition:
    """A null condition, one row, shorter than the texts."""
    if shape.classes:
        return Condition(labels=torch.tensor([shape.classes]))
    if not shape.text_width:
        return Condition()
    source = torch.Generator().manual_seed(99)
    return Condition(
        text=torch.randn(1, 2, shape.text_width, generator=source), mask=torch.ones(1, 2, dtype=torch.bool)
    )


def noise(batch: int, shape: DataShape = TEXT, seed: int = 0) -> torch.Tensor:
    """Standard normals like a batch of latents."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(batch, shape.channels, shape.size, shape.size, generator=source)


def card(**changes: object) -> Card:
    """A card with everything filled in."""
    content = {"role": "expert", "island": 0, "family": "dit", "condition": "class", "partition": "p" * 64}
    content |= {"latents": {"name": "none", "hash": "", "shift": 0.0, "scale": 1.0}, "text": None}
    content |= {"shape": vars(CLASSES), "parameters": 1, "rows": 10, "samples": 100, "batch": 10}
    content |= {"train_flops": 1.0, "forward_flops": 1.0, "weights_sha256": "0" * 64, "provenance": {}}
    return Card.parse({**content, **changes}, "a test")
