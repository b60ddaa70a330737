"""Rows that come out alike whatever shares their batch: on the CPU, in float32, with one thread.

There, products of few rows go through other kernels than those of many, and an activation computes the
numbers left over by its vectors in another way; both round otherwise. Filled up to `LEAST` and to a multiple
of `FILLED`, rows always meet the same kernel. A GPU chooses by other rules: there rows agree within rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn

FILLED, LEAST = 4, 16


def make_batch_invariant(network: nn.Module) -> None:
    """Let a network's layers fill up their rows, where nobody trains them."""
    for module in network.modules():
        if type(module) in _ALIKE:
            module.__class__ = _ALIKE[type(module)]


def _alike(kind: type[nn.Module]) -> type[nn.Module]:
    layer: Any = kind.forward
    least = FILLED if kind is nn.Conv2d else LEAST

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        rows = input.flatten(0, -2) if kind is not nn.Conv2d and input.ndim > 2 else input
        absent = max(least - len(rows), -len(rows) % FILLED)
        if not absent or rows.device.type != "cpu" or torch.is_grad_enabled():
            return layer(self, input)  # type: ignore[no-any-return]
        found: Tensor = layer(self, torch.cat([rows, rows.new_zeros(absent, *rows.shape[1:])]))[: len(rows)]
        return found if rows is input else found.view(*input.shape[:-1], found.shape[-1])

    return type(kind.__name__, (kind,), {"forward": forward, "__doc__": kind.__doc__})


_ALIKE: dict[type[nn.Module], type[nn.Module]] = {
    kind: _alike(kind) for kind in (nn.Linear, nn.Conv2d, nn.SiLU, nn.GELU)
}
