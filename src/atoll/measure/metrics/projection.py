"""Mean and covariance of features, and their principal components, in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError

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
            mean = mean + shift * (new / whole)
            count = whole
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
