"""What a step computes in bf16, and what it does not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode


class Float32Attention(TorchFunctionMode):
    """Attention in float32 under autocast on the CPU, where bf16 makes its backward pass six times slower.

    All the rest, matrix products before all, is faster in bf16 on a CPU that has it in hardware. Not for
    networks that compute activations again: backward passes, which do so, lie outside of it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        whole = {name: _float32(value) for name, value in (kwargs or {}).items()}
        with torch.autocast("cpu", enabled=False):
            return func(*map(_float32, args), **whole)


def _float32(value: Any) -> Any:
    """A tensor of a shorter floating-point type widened; anything else as it is."""
    short = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if short else value
