"""Two-level k-means (MoDE, arXiv 2404.16030): many fine centroids, then K coarse ones, then assignment.

The fine step sees a seeded sample of the features, so neither its time nor its memory grows with the data
set; the assignment streams. faiss does the k-means. Clusters may be held to shares of the rows: `prices`.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import PartitionError
from atoll.base.rng import seed_of

Features = NDArray[np.float32]
LEAST_FINE = 1024  # fewer fine centroids than these are founded on no fewer rows
POINTS_PER_CENTROID = 39  # under this faiss warns that centroids are poorly founded
WHOLE, SAMPLE = 64, 256
"""Rows for each fine centroid: up to the first all iterations see all rows; beyond the second more rows would
change the inertia by less than 1 / SAMPLE, as a centroid is then the mean of so many."""
STEPS = ((8, 0), (16, 4), (WHOLE, 5), (SAMPLE, 3))
"""Rows for each fine centroid and iterations on them, where all rows are too many; the first are starts."""
MOST_STARTS = 16_384  # rows whose distances from each other are in memory: 1 GiB


def fit(features: Features, k: int, fine: int, seed: int) -> Features:
    """K coarse centroids `(K, D)` of a sample of normalised features `(N, D)`, the largest cluster first."""
    if not np.isfinite(features).all():
        fix = "remove their folder below columns/ and embed again; atoll data audit names the shard"
        raise PartitionError("the features hold NaN or infinity", fix)
    distinct = len(np.unique(features[: 64 * k + 4096], axis=0))
    if distinct < k:  # the first rows may be alike; all of them are looked at only then
        distinct = len(np.unique(features, axis=0))
    if distinct < k:
        what = f"{distinct} different feature vectors cannot make {k} clusters"
        raise PartitionError(what, "raise partition.fit_rows" if len(features) < k else "lower partition.k")
    # MoDE's two levels: many small cells first, so that the coarse clusters follow the density's shape and a
    # dense region does not take all the coarse centroids.
    fine = max(k, min(fine, len(features) // POINTS_PER_CENTROID))
    # Starts are random: the best of several counts where its clusters are the final ones.
    many = fine > k and len(features) > WHOLE * max(fine, LEAST_FINE)
    cells = features, fine, seed_of(seed, "fine")
    centroids = _nested(*cells) if many else _kmeans(*cells, redo=1 if fine > k else 8)
    if fine > k:
        centroids = _kmeans(centroids, k, seed_of(seed, "coarse"), redo=8)
    if many:  # fine centroids count alike, whatever their rows
        centroids = _kmeans(features, k, seed_of(seed, "rows"), 1, 10, centroids)
    for _ in range(k):
        distances = squared_distances(features, centroids)
        sizes = np.bincount(distances.argmin(1), minlength=k)
        if sizes.all():
            break
        # Of equal rows several may be starts, and all but one of them end without a row. Such a centroid
        # moves to the row that is farthest from every centroid.
        apart = distances.min(1) + np.einsum("nd,nd->n", features, features)
        centroids[sizes.argmin()] = features[apart.argmax()]
    return centroids[np.argsort(-sizes, kind="stable")]


def squared_distances(features: Features, centroids: Features) -> Features:
    """Squared Euclidean distances `(N, K)`, but for what all of a row have in common: its own length."""
    distances: Features = (centroids**2).sum(1)[None] - 2.0 * features @ centroids.T
    return distances


def nearest_centroid(
    features: Features, centroids: Features, prices: Features | None = None
) -> NDArray[np.int64]:
    """Nearest centroid `(N,)` by squared distance plus price `(K,)`; the lower number wins a tie."""
    distances = squared_distances(features, centroids)
    if prices is not None and len(prices):
        distances += prices
    numbers: NDArray[np.int64] = distances.argmin(1).astype(np.int64)
    return numbers


def normalise(features: NDArray[np.floating]) -> Features:
    """Rows scaled to unit length, so that Euclidean k-means compares directions."""
    values = features.astype(np.float32)
    scaled: Features = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    return scaled


def _nested(features: Features, fine: int, seed: int) -> Features:
    """Fine centroids of many rows: well spread starts, then k-means on ever more of the rows."""
    order, centroids = np.random.default_rng(seed).permutation(len(features)), None
    for rows, iterations in STEPS:
        some = features[order[: rows * fine]] if rows * fine < len(features) else features
        if iterations:
            centroids = _kmeans(some, fine, seed, 1, iterations, centroids)
        elif len(some) <= MOST_STARTS:  # else starts are drawn from all alike
            centroids = spread_starts(some, fine, seed)
    assert centroids is not None
    return centroids


def spread_starts(features: Features, k: int, seed: int, trials: int = 8) -> Features:
    """Greedy k-means++: of some rows, drawn by their squared distance, each time the one that helps most.

    faiss draws one where this tries several; from such starts the inertia ends some per cent lower.
    """
    draws, lengths = np.random.default_rng(seed), (features**2).sum(1)
    distances = features @ features.T
    distances *= -2
    distances += lengths
    distances += lengths[:, None]
    chosen = [int(draws.integers(len(features)))]
    nearest = distances[chosen[0]].clip(min=0)
    for _ in range(k - 1):
        reach = np.cumsum(nearest, dtype=np.float64)
        tried = np.searchsorted(reach, draws.random(trials) * reach[-1]).clip(max=len(features) - 1)
        left = np.minimum(nearest, distances[tried])
        best = int(left.sum(1).argmin())
        nearest = left[best].clip(min=0)
        chosen.append(int(tried[best]))
    starts: Features = features[chosen]
    return starts


def _kmeans(
    features: Features, k: int, seed: int, redo: int, iterations: int = 25, starts: Features | None = None
) -> Features:
    import faiss

    points = np.ascontiguousarray(features, dtype=np.float32)
    # faiss warns of few points for each centroid, and silently subsamples beyond 256 for each.
    kmeans = faiss.Kmeans(
        points.shape[1],
        k,
        niter=iterations,
        nredo=redo,
        seed=seed % 2**31,  # faiss takes a signed int
        min_points_per_centroid=1,
        max_points_per_centroid=max(1, len(points) // k) + 1,
    )
    kmeans.train(points, init_centroids=starts)
    centroids: Features = np.array(kmeans.centroids, dtype=np.float32)
    return centroids
