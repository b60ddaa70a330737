"""Duplicates: rows that show what another row shows. They are written down and left out, never removed.

Three passes, each among the rows that the earlier ones kept:

1. the same file,
2. nearly the same pixels: perceptual hashes of a few different bits propose pairs, thumbnails decide,
3. if asked for, nearly the same features, within k-means cells (SemDeDup, arXiv 2303.09540).

Of rows that are alike the one of the largest source picture is kept, and of those the first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dctn

from atoll.base.errors import DataError
from atoll.data.cluster import fit, nearest_centroid, normalise
from atoll.data.columns import Column, Progress, Rows
from atoll.data.dataset import DataSet
from atoll.data.ingest import write_split
from atoll.data.settings import DedupeConfig, IngestConfig, features_column

LOOKS, COLUMN = "looks", "duplicate_of"
HOW = ("kept", "same file", "nearly the same pixels", "nearly the same features")
"""What `Duplicates.how` counts."""
SIDE, BLOCK, CELL = 8, 2048, 2000
"""Side of a thumbnail, rows that are compared at once, and rows of a k-means cell on average."""


@dataclass(frozen=True)
class Duplicates:
    """What was found.

    Attributes:
        of: for every row the one that is kept in its place, `(rows,)`; its own number where it is kept.
        how: number in `HOW`, `(rows,)`.
        groups: lowest number of a row in each row's group, `(rows,)`: rows that are alike, or alike to one
            that is alike.
        distances: between a row and the one that it was found by, `(rows,)`: of thumbnails, or 1 - cosine.
    """

    of: Rows
    how: NDArray[np.int8]
    groups: Rows
    distances: NDArray[np.float32]

    @property
    def counts(self) -> dict[str, int]:
        """Rows by how they were found."""
        return {name: int((self.how == number).sum()) for number, name in enumerate(HOW)}


def dedupe(
    dataset: DataSet, config: DedupeConfig, encoder: str, progress: Progress | None = None
) -> Duplicates:
    """Find duplicates, write the column `duplicate_of`, and split again so that no group is on two sides.

    Args:
        dataset: with pictures; with features, if `config.cosine` is set.
        config: what counts as alike.
        encoder: whose features are compared.
        progress: told how many shards have been looked at.

    Raises:
        DataError: features are wanted and not there.
    """
    if config.cosine is not None and not dataset.has_column(features_column(encoder)):
        what = f"{dataset.store.location} has no features by {encoder}"
        raise DataError(what, "run 'atoll data embed' first")
    seen = look(dataset, progress)
    search = _Search(dataset)
    search.same_files()
    search.same_pixels(seen, config.bits, config.difference)
    if config.cosine is not None:
        search.same_features(dataset.column(features_column(encoder)), config.cosine)
    found = search.found()

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {
            "values": torch.from_numpy(found.of[dataset.bounds[shard] : dataset.bounds[shard + 1]].copy())
        }

    names = dataset.table(["group"]).column("group").to_numpy(zero_copy_only=False)
    kept = found.of == np.arange(len(dataset))
    settings = IngestConfig.parse(dataset.manifest.config, dataset.store.name("manifest.json"))
    write_split(dataset, settings, _joined(names, found.groups), kept)
    dataset.write_column(COLUMN, about(dataset, config, encoder), compute)  # last: it says that all is done
    return found


def about(dataset: DataSet, config: DedupeConfig, encoder: str) -> dict[str, Any]:
    """Producer of the column: all that duplicates depend on beside the rows."""
    features = features_column(encoder) if config.cosine is not None else None
    compared = dataset.column(features).meta.producer if features and dataset.has_column(features) else None
    return {"name": "dedupe", **config.model_dump(), "features": compared}


def look(dataset: DataSet, progress: Progress | None = None) -> Column:
    """Write (or find) the column `looks`, uint8 `(rows, 8 + 3 * SIDE * SIDE)`: hash and thumbnail."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": torch.from_numpy(np.stack([looks(one) for one in dataset.iter_images(shard)]))}

    return dataset.write_column(
        LOOKS, {"name": LOOKS, "side": SIDE, "hash": "dct-8"}, compute, progress=progress
    )


def looks(image: Image.Image) -> NDArray[np.uint8]:
    """A picture's perceptual hash in 8 bytes (low frequencies over their median), then its thumbnail."""
    gray = image.convert("L").resize((32, 32), Image.Resampling.LANCZOS)
    low = dctn(np.asarray(gray, dtype=np.float32), norm="ortho")[:8, :8]
    thumbnail = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.uint8)
    return np.concatenate([np.packbits((low > np.median(low)).ravel()), thumbnail.ravel()])


class _Search:
    """Duplicates as far as they are found."""

    def __init__(self, dataset: DataSet) -> None:
        sides = dataset.table(["width", "height", "sha256"])
        area = sides["width"].to_numpy().astype(np.int64) * sides["height"].to_numpy()
        rows = np.arange(len(dataset))
        self.files = sides["sha256"].to_numpy(zero_copy_only=False)
        self.order = np.lexsort((rows, -area))  # the better of two comes first
        self.rank = np.argsort(self.order)
        self.of, self.parents = rows.copy(), rows.copy()
        self.how, self.distances = np.zeros(len(rows), np.int8), np.zeros(len(rows), np.float32)

    @property
    def left(self) -> Rows:
        """Rows that are no duplicates so far, the better ones first."""
        rows: Rows = self.order[self.of[self.order] == self.order]
        return rows

    def same_files(self) -> None:
        self._equal(self.files[self.left], 1)

    def same_pixels(self, seen: Column, bits: int, difference: float) -> None:
        rows = self.left
        values = np.ascontiguousarray(seen.read(rows).numpy())
        self._equal(values.view(f"V{values.shape[1]}")[:, 0], 2)
        rows = self.left
        hashes = np.ascontiguousarray(seen.read(rows)[:, :8].numpy())
        for one, other in _near(hashes, bits):
            # In blocks again: a common hash proposes many pairs.
            for some in np.array_split(np.arange(len(one)), -(-len(one) // 65_536)):
                first, second = rows[one[some]], rows[other[some]]
                apart = _difference(seen, first, second)
                close = apart <= difference
                self._join(first[close], second[close], apart[close], 2)

    def same_features(self, column: Column, cosine: float) -> None:
        rows = self.left
        sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), 128 * 1024)).astype(np.int64)]
        cells = max(1, len(rows) // CELL)
        centroids = fit(normalise(column.read(sample).numpy()), cells, cells, 0)
        home = np.zeros(len(rows), np.int64)
        for some in np.array_split(np.arange(len(rows)), -(-len(rows) // 65_536)):
            home[some] = nearest_centroid(normalise(column.read(rows[some]).numpy()), centroids)
        for cell in range(cells):
            inside = rows[home == cell]
            values = normalise(column.read(inside).numpy())
            for start in range(0, len(inside), BLOCK):
                apart = 1 - values[start : start + BLOCK] @ values[: start + BLOCK].T
                one, other = np.nonzero(apart <= np.float32(1 - cosine))
                earlier = other < one + start
                one, other = one[earlier], other[earlier]
                self._join(inside[one + start], inside[other], apart[one, other], 3)

    def found(self) -> Duplicates:
        """What all passes found."""
        roots = np.array([self._root(row) for row in range(len(self.of))])
        lowest = np.full(len(roots), len(roots))
        np.minimum.at(lowest, roots, np.arange(len(roots)))
        of = self.of
        while (of != of[of]).any():  # what a row was alike to may be alike to a better one
            of = of[of]
        return Duplicates(of, self.how, lowest[roots], self.distances)

    def _equal(self, keys: NDArray[np.generic], how: int) -> None:
        """Rows that are left, of equal keys."""
        rows = self.left
        _, first, place = np.unique(keys, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[place] != np.arange(len(rows)))
        self._join(rows[again], rows[first[place[again]]], np.zeros(len(again), np.float32), how)

    def _join(self, rows: Rows, others: Rows, apart: NDArray[np.float32], how: int) -> None:
        """Pairs of a row and a better one: the nearest that is kept is kept in its place."""
        for row, other in zip(rows.tolist(), others.tolist(), strict=True):
            self.parents[self._root(row)] = self._root(other)
        for n in np.lexsort((apart, self.rank[rows])).tolist():
            row, other = int(rows[n]), int(others[n])
            if self.of[row] == row and self.of[other] == other:
                self.of[row], self.how[row], self.distances[row] = other, how, apart[n]

    def _root(self, row: int) -> int:
        while self.parents[row] != row:
            self.parents[row] = row = self.parents[self.parents[row]]
        return row


def _near(hashes: NDArray[np.uint8], bits: int) -> Iterator[tuple[Rows, Rows]]:
    """Pairs of places of hashes `(n, 8)` that differ in few bits, the second place before the first."""
    import faiss

    # 4 parts of 16 bits: of hashes that differ in at most 7 bits one part differs in at most 1.
    index = faiss.IndexBinaryMultiHash(64, 4, 16)
    index.nflip = int(bits > 3)
    for start in range(0, len(hashes), BLOCK):
        block = hashes[start : start + BLOCK]
        index.add(block)
        bounds, _, found = index.range_search(block, bits + 1)
        bounds = bounds.astype(np.int64)
        places = np.repeat(np.arange(len(block)) + start, bounds[1:] - bounds[:-1])
        earlier = found < places
        # A pair is found by every part that agrees.
        once = np.unique(np.stack([places[earlier], found[earlier].astype(np.int64)], axis=1), axis=0)
        yield once[:, 0], once[:, 1]


def _difference(seen: Column, one: Rows, other: Rows) -> NDArray[np.float32]:
    """Largest difference of a colour of the thumbnails' pixels, of 1 between black and white `(n,)`."""
    first, second = (seen.read(rows)[:, 8:].float() for rows in (one, other))
    apart: NDArray[np.float32] = ((first - second) / 255).abs().amax(1).numpy()
    return apart


def _joined(names: NDArray[np.object_], groups: Rows) -> list[str]:
    """Names of groups in which rows that are alike, and rows of one name, are together: the first of them."""
    parents: dict[str | int, str | int] = {}

    def root(key: str | int) -> str | int:
        while (above := parents.setdefault(key, key)) != key:
            parents[key] = key = parents.setdefault(above, above)
        return key

    for name, group in zip(names.tolist(), groups.tolist(), strict=True):
        parents[root(group)] = root(name)
    first: dict[str | int, str] = {}
    for name in sorted({*names.tolist()}):
        first.setdefault(root(name), name)
    return [first[root(name)] for name in names.tolist()]
