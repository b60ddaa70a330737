"""Weights that are stored in one byte a number, and brought back layer by layer while a network computes."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.errors import ConfigError
from atoll.networks.lora import is_change

STORED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Types of one byte, by the name of the setting."""
KEPT = ("pos_embed", "patch_embed", "norm", "^proj_in$", "^proj_out$")
"""Patterns of layers that stay whole: those of diffusers' layerwise casting."""
SCALE = "_scale"
"""Ends the name of the scales `(rows,)` of a stored weight."""


def stored_layers(network: nn.Module, keep: Sequence[str] = ()) -> dict[str, nn.Module]:
    """Layers whose weights may be stored so, by name: those that diffusers' layerwise casting takes.

    `keep` are further patterns of names to leave as they are.
    """
    kept = [*KEPT, *(getattr(network, "_skip_layerwise_casting_patterns", None) or ()), *keep]
    for part in keep:
        if not any(re.search(part, name) for name, _ in network.named_modules()):
            what, fix = f"residency.keep: no layer's name has {part!r}", "write such as proj_out or attn.*"
            raise ConfigError(what, fix)
    return {
        name: layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d)
        and not is_change(name)
        and not any(re.search(part, name) for part in kept)
    }


def store(network: nn.Module, dtype: torch.dtype, keep: Sequence[str] = ()) -> dict[str, torch.dtype]:
    """Prepare a network for weights of this type; the types of the tensors that differ from the others'."""
    kinds = dict[str, torch.dtype]()
    for name, layer in stored_layers(network, keep).items():
        layer.register_buffer(f"weight{SCALE}", torch.empty(len(layer.get_parameter("weight"))))
        layer.register_forward_pre_hook(bring_back)
        layer.register_forward_hook(let_go, always_call=True)
        kinds |= {f"{name}.weight": dtype, f"{name}.weight{SCALE}": torch.float32}
    return kinds


def write_stored(value: Tensor, stored: Tensor, scales: Tensor) -> None:
    """Write a weight `(rows, ...)` in the type of `stored`: each row with the scale that fills its range."""
    rows = value.float().flatten(1)
    whole = stored.dtype == torch.int8
    largest = 127.0 if whole else torch.finfo(stored.dtype).max
    # A scale that bf16 has, since it is multiplied in the type that is computed in.
    scales.copy_((rows.abs().amax(1).clamp(min=1e-12) / largest).bfloat16())
    # The quotient may be just beyond the largest number, for which fp8 has no infinity, but NaN.
    scaled = (rows / scales[:, None]).clamp(-largest, largest)
    stored.copy_((scaled.round() if whole else scaled).view_as(stored))


def brought_back(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that is computed with."""
    return stored.to(dtype) * scales.to(dtype).view(-1, *[1] * (stored.ndim - 1))


# An entry of the instance's own hides the parameter of its name, which stays where its slot is: neither the
# parameter nor its memory changes, so that CUDA graphs and whoever moves weights know nothing of it.
def bring_back(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Before a layer computes: its weight in the type of its inputs."""
    weight, scales = layer.get_parameter("weight"), layer.get_buffer(f"weight{SCALE}")
    layer.__dict__["weight"] = brought_back(weight, scales, inputs[0].dtype)


def let_go(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """After it: the memory of that weight is free."""
    layer.__dict__.pop("weight", None)
