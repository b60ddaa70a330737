"""Count, mean and scatter of features, streamed: what a Fréchet distance needs, in memory that stays flat."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.errors import DataError

F64 = NDArray[np.float64]
_ROWS = 4096
"""Most rows that are taken in at once, so that a large batch costs no more memory than a small one."""


@dataclass
class Moments:
    """Moments of a stream of features, in float64.

    They are kept about the running mean and merged as Chan, Golub and LeVeque (1979) do, so that no digits
    are lost where the mean is large. How a stream is cut changes rounding alone.

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
        """Moments of features `(N, D)`."""
        moments = cls(np.asarray(features).shape[1])
        moments.add(features)
        return moments

    def add(self, features: NDArray[np.floating]) -> None:
        """Take in features `(N, D)`.

        Raises:
            DataError: another width, NaN or infinity.
        """
        if features.ndim != 2 or features.shape[1] != self.width:
            raise DataError(
                f"features of shape {features.shape} for a width of {self.width}", "use one extractor"
            )
        for first in range(0, len(features), _ROWS):
            self._add(finite(features[first : first + _ROWS]))

    def _add(self, values: F64) -> None:
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

    def merge(self, other: "Moments") -> None:
        """Take in what another one has seen; exact but for rounding."""
        if other.width != self.width:
            raise DataError(f"moments of widths {self.width} and {other.width}", "use one extractor")
        if other.count == 0:
            return
        shift, total = other.mean - self.mean, self.count + other.count
        self.scatter = (
            self.scatter + other.scatter + np.outer(shift, shift) * (self.count * other.count / total)
        )
        self.mean = self.mean + shift * (other.count / total)
        self.count = total

    @property
    def covariance(self) -> F64:
        """Unbiased covariance `(D, D)`; two samples or more."""
        return self.scatter / (self.count - 1)

    def project(self, mean: F64, axes: F64) -> "Moments":
        """Moments `(P,)` of the features' coordinates on axes `(D, P)` through `mean`."""
        moved = (self.mean - mean) @ axes
        return Moments(axes.shape[1], self.count, moved, axes.T @ self.scatter @ axes)

    def tensors(self) -> dict[str, Tensor]:
        """Count `(1,)`, mean and scatter, to be stored or sent."""
        return {
            "count": torch.tensor([self.count]),
            "mean": torch.from_numpy(self.mean),
            "scatter": torch.from_numpy(self.scatter),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Moments":
        """What `tensors` gave."""
        mean, scatter = tensors["mean"].numpy(), tensors["scatter"].numpy()
        return cls(len(mean), int(tensors["count"][0]), mean.copy(), scatter.copy())


def finite(features: NDArray[np.floating]) -> F64:
    """Features in float64; `DataError` where one is not finite."""
    values = np.asarray(features, dtype=np.float64)
    if not np.isfinite(values).all():
        raise DataError("the features hold NaN or infinity", "look at the pictures they were made from")
    return values
