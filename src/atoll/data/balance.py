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
class Limits:
    """Shares of the whole that each cluster may hold.

    Attributes:
        low: smallest `(K,)`.
        high: largest `(K,)`.
    """

    low: Shares
    high: Shares

    @classmethod
    def of(cls, config: PartitionConfig) -> "Limits | None":
        """What the settings ask for; None where they ask for nothing."""
        if config.capacities is None and config.max_share is None:
            return None
        low, high = np.zeros(config.k), np.ones(config.k)
        if config.capacities is not None:
            wanted = np.array(config.capacities) / sum(config.capacities)
            low, high = wanted * (1 - config.tolerance), wanted * (1 + config.tolerance)
        if config.max_share is not None:
            high = np.minimum(high, config.max_share)
        return cls(low, high)

    @classmethod
    def none(cls, k: int) -> "Limits":
        """No limits: every cluster may hold anything."""
        return cls(np.zeros(k), np.ones(k))

    def check(
        self, masses: NDArray[Any], row: float = 0.0, why: str = "rows that are alike stay together"
    ) -> None:
        """Refuse masses `(K,)` that are out of the limits by more than that of one `row`.

        Raises:
            PartitionError: they are, because of what `why` says.
        """
        shares = masses / masses.sum()
        over = np.maximum(self.low - shares, shares - self.high)
        worst = int(over.argmax())
        if over[worst] > 1e-9 + row / masses.sum():
            asked = f"{self.low[worst]:.2%} to {self.high[worst]:.2%}"
            raise PartitionError(
                f"cluster {worst} would hold {shares[worst]:.2%} and not {asked}, since {why}",
                "raise partition.tolerance or partition.max_share, or change partition.capacities",
            )


def balanced(
    features: Features, masses: NDArray[np.floating], centroids: Features, limits: Limits
) -> tuple[Features, Features]:
    """Move centroids and set prices until every cluster is within its limits.

    Args:
        features: `(N, D)`, normalised, in random order or of one kind throughout.
        masses: of the rows `(N,)`.
        centroids: to start from `(K, D)`, the largest cluster first.
        limits: of the shares.

    Returns:
        Centroids `(K, D)` and prices `(K,)`, float32, the least price 0. Where the limits differ the largest
        cluster starts where most is wanted.
    """
    centroids = centroids[np.argsort(np.argsort(-limits.high, kind="stable"), kind="stable")]
    few = slice(None, None, -(-len(features) // MOVED_BY))
    some, weights, owners = features[few], masses[few], np.empty(0)
    prices = np.zeros(len(centroids))
    for _ in range(MOVES):
        distances = np.ascontiguousarray(squared_distances(some, centroids).T)
        prices = set_prices(distances, weights, limits, prices, rounds=5)
        before, owners = owners, (distances + prices[:, None]).argmin(0)
        if np.array_equal(before, owners):
            break
        centroids = _means(some, weights, owners, centroids)
    distances = np.ascontiguousarray(squared_distances(features, centroids).T)
    prices = set_prices(distances, masses, limits, prices, rounds=50)
    final = (prices - prices.min()).astype(np.float32)
    held = np.bincount(nearest_centroid(features, centroids, final), masses, len(final))
    limits.check(held, float(masses.max()))
    return centroids, final


def set_prices(
    distances: NDArray[np.floating], masses: NDArray[np.floating], limits: Limits, prices: Shares, rounds: int
) -> Shares:
    """Raise the prices of clusters that hold too much and lower those of clusters that hold too little.

    One price is set at a time, to where the cluster just keeps its limits; each such step ascends the dual.

    Args:
        distances: squared `(K, N)`.
        masses: of the rows `(N,)`.
        limits: of the shares.
        prices: to start from `(K,)`.
        rounds: over all prices, at most.
    """
    prices, total = prices.astype(np.float32), float(masses.sum())
    low, high = limits.low * total, limits.high * total
    costs = distances + prices[:, None]
    for _ in range(rounds if len(prices) > 1 else 0):
        before = prices.copy()
        for number in range(len(prices)):
            costs[number] = np.inf
            gains = costs.min(0) - distances[number]
            prices[number] = _price(gains, masses, low[number], high[number])
            costs[number] = distances[number] + prices[number]
        held = np.bincount(costs.argmin(0), masses, len(prices))
        kept = (held >= low * (1 - 1e-9)).all() and (held <= high * (1 + 1e-9)).all()
        if kept and np.abs(prices - before).max() < CLOSE:
            break
    return prices.astype(np.float64)


def _price(gains: NDArray[np.floating], masses: NDArray[np.floating], low: float, high: float) -> float:
    """The price nearest to 0 at which rows that still gain by a cluster weigh between `low` and `high`."""
    free = float(masses[gains > 0].sum())
    if low <= free <= high:
        return 0.0
    order = np.argsort(-gains)
    reach = np.cumsum(masses[order], dtype=np.float64)
    # Of the places between two rows, the last within `high`, or the first beyond `low`.
    reached = np.searchsorted(reach, high, "right") if free > high else np.searchsorted(reach, low) + 1
    first, second = gains[order[np.clip([reached - 1, reached], 0, len(order) - 1)]]
    return float(first + second) / 2


def _means(
    features: Features, masses: NDArray[np.floating], owners: NDArray[np.int64], centroids: Features
) -> Features:
    """Weighted means of the clusters; one that holds nothing stays where it is."""
    moved = centroids.copy()
    for number in range(len(centroids)):
        inside = owners == number
        if masses[inside].sum() > 0:
            moved[number] = np.average(features[inside], axis=0, weights=masses[inside])
    return moved
