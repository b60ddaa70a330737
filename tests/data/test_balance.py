"""Clusters that are held to shares: the shares are kept, at the least inertia for the centroids."""

import numpy as np
import pytest
from scipy.optimize import linprog

from atoll.base.errors import ConfigError, PartitionError
from atoll.data.balance import ShareBounds, balanced
from atoll.data.cluster import fit, nearest_centroid, normalise
from atoll.data.settings import PartitionConfig

CAPACITIES = (8.0, 8.0, 4.0, 2.0)


def rows(count: int = 1200, width: int = 6) -> np.ndarray:
    draws = np.random.default_rng(0)
    return normalise(draws.normal(size=(count, width)) + np.eye(width)[draws.integers(0, 3, count)] * 2)


def held(features: np.ndarray, weights: np.ndarray, config: PartitionConfig) -> tuple[np.ndarray, float]:
    """Shares of the weights, and by how much the assignment costs more than the best for these centroids."""
    bounds = ShareBounds.of(config)
    assert bounds is not None
    centroids, prices = balanced(features, weights, fit(features, config.k, 16, 0), bounds)
    owners = nearest_centroid(features, centroids, prices)
    costs = ((features[:, None] - centroids[None]) ** 2).sum(2)
    total, (count, k) = weights.sum(), costs.shape
    each = np.kron(np.eye(count), np.ones((1, k)))
    of = np.tile(np.eye(k), (1, count)) * np.repeat(weights, k)
    best = linprog(
        (costs * weights[:, None]).ravel(),
        A_ub=np.concatenate([of, -of]),
        b_ub=np.concatenate([bounds.high, -bounds.low]) * total,
        A_eq=each,
        b_eq=np.ones(count),
        bounds=(0, 1),
    )
    cost = float((costs[np.arange(count), owners] * weights).sum())
    return np.bincount(owners, weights, k) / total, cost / best.fun - 1


@pytest.mark.parametrize("weighted", [False, True])
def test_capacities_are_kept_at_the_least_cost(weighted: bool) -> None:
    features = rows(400)
    weights = np.random.default_rng(1).uniform(0, 2, 400) if weighted else np.ones(400)
    shares, loss = held(features, weights, PartitionConfig(k=4, capacities=CAPACITIES))
    assert shares == pytest.approx(np.array(CAPACITIES) / 22, rel=0.02, abs=0.005)
    assert -1e-6 < loss < 5e-3  # rows are whole, so the optimum of fractions may be just below


def test_no_cluster_holds_more_than_its_largest_share() -> None:
    shares, loss = held(rows(400), np.ones(400), PartitionConfig(k=4, max_share=0.3))
    assert shares.max() <= 0.3 + 1e-9 and loss < 2e-3


def test_one_giant_cluster_is_divided() -> None:
    draws = np.random.default_rng(0)
    features = normalise(np.eye(1, 8) * 5 + draws.normal(size=(3000, 8)) * 0.3)
    bounds = ShareBounds.of(PartitionConfig(k=3, capacities=(1, 1, 1)))
    assert bounds is not None
    centroids, prices = balanced(features, np.ones(3000), fit(features, 3, 32, 0), bounds)
    assert np.bincount(nearest_centroid(features, centroids, prices)) == pytest.approx([1000] * 3, rel=0.0201)


def test_rows_that_are_alike_cannot_be_divided() -> None:
    features = np.repeat(np.eye(2, 4, dtype="f4"), [900, 100], axis=0)
    bounds = ShareBounds.of(PartitionConfig(k=2, capacities=(1, 1)))
    assert bounds is not None
    with pytest.raises(PartitionError, match=r"cluster 0 would hold 90.00% and not 49.00% to 51.00%.*raise"):
        balanced(features, np.ones(1000), np.eye(2, 4, dtype="f4"), bounds)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"k": 3, "capacities": [1, 2]}, "not one positive number for each of partition.k=3"),
        ({"k": 2, "capacities": [1, 0]}, "not one positive number"),
        ({"k": 2, "capacities": "2:1"}, r"Input should be a list, such as \[2, 1\]"),
        ({"k": 4, "max_share": 0.2}, "does not hold all rows"),
        ({"method": "column"}, "column is for partition.method=column"),
        ({"column": "source"}, "column is for partition.method=column"),
    ],
)
def test_settings_that_cannot_be_kept(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        PartitionConfig.parse(settings, "here")
