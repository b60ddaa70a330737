"""The partition: which row belongs to which cluster, and what decided it, under one hash."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from atoll.base.errors import PartitionError
from atoll.base.hashing import digest, sha256
from atoll.base.pictures import grid, png
from atoll.base.rng import generator, seed_of
from atoll.data import cluster
from atoll.data.columns import Column
from atoll.data.dataset import DataSet
from atoll.data.formats import PartitionFile
from atoll.data.settings import PartitionConfig
from atoll.store.store import Store

FILE = "partition/partition.json"
TENSORS = "partition/centroids.safetensors"
HASHED = {"method", "k", "seed", "encoder", "rows", "data"}
"""Fields of the file that the hash covers, with the version."""
CATCH_ALL = 0.4  # share of the rows above which a cluster is reported as a catch-all
_CHUNK = 8192  # rows whose features are in memory at a time


@dataclass(frozen=True)
class Partition:
    """Clusters of all rows.

    Attributes:
        about: sizes, and what decided them.
        clusters: cluster number of every row, held-out rows too `(rows,)`; -1 of rows that are left out.
        centroids: `(K, D)`, empty for `random`.
    """

    about: PartitionFile
    clusters: NDArray[np.int64]
    centroids: NDArray[np.float32]

    @property
    def k(self) -> int:
        """Number of clusters."""
        return self.about.k

    @property
    def sizes(self) -> list[int]:
        """Training rows per cluster."""
        return self.about.sizes

    @property
    def masses(self) -> Sequence[float]:
        """What each cluster's compute is in proportion to: its training rows, or the sum of their weights."""
        return self.about.masses or self.about.sizes

    @property
    def hash(self) -> str:
        """Digest of clusters, centroids and what decided them."""
        return self.about.hash


def make(
    dataset: DataSet,
    features: Column | None,
    config: PartitionConfig,
    seed: int,
    weights: NDArray[np.float32] | None = None,
) -> Partition:
    """Cut a data set. The k-means is fitted on training rows only; held-out rows are assigned.

    Args:
        dataset: with a split.
        features: to cluster by.
        config: how.
        seed: of the sample and the starts.
        weights: of all rows `(rows,)`, where they are drawn by weight; clusters do not depend on them.

    Raises:
        PartitionError: K is larger than the rows, or a cluster stays empty, or has no weight.
    """
    train = dataset.split("train")
    if config.k > len(train):
        what = f"K = {config.k} clusters for {len(train)} training rows"
        raise PartitionError(what, "choose 1 <= partition.k <= rows")
    if config.method == "random":
        clusters = np.array([seed_of(seed, "cluster/" + row) % config.k for row in dataset.ids])
        centroids = np.empty((0, 0), dtype=np.float32)
    else:
        assert features is not None, "kmeans needs features"
        centroids = _fit(features, train, config, seed)
        clusters = _assign(features, centroids)
    clusters[dataset.left_out()] = -1
    sizes = np.bincount(clusters[train], minlength=config.k)
    if not sizes.all():
        raise PartitionError(f"cluster {sizes.argmin()} of {config.k} is empty", "lower partition.k")
    masses = np.bincount(clusters[train], weights[train], config.k) if weights is not None else np.empty(0)
    if not masses.all():
        raise PartitionError(
            f"no row of cluster {masses.argmin()} has any weight", "give it some, or lower K"
        )
    about = PartitionFile(
        method=config.method,
        k=config.k,
        seed=seed,
        encoder=features.meta.producer if features is not None else None,
        rows=len(dataset),
        data=dataset.id_hash,
        sizes=sizes.tolist(),
        heldout=(np.bincount(clusters[clusters >= 0], minlength=config.k) - sizes).tolist(),
        weights=None if weights is None else sha256(weights.tobytes()),
        masses=masses.tolist(),
        warnings=imbalances(sizes.tolist()),
        hash="",
    )
    whole = about.model_copy(update={"hash": _hash(about, clusters, centroids)})
    return Partition(whole, clusters, centroids)


def imbalances(sizes: list[int]) -> list[str]:
    """What is odd about training rows per cluster."""
    total, warnings = sum(sizes), []
    for number, size in enumerate(sizes):
        if len(sizes) > 2 and size > CATCH_ALL * total:
            warnings.append(f"cluster {number} holds {size / total:.0%} of the rows: a catch-all")
        if size * len(sizes) * 10 < total:
            warnings.append(f"cluster {number} holds only {size} rows: under a tenth of an even share")
    return warnings


def save(partition: Partition, store: Store, dataset: DataSet) -> None:
    """Write `partition/`: contact sheets and centroids first, `partition.json` last."""
    for number in range(partition.k):
        store.put(f"partition/sheets/{number}.png", contact_sheet(partition, dataset, number))
    arrays = {"clusters": partition.clusters, "centroids": partition.centroids}
    store.put(TENSORS, save_tensors({name: torch.from_numpy(array) for name, array in arrays.items()}))
    store.put_json(FILE, partition.about.to_json())


def load(store: Store) -> Partition:
    """Read `partition/` back.

    Raises:
        PartitionError: it is of another schema version, or is not what its hash says.
        StoreError: a file is missing, or `partition.json` is not JSON.
    """
    about = PartitionFile.read(store, FILE)
    try:
        tensors = load_tensors(store.get(TENSORS))
        clusters, centroids = tensors["clusters"].numpy(), tensors["centroids"].numpy()
    except KeyError as error:
        raise _damaged(store, f"{error} is missing") from None
    except (SafetensorError, TypeError):  # TypeError: a type that numpy lacks
        raise _damaged(store, "centroids.safetensors cannot be read") from None
    typed = clusters.dtype == np.int64 and centroids.dtype == np.float32
    if not typed or _hash(about, clusters, centroids) != about.hash:
        raise _damaged(store, "its files do not match the hash in partition.json")
    counts, parts = np.bincount(clusters + 1, minlength=about.k + 1)[1:], (about.sizes, about.heldout)
    if {len(part) for part in parts} != {about.k} or not np.array_equal(np.sum(parts, axis=0), counts):
        raise _damaged(store, "the sizes in partition.json are not those of its clusters")
    return Partition(about, clusters, centroids)


def contact_sheet(partition: Partition, dataset: DataSet, number: int, cells: int = 60) -> bytes:
    """A PNG of some training pictures of one cluster, chosen by a seed."""
    train = dataset.split("train")
    rows = train[partition.clusters[train] == number]
    shuffled = torch.randperm(len(rows), generator=generator(0, "sheet", number))[:cells].numpy()
    pictures = [dataset.image(int(row)) for row in np.sort(rows[shuffled])]
    return png(grid(pictures, columns=12, scale=max(1, 48 // pictures[0].width)))


def _hash(about: PartitionFile, clusters: NDArray[np.int64], centroids: NDArray[np.float32]) -> str:
    decided: dict[str, Any] = {**about.header(), **about.model_dump(include=HASHED)}
    decided |= {"weights": about.weights} if about.weights else {}
    arrays = {"clusters": sha256(clusters.tobytes()), "centroids": sha256(centroids.tobytes())}
    return digest({**decided, **arrays})


def _damaged(store: Store, why: str) -> PartitionError:
    what = f"{store.name('partition')} is damaged: {why}"
    return PartitionError(what, "restore it from a copy, or start a new campaign")


def _fit(
    features: Column, train: NDArray[np.int64], config: PartitionConfig, seed: int
) -> NDArray[np.float32]:
    rows = train
    if len(train) > config.fit_rows:
        shuffled = torch.randperm(len(train), generator=generator(seed, "fit"))
        rows = np.sort(train[shuffled[: config.fit_rows].numpy()])
    sample = cluster.normalise(features.read(rows).numpy())
    return cluster.fit(sample, config.k, config.fine, seed)


def _assign(features: Column, centroids: NDArray[np.float32]) -> NDArray[np.int64]:
    """Cluster of every row; memory does not grow with the features."""
    numbers = np.empty(len(features), dtype=np.int64)
    for start in range(0, len(numbers), _CHUNK):
        rows = np.arange(start, min(start + _CHUNK, len(numbers)))
        values = cluster.normalise(features.read(rows).float().numpy())
        numbers[rows] = cluster.nearest_centroid(values, centroids)
    return numbers
