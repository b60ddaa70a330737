"""Means and standard errors of values that come in batches: memory does not grow with the rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from atoll.base.table import finite


@dataclass
class Means:
    """Count, mean and squared deviations of values by group, merged batch by batch in float64.

    The update is the pairwise one of Chan, Golub and LeVeque (1979): no cancellation, whatever the batches.

    Attributes:
        count: rows that have each value, by group, then as a row is shaped; so are the other two.
        mean: 0 where no row has the value.
        squares: sum of squared deviations from the mean.
    """

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        """Of no rows yet; the groups come first."""
        return cls(*(torch.zeros(shape, dtype=torch.float64) for _ in range(3)))

    def add(self, values: Tensor, groups: Tensor | None = None) -> None:
        """Rows `(B, *shape)` of groups `(B,)`, by default the first; NaN is a value that a row lacks."""
        groups = torch.zeros(len(values), dtype=torch.int64) if groups is None else groups
        values = values.double()
        there = ~values.isnan()
        filled = values.where(there, 0.0)
        batch = Means.zeros(*self.mean.shape)
        batch.count.index_add_(0, groups, there.double())
        batch.mean.index_add_(0, groups, filled)
        batch.mean /= batch.count.clamp(min=1)
        batch.squares.index_add_(0, groups, (filled - batch.mean[groups]).where(there, 0.0).square())
        self._merge(batch)

    def _merge(self, other: "Means") -> None:
        n, m, gap = self.count, other.count, other.mean - self.mean
        both = (n + m).clamp(min=1)
        self.squares = self.squares + other.squares + gap.square() * n * m / both
        self.mean = self.mean + gap * m / both
        self.count = n + m

    def of(self, group: int) -> "Means":
        """What one group has."""
        return Means(self.count[group], self.mean[group], self.squares[group])

    def pooled(self, groups: Sequence[int]) -> "Means":
        """Some groups as one, every row counted once."""
        whole = Means.zeros(*self.mean.shape[1:])
        for group in groups:
            whole._merge(self.of(group))
        return whole

    def cells(self, *index: int) -> tuple[int, float | None, float | None]:
        """Rows, mean and standard error of one value.

        The error is the sample standard deviation over the root of the rows, as of independent ones; None for
        fewer than two. Rows that resemble each other (a character in several faces) make the true one larger.
        """
        count = int(self.count[index])
        if count == 0:
            return 0, None, None
        mean = finite(self.mean[index])
        if count == 1:
            return 1, mean, None
        return count, mean, finite((self.squares[index] / (count - 1) / count).sqrt())

    def fields(self, names: Sequence[str], *index: int) -> dict[str, Any]:
        """Of a typed row: `NAME` and `NAME_se` of the values that stand in a line at an index."""
        fields = dict[str, Any]()
        for column, name in enumerate(names):
            _, fields[name], fields[f"{name}_se"] = self.cells(*index, column)
        return fields
