"""Experts and router as one model.

The marginal flow is the router-weighted sum of the experts' flows; a routing strategy replaces the
exact weights by cheaper ones. Every expert is evaluated only on the samples that chose it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser, concatenate
from atoll.base.errors import ConfigError
from atoll.base.rng import uniforms
from atoll.ensemble.routing import Routing, asked_at, route, uniforms_needed
from atoll.flow.guidance import guide


class LogitSource(Protocol):
    """Anything that gives `p(k | x_t, t, cond)` as logits: the router, or exact posteriors in tests."""

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Logits `(B, K)`."""
        ...


class Field(Protocol):
    """The flow that a sampler integrates, with guidance and routing settled."""

    def __call__(self, x_t: Tensor, t: float, step: int) -> Tensor:
        """Velocity `(B, C, H, W)` at one time for all samples, in step number `step`."""
        ...


@dataclass
class Trace:
    """Which expert served which sample at which step.

    Attributes:
        weights: one `(B, K)` float32 per step, of the conditional branch.
        router_calls: samples the router was asked for.
        expert_calls: samples that experts were evaluated on, both branches of guidance counted.
    """

    weights: list[Tensor] = field(default_factory=list)
    router_calls: int = 0
    expert_calls: int = 0

    def stacked(self) -> Tensor:
        """Weights `(steps, B, K)`."""
        return torch.stack(self.weights)


def mix(
    experts: Sequence[Denoiser],
    weights: Float[Tensor, "B K"],
    x_t: Float[Tensor, "B C H W"],
    t: Float[Tensor, "B"],
    cond: Condition,
) -> Float[Tensor, "B C H W"]:
    """`sum_k weights_k v_k(x_t)`, each expert on its samples only.

    Sums run over experts in order of their number, so a sample's result does not depend on who shares
    its batch.
    """
    total = torch.zeros_like(x_t)
    for number, expert in enumerate(experts):
        rows = weights[:, number].nonzero()[:, 0]
        if len(rows) == 0:
            continue
        everyone = len(rows) == len(x_t)
        part = cond if everyone else cond.select(rows)
        v = expert.velocity(x_t if everyone else x_t[rows], t if everyone else t[rows], part)
        total.index_add_(0, rows, v * weights[rows, number].to(v.dtype).view(-1, 1, 1, 1))
    return total


class Ensemble:
    """K experts and a router.

    As a plain denoiser (`velocity`) it is the exact marginal flow: all experts, the router's weights.
    `field` gives what a sampler follows under any routing strategy.

    Args:
        experts: denoisers, in the order of the router's logits.
        router: gives the logits.
        missing: numbers of experts that do not exist; they get no weight.
    """

    def __init__(self, experts: Sequence[Denoiser], router: LogitSource, missing: Sequence[int] = ()) -> None:
        self.experts, self.router, self.missing = list(experts), router, tuple(missing)

    def velocity(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """The marginal flow `sum_k p(k | x_t, t, cond) v_k(x_t, t, cond)`."""
        weights = self.logits(x_t, t, cond).softmax(dim=1)
        return mix(self.experts, weights, x_t, t, cond)

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The router's logits `(B, K)`, minus infinity for missing experts."""
        logits = self.router.logits(x_t, t, cond)
        if logits.shape[1] != len(self.experts):
            raise ConfigError(
                f"the router knows {logits.shape[1]} experts, the ensemble has {len(self.experts)}",
                "assemble again",
            )
        return self.without_missing(logits)

    def without_missing(self, logits: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """The logits with minus infinity for experts that do not exist."""
        if self.missing:
            logits = logits.clone()
            logits[:, list(self.missing)] = -torch.inf
        return logits

    def field(
        self,
        cond: Condition,
        null: Condition,
        guidance: float,
        routing: Routing,
        seed: int,
        indices: Sequence[int],
        labels: Tensor | None = None,
    ) -> "RoutedField":
        """What a sampler follows for one batch.

        Args:
            cond: conditions of B samples.
            null: the null condition, one row.
            guidance: classifier-free guidance scale; 1 is none.
            routing: strategy.
            seed: of the routing draws, a stream apart from the starting noise.
            indices: number of each sample `(B,)`; its draws depend on nothing else.
            labels: cluster of each sample, for `oracle`.
        """
        return RoutedField(self, cond, null, guidance, routing, seed, indices, labels)


class RoutedField:
    """An ensemble's flow for one batch: keeps the weights between the steps that ask the router."""

    def __init__(
        self,
        ensemble: Ensemble,
        cond: Condition,
        null: Condition,
        guidance: float,
        routing: Routing,
        seed: int,
        indices: Sequence[int],
        labels: Tensor | None,
    ) -> None:
        if routing.strategy == "oracle" and labels is None:
            raise ConfigError("routing 'oracle' needs the cluster of every sample", "use another strategy")
        self.ensemble, self.routing, self.guidance = ensemble, routing, guidance
        self.cond, self.null = cond, null.expand(len(indices))
        self.both = concatenate([cond, self.null]) if guidance != 1.0 else cond
        self.seed, self.indices, self.labels = seed, list(indices), labels
        self.trace = Trace()
        self._step = -1
        self._weights: Tensor | None = None
        self._null_weights: Tensor | None = None

    def __call__(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B C H W"]:
        """Guided velocity; the router is asked once per step however often a solver calls."""
        if step != self._step:
            self._route(x_t, t, step)
        assert self._weights is not None
        if self.guidance == 1.0:
            return self._mix(self._weights, x_t, t)
        # Sparse strategies use the conditional branch's experts for both branches.
        null = self._weights if self._null_weights is None else self._null_weights
        v = self._mix(torch.cat([self._weights, null]), torch.cat([x_t, x_t]), t)
        v_cond, v_null = v.chunk(2)
        return guide(v_cond, v_null, self.guidance)

    def _route(self, x_t: Tensor, t: float, step: int) -> None:
        self._step = step
        if self._weights is None or asked_at(self.routing, step):
            logits = self._logits(x_t, t, self.cond)
            draws = uniforms(
                self.seed, f"route/{step}", self.indices, (max(1, uniforms_needed(self.routing)),)
            )
            self._weights = route(self.routing, logits, draws.to(logits), self.labels)
            if self.routing.strategy == "full" and self.guidance != 1.0:
                self._null_weights = self._logits(x_t, t, self.null).softmax(dim=1)
        self.trace.weights.append(self._weights.float().cpu())

    def _logits(self, x_t: Tensor, t: float, cond: Condition) -> Tensor:
        if self.routing.strategy == "oracle":
            even = x_t.new_zeros(x_t.shape[0], len(self.ensemble.experts))
            return self.ensemble.without_missing(even)
        self.trace.router_calls += x_t.shape[0]
        return self.ensemble.logits(x_t, x_t.new_full((x_t.shape[0],), t), cond)

    def _mix(self, weights: Tensor, x_t: Tensor, t: float) -> Tensor:
        self.trace.expert_calls += int((weights != 0).sum())
        return mix(self.ensemble.experts, weights, x_t, x_t.new_full((x_t.shape[0],), t), self.both)


class SingleField:
    """One denoiser's flow for one batch, with guidance: both branches in one call."""

    def __init__(
        self, denoiser: Denoiser, cond: Condition, null: Condition, guidance: float, batch: int
    ) -> None:
        self.denoiser, self.guidance, self.cond = denoiser, guidance, cond
        self.both = concatenate([cond, null.expand(batch)]) if guidance != 1.0 else cond

    def __call__(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B C H W"]:
        """Guided velocity."""
        if self.guidance == 1.0:
            return self.denoiser.velocity(x_t, x_t.new_full((x_t.shape[0],), t), self.cond)
        doubled = torch.cat([x_t, x_t])
        v = self.denoiser.velocity(doubled, x_t.new_full((doubled.shape[0],), t), self.both)
        v_cond, v_null = v.chunk(2)
        return guide(v_cond, v_null, self.guidance)
