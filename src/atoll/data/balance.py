"""Clusters held to shares of the rows, for islands of unequal compute.

Every cluster has a price that is added to the squared distance to its centroid; a row goes where the sum is
least. Of all ways to give rows to these centroids within the same shares, that is the one of least inertia:
prices are the duals of the transport problem (Aurenhammer, Hoffmann and Aronov 1998, power diagrams).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import PartitionError
from atoll.data.cluster import Features, nearest_centroid, squared_distances
from atoll.data.settings import PartitionConfig

MOVES = 15  # of the centroids, at most
CLOSE = 1e-4  # changes of a price that count as none: features are of unit length
MOVED_BY = 65_536  # rows that the centroids are moved by; the last prices are those of all rows given
Shares = NDArray[np.float64]


@dataclass(frozen=True)
class ShareBounds:
    """Shares of the whole that each cluster may hold: the smallest and the largest, `(K,)` each."""

    low: Shares
    high: Shares

    @classmethod
    def of(cls, config: PartitionConfig) -> "ShareBounds | None":
        """What the settings ask for; None where they ask for nothing."""
        if config.capacities is None and config.max_share is None and config.min_share is None:
            return None
        low, high = np.zeros(config.k), np.ones(config.k)
        if config.capacities is not None:
            wanted = np.array(config.capacities) / sum(config.capacities)
            low, high = wanted * (1 - config.tolerance), wanted * (1 + config.tolerance)
        if config.max_share is not None:
            high = np.minimum(high, config.max_share)
        return cls(np.maximum(low, config.min_share or 0), high)

    def check(
        self, weights: NDArray[Any], row: float = 0.0, why: str = "rows that are alike stay together"
    ) -> None:
        """Refuse weights `(K,)` that are out of the bounds by more than that of one `row`; `why` says why."""
        shares = weights / weights.sum()
        over = np.maximum(self.low - shares, shares - self.high)
        worst = int(over.argmax())
        if over[worst] > 1e-9 + row / weights.sum():
            asked = f"{self.low[worst]:.2%} to {self.high[worst]:.2%}"
            what = f"cluster {worst} would hold {shares[worst]:.2%} and not {asked}, since {why}"
            fix = "raise partition.tolerance or max_share, or lower min_share or change capacities"
            raise PartitionError(what, fix)


def balanced(
    features: Features, weights: NDArray[np.floating], centroids: Features, bounds: ShareBounds
) -> tuple[Features, Features]:
    """Move centroids `(K, D)` and set prices `(K,)`, the least of them 0, until clusters are within bounds.

    Features `(N, D)` are normalised, and in random order or of one kind throughout; weights are `(N,)`. The
    centroids to start from have the largest cluster first; it starts where most is wanted.
    """
    centroids = centroids[np.argsort(np.argsort(-bounds.high, kind="stable"), kind="stable")]
    # Few rows move the centroids, for a step costs time in proportion; all rows set the last prices, since
    # the shares have to hold for them.
    few = slice(None, None, -(-len(features) // MOVED_BY))
    some, counts, owners = features[few], weights[few], np.empty(0)
    prices = np.zeros(len(centroids))
    for _ in range(MOVES):
        distances = np.ascontiguousarray(squared_distances(some, centroids).T)
        prices = set_prices(distances, counts, bounds, prices, rounds=5)
        before, owners = owners, (distances + prices[:, None]).argmin(0)
        if np.array_equal(before, owners):
            break
        centroids = _means(some, counts, owners, centroids)
    distances = np.ascontiguousarray(squared_distances(features, centroids).T)
    prices = set_prices(distances, weights, bounds, prices, rounds=50)
    final = (prices - prices.min()).astype(np.float32)
    held = np.bincount(nearest_centroid(features, centroids, final), weights, len(final))
    # One row may be too much: a row is whole, and the heaviest may straddle the bound.
    bounds.check(held, float(weights.max()))
    return centroids, final


def set_prices(
    distances: NDArray[np.floating],
    weights: NDArray[np.floating],
    bounds: ShareBounds,
    prices: Shares,
    rounds: int,
) -> Shares:
    """Raise the prices of clusters that hold too much and lower those of clusters that hold too little.

    One price is set at a time, to where the cluster just keeps its bounds; each such step ascends the dual.
    Distances `(K, N)` are squared, weights `(N,)`, prices to start from `(K,)`; `rounds` over them at most.
    """
    prices, total = prices.astype(np.float32), float(weights.sum())
    low, high = bounds.low * total, bounds.high * total
    costs = distances + prices[:, None]
    for _ in range(rounds if len(prices) > 1 else 0):
        before = prices.copy()
        for number in range(len(prices)):
            # What each row would gain by this cluster, beside the best of all others.
            costs[number] = np.inf
            prices[number] = _price(costs.min(0) - distances[number], weights, low[number], high[number])
            costs[number] = distances[number] + prices[number]
        held = np.bincount(costs.argmin(0), weights, len(prices))
        within = (held >= low * (1 - 1e-9)).all() and (held <= high * (1 + 1e-9)).all()
        if within and np.abs(prices - before).max() < CLOSE:
            break
    return prices.astype(np.float64)


def _price(gains: NDArray[np.floating], weights: NDArray[np.floating], low: float, high: float) -> float:
    """The price nearest to 0 at which rows that still gain by a cluster weigh between `low` and `high`."""
    free = float(weights[gains > 0].sum())
    if low <= free <= high:
        return 0.0
    order = np.argsort(-gains)
    reach = np.cumsum(weights[order], dtype=np.float64)
    # Of the places between two rows, the last within `high`, or the first beyond `low`.
    reached = np.searchsorted(reach, high, "right") if free > high else np.searchsorted(reach, low) + 1
    first, second = gains[order[np.clip([reached - 1, reached], 0, len(order) - 1)]]
    return float(first + second) / 2


def _means(
    features: Features, weights: NDArray[np.floating], owners: NDArray[np.int64], centroids: Features
) -> Features:
    """Weighted means of the clusters; one that holds nothing stays where it is."""
    moved = centroids.copy()
    for number in range(len(centroids)):
        inside = owners == number
        if weights[inside].sum() > 0:
            moved[number] = np.average(features[inside], axis=0, weights=weights[inside])
    return moved
