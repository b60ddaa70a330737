"""Whether samples end where the experts that made them are at home: in the features that cut the clusters.

The data-cluster distance of arXiv 2602.02685, taken at the end of the path, where a picture can be looked at.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from atoll.campaign.diagnosed import ClusterMatchRow
from atoll.campaign.measured import Cluster
from atoll.data.cluster import Features, nearest_centroid, normalise
from atoll.measure.diagnosis.memorization import leaders
from atoll.measure.moments import Means


def cluster_match(
    features: NDArray[np.floating],
    weights: NDArray[np.float64],
    heldout: NDArray[np.floating],
    clusters: NDArray[np.int64],
    centroids: Features,
    prices: Features | None = None,
) -> list[ClusterMatchRow]:
    """Samples by the expert that served them most, beside held-out pictures of its cluster; `all` first.

    Args:
        features: of the samples `(N, D)`, by the partition's encoder.
        weights: of the trace `(S, N, K)`; their mean over the steps counts.
        heldout: features of held-out pictures `(M, D)`; none are fine.
        clusters: of the held-out pictures `(M,)`.
        centroids: of the partition `(K, D)`.
        prices: of the partition `(K,)`, where it has any.
    """

    def stacked(*values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack([value.astype(np.float64) for value in values], 1))

    k = len(centroids)
    served, share = leaders(weights), weights.mean(0)
    landed = nearest_centroid(normalise(features), centroids, prices) == served
    samples, real = Means(k, (3,)), Means(k, (2,))
    samples.add(stacked(landed, *_distances(features, centroids, share)), torch.from_numpy(served))
    if len(heldout):
        real.add(stacked(*_distances(heldout, centroids, np.eye(k)[clusters])), torch.from_numpy(clusters))
    numbers: list[Cluster] = ["all", *range(k)]
    rows = []
    for number in numbers:
        mine, theirs = (m.pooled(range(k)) if number == "all" else m.of(number) for m in (samples, real))
        values: dict[str, Any] = {}
        for moments, names in ((mine, ("landed", "served", "others")), (theirs, ("own", "heldout_others"))):
            for column, name in enumerate(names):
                _, values[name], values[f"{name}_se"] = moments.cells(column)
        rows.append(
            ClusterMatchRow(cluster=number, samples=mine.cells(0)[0], heldout=theirs.cells(0)[0], **values)
        )
    return rows


def _distances(
    features: NDArray[np.floating], centroids: Features, weights: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances to the centroids `(N,)`: weighted, and weighted by what the weights leave of 1."""
    points, places = torch.from_numpy(normalise(features)).double(), torch.from_numpy(centroids).double()
    apart, rest = torch.cdist(points, places).numpy(), 1 - weights
    left = rest.sum(1)
    far = np.divide((apart * rest).sum(1), left, out=np.full(len(apart), np.nan), where=left > 0)
    return (apart * weights).sum(1), far
