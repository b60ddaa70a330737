"""Fréchet distance between two sets of features, in float64.

`d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))` (Dowson and Landau 1982; Heusel et al. 2017). With few
samples for many dimensions the covariances are singular, so features are projected on fixed principal
components first; the result is then named after its extractor and never called FID.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError
from atoll.measure.moments import F64, Moments, finite


@dataclass(frozen=True)
class Projection:
    """Fixed principal components of a set of features.

    Attributes:
        mean: `(D,)`.
        axes: `(D, P)`, orthonormal.
    """

    mean: F64
    axes: F64

    @classmethod
    def fit(cls, features: NDArray[np.floating], components: int) -> "Projection":
        """The first principal components of features `(N, D)`."""
        return cls.of_moments(Moments.of(features), components)

    @classmethod
    def of_moments(cls, moments: Moments, components: int) -> "Projection":
        """The first principal components of features of these moments."""
        if moments.count <= components:
            raise DataError(
                f"{moments.count} pictures cannot fix {components} components",
                "give more, or fewer components",
            )
        _, vectors = np.linalg.eigh(moments.covariance)
        return cls(moments.mean, np.ascontiguousarray(vectors[:, ::-1][:, :components]))

    def __call__(self, features: NDArray[np.floating]) -> F64:
        """Features `(N, P)`."""
        projected: F64 = (finite(features) - self.mean) @ self.axes
        return projected


def frechet_distance(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Squared distance between Gaussians fitted to features `(N, D)` and `(M, D)`.

    Raises:
        DataError: NaN, or fewer samples than dimensions (a singular covariance).
    """
    return frechet_between(Moments.of(first), Moments.of(second))


def frechet_between(first: Moments, second: Moments) -> float:
    """The same from moments.

    Raises:
        DataError: fewer samples than dimensions (a singular covariance).
    """
    for moments in (first, second):
        must_be_regular(moments.count, moments.width)
    return frechet_of_moments(first.mean, first.covariance, second.mean, second.covariance)


def must_be_regular(
    count: int, dimensions: int, what: str = "samples", fewer: str = "project on fewer components"
) -> None:
    """Refuse so few samples that their covariance must be singular."""
    if count <= dimensions:
        raise DataError(
            f"{count} {what} for {dimensions} dimensions: the covariance is singular",
            f"give more samples, or {fewer}",
        )


def frechet_of_moments(m1: F64, c1: F64, m2: F64, c2: F64) -> float:
    """Squared Fréchet distance between two Gaussians of known mean `(D,)` and covariance `(D, D)`.

    Covariances may be singular. Equal ones give 0 up to rounding, which never makes it negative.

    Raises:
        DataError: NaN or infinity.
    """
    if not all(np.isfinite(values).all() for values in (m1, c1, m2, c2)):
        raise DataError("the moments hold NaN or infinity", "make them again from the pictures")
    # tr (C1 C2)^(1/2) through the symmetric A C2 A with A = C1^(1/2): real and stable.
    values, vectors = np.linalg.eigh(c1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    middle = np.linalg.eigvalsh(root @ c2 @ root)
    trace = np.trace(c1) + np.trace(c2) - 2 * np.sqrt(middle.clip(0)).sum()
    return max(0.0, float(((m1 - m2) ** 2).sum() + trace))


def rank(moments: Moments) -> int:
    """How many dimensions the features fill: fewer than they have if their covariance is singular."""
    return int(np.linalg.matrix_rank(moments.covariance, hermitian=True))
