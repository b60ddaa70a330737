"""Mean and covariance of features, and their principal components, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError

F64 = NDArray[np.float64]
_ROWS = 4096
"""Most rows that are taken in at once, so that a large set costs no more memory than a small one."""


@dataclass
class Moments:
    """Moments of features, in float64.

    They are kept about the running mean and merged as Chan, Golub and LeVeque (1979) do, so that no digits
    are lost where the mean is large.

    Attributes:
        width: D.
        count: number of samples N.
        mean: `(D,)`.
        scatter: `(D, D)`, the sum of (x - mean)(x - mean)^T.
    """

    width: int
    count: int = 0
    mean: F64 = field(default_factory=lambda: np.zeros(0))
    scatter: F64 = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        if not self.mean.size:
            self.mean, self.scatter = np.zeros(self.width), np.zeros((self.width, self.width))

    @classmethod
    def of(cls, features: NDArray[np.floating]) -> "Moments":
        """Moments of features `(N, D)`; `DataError` where one is not finite."""
        moments = cls(np.asarray(features).shape[1])
        for first in range(0, len(features), _ROWS):
            moments.add(must_be_finite(features[first : first + _ROWS]))
        return moments

    def add(self, values: F64) -> None:
        """Take in features `(N, D)`."""
        count, mean = len(values), values.mean(0)
        shift = mean - self.mean
        factor = self.count * count / (self.count + count)
        # One row more holds the shift of the mean: one product, which is symmetric to the bit, does it all.
        rows = np.empty((count + 1, self.width))
        np.subtract(values, mean, out=rows[:count])
        np.multiply(shift, np.sqrt(factor), out=rows[count])
        self.scatter += rows.T @ rows
        self.mean = self.mean + shift * (count / (self.count + count))
        self.count += count

    @property
    def covariance(self) -> F64:
        """Unbiased covariance `(D, D)`; two samples or more."""
        return self.scatter / (self.count - 1)


def must_be_finite(features: NDArray[np.floating]) -> F64:
    """Features in float64; `DataError` where one is not finite."""
    values = np.asarray(features, dtype=np.float64)
    if not np.isfinite(values).all():
        raise DataError("the features hold NaN or infinity", "look at the pictures they were made from")
    return values


@dataclass(frozen=True)
class Projection:
    """Principal components of a set of features.

    Attributes:
        mean: `(D,)`.
        axes: `(D, P)`, orthonormal, the largest first.
    """

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
    """Principal components that other pictures than the reference's fix.

    Attributes:
        about: which pictures these are, for the settings of a distance.
        projection: the components, computed when they are first needed.
    """

    about: dict[str, object]
    projection: Callable[[], Projection]
