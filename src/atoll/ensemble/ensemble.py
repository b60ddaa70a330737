"""Experts and router as one model.

The marginal flow is the router-weighted sum of the experts' flows; a routing strategy replaces the
exact weights by cheaper ones. Every expert is evaluated only on the samples that chose it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser, concatenate
from atoll.base.errors import ConfigError
from atoll.base.rng import uniforms
from atoll.ensemble.card import Card
from atoll.ensemble.dispatch import Dispatch, Experts
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


@dataclass(frozen=True)
class Costs:
    """Operations of one evaluation of one sample (the `forward_flops` of the cards).

    Attributes:
        router: of the router.
        experts: of every expert, by number; 0 where one is missing.
    """

    router: float
    experts: Sequence[float]

    @classmethod
    def of(cls, router: Card, experts: Mapping[int, Card], k: int) -> "Costs":
        """What the cards say, of K places."""
        return cls(
            router.forward_flops, [experts[n].forward_flops if n in experts else 0.0 for n in range(k)]
        )


@dataclass
class Trace:
    """Which expert served which sample at which step, and what it cost.

    Attributes:
        weights: one `(B, K)` float32 per step, of the conditional branch.
        router_calls: samples the router was asked for.
        expert_calls: samples that experts were evaluated on, both branches of guidance counted.
        expert_runs: evaluations of networks, each on the samples that chose it.
        router_flops: operations of the router; NaN where the ensemble does not know its costs.
        expert_flops: operations of the experts, likewise.
    """

    weights: list[Tensor] = field(default_factory=list)
    router_calls: int = 0
    expert_calls: int = 0
    expert_runs: int = 0
    router_flops: float = 0.0
    expert_flops: float = 0.0

    def stacked(self) -> Tensor:
        """Weights `(steps, B, K)`."""
        return torch.stack(self.weights)

    @property
    def router_share(self) -> float:
        """The router's part of all operations; NaN where costs are unknown."""
        total = self.router_flops + self.expert_flops
        return self.router_flops / total if total else math.nan

    @classmethod
    def joined(cls, traces: Sequence["Trace"]) -> "Trace":
        """One trace of several batches that took the same number of steps, samples one after the other."""
        steps = zip(*(t.weights for t in traces), strict=True)
        return cls(
            [torch.cat(parts) for parts in steps],
            sum(t.router_calls for t in traces),
            sum(t.expert_calls for t in traces),
            sum(t.expert_runs for t in traces),
            sum(t.router_flops for t in traces),
            sum(t.expert_flops for t in traces),
        )


def mix(
    experts: Experts,
    weights: Float[Tensor, "B K"],
    x_t: Float[Tensor, "B C H W"],
    t: Float[Tensor, "B"],
    cond: Condition,
) -> Float[Tensor, "B C H W"]:
    """`sum_k weights_k v_k(x_t)`, each expert on its samples only (see `dispatch.Dispatch`)."""
    return Dispatch(weights, cond).run(experts, x_t, t)


class Ensemble:
    """K experts and a router.

    As a plain denoiser (`velocity`) it is the exact marginal flow: all experts, the router's weights.
    `field` gives what a sampler follows under any routing strategy.

    Args:
        experts: denoisers in the order of the router's logits: a list, with None where one does not exist,
            or `residency.ResidentExperts`.
        router: gives the logits.
        missing: numbers of experts that do not exist, beside those that are None; they get no weight.
        costs: operations of the parts, for the trace.
    """

    def __init__(
        self,
        experts: Experts,
        router: LogitSource,
        missing: Sequence[int] = (),
        costs: Costs | None = None,
    ) -> None:
        self.experts, self.router, self.costs = experts, router, costs
        plain = experts if isinstance(experts, list | tuple) else ()
        self.missing = tuple(sorted({*missing, *(n for n, expert in enumerate(plain) if expert is None)}))

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
        chosen: Tensor | None = None,
        later: Sequence[int] = (),
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
            chosen: weights `(B, K)` that `choose` found before, for `once` and `oracle`.
            later: experts that are wanted after this batch, in order; those on disk are brought ahead.
        """
        return RoutedField(self, cond, null, guidance, routing, seed, indices, labels, chosen, later)

    def choose(
        self,
        x_t: Float[Tensor, "B C H W"],
        t: float,
        cond: Condition,
        routing: Routing,
        seed: int,
        indices: Sequence[int],
        labels: Tensor | None = None,
    ) -> Float[Tensor, "B K"]:
        """The weights of a batch's first step, as its field finds them by itself.

        Args:
            x_t: the noise that sampling starts from.
            t: the time that it starts at.
            cond: conditions.
            routing: strategy.
            seed: of the routing draws.
            indices: number of each sample `(B,)`.
            labels: cluster of each sample, for `oracle`.
        """
        return RoutedField(self, cond, Condition(), 1.0, routing, seed, indices, labels).weights_at(x_t, t, 0)


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
        labels: Tensor | None = None,
        chosen: Tensor | None = None,
        later: Sequence[int] = (),
    ) -> None:
        if routing.strategy == "oracle" and labels is None:
            raise ConfigError("routing 'oracle' needs the cluster of every sample", "use another strategy")
        self.ensemble, self.routing, self.guidance = ensemble, routing, guidance
        self.cond, self.null = cond, null.expand(len(indices))
        self.both = concatenate([cond, self.null]) if guidance != 1.0 else cond
        self.seed, self.indices, self.labels = seed, list(indices), labels
        self.later, self.trace = later, Trace()
        self._step = -1
        self._chosen = chosen
        self._of_null = routing.of_null if guidance != 1.0 else None
        self._weights: list[Tensor] = []  # of the conditional branch, and of one with a routing of its own
        self._dispatch: Dispatch | None = None
        self._seen: Tensor | None = None

    def __call__(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B C H W"]:
        """Guided velocity; the router is asked once per step however often a solver calls."""
        if step != self._step:
            self._route(x_t, t, step)
        if self.guidance == 1.0:
            return self._mix(x_t, t)
        v_cond, v_null = self._mix(torch.cat([x_t, x_t]), t).chunk(2)
        return guide(v_cond, v_null, self.guidance)

    def weights_at(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B K"]:
        """The strategy's weights of the conditional branch, from the router's logits and the step's draws."""
        if self.routing.strategy == "oracle":
            even = x_t.new_zeros(x_t.shape[0], len(self.ensemble.experts))
            return route(self.routing, self.ensemble.without_missing(even), even, self.labels)
        return self._ask(self.routing, x_t, t, self.cond, f"route/{step}")

    def _ask(self, routing: Routing, x_t: Tensor, t: float, cond: Condition, stream: str) -> Tensor:
        self._count_router(x_t.shape[0])
        logits = self.ensemble.logits(x_t, x_t.new_full((x_t.shape[0],), t), cond)
        draws = uniforms(self.seed, stream, self.indices, (max(1, uniforms_needed(routing)),))
        return route(routing, logits, draws.to(logits))

    def _route(self, x_t: Tensor, t: float, step: int) -> None:
        self._step = step
        known, own = self._weights, self._of_null
        weights = known[0] if known and not asked_at(self.routing, step) else self._first(x_t, t, step)
        found = [weights]
        if own is not None:
            kept = known and not asked_at(own, step)
            found.append(known[1] if kept else self._ask(own, x_t, t, self.null, f"route-null/{step}"))
        if len(known) != len(found) or any(a is not b for a, b in zip(known, found, strict=True)):
            self._weights = found
            both = torch.cat([weights, found[-1]]) if self.guidance != 1.0 else weights
            self._dispatch = Dispatch(both, self.both)
            self._seen = weights.float().cpu()
        assert self._seen is not None
        self.trace.weights.append(self._seen)

    def _first(self, x_t: Tensor, t: float, step: int) -> Tensor:
        """Weights of the conditional branch: those that were found before, or the router's."""
        if self._chosen is None:
            return self.weights_at(x_t, t, step)
        if self.routing.strategy != "oracle":
            self._count_router(len(self._chosen))  # asked before, for these samples
        return self._chosen

    def _count_router(self, samples: int) -> None:
        costs = self.ensemble.costs
        self.trace.router_calls += samples
        self.trace.router_flops += samples * costs.router if costs else math.nan

    def _mix(self, x_t: Tensor, t: float) -> Tensor:
        dispatch, costs = self._dispatch, self.ensemble.costs
        assert dispatch is not None
        calls = sum(dispatch.calls)
        self.trace.expert_calls += calls
        self.trace.expert_runs += len(dispatch.numbers)
        self.trace.expert_flops += (
            sum(n * cost for n, cost in zip(dispatch.calls, costs.experts, strict=True))
            if costs
            else math.nan
        )
        return dispatch.run(self.ensemble.experts, x_t, x_t.new_full((x_t.shape[0],), t), self.later)


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
