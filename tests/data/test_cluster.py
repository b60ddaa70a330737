"""Two-level k-means: blobs are found, small and odd inputs are refused or survived."""

import numpy as np
import pytest

from atoll.base.errors import PartitionError
from atoll.data import cluster
from atoll.data.cluster import fit, nearest_centroid, normalise


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
    centroids = fit(features[kept], 4, 64, seed=0)
    found = nearest_centroid(features[kept], centroids)
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
    twins = np.stack([centroids[0], centroids[0]])
    assert (nearest_centroid(features, twins) == 0).all()


@pytest.mark.parametrize(("rows", "k"), [(3, 4), (1, 2)])
def test_more_clusters_than_rows(rows: int, k: int) -> None:
    with pytest.raises(PartitionError, match=f"{rows} different feature vectors cannot make {k} clusters"):
        fit(np.eye(4, dtype="f4")[:rows], k, 8, 0)


def test_more_clusters_than_different_rows() -> None:
    features = np.repeat(np.eye(3, dtype="f4"), 100, axis=0)
    with pytest.raises(PartitionError, match="3 different feature vectors cannot make 4 clusters: lower"):
        fit(features, 4, 32, 0)
    assert agree(nearest_centroid(features, fit(features, 3, 32, 0)), np.repeat([0, 1, 2], 100))


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
    values = np.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]], dtype=np.float16)
    scaled = normalise(values)
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
