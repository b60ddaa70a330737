"""Two-level k-means: blobs are found, small and odd inputs are refused or survived."""

import numpy as np
import pytest
from scipy.optimize import linprog

from atoll.base.errors import ConfigError, PartitionError
from atoll.data import cluster
from atoll.data.balance import ShareBounds, balanced
from atoll.data.cluster import fit, nearest_centroid, normalise
from atoll.data.settings import PartitionConfig


def blobs(
    k: int, rows: int, width: int = 16, spread: float = 0.05, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Directions with little noise around them, and which is whose."""
    draws = np.random.default_rng(seed)
    middles = np.linalg.qr(draws.normal(size=(width, width)))[0][:k]
    label = draws.integers(0, k, rows)
    return normalise(middles[label] + spread * draws.normal(size=(rows, width))), label


def agree(found: np.ndarray, label: np.ndarray) -> bool:
    """Whether two partitions are the same but for the numbers."""
    pairs = set(zip(found.tolist(), label.tolist(), strict=True))
    return len(pairs) == len(set(label.tolist())) == len(set(found.tolist()))


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("fine", [1, 32, 1024])
def test_blobs_are_found(k: int, fine: int) -> None:
    features, label = blobs(k, 2000)
    centroids = fit(features, k, fine, seed=0)
    assert centroids.shape == (k, 16) and centroids.dtype == np.float32
    assert agree(nearest_centroid(features, centroids), label)


def test_blobs_of_very_different_size_are_found() -> None:
    features, label = blobs(4, 4000)
    kept = np.concatenate([np.flatnonzero(label == i)[: (900, 400, 100, 25)[i]] for i in range(4)])
    found = nearest_centroid(features[kept], fit(features[kept], 4, 64, seed=0))
    assert agree(found, label[kept])
    assert np.bincount(found).tolist() == [900, 400, 100, 25]  # numbered by falling size


def test_the_seed_decides() -> None:
    features = normalise(np.random.default_rng(0).normal(size=(3000, 8)))
    assert np.array_equal(fit(features, 5, 40, 1), fit(features, 5, 40, 1))
    assert not np.array_equal(fit(features, 5, 40, 1), fit(features, 5, 40, 2))


def test_assignment_is_to_the_nearest() -> None:
    draws = np.random.default_rng(0)
    features, centroids = draws.normal(size=(200, 5)).astype("f4"), draws.normal(size=(7, 5)).astype("f4")
    distances = ((features[:, None] - centroids[None]) ** 2).sum(2)
    assert np.array_equal(nearest_centroid(features, centroids), distances.argmin(1))
    assert (nearest_centroid(features, np.stack([centroids[0], centroids[0]])) == 0).all()


def test_more_clusters_than_different_rows() -> None:
    with pytest.raises(PartitionError, match="1 different feature vectors cannot make 2 clusters: raise"):
        fit(np.eye(4, dtype="f4")[:1], 2, 8, 0)
    features = np.repeat(np.eye(16, dtype="f4"), 50, axis=0)
    with pytest.raises(PartitionError, match="16 different feature vectors cannot make 17 clusters: lower"):
        fit(features, 17, 32, 0)
    # Though random starts fall on equal rows, no cluster is left without any.
    assert agree(nearest_centroid(features, fit(features, 16, 32, 0)), np.repeat(range(16), 50))


def test_different_rows_that_come_late_count() -> None:
    """The first thousands of rows are one picture, as in a data set sorted by source."""
    features = np.concatenate([np.repeat(np.eye(1, 4, dtype="f4"), 6000, axis=0), np.eye(4, dtype="f4")[1:]])
    assert fit(features, 2, 64, 0).shape == (2, 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_features_that_are_no_numbers(bad: float) -> None:
    features, _ = blobs(2, 100)
    features[50, 3] = bad
    with pytest.raises(PartitionError, match="NaN or infinity"):
        fit(features, 2, 8, 0)


def test_normalise() -> None:
    scaled = normalise(np.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=np.float16))
    np.testing.assert_allclose(scaled, [[0.6, 0.8], [0, 0], [1, 0]], rtol=1e-6)
    assert scaled.dtype == np.float32


def test_many_rows_are_fitted_on_samples_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 64 rows for each fine centroid: as good, and decided by the seed, whatever the threads."""
    import faiss

    draws = np.random.default_rng(0)
    middles = draws.normal(size=(200, 12))
    shares = draws.pareto(1.2, 200) + 0.1
    chosen = draws.choice(200, 12_000, p=shares / shares.sum())
    features = normalise(middles[chosen] + 0.5 * draws.normal(size=(12_000, 12)))
    whole = fit(features, 4, 32, 0)
    monkeypatch.setattr(cluster, "LEAST_FINE", 32)
    threads = faiss.omp_get_max_threads()
    found = [fit(features, 4, 32, 0)]
    for count in (1, 2):
        faiss.omp_set_num_threads(count)
        found.append(fit(features, 4, 32, 0))
    faiss.omp_set_num_threads(threads)
    assert not np.array_equal(found[0], whole) and all(np.array_equal(one, found[0]) for one in found)

    def inertia(centroids: np.ndarray) -> float:
        return float(((features - centroids[nearest_centroid(features, centroids)]) ** 2).sum(1).mean())

    assert inertia(found[0]) < 1.01 * inertia(whole)


def test_starts_are_well_spread() -> None:
    features, label = blobs(8, 400)
    starts = cluster.spread_starts(features, 8, 0)
    assert len({int(label[(features == start).all(1).argmax()]) for start in starts}) == 8


# Clusters that are held to shares: the shares are kept, at the least inertia for the centroids.

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


def test_no_cluster_holds_less_than_its_smallest_share() -> None:
    free, _ = held(rows(400), np.ones(400), PartitionConfig(k=4, min_share=1e-9))
    shares, loss = held(rows(400), np.ones(400), PartitionConfig(k=4, min_share=0.22))
    assert free.min() < 0.2 and shares.min() >= 0.22 - 1e-9 and loss < 5e-3


def test_one_giant_cluster_is_divided() -> None:
    features = normalise(np.eye(1, 8) * 5 + np.random.default_rng(0).normal(size=(3000, 8)) * 0.3)
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
        ({"k": 4, "min_share": 0.3}, "min_share=0.3 is more than 4 clusters can each hold"),
        ({"k": 4, "max_share": 0.4, "min_share": 0.5}, "min_share=0.5 is more than"),
        ({"k": 3, "capacities": [8, 1, 1], "min_share": 0.2}, "ask for 10.0% to 80.0% of the rows"),
        ({"method": "column"}, "column is for partition.method=column"),
        ({"column": "source"}, "column is for partition.method=column"),
    ],
)
def test_settings_that_cannot_be_kept(settings: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        PartitionConfig.parse(settings, "here")
