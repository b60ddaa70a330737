"""What a batch of samples was served by, and what that cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.model.card import Card


@dataclass(frozen=True)
class Costs:
    """Operations of one evaluation of one sample, as cards say; 0 where a network is missing."""

    router: float
    experts: Sequence[float]
    pretrain: float = 0.0

    @classmethod
    def of(cls, router: Card, experts: Mapping[int, Card], k: int, pretrain: Card | None = None) -> "Costs":
        """What the cards say, of K experts."""
        each = [experts[n].forward_flops if n in experts else 0.0 for n in range(k)]
        return cls(router.forward_flops, each, 0.0 if pretrain is None else pretrain.forward_flops)


@dataclass
class Trace:
    """Which expert served which sample at which step, and what it cost.

    Attributes:
        weights: one `(B, K)` float32 per step, of the conditional branch.
        router_calls: samples the router was asked for.
        expert_calls: samples that experts were evaluated on, both branches of guidance counted, and the null
            branches that shared pretraining's network serves.
        expert_runs: evaluations of networks, each on the samples that chose it.
        router_flops: operations of the router; NaN where the ensemble does not know its costs.
        expert_flops: operations of the experts, likewise.
        branches: 2 under guidance, which evaluates every sample with and without its condition.
    """

    weights: list[Tensor] = field(default_factory=list)
    router_calls: int = 0
    expert_calls: int = 0
    expert_runs: int = 0
    router_flops: float = 0.0
    expert_flops: float = 0.0
    branches: int = 1

    def stacked(self) -> Tensor:
        """Weights `(steps, B, K)`."""
        return torch.stack(self.weights)

    @property
    def router_share(self) -> float:
        """The router's part of all operations; NaN where costs are unknown."""
        # NaN spreads through the sum: a share of unknown costs is unknown, not 0.
        total = self.router_flops + self.expert_flops
        return self.router_flops / total if total else math.nan

    @classmethod
    def joined(cls, traces: Sequence["Trace"]) -> "Trace":
        """One trace of several batches that took the same number of steps, samples one after the other."""
        steps = zip(*(t.weights for t in traces), strict=True)
        joined = cls([torch.cat(parts) for parts in steps], branches=traces[0].branches)
        for name in ("router_calls", "expert_calls", "expert_runs", "router_flops", "expert_flops"):
            setattr(joined, name, sum(getattr(trace, name) for trace in traces))
        return joined
