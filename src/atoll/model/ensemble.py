"""Experts and router as one model.

The marginal flow is the router-weighted sum of the experts' flows; a routing strategy replaces the
exact weights by cheaper ones. Every expert is evaluated only on the samples that chose it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError
from atoll.base.rng import Position
from atoll.model.dispatch import Dispatch, Experts
from atoll.model.field import RoutedField
from atoll.model.generation import Generation
from atoll.model.trace import Costs


class LogitSource(Protocol):
    """Anything that gives `p(k | x_t, t, cond)` as logits: the router, or exact posteriors in tests."""

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Logits `(B, K)`."""
        ...


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
        pretrain: network of shared pretraining, which may serve guidance's null branch.
    """

    def __init__(
        self,
        experts: Experts,
        router: LogitSource,
        missing: Sequence[int] = (),
        costs: Costs | None = None,
        pretrain: Denoiser | None = None,
    ) -> None:
        self.experts, self.router, self.costs, self.pretrain = experts, router, costs, pretrain
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
    ) -> RoutedField:
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
        known = None if labels is None else labels.tolist()
        return RoutedField(self, cond, null, [generation] * len(rows), rows, known, chosen, later)
