"""How performance goes with the frequency of concepts (Udandarao et al. 2024, arXiv 2404.04125).

The paper's figure is the correlation of a few bins' means, which hides how far concepts scatter; it is here
to be compared with. The slope and the correlations over all concepts, with intervals, say what can be
expected of one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.base.errors import DataError

F64 = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A number with the 95 % interval of a bootstrap over concepts.

    Attributes:
        value: over all concepts.
        interval: 2.5th and 97.5th percentile of resampled ones.
    """

    value: float
    interval: Interval


@dataclass(frozen=True)
class Fit:
    """Performance of concepts over the logarithm of their frequency.

    Attributes:
        concepts: how many.
        slope: performance gained by ten times the examples.
        pearson: correlation with the logarithm.
        spearman: of the ranks.
        binned: Pearson's correlation of the paper's bins; NaN where they are too few.
    """

    concepts: int
    slope: Estimate
    pearson: Estimate
    spearman: Estimate
    binned: float

    def examples_for(self, gain: float) -> Estimate:
        """How many times the examples a gain takes; infinite where there is no rising trend."""
        low, high = self.slope.interval
        return Estimate(_times(gain, self.slope.value), (_times(gain, high), _times(gain, low)))


def _times(gain: float, slope: float) -> float:
    exponent = gain / slope if slope > 0 else math.inf
    return 10.0**exponent if exponent < 300 else math.inf


def fit(counts: ArrayLike, performance: ArrayLike, draws: int = 1000, seed: int = 0) -> Fit:
    """Fit performance to ln(max(count, 1)) by least squares.

    Args:
        counts: examples of every concept `(N,)`.
        performance: of every concept `(N,)`.
        draws: of the bootstrap.
        seed: of its random numbers.

    Raises:
        DataError: fewer than three concepts, values that are no numbers, negative counts, or one value only.
    """
    x, y = checked(counts, performance)
    logs = np.log(np.maximum(x, 1))
    generator = np.random.default_rng(seed)
    samples = generator.integers(0, len(x), (draws, len(x)))

    def estimate(of: Callable[[F64, F64], float]) -> Estimate:
        # A draw of one concept many times has no slope, and says nothing.
        drawn = [of(logs[rows], y[rows]) for rows in samples]
        known = [value for value in drawn if math.isfinite(value)]
        low, high = np.percentile(known, [2.5, 97.5]) if known else (math.nan, math.nan)
        return Estimate(of(logs, y), (float(low), float(high)))

    return Fit(len(x), estimate(slope), estimate(pearson), estimate(spearman), binned(x, y))


def checked(counts: ArrayLike, performance: ArrayLike) -> tuple[F64, F64]:
    """Both as numbers, one of each for every concept."""
    x, y = np.asarray(counts, dtype=np.float64), np.asarray(performance, dtype=np.float64)
    if x.shape != y.shape or x.ndim != 1:
        raise DataError(f"{x.size} counts for {y.size} results", "give one of each for every concept")
    if len(x) < 3:
        raise DataError(f"{len(x)} concepts have both a count and a result", "give three or more")
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x >= 0).all()):
        raise DataError("a count or a result is negative or no number", "leave that concept out")
    for what, values in (("counts", x), ("results", y)):
        if (values == values[0]).all():
            raise DataError(f"all {what} are {values[0]:g}: nothing can be fitted", "give others")
    return x, y


def slope(logs: F64, y: F64) -> float:
    """Least squares, in performance for ten times the examples."""
    centred = logs - logs.mean()
    scatter = float(centred @ centred)
    return math.log(10) * float(centred @ y) / scatter if scatter else math.nan


def pearson(a: F64, b: F64) -> float:
    """Correlation; NaN where one of them does not change."""
    a, b = a - a.mean(), b - b.mean()
    norm = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / norm if norm else math.nan


def spearman(a: F64, b: F64) -> float:
    """Correlation of the ranks, equal values sharing their mean rank."""
    return pearson(ranks(a), ranks(b))


def ranks(values: F64) -> F64:
    """Ranks from 1, the mean of their ranks for equal values."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    last = count.cumsum()
    means: F64 = ((last - count + 1 + last) / 2)[inverse]
    return means


def binned(counts: F64, performance: F64, bins: int = 12) -> float:
    """The paper's figure: correlation of 12 bins' edges and means, less the first and the last bin.

    Bins are even in ln(max(count, 1)), closed on the right; an empty one has the mean 0, as in the authors'
    notebooks, which is no good idea.
    """
    logs = np.log(np.maximum(counts, 1))
    edges = np.linspace(logs.min(), logs.max(), bins)
    which = np.digitize(logs, edges, right=True)
    means = np.array([performance[which == n].mean() if (which == n).any() else 0.0 for n in range(bins)])
    return pearson(edges[1:-1], means[1:-1])
