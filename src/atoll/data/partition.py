"""The partition: which row belongs to which cluster, and what decided it, under one hash."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors.torch import save as save_tensors

from atoll.base.errors import DataError, PartitionError, nearest
from atoll.base.hashing import digest, sha256
from atoll.base.pictures import grid, png
from atoll.base.rng import generator, seed_of
from atoll.base.text import many, shorten
from atoll.data import cluster
from atoll.data.balance import ShareBounds, balanced
from atoll.data.cluster import Features
from atoll.data.cluster_map import inertia_of
from atoll.data.columns import Column, Rows, some_rows
from atoll.data.dataset import DataSet
from atoll.data.formats import PartitionFile
from atoll.data.settings import PartitionConfig
from atoll.store.store import Damaged, Store
from atoll.store.tensors import read_tensors

TENSORS = "partition/centroids.safetensors"
HASHED = {"method", "k", "seed", "encoder", "rows", "data"}
"""Fields of the file that the hash covers, with the version."""
CATCH_ALL = 0.4  # share of the rows above which a cluster is reported as a catch-all
_CHUNK = 8192  # rows whose features are in memory at a time


@dataclass(frozen=True)
class Partition:
    """Clusters of all rows `(rows,)`, held-out rows and those of weight 0 too, and what decided them."""

    about: PartitionFile
    clusters: Rows
    centroids: Features  # (K, D), empty unless the method is `kmeans`
    prices: NDArray[np.float32]  # added to squared distances (K,), empty unless clusters are held to shares

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

    def rows(self, number: int, dataset: DataSet) -> Rows:
        """Rows of a cluster that count, held-out ones too."""
        return np.flatnonzero((self.clusters == number) & (dataset.weights > 0))

    def weighs_as(self, dataset: DataSet) -> bool:
        """Whether the rows of a data set count as they did for the cut, but for those that opted out."""
        weights = _weights_hash(dataset.weights, weighted=bool(self.about.masses))
        return weights == (self.about.revision or self.about.weights)

    def assign(self, dataset: DataSet, features: Column | None) -> Rows:
        """Clusters of any rows by what decided this cut `(rows,)`."""
        about = self.about
        if about.method == "kmeans":
            assert features is not None, "kmeans needs features"
            return _nearest(features, self.centroids, self.prices)
        if about.method == "random":
            return _random(dataset.ids, about.seed, about.k, about.capacities)
        values = values_of(dataset, about.column or "label")
        clusters = clusters_by(values, about.values)
        if (clusters < 0).any():
            new, counts = np.unique(values[clusters < 0], return_counts=True)
            names = [f"{v!r} ({n:,} rows)" for v, n in zip(new.tolist(), counts.tolist(), strict=True)]
            what = f"{len(new)} values of {about.column or 'label'} are in no cluster: {shorten(names, 5)}"
            raise PartitionError(what, "leave these rows out, or start a new campaign")
        return clusters


def make(
    dataset: DataSet, features: Column | None, config: PartitionConfig, seed: int, weighted: bool = False
) -> Partition:
    """Cut a data set. The k-means is fitted on training rows only; held-out rows are assigned.

    `weighted` says whether rows are drawn by their weights; clusters do not depend on them.
    """
    train = dataset.split("train")
    if not len(train) and not dataset.weights.all():
        raise PartitionError("no training row has any weight", "write weights above 0, or remove the column")
    if config.k > len(train):
        what = f"K = {config.k} clusters for {len(train)} training rows"
        raise PartitionError(what, "choose 1 <= partition.k <= rows")
    clustered, bounds, values = config.method == "kmeans", ShareBounds.of(config), list[list[str]]()
    # Held-out rows weigh nothing, so neither shares nor the order of clusters depend on them.
    weights = np.zeros(len(dataset))
    weights[train] = dataset.weights[train] if weighted else 1
    centroids = free = np.empty((0, 0), dtype=np.float32)
    prices = np.empty(0, dtype=np.float32)
    if clustered:
        assert features is not None, "kmeans needs features"
        most = min(config.fit_rows, cluster.SAMPLE * max(config.fine, cluster.LEAST_FINE))
        rows = some_rows(train, most, generator(seed, "fit")) if len(train) > most else train
        sample, start = np.empty((len(rows), *features.meta.shape), dtype=np.float32), 0
        for block, raw in features.blocks(rows, _CHUNK):
            sample[start : start + len(block)] = cluster.normalise(raw.float().numpy())
            start += len(block)
        centroids = cluster.fit(sample, config.k, config.fine, seed)
        if bounds is not None:
            # First without bounds: the inertia of these centroids says what the shares cost.
            anything = ShareBounds(np.zeros(config.k), np.ones(config.k))
            free, _ = balanced(sample, weights[rows], centroids, anything)
            centroids, prices = balanced(sample, weights[rows], free, bounds)
        clusters = _nearest(features, centroids, prices)
    elif config.method == "random":
        clusters = _random(dataset.ids, seed, config.k, config.capacities or ())
    else:
        texts = values_of(dataset, config.column or "label")
        values = merge(texts, weights, config)
        clusters = clusters_by(texts, values)
    counts = count_rows(dataset, clusters, config.k, weighted)
    sizes, heldout = counts["sizes"], np.array(counts["heldout"])
    if not all(sizes):
        number = sizes.index(0)
        if (clusters == number).any() and not dataset.weights.all():
            what = f"no row of cluster {number} has any weight"
            raise PartitionError(what, "give it some, or lower partition.k")
        raise PartitionError(f"cluster {number} of {config.k} is empty", "lower partition.k")
    if bounds is not None and not clustered:
        together = f"rows of one {config.column or 'label'} stay together"
        why = "few random rows vary" if config.method == "random" else together
        bounds.check(np.bincount(clusters[train], weights[train], config.k), why=why)
    warnings = imbalances(sizes, config.capacities)
    if (heldout == 0).any() and heldout.any():
        names = shorten([*map(str, np.flatnonzero(heldout == 0))])
        few = "; compare needs two such rows: raise data.ingest.heldout" if heldout.sum() == 1 else ""
        warnings.append(f"clusters without held-out rows, so without a validation loss: {names}{few}")
    if several := [f"{number} ({len(names)})" for number, names in enumerate(values) if len(names) > 1]:
        warnings.append(f"clusters hold several values each: {shorten(several)}")
    about = PartitionFile(
        method=config.method,
        k=config.k,
        seed=seed,
        encoder=features.meta.producer if features is not None and clustered else None,
        rows=len(dataset),
        data=dataset.id_hash,
        column=config.column,
        values=values,
        capacities=list(config.capacities or ()),
        **counts,
        weights=_weights_hash(dataset.weights, weighted),
        warnings=warnings,
        inertia=None if features is None else inertia_of(features, train, clusters, centroids, free),
        hash="",
    )
    whole = about.model_copy(update={"hash": _hash(about, clusters, centroids, prices)})
    return Partition(whole, clusters, centroids, prices)


def count_rows(dataset: DataSet, clusters: Rows, k: int, weighted: bool) -> dict[str, Any]:
    """Fields of the file that depend on which rows count: sizes, heldout, masses and buckets."""
    train, weights = dataset.split("train"), dataset.weights
    sizes = np.bincount(clusters[train], minlength=k)
    masses = weights[train] if weighted else None
    buckets = dict[str, list[float]]()
    if dataset.buckets is not None:
        shapes, numbers = np.unique(dataset.buckets, axis=0, return_inverse=True)
        # One count for all pairs of bucket and cluster.
        places = clusters[train] + k * numbers.reshape(-1)[train]
        rows = np.bincount(places, masses, k * len(shapes)).astype(np.float64).reshape(len(shapes), k)
        for (width, height), each in zip(shapes.tolist(), rows.tolist(), strict=True):
            buckets[f"{width}x{height}"] = each
    return {
        "sizes": sizes.tolist(),
        "heldout": (np.bincount(clusters[weights > 0], minlength=k) - sizes).tolist(),
        "masses": [] if masses is None else np.bincount(clusters[train], masses, k).tolist(),
        "buckets": buckets,
    }


def carried(origin: Partition, clusters: Rows, dataset: DataSet, weighted: bool = False) -> Partition:
    """Another campaign's cut for this data set; rows of none of its clusters are -1, and weigh nothing."""
    changes = count_rows(dataset, clusters, origin.k, weighted)
    if not all(changes["sizes"]):
        what = f"no row of cluster {changes['sizes'].index(0)} of the origin is here"
        raise PartitionError(what, "allow more in data.ingest.buckets: max_upscale, max_crop")
    changes |= {"rows": len(dataset), "data": dataset.id_hash, "inertia": None, "warnings": []}
    changes |= {"weights": _weights_hash(dataset.weights, weighted), "revision": None}
    about = origin.about.model_copy(update=changes)
    hashed = {"hash": _hash(about, clusters, origin.centroids, origin.prices)}
    return replace(origin, about=about.model_copy(update=hashed), clusters=clusters)


def revised(partition: Partition, dataset: DataSet) -> Partition:
    """The same cut of a data set of which rows have left: other numbers, and a revision.

    The hash stays, so that the experts of islands that lost no row stay what they are.
    """
    about, weighted = partition.about, bool(partition.about.masses)
    changes = count_rows(dataset, partition.clusters, about.k, weighted)
    if not all(changes["sizes"]):
        what = f"island {changes['sizes'].index(0)} would be left without rows to train on"
        raise PartitionError(what, "start a new campaign with a smaller partition.k")
    changes["revision"] = _weights_hash(dataset.weights, weighted)
    return replace(partition, about=about.model_copy(update=changes))


def _weights_hash(weights: NDArray[np.float32], weighted: bool) -> str | None:
    """Digest of what rows count; without weighting that is 0 or 1, and None where all are 1."""
    counts = weights if weighted else (weights > 0).astype(np.float32)
    return sha256(counts.tobytes()) if weighted or not counts.all() else None


def imbalances(sizes: list[int], capacities: Sequence[float] | None = None) -> list[str]:
    """What is odd about training rows per cluster; nothing where capacities asked for it."""
    total, warnings = sum(sizes), list[str]()
    # Of two clusters, one with more than 40 % is no catch-all.
    for number, size in enumerate(sizes if capacities is None else ()):
        if len(sizes) > 2 and size > CATCH_ALL * total:
            fix = "lower partition.max_share, or try another partition.encoder or k"
            warnings.append(f"cluster {number} holds {size / total:.0%} of the rows, a catch-all: {fix}")
        if size * len(sizes) * 10 < total:
            fix = f"set partition.min_share={0.5 / len(sizes):.2g}, or lower partition.k"
            few = f"{many(size, 'row')}, under a tenth of an even share"
            warnings.append(f"cluster {number} holds only {few}: {fix}")
    return warnings


def save(partition: Partition, store: Store, dataset: DataSet) -> None:
    """Write `partition/`: contact sheets and centroids first, `partition.json` last."""
    for number in range(partition.k):
        store.put(f"partition/sheets/{number}.png", contact_sheet(partition, dataset, number))
    arrays = {"clusters": partition.clusters, "centroids": partition.centroids}
    arrays |= {"prices": partition.prices} if len(partition.prices) else {}
    # Safetensors and not pickle: an island's machine is not trusted, nor does it trust this one.
    store.put(TENSORS, save_tensors({name: torch.from_numpy(array) for name, array in arrays.items()}))
    store.put_json(PartitionFile.PLACE, partition.about.to_json())


def load(store: Store) -> Partition:
    """Read `partition/` back; `PartitionError` where it is not what its hash says."""
    about = PartitionFile.read(store, PartitionFile.PLACE)
    damage = "its files do not match the hash in partition.json"
    try:
        read = read_tensors(store.get(TENSORS), TENSORS, "clusters", "centroids")
        parts = read["clusters"], read["centroids"], read.get("prices", torch.empty(0))
        if [part.dtype for part in parts] == [torch.int64, torch.float32, torch.float32]:
            clusters, centroids, prices = (part.numpy() for part in parts)
            if _hash(about, clusters, centroids, prices) == about.hash:
                return Partition(about, clusters, centroids, prices)
    except Damaged as error:
        damage = error.what
    what = f"{store.name('partition')} is damaged: {damage}"
    raise PartitionError(what, "restore it from a copy, or start a new campaign")


def contact_sheet(partition: Partition, dataset: DataSet, number: int, cells: int = 60) -> bytes:
    """A PNG of some training pictures of one cluster, chosen by a seed."""
    train = dataset.split("train")
    rows = train[partition.clusters[train] == number]
    pictures = [dataset.image(int(row)) for row in some_rows(rows, cells, generator(0, "sheet", number))]
    return png(grid(pictures, columns=12, scale=max(1, 48 // pictures[0].width)))


def _hash(about: PartitionFile, clusters: Rows, centroids: Features, prices: NDArray[np.float32]) -> str:
    # Without what a cut does not use, so that a new field leaves the hashes of cuts without it as they were.
    decided: dict[str, Any] = {**about.header(), **about.model_dump(include=HASHED)}
    decided |= {"weights": about.weights} if about.weights else {}
    decided |= {"column": about.column, "values": about.values} if about.values else {}
    arrays = {"clusters": sha256(clusters.tobytes()), "centroids": sha256(centroids.tobytes())}
    arrays |= {"prices": sha256(prices.tobytes())} if len(prices) else {}
    return digest({**decided, **arrays})


def _nearest(features: Column, centroids: Features, prices: NDArray[np.float32]) -> Rows:
    """Cluster of every row; memory does not grow with the features."""
    numbers = np.empty(len(features), dtype=np.int64)
    for rows, values in features.blocks(np.arange(len(features)), _CHUNK):
        numbers[rows] = cluster.nearest_centroid(cluster.normalise(values.float().numpy()), centroids, prices)
    return numbers


def _random(ids: Sequence[str], seed: int, k: int, capacities: Sequence[float]) -> Rows:
    """Clusters by a hash of the ids, alike or in proportion."""
    # By id and not by position: rows that are added later do not move the others.
    draws = (seed_of(seed, "cluster/" + row) for row in ids)
    if not capacities:
        return np.array([draw % k for draw in draws])
    ends = np.cumsum(capacities) / np.sum(capacities)
    return np.searchsorted(ends[:-1], np.array([draw / 2**63 for draw in draws]), "right").astype(np.int64)


def values_of(dataset: DataSet, name: str) -> NDArray[np.str_]:
    """Values `(rows,)`, as text, of a column of rows, or of one of numbers of the data set."""
    known: list[str] = dataset.shard_table(0).column_names
    if name in known:
        column = dataset.table([name]).column(name)
        if not (pa.types.is_string(column.type) or pa.types.is_integer(column.type)):
            raise DataError(f"column {name!r} holds {column.type}", "choose one of words or whole numbers")
        values = np.array(["" if value is None else str(value) for value in column.to_pylist()])
    elif name in dataset.column_names():
        numbers = dataset.column(name)
        if numbers.meta.kind != "fixed" or numbers.meta.shape or numbers.dtype.is_floating_point:
            raise DataError(f"column {name!r} holds no whole number for each row", "choose another")
        values = numbers.read(np.arange(len(dataset))).numpy().astype(np.str_)
    else:
        what = f"partition.column: {dataset.store.location} has no column {name!r}"
        raise DataError(what, nearest(name, [*known, *dataset.column_names()]))
    missing = values == ""
    if name == "label":  # a negative label means none
        missing |= np.char.startswith(values, "-")
    if missing.any():
        count, first = int(missing.sum()), dataset.ids[int(missing.argmax())]
        raise DataError(f"{count:,} rows lack {name}, the first is {first!r}", "fill it in or choose another")
    return values


def merge(
    values: NDArray[np.str_], weights: NDArray[np.floating], config: PartitionConfig
) -> list[list[str]]:
    """Share out the values among K clusters.

    As many values as clusters are taken in order, numbers by size. More are merged: the heaviest first, each
    to the cluster that is emptiest for its capacity; clusters are then numbered by falling mass, unless
    capacities number them. Weights `(rows,)` are 0 for rows that are not trained on.
    """
    names, owners = np.unique(values, return_inverse=True)
    totals, k = np.bincount(owners, weights, len(names)), config.k
    trained = int((totals > 0).sum())
    if trained < k:
        what = f"{config.column or 'label'} has {trained} values among the training rows for K = {k} clusters"
        fix = f"lower partition.k to {max(trained, 1)}, or cut by another partition.column"
        raise PartitionError(what, fix)
    if len(names) == k and config.capacities is None:
        # As numbers where all are: as texts, 10 would come before 2.
        numbers = all(name.lstrip("-").isdecimal() for name in names.tolist())
        return [[name] for name in sorted(names.tolist(), key=int if numbers else str)]
    capacities = np.array(config.capacities or [1.0] * k)
    held, merged = np.zeros(k), [list[str]() for _ in range(k)]
    # The heaviest first (Graham's rule): one that came last would lie on top of a cluster that is full.
    for number in np.argsort(-totals, kind="stable"):
        emptiest = int(((held + totals[number]) / capacities).argmin())
        held[emptiest] += totals[number]
        merged[emptiest].append(str(names[number]))
    order = range(k) if config.capacities else np.argsort(-held, kind="stable").tolist()
    return [merged[number] for number in order]


def clusters_by(values: NDArray[np.str_], merged: Sequence[Sequence[str]]) -> Rows:
    """Cluster of every row by its value `(rows,)`; -1 for a value that none has."""
    known = {value: number for number, names in enumerate(merged) for value in names}
    names, owners = np.unique(values, return_inverse=True)
    return np.array([known.get(name, -1) for name in names.tolist()], dtype=np.int64)[owners]
