"""Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598)."""

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.flow.schedule import expand


def guide(
    v_cond: Float[Tensor, "B C H W"],
    v_null: Float[Tensor, "B C H W"],
    scale: float | Float[Tensor, "B"],
) -> Float[Tensor, "B C H W"]:
    """`v_null + scale (v_cond - v_null)`; the scale is the paper's `1 + w`. Scale 1 is `v_cond` exactly."""
    if isinstance(scale, Tensor):
        each = expand(scale, v_cond).to(v_cond.dtype)
        return torch.where(each == 1, v_cond, v_null + each * (v_cond - v_null))
    return v_cond if scale == 1 else v_null + scale * (v_cond - v_null)
