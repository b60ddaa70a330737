"""How clusters lie: the inertia against random ones, a map of some rows, and the words that tell them."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from atoll.base.text import NO_NOUNS, words_of
from atoll.data.cluster import Features, nearest_centroid, normalise
from atoll.data.columns import Column, some_rows
from atoll.data.dataset import DataSet
from atoll.data.formats import ClusterMap, Inertia

ROWS, POINTS, SHARDS = 65_536, 1500, 64
"""Most training rows that the inertia is taken of, points of a map, and shards whose captions are read."""
WORDS, LEAST = 6, 5
"""Words of a cluster, and captions that such a word stands in."""
I64 = NDArray[np.int64]


def inertia_of(features: Column, train: I64, clusters: I64, centroids: Features, free: Features) -> Inertia:
    """Measure how close training rows, at most `ROWS` of them, are to the middles of their clusters.

    Middles are the centroids `(K, D)`, or means where those are empty. `free` are centroids that the clusters
    would have without bounds on their shares, or empty.
    """
    rows, values = _some(features, train, ROWS)
    owners = clusters[rows]
    middles = centroids if len(centroids) else _means(values, owners, int(clusters.max()) + 1)
    nearest = free[nearest_centroid(values, free)] if len(free) else values
    return Inertia(
        clusters=_mean_square(values - middles[owners]),
        random=_mean_square(values - values.mean(0)),
        free=_mean_square(values - nearest) if len(free) else None,
    )


def cluster_map(
    dataset: DataSet, features: Column | None, clusters: I64, centroids: Features, k: int
) -> ClusterMap:
    """Draw training rows on the plane in which the clusters' middles differ most, and find telling words."""
    train, points, explained = dataset.split("train"), list[tuple[float, float, int]](), 0.0
    if features is not None:
        rows, values = _some(features, train, POINTS)
        middles = centroids if len(centroids) else _means(values, clusters[rows], k)
        axes, explained = _plane(middles, values)
        places = ((values - middles.mean(0)) @ axes.T).round(4)
        points = [(float(x), float(y), int(c)) for (x, y), c in zip(places, clusters[rows], strict=True)]

    # Words by cluster, from the captions of some shards: all captions of a large data set take hours.
    counts, rows_of = [Counter[str]() for _ in range(k)], np.zeros(k, np.int64)
    trained = np.zeros(len(dataset), bool)
    trained[train] = True
    for shard in some_rows(np.arange(len(dataset.shards)), SHARDS).tolist():
        captions = dataset.shard_table(shard, ["caption"]).column("caption").to_pylist()
        for row, caption in enumerate(captions, int(dataset.bounds[shard])):
            if trained[row]:
                rows_of[clusters[row]] += 1
                counts[clusters[row]].update(set(words_of(caption or "")) - NO_NOUNS)
    words = sorted({word for counter in counts for word, count in counter.items() if count >= LEAST})
    table = np.array([[counter[word] for counter in counts] for word in words]).reshape(len(words), k)
    best = telling(table, rows_of, WORDS, LEAST) if words else [[] for _ in range(k)]
    return ClusterMap(points=points, explained=explained, words=[[words[n] for n in each] for each in best])


def _plane(middles: Features, values: Features) -> tuple[Features, float]:
    """Two directions `(2, D)`, first those in which middles differ, and the part of that variance in them."""
    _, scales, directions = np.linalg.svd(middles - middles.mean(0), full_matrices=False)
    first = directions[: min(2, len(middles) - 1)]
    if len(first) < 2:  # two middles lie on a line, one on a point: the rows tell the rest
        rest = values - values.mean(0)
        rest = rest - rest @ first.T @ first
        first = np.concatenate([first, np.linalg.svd(rest, full_matrices=False)[2][: 2 - len(first)]])
    axes = np.zeros((2, middles.shape[1]), np.float32)
    axes[: len(first)] = first
    # A direction is as good as its opposite: its largest entry is positive.
    axes *= np.sign(np.take_along_axis(axes, np.abs(axes).argmax(1)[:, None], 1))
    whole = float((scales**2).sum())
    return axes, min(1.0, float((scales[:2] ** 2).sum()) / whole) if whole > 0 else 1.0


def _some(features: Column, train: I64, most: int) -> tuple[I64, Features]:
    """Training rows, evenly spread, and their features of unit length."""
    rows = some_rows(train, most)
    parts = [normalise(values.float().numpy()) for _, values in features.blocks(rows, 8192)]
    return rows, np.concatenate(parts)


def _means(values: Features, owners: I64, k: int) -> Features:
    """Means of the clusters; of those without a row, that of all."""
    means = [values[owners == n].mean(0) if (owners == n).any() else values.mean(0) for n in range(k)]
    return np.array(means, dtype=np.float32)


def _mean_square(differences: Features) -> float:
    return float(np.square(differences).sum(1, dtype=np.float64).mean())


def telling(table: I64, rows: I64, most: int = 5, least: int = 5) -> list[list[int]]:
    """Of every cluster the concepts that tell it from the others: by the z score of their share in it."""
    prior = rows / max(1, rows.sum())
    expected = table.sum(1, keepdims=True) * prior
    scores = (table - expected) / np.sqrt(np.maximum(expected * (1 - prior), 1e-9))
    scores[(table < least) | (table <= expected)] = -np.inf
    best = np.argsort(-scores, axis=0, kind="stable")[:most]
    return [[int(n) for n in best[:, k] if scores[n, k] > 0] for k in range(table.shape[1])]
