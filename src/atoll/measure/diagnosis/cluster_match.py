"""Whether samples end where the experts that made them are at home: in the features that cut the clusters.

The data-cluster distance of arXiv 2602.02685, taken at the end of the path, where a picture can be looked at.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.campaign.results import Table
from atoll.data.cluster import Features, nearest_centroid, normalise
from atoll.measure.diagnosis.memorization import leaders
from atoll.measure.diagnosis.running_stats import Means
from atoll.measure.table import Cell

COLUMNS = (
    "cluster", "samples", "landed", "landed_se", "served", "served_se", "others", "others_se",
    "heldout", "own", "own_se", "heldout_others", "heldout_others_se",
)  # fmt: skip


def landing(
    features: NDArray[np.floating],
    weights: NDArray[np.float64],
    heldout: NDArray[np.floating],
    clusters: NDArray[np.int64],
    centroids: Features,
    prices: Features | None = None,
) -> Table:
    """Samples by the expert that served them most, beside held-out pictures of its cluster; `all` first.

    landed: share whose nearest centroid is that of the expert. served: distance to the centroids of the
    experts that served it, by their weights; others: to the rest, by what the weights leave of 1. own and
    heldout_others: the same of held-out pictures, which are wholly their cluster's. Distances are Euclidean,
    between features of unit length and centroids.

    Args:
        features: of the samples `(N, D)`, by the partition's encoder.
        weights: of the trace `(S, N, K)`; their mean over the steps counts.
        heldout: features of held-out pictures `(M, D)`; none are fine.
        clusters: of the held-out pictures `(M,)`.
        centroids: of the partition `(K, D)`.
        prices: of the partition `(K,)`, where it has any.
    """
    k = len(centroids)
    served, share = leaders(weights), weights.mean(0)
    landed = nearest_centroid(normalise(features), centroids, prices) == served
    samples, real = Means(k, (3,)), Means(k, (2,))
    samples.add(_columns(landed, *_distances(features, centroids, share)), torch.from_numpy(served))
    if len(heldout):
        one_hot = np.eye(k)[clusters]
        real.add(_columns(*_distances(heldout, centroids, one_hot)), torch.from_numpy(clusters))
    names: list[Cell] = ["all", *range(k)]
    rows = zip(names, _cells(samples, k), _cells(real, k), strict=True)
    return Table.of(COLUMNS, [[name, *one_hot, *other] for name, one_hot, other in rows])


def _distances(
    features: NDArray[np.floating], centroids: Features, weights: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances to the centroids `(N,)`: weighted, and weighted by what the weights leave of 1."""
    points, places = torch.from_numpy(normalise(features)).double(), torch.from_numpy(centroids).double()
    apart, rest = torch.cdist(points, places).numpy(), 1 - weights
    left = rest.sum(1)
    far = np.divide((apart * rest).sum(1), left, out=np.full(len(apart), np.nan), where=left > 0)
    return (apart * weights).sum(1), far


def _columns(*values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack([value.astype(np.float64) for value in values], 1))


def _cells(means: Means, k: int) -> list[list[Cell]]:
    """Of all clusters together and of each: how many, then mean and standard error of every value."""
    pooled = [means.pooled(range(k)), *(means.of(number) for number in range(k))]
    places = range(means.mean.shape[1])
    return [[one.cells(0)[0], *(cell for n in places for cell in one.cells(n)[1:])] for one in pooled]
