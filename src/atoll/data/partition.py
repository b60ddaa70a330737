"""The partition: which row belongs to which cluster, and what decided it, under one hash."""

from collections.abc import Iterator
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
ABOUT = {"method", "k", "seed", "encoder", "rows", "data"}
"""Fields of the file that the hash covers, with the version."""
CATCH_ALL = 0.4  # share of the rows above which a cluster is reported as a catch-all


@dataclass(frozen=True)
class Partition:
    """Clusters of all rows.

    Attributes:
        clusters: cluster number of every row, held-out rows too `(rows,)`.
        centroids: `(K, D)`, empty for `random`.
        sizes: training rows per cluster.
        heldout: held-out rows per cluster.
        about: what decided it: method, encoder, seed, data.
        hash: of clusters, centroids and `about`; the sizes follow from them and the split.
    """

    clusters: NDArray[np.int64]
    centroids: NDArray[np.float32]
    sizes: list[int]
    heldout: list[int]
    about: dict[str, Any]
    hash: str

    @property
    def k(self) -> int:
        """Number of clusters."""
        return len(self.sizes)

    def warnings(self) -> list[str]:
        """What is odd about the balance."""
        total, found = sum(self.sizes), []
        for number, size in enumerate(self.sizes):
            if self.k > 2 and size > CATCH_ALL * total:
                found.append(f"cluster {number} holds {size / total:.0%} of the rows: a catch-all")
            if size * self.k * 10 < total:
                found.append(f"cluster {number} holds only {size} rows: under a tenth of an even share")
        return found


def make(dataset: DataSet, features: Column | None, config: PartitionConfig, seed: int) -> Partition:
    """Cut a data set. The k-means is fitted on training rows only; held-out rows are assigned.

    Args:
        dataset: with a `split` column.
        features: the encoder's column; None for `random`.
        config: method and numbers.
        seed: of the sample and the starts.

    Raises:
        PartitionError: K is larger than the rows, or a cluster stays empty.
    """
    train, heldout = dataset.split("train"), dataset.split("heldout")
    if config.k > len(train):
        raise PartitionError(
            f"K = {config.k} clusters for {len(train)} training rows", "choose 1 <= partition.k <= rows"
        )
    if config.method == "random":
        clusters = np.array([seed_of(seed, "cluster/" + row) % config.k for row in dataset.ids])
        centroids = np.empty((0, 0), dtype=np.float32)
    else:
        assert features is not None, "kmeans needs features"
        centroids = _fit(features, train, config, seed)
        clusters = np.concatenate(list(cluster.stream(_chunks(features, len(dataset)), centroids)))
    sizes = np.bincount(clusters[train], minlength=config.k).tolist()
    if min(sizes) == 0:
        raise PartitionError(f"cluster {sizes.index(0)} of {config.k} is empty", "lower partition.k")
    held = np.bincount(clusters[heldout], minlength=config.k).tolist()
    encoder = features.meta.producer if features is not None else None
    about = {
        **PartitionFile.header(),
        "method": config.method,
        "k": config.k,
        "seed": seed,
        "encoder": encoder,
        "rows": len(dataset),
        "data": dataset.id_hash,
    }
    return Partition(clusters, centroids, sizes, held, about, _hash(clusters, centroids, about))


def save(partition: Partition, store: Store, dataset: DataSet) -> None:
    """Write `partition/`: contact sheets and centroids first, `partition.json` last."""
    for number in range(partition.k):
        store.put(f"partition/sheets/{number}.png", contact_sheet(partition, dataset, number))
    tensors = {
        "clusters": torch.from_numpy(partition.clusters),
        "centroids": torch.from_numpy(partition.centroids),
    }
    store.put("partition/centroids.safetensors", save_tensors(tensors))
    balance = {"sizes": partition.sizes, "heldout": partition.heldout, "warnings": partition.warnings()}
    content = {**partition.about, **balance, "hash": partition.hash}
    store.put_json(FILE, PartitionFile.of_json(content, FILE).to_json())


def load(store: Store) -> Partition:
    """Read `partition/` back.

    Raises:
        PartitionError: it is of another schema version, or is not what its hash says.
        StoreError: a file is missing, or `partition.json` is not JSON.
    """
    file = PartitionFile.read(store, FILE)
    about = {"schema": file.VERSION, **file.model_dump(include=ABOUT)}
    try:
        tensors = load_tensors(store.get("partition/centroids.safetensors"))
        clusters, centroids = tensors["clusters"].numpy(), tensors["centroids"].numpy()
    except KeyError as error:
        raise _damaged(store, f"{error} is missing") from None
    except (SafetensorError, TypeError):  # TypeError: a type that numpy lacks
        raise _damaged(store, "centroids.safetensors cannot be read") from None
    typed = clusters.dtype == np.int64 and centroids.dtype == np.float32
    if not typed or _hash(clusters, centroids, about) != file.hash:
        raise _damaged(store, "its files do not match the hash in partition.json")
    if not _adds_up(clusters, file.k, file.sizes, file.heldout):
        raise _damaged(store, "the sizes in partition.json are not those of its clusters")
    return Partition(clusters, centroids, file.sizes, file.heldout, about, file.hash)


def _hash(clusters: NDArray[np.int64], centroids: NDArray[np.float32], about: dict[str, Any]) -> str:
    arrays = {"clusters": sha256(clusters.tobytes()), "centroids": sha256(centroids.tobytes())}
    return digest({**about, **arrays})


def _adds_up(clusters: NDArray[np.int64], k: int, *counts: Any) -> bool:
    """Whether these counts per cluster, such as training and held-out rows, are together all rows."""
    if not all(isinstance(c, list) and len(c) == k and all(type(n) is int for n in c) for c in counts):
        return False
    return np.array_equal(np.sum(counts, axis=0), np.bincount(clusters, minlength=k))


def _damaged(store: Store, why: str) -> PartitionError:
    what = f"{store.name('partition')} is damaged: {why}"
    return PartitionError(what, "restore it from a copy, or start a new campaign")


def contact_sheet(partition: Partition, dataset: DataSet, number: int, cells: int = 60) -> bytes:
    """A PNG of some training pictures of one cluster, chosen by a seed."""
    train = dataset.split("train")
    rows = train[partition.clusters[train] == number]
    shuffled = torch.randperm(len(rows), generator=generator(0, "sheet", number))[:cells].numpy()
    pictures = [dataset.image(int(row)) for row in np.sort(rows[shuffled])]
    scale = max(1, 48 // pictures[0].width)
    return png(grid(pictures, columns=12, scale=scale))


def _fit(
    features: Column, train: NDArray[np.int64], config: PartitionConfig, seed: int
) -> NDArray[np.float32]:
    chosen = train
    if len(train) > config.fit_rows:
        chosen = np.sort(
            train[torch.randperm(len(train), generator=generator(seed, "fit"))[: config.fit_rows].numpy()]
        )
    sample = cluster.normalise(features.read(chosen).numpy())
    return cluster.fit(sample, config.k, config.fine, seed)


def _chunks(features: Column, rows: int, size: int = 8192) -> Iterator[NDArray[np.float32]]:
    for start in range(0, rows, size):
        yield features.read(np.arange(start, min(start + size, rows))).float().numpy()
