"""A batch regrouped by expert: every expert is evaluated once, on the samples that chose it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError


class Networks(Protocol):
    """Networks by number: a list (None where one is missing), `ResidentExperts`, or a bank."""

    def __len__(self) -> int:
        """How many, missing ones counted."""
        ...

    def __getitem__(self, number: int, /) -> Denoiser | None:
        """One of them; those that are missing are never asked for."""
        ...


@runtime_checkable
class Prefetching(Protocol):
    """Networks that are brought to the device before they run, and so have to know what comes."""

    def prefetch(self, now: Sequence[int], next: Sequence[int] = ()) -> Sequence[int]:
        """Start to bring what is wanted: `now` once each in any order, `next` after that in this order.

        Returns:
            The numbers of `now` in the order in which they are best asked: first those on the device.
        """
        ...


@dataclass(frozen=True)
class _Part:
    """One expert's share of a batch: its rows (None: every row), their weights (None: all 1), conditions.

    `chosen` and `shares` are the rows and their weights in host memory, by which a later step knows its part.
    """

    number: int
    rows: Tensor | None
    weights: Tensor | None
    cond: Condition
    chosen: Tensor
    shares: Tensor


class Dispatch:
    """Which expert is evaluated on which rows, for as long as the weights stay.

    What is found on the way (rows, conditions) is kept, so that steps which keep their weights only evaluate.
    A step that changes some of them regroups the conditions of those experts only whose rows changed.

    Args:
        weights: of every expert for every row `(B, K)`; 0 is not evaluated.

    Attributes:
        numbers: experts with any weight, rising.
        calls: evaluations of each expert on one sample `(K)`, in one run.
    """

    def __init__(
        self, weights: Float[Tensor, "B K"], cond: Condition, before: "Dispatch | None" = None
    ) -> None:
        host = weights.detach().cpu()  # one look at the device for all experts
        known = {} if before is None else before._parts
        self._parts: dict[int, _Part] = {}
        for number in range(host.shape[1]):
            rows = host[:, number].nonzero()[:, 0]
            if len(rows):
                self._parts[number] = _part(number, rows, host, weights, cond, known.get(number))
        self.numbers = list(self._parts)
        self.calls = [len(self._parts[k].chosen) if k in self._parts else 0 for k in range(host.shape[1])]

    def rows(self, number: int) -> list[int]:
        """Rows that one of the experts is evaluated on."""
        rows: list[int] = self._parts[number].chosen.tolist()
        return rows

    def run(
        self,
        experts: Networks,
        x_t: Float[Tensor, "B C H W"],
        t: Float[Tensor, "B"],
        next: Sequence[int] = (),
    ) -> Float[Tensor, "B C H W"]:
        """`sum_k weights_k v_k(x_t)`; `next` are experts that are wanted after this run, in order."""
        order: Sequence[int] = self.numbers
        if isinstance(experts, Prefetching):
            order = experts.prefetch(self.numbers, next)
        velocities = {}
        for number in order:
            part, expert = self._parts[number], experts[number]
            if expert is None:
                raise ConfigError(f"expert {number} is missing, and yet was asked", "list it in `missing`")
            states, times = (x_t, t) if part.rows is None else (x_t[part.rows], t[part.rows])
            velocities[number] = expert.velocity(states, times, part.cond)
        # One expert for all rows: its answer is the sum, without a pass over the batch.
        alone = self._parts[self.numbers[0]] if len(self.numbers) == 1 else None
        if alone is not None and alone.rows is None and alone.weights is None:
            return velocities[alone.number]
        # Experts run in the order that suits them, but sums run in order of their number: floating-point sums
        # depend on their order, and a picture must not depend on where experts lie or who shares its batch.
        total = torch.zeros_like(x_t)
        for part in self._parts.values():
            v = velocities.pop(part.number)
            if part.weights is not None:
                v = v * part.weights.to(v.dtype)
            total = total.add_(v) if part.rows is None else total.index_add_(0, part.rows, v)
        return total


def _part(
    number: int, rows: Tensor, host: Tensor, weights: Tensor, cond: Condition, before: _Part | None
) -> _Part:
    shares = host[rows, number]
    same = before is not None and torch.equal(before.chosen, rows)
    if before is not None and same and torch.equal(before.shares, shares):
        return before
    scale = None if bool((shares == 1).all()) else shares.to(weights.device).view(-1, 1, 1, 1)
    if before is not None and same:
        return replace(before, weights=scale, shares=shares)
    if len(rows) == len(host):
        return _Part(number, None, scale, cond, rows, shares)
    there = rows.to(weights.device)
    return _Part(number, there, scale, cond.select(there), rows, shares)
