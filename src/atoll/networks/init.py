"""The published initialisation of each family, drawn from one seed.

diffusers builds networks with torch's defaults: no adaLN-zero, no Xavier. These rules are those of the
papers' own code (DiT: arXiv 2212.09748 section 3.2; PixArt: arXiv 2310.00426 section 2.3). SD3 and Flux
have none published; they get DiT's, whose blocks SD3 (arXiv 2403.03206) builds on.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.base.rng import generator

GATES = (".norm1.linear", ".norm1_context.linear", ".attn2.to_out.0", ".norm.linear")
"""Of DiT and SD3, SD3, PixArt, Flux."""


def initialise(network: nn.Module, seed: int) -> None:
    """Draw all weights anew, in place, from `seed` alone (the same on every machine and device)."""
    source = generator(seed, "init")
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                _xavier(module, source)
            elif isinstance(module, nn.Embedding):
                _normal(module.weight, 0.02, source)
            elif type(module).__name__ == "RMSNorm" and module.weight is not None:  # torch's or diffusers'
                cast(Tensor, module.weight).fill_(1.0)
            for key, parameter in module.named_parameters(recurse=False):
                if key in ("scale_shift_table", "cls_token"):
                    std = 0.02 if key == "cls_token" else parameter.shape[-1] ** -0.5
                    _normal(parameter, std, source)
        for name, module in network.named_modules():  # after their layers, which come later in the first pass
            if name.endswith(("timestep_embedder", "caption_projection")):
                _normal(cast(Any, module).linear_1.weight, 0.02, source)
                _normal(cast(Any, module).linear_2.weight, 0.02, source)
            elif name == "adaln_single.linear":
                _normal(cast(Any, module).weight, 0.02, source)
        _zero_gates(network)


def _zero_gates(network: nn.Module) -> None:
    """Every block starts as the identity and the output as zero, so v = 0 at the first step."""
    parts = dict(network.named_modules())
    zero = [name for name in parts if name in ("proj_out", "proj_out_2", "proj_out_1", "norm_out.linear")]
    for name in parts:
        if "transformer_blocks." in name and name.endswith(GATES):
            zero.append(name)
    for name in zero:
        layer = parts[name]
        assert isinstance(layer, nn.Linear), name
        layer.weight.zero_()
        layer.bias.zero_()


def _xavier(layer: nn.Linear | nn.Conv2d, source: torch.Generator) -> None:
    flat = layer.weight.view(layer.weight.shape[0], -1)
    bound = (6.0 / (flat.shape[0] + flat.shape[1])) ** 0.5
    values = torch.rand(layer.weight.shape, generator=source) * (2 * bound) - bound
    layer.weight.copy_(values)
    if layer.bias is not None:
        layer.bias.zero_()


def _normal(weight: torch.Tensor, std: float, source: torch.Generator) -> None:
    weight.copy_(torch.randn(weight.shape, generator=source) * std)
