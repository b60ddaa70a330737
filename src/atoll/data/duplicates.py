"""Duplicates: rows that show what another row shows. They are written down and left out, never removed.

Three passes, each among the rows that the earlier ones kept:

1. the same file,
2. nearly the same pixels: perceptual hashes of a few different bits propose pairs, thumbnails decide,
3. if asked for, nearly the same features, within k-means cells (SemDeDup, arXiv 2303.09540).

Rows come the better ones first: those of larger source pictures, and of those the earlier. A row is
compared with better rows that are kept, and the nearest of them is kept in its place. So every row that is
left out is alike to one that is kept, and no series is lost of which only neighbours are alike.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dctn

from atoll.base.console import say
from atoll.base.errors import DataError
from atoll.data.cluster import fit, nearest_centroid, normalise
from atoll.data.columns import Column, Progress, Rows
from atoll.data.dataset import DataSet
from atoll.data.job import ColumnJob
from atoll.data.settings import DedupeConfig, IngestConfig, features_column
from atoll.data.split import write_split
from atoll.data.weights import DUPLICATES, leave_duplicates_out

LOOKS, COLUMN = "looks", DUPLICATES
HOW = ("kept", "same file", "nearly the same pixels", "nearly the same features")
"""What `Duplicates.how` counts."""
SIDE, FINE = 8, 32
"""Sides of a row's thumbnails: one in colour, one in brightness."""
STEADY = 5.0
"""How far a frequency must be over the median for its bit: what a picture lacks would flip by chance."""
BLOCK, ASKED, PAIRS, CELL = 2048, 256, 32_768, 2000
"""Rows that are settled at once, rows that ask the index at once, pairs that are compared at once, and rows
of a k-means cell on average."""


@dataclass(frozen=True)
class Duplicates:
    """What was found.

    Attributes:
        of: for every row the one that is kept in its place, `(rows,)`; its own number where it is kept.
        how: number in `HOW`, `(rows,)`.
        distances: between a row and the one that it was found by, as a part of the bound, `(rows,)`.
        groups: name of each row's group: rows of one name in the source, and rows that are alike.
    """

    of: Rows
    how: NDArray[np.int8]
    distances: NDArray[np.float32]
    groups: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Rows by how they were found."""
        return {name: int((self.how == number).sum()) for number, name in enumerate(HOW)}


def dedupe(dataset: DataSet, config: DedupeConfig, encoder: str) -> Duplicates:
    """Find duplicates, write the column `duplicate_of`, and split again so that no group is on two sides.

    Args:
        dataset: with pictures; with features, if `config.cosine` is set.
        config: what counts as alike.
        encoder: whose features are compared.

    Raises:
        DataError: features are wanted and not there.
    """
    if config.cosine is not None and not dataset.has_column(features_column(encoder)):
        what = f"{dataset.store.location} has no features by {encoder}"
        raise DataError(what, "run 'atoll data embed' first")
    fingerprint_job(dataset).run()
    search = _Search(dataset)
    search.same_files()
    search.same_pixels(dataset.column(LOOKS), config)
    if config.cosine is not None:
        search.same_features(dataset.column(features_column(encoder)), config.cosine)
    names = dataset.table(["group"]).column("group").to_numpy(zero_copy_only=False)
    found = search.found(names)
    settings = IngestConfig.parse(dataset.manifest.config, dataset.store.name("manifest.json"))
    write_split(dataset, settings, found.groups)
    replaced = leave_duplicates_out(dataset, found.of != np.arange(len(dataset)))
    if replaced is not None:
        say(f"warning: weights by {replaced} are replaced; write them again")
    dataset.write_values(COLUMN, about(dataset, config, encoder), found.of)  # last: it says that all is done
    return found


def about(dataset: DataSet, config: DedupeConfig, encoder: str) -> dict[str, Any]:
    """Producer of the column: all that duplicates depend on beside the rows."""
    features = features_column(encoder) if config.cosine is not None else None
    compared = dataset.column(features).meta.producer if features and dataset.has_column(features) else None
    return {"name": "dedupe", **config.model_dump(), "features": compared}


def fingerprint_job(dataset: DataSet, progress: Progress | None = None) -> ColumnJob:
    """The column `looks`, uint8 `(rows, 8 + 3 * SIDE**2 + FINE**2)`: hash and thumbnails of every picture."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        values = np.stack([fingerprint(image) for image in dataset.iter_images(shard)])
        return {"values": torch.from_numpy(values)}

    about = {"name": LOOKS, "side": SIDE, "fine": FINE, "hash": f"dct-8 over {STEADY}"}
    return dataset.column_job(LOOKS, about, compute, progress=progress)


def fingerprint(image: Image.Image) -> NDArray[np.uint8]:
    """A picture's perceptual hash in 8 bytes (low frequencies over their median), then its thumbnails."""
    gray, colour = image.convert("L"), image.convert("RGB")
    small = np.asarray(gray.resize((32, 32), Image.Resampling.LANCZOS), dtype=np.float32)
    low = dctn(small, norm="ortho")[:8, :8]
    thumbnails = [
        np.asarray(one.resize((side, side), Image.Resampling.BOX), dtype=np.uint8).ravel()
        for one, side in ((colour, SIDE), (gray, FINE))
    ]
    return np.concatenate([np.packbits((low > np.median(low) + STEADY).ravel()), *thumbnails])


class _Search:
    """Duplicates as far as they are found."""

    def __init__(self, dataset: DataSet) -> None:
        sides = dataset.table(["width", "height", "sha256"])
        area = sides["width"].to_numpy().astype(np.int64) * sides["height"].to_numpy()
        rows = np.arange(len(dataset))
        self.files = sides["sha256"].to_numpy(zero_copy_only=False)
        self.order = np.lexsort((rows, -area))  # the better of two comes first
        self.rank = np.argsort(self.order)
        self.of = rows.copy()
        self.how, self.distances = np.zeros(len(rows), np.int8), np.zeros(len(rows), np.float32)

    @property
    def left(self) -> Rows:
        """Rows that are no duplicates so far, the better ones first."""
        rows: Rows = self.order[self.of[self.order] == self.order]
        return rows

    def same_files(self) -> None:
        self._equal(self.left, self.files[self.left], 1)

    def same_pixels(self, seen: Column, config: DedupeConfig) -> None:
        import faiss

        looked = _Looked(seen, self.left, config)
        self._equal(looked.rows, looked.keys, 2)
        rows, hashes, bits = looked.rows, looked.hashes, config.bits
        # 4 parts of 16 bits: of hashes that differ in at most 7 bits one part differs in at most 1.
        index = faiss.IndexBinaryMultiHash(64, 4, 16)
        index.nflip = int(bits > 3)
        kept = np.empty(0, np.int64)
        for block in np.array_split(left := np.flatnonzero(self.of[rows] == rows), -(-len(left) // BLOCK)):
            one, other = _near_each_other(hashes[block], bits)
            found = [looked.alike(block[one], block[other])]
            for some in np.array_split(block, -(-len(block) // ASKED)):
                one, other = _near(index, hashes[some], bits)
                found.append(looked.alike(some[one], kept[other]))
            one, other, apart = (np.concatenate(part) for part in zip(*found, strict=True))
            self._settle(rows[one], rows[other], apart, 2)
            stays = block[self.of[rows[block]] == rows[block]]
            index.add(hashes[stays])
            kept = np.append(kept, stays)

    def same_features(self, column: Column, cosine: float) -> None:
        rows = self.left
        sample = rows[np.linspace(0, len(rows) - 1, min(len(rows), 128 * 1024)).astype(np.int64)]
        cells = max(1, len(rows) // CELL)
        centroids = fit(normalise(column.read(sample).numpy()), cells, cells, 0)
        home = np.zeros(len(rows), np.int64)
        for some in _parts(len(rows), 65_536):
            home[some] = nearest_centroid(normalise(column.read(rows[some]).numpy()), centroids)
        for cell in range(cells):
            inside = rows[home == cell]
            values, kept = normalise(column.read(inside).numpy()), np.empty(0, np.int64)
            for block in _parts(len(inside), BLOCK):
                others = np.concatenate([kept, block])
                apart = (1 - values[block] @ values[others].T) / max(1 - cosine, 1e-6)
                one, other = np.nonzero((apart <= 1) & (others < block[:, None]))
                self._settle(inside[block[one]], inside[others[other]], apart[one, other], 3)
                kept = np.concatenate([kept, block[self.of[inside[block]] == inside[block]]])

    def found(self, names: NDArray[np.object_]) -> Duplicates:
        """What all passes found, of rows of groups of these names."""
        of = self.of
        while (of != of[of]).any():  # what one pass kept, a later one may have found alike to a better one
            of = of[of]
        return Duplicates(of, self.how, self.distances, _joined(names, of))

    def _equal(self, rows: Rows, keys: NDArray[np.generic], how: int) -> None:
        """Rows, the better ones first, of equal keys."""
        _, first, place = np.unique(keys, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[place] != np.arange(len(rows)))
        self.of[rows[again]], self.how[rows[again]] = rows[first[place[again]]], how

    def _settle(self, rows: Rows, others: Rows, apart: NDArray[np.float32], how: int) -> None:
        """Pairs of a row and a better one that are alike: all that there are of these rows."""
        for n in np.lexsort((apart, self.rank[rows])).tolist():
            row, other = rows[n], others[n]
            if self.of[row] == row and self.of[other] == other:
                self.of[row], self.how[row], self.distances[row] = other, how, apart[n]


def _parts(count: int, size: int) -> list[Rows]:
    """The numbers up to `count` in parts."""
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


class _Looked:
    """How rows look, by their places: what is small of it in memory.

    Attributes:
        rows: row numbers.
        keys: digests of all that is known of their looks.
        hashes: perceptual hashes `(n, 8)`.
    """

    def __init__(self, seen: Column, rows: Rows, config: DedupeConfig) -> None:
        self.seen, self.rows, self.bounds = seen, rows, (config.difference, config.detail)
        keys, hashes, fours = [], [], []
        for some in _parts(len(rows), PAIRS):
            values = seen.read(rows[some]).numpy()
            keys += [hashlib.blake2b(one, digest_size=16).digest() for one in values]
            hashes.append(values[:, :8])
            colour = values[:, 8 : 8 + 3 * SIDE**2].reshape(-1, SIDE // 2, 2, SIDE // 2, 2, 3)
            fours.append(colour.sum((2, 4), dtype=np.int16).reshape(len(values), -1))
        self.keys, self.hashes = np.array(keys, dtype="V16"), np.concatenate(hashes)
        self._fours = np.concatenate(fours)

    def alike(self, one: Rows, other: Rows) -> tuple[Rows, Rows, NDArray[np.float32]]:
        """Those of some pairs of places within both bounds, and how much of a bound they take up."""
        found = [(one[:0], other[:0], np.empty(0, np.float32))]
        for some in _parts(len(one), PAIRS):
            # Sums of four pixels are farther apart than four times the bound only if one of the pixels is.
            apart = np.abs(self._fours[one[some]] - self._fours[other[some]]).max(1)
            near = some[apart <= 4 * 255 * self.bounds[0]]
            first, second = (
                self.seen.read(self.rows[places[near]])[:, 8:].short() for places in (one, other)
            )
            colour, detail = (first - second).abs().tensor_split([3 * SIDE**2], dim=1)
            used = [
                part.amax(1).numpy() / np.float32(255 * max(bound, 1e-6))
                for part, bound in zip((colour, detail), self.bounds, strict=True)
            ]
            share = np.maximum(*used)
            found.append((one[near][share <= 1], other[near][share <= 1], share[share <= 1]))
        places, others, shares = zip(*found, strict=True)
        return np.concatenate(places), np.concatenate(others), np.concatenate(shares)


def _near(index: Any, asked: NDArray[np.uint8], bits: int) -> tuple[Rows, Rows]:
    """Places among those asked for, and in the index, of hashes that differ in few bits."""
    if not index.ntotal:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    bounds, _, found = index.range_search(asked, bits + 1)
    places = np.repeat(np.arange(len(asked)), np.diff(bounds.astype(np.int64)))
    once = np.unique(places * index.ntotal + found)  # a pair is found by every part that agrees
    return once // index.ntotal, once % index.ntotal


def _near_each_other(block: NDArray[np.uint8], bits: int) -> tuple[Rows, Rows]:
    """Places in a block of hashes that differ in few bits, the second before the first."""
    numbers = block.view(np.uint64)[:, 0]
    one, other = np.nonzero(np.tril(np.bitwise_count(numbers[:, None] ^ numbers) <= bits, -1))
    return one, other


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
