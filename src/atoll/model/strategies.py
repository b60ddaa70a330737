"""The routing strategies. A new one is one entry of `STRATEGIES`, here or in a file of your own.

Settings name strategies and are read without torch, so torch is imported only where weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.model.routing import Routing


@dataclass(frozen=True)
class Strategy:
    """What a strategy computes, and what it needs and costs.

    Attributes:
        forms: how it is written, for messages; `K`, `P` and `T` stand for numbers.
        words: what it does, for tables and reports.
        weights: of the routing, the router's probabilities `(B, K)` in float64 and uniforms `(B, n)`: weights
            `(B, K)`. None where they do not come from the router.
        parameters: fields of `Routing` that it uses, in the order of its arguments.
        uniforms: n, the uniforms per sample.
        experts: most experts of a sample at a step; None for all of them.
        least: fewest experts that there have to be.
        fixed: a sample's experts are known before the first step and stay.
        own_null: guidance's null branch is routed by its own posterior, which makes the flow exact.
    """

    forms: str
    words: Callable[[Routing], str]
    weights: Callable[[Routing, Tensor, Tensor], Tensor] | None = None
    parameters: tuple[str, ...] = ()
    uniforms: Callable[[Routing], int] = lambda routing: 0
    experts: Callable[[Routing], int | None] = lambda routing: None
    least: Callable[[Routing], int] = lambda routing: 1
    fixed: bool = False
    own_null: bool = False


def keep(p: Tensor, mask: Tensor) -> Tensor:
    """Probabilities where the mask is 1, renormalised."""
    kept = p * mask
    return kept / kept.sum(-1, keepdim=True)


def draw(p: Tensor, uniforms: Tensor) -> Tensor:
    """Counts / n of n draws with replacement, by inverse CDF; an expert with p = 0 is never drawn."""
    import torch

    cdf = p.cumsum(-1)
    point = uniforms.to(p) * cdf[:, -1:]
    last = (p > 0).cumsum(-1).argmax(-1, keepdim=True)  # rounding must not lead past the last expert present
    drawn = torch.searchsorted(cdf, point.contiguous(), right=True).minimum(last)
    counts = p.new_zeros(p.shape).scatter_add(-1, drawn, torch.ones_like(point))
    return counts / uniforms.shape[1] + 0 * cdf[:, -1:]  # a NaN stays one, instead of choosing an expert


def _top(routing: Routing, p: Tensor, uniforms: Tensor) -> Tensor:
    return keep(p, p.new_zeros(p.shape).scatter(-1, p.topk(routing.k).indices, 1))


def _threshold(routing: Routing, p: Tensor, uniforms: Tensor) -> Tensor:
    top = p.new_zeros(p.shape).scatter(-1, p.argmax(-1, keepdim=True), 1)
    return keep(p, top.masked_fill(p > routing.mass, 1))


def _nucleus(routing: Routing, p: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from the smallest set of experts with at least this mass (arXiv 1904.09751)."""
    falling, order = p.sort(stable=True, dim=-1, descending=True)
    before = falling.cumsum(-1) - falling
    nucleus = p.new_zeros(p.shape).scatter(-1, order, (before < routing.mass).to(p.dtype))
    return draw(keep(p, nucleus), uniforms)


STRATEGIES: dict[str, Strategy] = {
    "full": Strategy(
        "full",
        lambda r: "all experts, weighted by the router",
        lambda r, p, u: p,
        own_null=True,
    ),
    "top-k": Strategy(
        "top-K",
        lambda r: (
            f"the {r.k} likeliest experts at each step" if r.k > 1 else "the likeliest expert at each step"
        ),
        _top,
        ("k",),
        experts=lambda r: r.k,
        least=lambda r: r.k,
    ),
    "threshold": Strategy(
        "threshold(P)", lambda r: f"all experts above {r.p:g} at each step", _threshold, ("p",)
    ),
    "sample-k": Strategy(
        "sample-K, sample-K(T)",
        lambda r: f"{r.k} draws from the router at each step" if r.k > 1 else "one draw at each step",
        lambda r, p, u: draw(p, u),
        ("k", "temperature"),
        uniforms=lambda r: r.k,
        experts=lambda r: r.k,
    ),
    "nucleus": Strategy(
        "nucleus(P), nucleus(P,T)",
        lambda r: f"one draw at each step from the likeliest experts, which hold {r.p:g}",
        _nucleus,
        ("p", "temperature"),
        uniforms=lambda r: 1,
        experts=lambda r: 1,
    ),
    "oracle": Strategy(
        "oracle", lambda r: "the expert of the row's own cluster", experts=lambda r: 1, fixed=True
    ),
    "once": Strategy(
        "once, once(T)",
        lambda r: "one expert drawn at the start of each picture, and kept",
        lambda r, p, u: draw(p, u),
        ("temperature",),
        uniforms=lambda r: 1,
        experts=lambda r: 1,
        fixed=True,
    ),
    "function": Strategy("", lambda r: "a function of your own", uniforms=lambda r: 1),
}
