"""Low-rank changes of a network's linear layers (LoRA, arXiv 2106.09685): the network stays as it is.

Names and arithmetic are peft's. A changed layer keeps its own name and type, and the two matrices that learn
lie below it. So a network's tensors are those of the one that it changes, and its own. peft renames the
changed layers; why it is not used is in docs/decisions/0042.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from atoll.base.errors import ConfigError
from atoll.networks.settings import LoraConfig

DOWN, UP = "lora_A", "lora_B"
T = TypeVar("T")


def is_change(name: str) -> bool:
    """Whether this is the name of a tensor, or a module, of a change."""
    return f".{DOWN}" in name or f".{UP}" in name


def changes(network: nn.Module) -> bool:
    """Whether the network is a low-rank change of another one."""
    return bool(getattr(network, "config", {}).get("lora"))


def own(network: nn.Module, tensors: Mapping[str, T]) -> dict[str, T]:
    """Those of its named tensors that its file holds: all, or of a change the change alone."""
    return {name: value for name, value in tensors.items() if is_change(name) or not changes(network)}


def shared(network: nn.Module, tensors: Mapping[str, T]) -> dict[str, T]:
    """Those of its named tensors that are of the network that it changes; all of a network that is none."""
    return {name: value for name, value in tensors.items() if not is_change(name)}


def trainable(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: p for name, p in network.named_parameters() if p.requires_grad}


def changed(network: nn.Module, config: LoraConfig | Mapping[str, Any] | None) -> nn.Module:
    """Add a change's matrices, in place, and freeze the rest; `ConfigError` if targets or rank do not fit."""
    if config is None:
        return network
    if not isinstance(config, LoraConfig):
        config = LoraConfig.parse(config, "config.json")
    layers = {name: layer for name, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    blocks = {name: layer for name, layer in layers.items() if "transformer_blocks." in name}
    chosen = {} if config.targets else blocks
    for target in config.targets:
        matched = {n: layer for n, layer in layers.items() if n == target or n.endswith(f".{target}")}
        if not matched:
            ends = sorted({name.partition("transformer_blocks.")[2].partition(".")[2] for name in blocks})
            what = f"network.lora.targets: no linear layer of {type(network).__name__} is called {target!r}"
            raise ConfigError(what, f"there are {', '.join(ends)}")
        chosen |= matched

    def add(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # A hook, so that the layer stays a plain `Linear` for whoever looks at its type.
        change: Tensor = layer.lora_B(layer.lora_A(inputs[0])) * layer.lora_scale
        return output + change

    network.requires_grad_(False)
    for name, layer in chosen.items():
        width = min(layer.in_features, layer.out_features)
        if config.rank > width:
            fix = f"set it to {width} or less, or leave that layer out of network.lora.targets"
            raise ConfigError(f"network.lora.rank {config.rank} is over the width of {name}, {width}", fix)
        setattr(layer, DOWN, nn.Linear(layer.in_features, config.rank, bias=False))
        setattr(layer, UP, nn.Linear(config.rank, layer.out_features, bias=False))
        layer.lora_scale = config.scale  # type: ignore[assignment]
        layer.register_forward_hook(add)
    network.register_to_config(lora=config.model_dump())  # type: ignore[operator]
    return network
