"""Fréchet distance between two sets of features, in float64.

`d^2 = |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2))` (Dowson and Landau 1982; Heusel et al. 2017). With few
samples for many dimensions the covariances are singular, so features are projected on fixed principal
components first; the result is then named after its extractor and never called FID.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import DataError

F64 = NDArray[np.float64]


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
        values = _finite(features)
        if len(values) <= components:
            raise DataError(
                f"{len(values)} pictures cannot fix {components} components", "give more, or fewer components"
            )
        mean = values.mean(0)
        _, vectors = np.linalg.eigh(_covariance(values))
        return cls(mean, np.ascontiguousarray(vectors[:, ::-1][:, :components]))

    def __call__(self, features: NDArray[np.floating]) -> F64:
        """Features `(N, P)`."""
        projected: F64 = (_finite(features) - self.mean) @ self.axes
        return projected


def frechet_distance(first: NDArray[np.floating], second: NDArray[np.floating]) -> float:
    """Squared Fréchet distance between Gaussians fitted to features `(N, D)` and `(M, D)`.

    Raises:
        DataError: NaN, or fewer samples than dimensions (a singular covariance).
    """
    sets = [_finite(first), _finite(second)]
    for values in sets:
        if len(values) <= values.shape[1]:
            fix = "give more samples, or project on fewer components"
            raise DataError(
                f"{len(values)} samples for {values.shape[1]} dimensions: the covariance is singular", fix
            )
    (m1, c1), (m2, c2) = ((v.mean(0), _covariance(v)) for v in sets)
    return frechet_of_moments(m1, c1, m2, c2)


def frechet_of_moments(m1: F64, c1: F64, m2: F64, c2: F64) -> float:
    """Squared Fréchet distance between two Gaussians of known mean `(D,)` and covariance `(D, D)`."""
    # tr (C1 C2)^(1/2) through the symmetric A C2 A with A = C1^(1/2): real and stable.
    values, vectors = np.linalg.eigh(c1)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    middle = np.linalg.eigvalsh(root @ c2 @ root)
    trace = np.trace(c1) + np.trace(c2) - 2 * np.sqrt(middle.clip(0)).sum()
    return float(((m1 - m2) ** 2).sum() + trace)


def _covariance(values: F64) -> F64:
    """Covariance `(D, D)` of `(N, D)`, for D = 1 too."""
    return np.atleast_2d(np.cov(values, rowvar=False))


def _finite(features: NDArray[np.floating]) -> F64:
    values = np.asarray(features, dtype=np.float64)
    if not np.isfinite(values).all():
        raise DataError("the features hold NaN or infinity", "look at the pictures they were made from")
    return values
