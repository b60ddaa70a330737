"""Means, covariances and principal components in float64, batch by batch: memory stays as it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.table import finite

F64 = NDArray[np.float64]
_ROWS = 4096
"""Most rows that are taken in at once, so that a large set costs no more memory than a small one."""


@dataclass(frozen=True)
class Moments:
    """Number, mean `(D,)` and scatter `(D, D)` of features: the sum of (x - mean)(x - mean)^T."""

    count: int
    mean: F64
    scatter: F64

    @classmethod
    def of(cls, features: NDArray[np.floating]) -> "Moments":
        """Moments of features `(N, D)`; `DataError` where one is not finite."""
        width = features.shape[1]
        count, mean, scatter = 0, np.zeros(width), np.zeros((width, width))
        for first in range(0, len(features), _ROWS):
            values = must_be_finite(features[first : first + _ROWS])
            new, whole, center = len(values), count + len(values), values.mean(0)
            # Kept about the mean: sums of squares lose all digits where it is large. One row more holds the
            # shift of the mean: one product, which is symmetric to the bit, does it all.
            shift, rows = center - mean, np.empty((new + 1, width))
            np.subtract(values, center, out=rows[:new])
            np.multiply(shift, np.sqrt(count * new / whole), out=rows[new])
            scatter += rows.T @ rows
            mean, count = mean + shift * (new / whole), whole
        return cls(count, mean, scatter)

    @property
    def covariance(self) -> F64:
        """Unbiased covariance `(D, D)`; two samples or more."""
        return self.scatter / (self.count - 1)

    @property
    def rank(self) -> int:
        """How many dimensions the features fill: fewer than D if their covariance is singular."""
        return int(np.linalg.matrix_rank(self.covariance, hermitian=True))


def must_be_finite(features: NDArray[np.floating]) -> F64:
    """Features in float64; `DataError` where one is not finite."""
    values = np.asarray(features, dtype=np.float64)
    if not np.isfinite(values).all():
        raise DataError("the features hold NaN or infinity", "look at the pictures they were made from")
    return values


@dataclass(frozen=True)
class Projection:
    """Principal components of features: mean `(D,)`, and axes `(D, P)`, orthonormal, the largest first."""

    mean: F64
    axes: F64

    @classmethod
    def fit(cls, features: NDArray[np.floating], components: int) -> "Projection":
        """The first principal components of features `(N, D)`; `DataError` if there are too few."""
        moments = Moments.of(features)
        if moments.count <= components:
            fix = "give more, or fewer components"
            raise DataError(f"{moments.count} pictures cannot fix {components} components", fix)
        _, vectors = np.linalg.eigh(moments.covariance)
        # eigh's eigenvalues rise, and BLAS takes no view of negative strides.
        return cls(moments.mean, np.ascontiguousarray(vectors[:, ::-1][:, :components]))

    def __call__(self, features: NDArray[np.floating]) -> F64:
        """Features `(N, P)`."""
        projected: F64 = (must_be_finite(features) - self.mean) @ self.axes
        return projected

    def first(self, components: int) -> "Projection":
        """The first of these components."""
        return Projection(self.mean, self.axes[:, :components])


@dataclass(frozen=True)
class Axes:
    """Principal components of other pictures than the reference's, computed when they are first needed."""

    about: dict[str, object]
    """Which pictures, for the settings of a distance."""
    projection: Callable[[], Projection]


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
