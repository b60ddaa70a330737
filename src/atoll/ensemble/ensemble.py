"""Experts and router as one model.

The marginal flow is the router-weighted sum of the experts' flows; a routing strategy replaces the
exact weights by cheaper ones. Every expert is evaluated only on the samples that chose it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser, concatenate
from atoll.base.errors import ConfigError
from atoll.base.rng import Position, uniforms
from atoll.ensemble.card import Card
from atoll.ensemble.dispatch import Dispatch, Experts
from atoll.ensemble.generation import Generation
from atoll.ensemble.route import route
from atoll.ensemble.routing import Routing
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
            traces[0].branches,
        )


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
        return Dispatch(weights, cond).run(self.experts, x_t, t)

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
        generation: Generation,
        rows: Sequence[Position],
        labels: Tensor | None = None,
        chosen: Tensor | None = None,
        later: Sequence[int] = (),
    ) -> "RoutedField":
        """What a sampler follows for one batch.

        Args:
            cond: conditions of B samples.
            null: the null condition, one row or B.
            generation: guidance, routing, and the seed of the routing draws, a stream apart from the noise.
            rows: place of each sample in the random streams `(B,)`; its draws depend on nothing else.
            labels: cluster of each sample, for `oracle`.
            chosen: weights `(B, K)` of the first step, where they were asked for before.
            later: experts that are wanted after this batch, in order; those on disk are brought ahead.
        """
        return RoutedField(self, cond, null, generation, rows, labels, chosen, later)


class RoutedField:
    """An ensemble's flow for one batch: keeps the weights between the steps that ask the router."""

    def __init__(
        self,
        ensemble: Ensemble,
        cond: Condition,
        null: Condition,
        generation: Generation,
        rows: Sequence[Position],
        labels: Tensor | None = None,
        chosen: Tensor | None = None,
        later: Sequence[int] = (),
    ) -> None:
        if generation.routing.needs_labels and labels is None:
            raise ConfigError("routing 'oracle' needs the cluster of every sample", "use another strategy")
        self.ensemble, self.generation, self.routing = ensemble, generation, generation.routing
        self.branches = Branches(cond, null, generation.guidance, len(rows))
        self.rows, self.labels, self.later = list(rows), labels, later
        self.trace = Trace(branches=2 if self.branches.guided else 1)
        self._step = -1
        self._chosen = chosen
        self._null_routing = self.routing.of_null if self.branches.guided else None
        self._weights: list[Tensor] = []  # of the conditional branch, and of one with a routing of its own
        self._dispatch: Dispatch | None = None
        self._seen: Tensor | None = None

    def __call__(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B C H W"]:
        """Guided velocity; the router is asked once per step however often a solver calls."""
        if step != self._step:
            self._route(x_t, t, step)
        return self.branches.velocity(self._evaluate, x_t, t)

    def weights_at(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B K"]:
        """The strategy's weights of the conditional branch, from the router's logits and the step's draws."""
        if self.routing.needs_labels:
            even = x_t.new_zeros(x_t.shape[0], len(self.ensemble.experts))
            return route(self.routing, self.ensemble.without_missing(even), even, self.labels)
        return self._ask(self.routing, x_t, t, self.branches.cond, f"route/{step}")

    def _ask(self, routing: Routing, x_t: Tensor, t: float, cond: Condition, stream: str) -> Tensor:
        self._count_router(x_t.shape[0])
        logits = self.ensemble.logits(x_t, x_t.new_full((x_t.shape[0],), t), cond)
        if not routing.uniforms:
            return route(routing, logits, logits.new_empty(len(logits), 0))
        draws = uniforms(self.generation.seed, stream, self.rows, (routing.uniforms,))
        return route(routing, logits, draws.to(logits))

    def _route(self, x_t: Tensor, t: float, step: int) -> None:
        """Find this step's weights; what does not change keeps its regrouping by expert."""
        self._step = step
        known = self._weights
        weights = known[0] if known and not self.routing.asks_at(step) else self._first(x_t, t, step)
        current = [weights]
        if self._null_routing is not None:
            keeps = known and not self._null_routing.asks_at(step)
            null = self.branches.null
            current.append(
                known[1] if keeps else self._ask(self._null_routing, x_t, t, null, f"route-null/{step}")
            )
        if len(known) != len(current) or any(a is not b for a, b in zip(known, current, strict=True)):
            self._weights = current
            both = torch.cat([weights, current[-1]]) if self.branches.guided else weights
            self._dispatch = Dispatch(both, self.branches.both, self._dispatch)
            self._seen = weights.float().cpu()
        assert self._seen is not None
        self.trace.weights.append(self._seen)

    def _first(self, x_t: Tensor, t: float, step: int) -> Tensor:
        """Weights of the conditional branch: those that were found before, or the router's."""
        if self._chosen is None:
            return self.weights_at(x_t, t, step)
        if not self.routing.needs_labels:
            self._count_router(len(self._chosen))  # asked before, for these samples
        return self._chosen

    def _count_router(self, samples: int) -> None:
        costs = self.ensemble.costs
        self.trace.router_calls += samples
        self.trace.router_flops += samples * costs.router if costs else math.nan

    def _evaluate(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dispatch, costs = self._dispatch, self.ensemble.costs
        assert dispatch is not None
        self.trace.expert_calls += sum(dispatch.calls)
        self.trace.expert_runs += len(dispatch.numbers)
        self.trace.expert_flops += (
            sum(n * cost for n, cost in zip(dispatch.calls, costs.experts, strict=True))
            if costs
            else math.nan
        )
        return dispatch.run(self.ensemble.experts, x_t, t, self.later)


class Branches:
    """Classifier-free guidance of one batch: the conditional and the null branch in one evaluation.

    Args:
        cond: conditions of B samples.
        null: the null condition, one row or B.
        guidance: scale; with 1 there is no null branch.
        batch: B.
    """

    def __init__(self, cond: Condition, null: Condition, guidance: float, batch: int) -> None:
        # Without a condition both branches are the same: there is nothing to lead away from.
        self.guidance, self.guided = guidance, guidance != 1.0 and not cond.empty
        self.cond, self.null = cond, null.expand(batch) if self.guided else cond
        self.both = concatenate([cond, self.null]) if self.guided else cond

    def velocity(
        self, evaluate: Callable[[Tensor, Tensor, Condition], Tensor], x_t: Float[Tensor, "B C H W"], t: float
    ) -> Float[Tensor, "B C H W"]:
        """Guided velocity of what gives velocities of states, times and conditions."""
        x = torch.cat([x_t, x_t]) if self.guided else x_t
        v = evaluate(x, x.new_full((x.shape[0],), t), self.both)
        if not self.guided:
            return v
        v_cond, v_null = v.chunk(2)
        return guide(v_cond, v_null, self.guidance)


class SingleField:
    """One denoiser's flow for one batch, with guidance."""

    def __init__(
        self, denoiser: Denoiser, cond: Condition, null: Condition, guidance: float, batch: int
    ) -> None:
        self.denoiser, self.branches = denoiser, Branches(cond, null, guidance, batch)

    def __call__(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B C H W"]:
        """Guided velocity."""
        return self.branches.velocity(self.denoiser.velocity, x_t, t)
