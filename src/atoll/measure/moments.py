"""Means and standard errors of values that come in batches: memory does not grow with the rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.base.table import finite


class Means:
    """Count, mean and squared deviations of values by group, merged batch by batch in float64.

    The update is the pairwise one of Chan, Golub and LeVeque (1979): no cancellation, whatever the batches.

    Args:
        groups: number of groups G.
        shape: of one row's values.
    """

    def __init__(self, groups: int, shape: Sequence[int]) -> None:
        self.count, self.mean, self.deviation = (
            torch.zeros((groups, *shape), dtype=torch.float64) for _ in range(3)
        )

    def add(self, values: Tensor, groups: Tensor) -> None:
        """Rows `(B, *shape)` of these groups `(B,)`; NaN is a value that a row does not have."""
        values = values.double()
        there = ~values.isnan()
        filled = values.where(there, 0.0)
        count, total = torch.zeros_like(self.count), torch.zeros_like(self.mean)
        count.index_add_(0, groups, there.double())
        total.index_add_(0, groups, filled)
        mean = total / count.clamp(min=1)
        around = torch.zeros_like(self.deviation)
        around.index_add_(0, groups, (filled - mean[groups]).where(there, 0.0).square())
        self.count, self.mean, self.deviation = _merge(
            (self.count, self.mean, self.deviation), (count, mean, around)
        )

    def of(self, group: int) -> "Moments":
        """What one group has."""
        return Moments(self.count[group], self.mean[group], self.deviation[group])

    def pooled(self, groups: Sequence[int]) -> "Moments":
        """Some groups as one, every row counted once."""
        zero = torch.zeros_like(self.mean[0])
        merged = (zero, zero, zero)
        for group in groups:
            merged = _merge(merged, (self.count[group], self.mean[group], self.deviation[group]))
        return Moments(*merged)


@dataclass(frozen=True)
class Moments:
    """Of one group of rows.

    Attributes:
        count: rows that have the value.
        average: their mean where there are any.
        deviation: sum of squared deviations.
    """

    count: Tensor
    average: Tensor
    deviation: Tensor

    def cells(self, *index: int) -> tuple[int, float | None, float | None]:
        """Rows, mean and standard error of one value.

        The standard error is the sample standard deviation over the root of the number of rows, as of
        independent rows; None for fewer than two. Rows that resemble each other (one character in several
        type faces) make the true one larger.
        """
        count = int(self.count[index])
        if count == 0:
            return 0, None, None
        mean = finite(self.average[index])
        if count == 1:
            return 1, mean, None
        return count, mean, finite((self.deviation[index] / (count - 1) / count).sqrt())


def _merge(
    a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    (n, mean, around), (m, other, more) = a, b
    both = (n + m).clamp(min=1)
    gap = other - mean
    return n + m, mean + gap * m / both, around + more + gap.square() * n * m / both
