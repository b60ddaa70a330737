"""Two-level k-means (MoDE, arXiv 2404.16030): many fine centroids, then K coarse ones, then assignment.

The fine step sees a seeded sample of the features, so its cost does not grow with the data set; the
assignment streams. faiss does the k-means.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.base.errors import PartitionError
from atoll.base.rng import seed_of

Features = NDArray[np.float32]
POINTS_PER_CENTROID = 39  # under this faiss warns that centroids are poorly founded


def fit(features: Features, k: int, fine: int, seed: int) -> Features:
    """K coarse centroids of a sample of normalised features `(N, D)`.

    Returns:
        Centroids `(K, D)` float32, in order of falling first-seen size so that numbers are stable.

    Raises:
        PartitionError: fewer distinct rows than clusters.
    """
    if not np.isfinite(features).all():
        raise PartitionError(
            "the features hold NaN or infinity", "embed again: atoll data audit names the shard"
        )
    distinct = len(np.unique(features[: 64 * k + 4096], axis=0))
    if distinct < k:  # the first rows may be alike; all of them are looked at only then
        distinct = len(np.unique(features, axis=0))
    if distinct < k:
        raise PartitionError(
            f"{distinct} different feature vectors cannot make {k} clusters", "lower partition.k"
        )
    fine = max(k, min(fine, len(features) // POINTS_PER_CENTROID))
    # Starts are random: the best of several counts where its clusters are the final ones.
    centroids = _kmeans(features, fine, seed_of(seed, "fine"), redo=1 if fine > k else 8)
    if fine > k:
        centroids = _kmeans(centroids, k, seed_of(seed, "coarse"), redo=8)
    sizes = np.bincount(nearest_centroid(features, centroids), minlength=k)
    return centroids[np.argsort(-sizes, kind="stable")]


def nearest_centroid(features: Features, centroids: Features) -> NDArray[np.int64]:
    """Number of the nearest centroid `(N,)` in Euclidean distance; the lower number wins a tie."""
    distances = (centroids**2).sum(1)[None] - 2.0 * features @ centroids.T
    numbers: NDArray[np.int64] = distances.argmin(1).astype(np.int64)
    return numbers


def normalise(features: NDArray[np.floating]) -> Features:
    """Rows scaled to unit length, so that Euclidean k-means compares directions."""
    values = features.astype(np.float32)
    scaled: Features = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
    return scaled


def _kmeans(features: Features, k: int, seed: int, redo: int) -> Features:
    import faiss

    points = np.ascontiguousarray(features, dtype=np.float32)
    quiet = max(1, len(points) // k)  # no warning for few points, no silent subsampling of many
    kmeans = faiss.Kmeans(
        points.shape[1],
        k,
        niter=25,
        nredo=redo,
        seed=seed % 2**31,
        min_points_per_centroid=1,
        max_points_per_centroid=quiet + 1,
    )
    kmeans.train(points)
    centroids: Features = np.array(kmeans.centroids, dtype=np.float32)
    if not np.isfinite(centroids).all():
        raise PartitionError("k-means did not converge to finite centroids", "check the features column")
    return centroids
