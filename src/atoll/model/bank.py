"""A model's networks and its router: experts by number, and shared pretraining's network as the last one.

A single network (the monolith, a student, a preview's) is a bank of one without a router.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError
from atoll.model.dispatch import Costs, Dispatch, Networks, Prefetching


class LogitSource(Protocol):
    """Anything that gives `p(k | x_t, t, cond)` as logits: the router, or exact posteriors in tests."""

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Logits `(B, K)`."""
        ...


class Bank:
    """K experts with their router, or one network without.

    As a plain denoiser (`velocity`) it is the exact marginal flow: all experts, the router's weights. A
    `sampler.Sampler` follows it under any routing strategy. `k` counts missing experts.

    Args:
        experts: denoisers in the order of the router's logits: a list, with None where one does not exist,
            or `residency.ResidentExperts`.
        missing: numbers of experts that do not exist, beside those that are None; they get no weight.
        pretrain: network of shared pretraining, the bank's last member. The router has no logit for it, so
            that only guidance's null branch asks it (`null pretrain`).
    """

    def __init__(
        self,
        experts: Networks,
        router: LogitSource | None = None,
        missing: Sequence[int] = (),
        costs: Costs | None = None,
        pretrain: Denoiser | None = None,
    ) -> None:
        self.experts, self.router, self.costs, self.pretrain = experts, router, costs, pretrain
        self.k = len(experts)
        listed = experts if isinstance(experts, list | tuple) else ()
        self.missing = tuple(sorted({*missing, *(n for n, expert in enumerate(listed) if expert is None)}))

    def __len__(self) -> int:
        return self.k + (self.pretrain is not None)

    def __getitem__(self, number: int, /) -> Denoiser | None:
        return self.pretrain if number == self.k else self.experts[number]

    @property
    def capacity(self) -> int:
        """Experts that a step can use without bringing any of them twice in the next."""
        capacity: int = getattr(self.experts, "capacity", self.k)
        return capacity

    def prefetch(self, now: Sequence[int], next: Sequence[int] = ()) -> Sequence[int]:
        """See `dispatch.Prefetching`; shared pretraining's network is always at hand."""
        if not isinstance(self.experts, Prefetching):
            return now
        # Shared pretraining's network is no resident expert, and so never one that has to be brought.
        own = self.experts.prefetch([number for number in now if number < self.k], next)
        return [*own, *(number for number in now if number >= self.k)]

    def velocity(
        self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"], cond: Condition
    ) -> Float[Tensor, "B C H W"]:
        """The marginal flow `sum_k p(k | x_t, t, cond) v_k(x_t, t, cond)`."""
        return Dispatch(self.logits(x_t, t, cond).softmax(dim=1), cond).run(self, x_t, t)

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """The router's logits `(B, K)`, minus infinity for missing experts; zeros without a router."""
        if self.router is None:
            assert self.k == 1, "several experts need a router, or known clusters"
            return x_t.new_zeros(len(x_t), 1)  # softmax of one logit is 1, so one network needs no branch
        logits = self.router.logits(x_t, t, cond)
        if logits.shape[1] != self.k:
            what = f"the router knows {logits.shape[1]} experts, the ensemble has {self.k}"
            raise ConfigError(what, "assemble again")
        return self.without_missing(logits)

    def without_missing(self, logits: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
        """The logits with minus infinity for experts that do not exist."""
        # Before any softmax, so that a missing expert's share goes to the others in proportion.
        if self.missing:
            logits = logits.clone()
            logits[:, list(self.missing)] = -torch.inf
        return logits
