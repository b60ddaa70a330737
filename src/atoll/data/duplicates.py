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
from atoll.data.columns import Column, Rows, some_rows
from atoll.data.dataset import DataSet
from atoll.data.ingest import write_split
from atoll.data.job import ColumnJob
from atoll.data.settings import DedupeConfig, IngestConfig, features_column
from atoll.data.weights import DUPLICATES, leave_duplicates_out

LOOKS = "looks"
REASONS = ("kept", "same file", "nearly the same pixels", "nearly the same features")
"""What `Duplicates.reason` counts."""
SIDE, FINE = 8, 32
"""Sides of a row's thumbnails: one in colour, one in brightness."""
STEADY = 5.0
"""How far a frequency must be over the median for its bit: what a picture lacks would flip by chance."""
BLOCK, ASKED, PAIRS, CELL = 2048, 256, 32_768, 2000
"""Rows that are settled at once, rows that ask the index at once, pairs that are compared at once, and rows
of a k-means cell on average."""


@dataclass(frozen=True)
class Duplicates:
    """What was found of every row; arrays are `(rows,)`."""

    kept_row: Rows  # the one that is kept in its place; its own number where it is kept
    reason: NDArray[np.int8]  # number in `REASONS`
    distances: NDArray[np.float32]  # to the row that it was found by, as a part of the bound
    groups: list[str]  # rows of one name in the source, and rows that are alike, have one

    @property
    def counts(self) -> dict[str, int]:
        """Rows by reason."""
        return {name: int((self.reason == number).sum()) for number, name in enumerate(REASONS)}


def dedupe(dataset: DataSet, config: DedupeConfig, encoder: str) -> Duplicates:
    """Find duplicates, write the column `duplicate_of`, and split again so that no group is on two sides."""
    if config.cosine is not None and not dataset.has_column(features_column(encoder)):
        what = f"{dataset.store.location} has no features by {encoder}"
        raise DataError(what, "run 'atoll data embed' first")
    fingerprint_job(dataset).run()
    search = _Search(dataset)
    search.same_pixels(dataset.column(LOOKS), config)
    if config.cosine is not None:
        search.same_features(dataset.column(features_column(encoder)), config.cosine)
    duplicates = search.result(dataset.table(["group"]).column("group").to_pylist())
    settings = IngestConfig.parse(dataset.manifest.config, dataset.store.name("manifest.json"))
    # Groups have grown: rows of different groups may be alike.
    write_split(dataset, settings, duplicates.groups)
    replaced = leave_duplicates_out(dataset, duplicates.kept_row != np.arange(len(dataset)))
    if replaced is not None:
        say(f"warning: weights by {replaced} are replaced; write them again")
    # Last: the column says that split and weights are right too.
    dataset.write_values(DUPLICATES, dedupe_producer(dataset, config, encoder), duplicates.kept_row)
    return duplicates


def dedupe_producer(dataset: DataSet, config: DedupeConfig, encoder: str) -> dict[str, Any]:
    """Producer of the column: all that duplicates depend on beside the rows."""
    features = features_column(encoder) if config.cosine is not None else None
    compared = dataset.column(features).meta.producer if features and dataset.has_column(features) else None
    return {"name": "dedupe", **config.model_dump(), "features": compared}


def fingerprint_job(dataset: DataSet) -> ColumnJob:
    """The column `looks`, uint8 `(rows, 8 + 3 * SIDE**2 + FINE**2)`: hash and thumbnails of every picture."""

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": torch.from_numpy(np.stack([*map(fingerprint, dataset.iter_images(shard))]))}

    producer = {"name": LOOKS, "side": SIDE, "fine": FINE, "hash": f"dct-8 over {STEADY}"}
    return ColumnJob(dataset, LOOKS, producer, compute)


def fingerprint(image: Image.Image) -> NDArray[np.uint8]:
    """A picture's perceptual hash in 8 bytes (low frequencies over their median), then its thumbnails."""
    gray, colour = image.convert("L"), image.convert("RGB")
    small = np.asarray(gray.resize((32, 32), Image.Resampling.LANCZOS), dtype=np.float32)
    # Of the cosine transform the low frequencies: encoding and scaling change the high ones.
    low = dctn(small, norm="ortho")[:8, :8]
    thumbnails = [
        np.asarray(picture.resize((side, side), Image.Resampling.BOX), dtype=np.uint8).ravel()
        for picture, side in ((colour, SIDE), (gray, FINE))
    ]
    return np.concatenate([np.packbits((low > np.median(low) + STEADY).ravel()), *thumbnails])


class _Search:
    """Duplicates as far as they are found."""

    def __init__(self, dataset: DataSet) -> None:
        sides = dataset.table(["width", "height", "sha256"])
        area = sides["width"].to_numpy().astype(np.int64) * sides["height"].to_numpy()
        rows = np.arange(len(dataset))
        files = sides["sha256"].to_numpy(zero_copy_only=False)
        self.order = np.lexsort((rows, -area))  # the better of two comes first
        self.rank = np.argsort(self.order)
        self.kept_row = rows.copy()
        self.reason, self.distances = np.zeros(len(rows), np.int8), np.zeros(len(rows), np.float32)
        self._equal(self.left, files[self.left], 1)

    @property
    def left(self) -> Rows:
        """Rows that are no duplicates so far, the better ones first."""
        rows: Rows = self.order[self.kept_row[self.order] == self.order]
        return rows

    def same_pixels(self, looks: Column, config: DedupeConfig) -> None:
        import faiss

        index = _FingerprintIndex(looks, self.left, config)
        self._equal(index.rows, index.keys, 2)
        rows, hashes, bits = index.rows, index.hashes, config.bits
        # 4 parts of 16 bits: of hashes that differ in at most 7 bits one part differs in at most 1.
        multihash = faiss.IndexBinaryMultiHash(64, 4, 16)
        multihash.nflip = int(bits > 3)
        kept, left = np.empty(0, np.int64), np.flatnonzero(self.kept_row[rows] == rows)
        for block in np.array_split(left, -(-len(left) // BLOCK)):
            # Pairs within the block, the second before the first; then those with rows of earlier blocks.
            numbers = hashes[block].view(np.uint64)[:, 0]
            first, second = np.nonzero(np.tril(np.bitwise_count(numbers[:, None] ^ numbers) <= bits, -1))
            pairs = [index.alike(block[first], block[second])]
            for some in np.array_split(block, -(-len(block) // ASKED)):
                if multihash.ntotal:
                    ends, _, neighbours = multihash.range_search(hashes[some], bits + 1)
                    ends = ends.astype(np.int64)
                    asked = np.repeat(np.arange(len(some)), ends[1:] - ends[:-1])
                    # A pair is found by every part that agrees, up to four times.
                    once = np.unique(asked * multihash.ntotal + neighbours)
                    first, second = once // multihash.ntotal, once % multihash.ntotal
                    pairs.append(index.alike(some[first], kept[second]))
            first, second, distances = (np.concatenate(part) for part in zip(*pairs, strict=True))
            self._settle(rows[first], rows[second], distances, 2)
            stays = block[self.kept_row[rows[block]] == rows[block]]
            multihash.add(hashes[stays])
            kept = np.append(kept, stays)

    def same_features(self, column: Column, cosine: float) -> None:
        rows = self.left
        cells = max(1, len(rows) // CELL)
        # Alike rows fall into one cell nearly always, so rows are compared within cells only (SemDeDup): all
        # pairs of a million rows are 10^12.
        centroids = fit(normalise(column.read(some_rows(rows, 128 * 1024)).numpy()), cells, cells, 0)
        home = np.zeros(len(rows), np.int64)
        for some in _parts(len(rows), 65_536):
            home[some] = nearest_centroid(normalise(column.read(rows[some]).numpy()), centroids)
        for cell in range(cells):
            inside = rows[home == cell]
            values, kept = normalise(column.read(inside).numpy()), np.empty(0, np.int64)
            for block in _parts(len(inside), BLOCK):
                others = np.concatenate([kept, block])
                distances = (1 - values[block] @ values[others].T) / max(1 - cosine, 1e-6)
                first, second = np.nonzero((distances <= 1) & (others < block[:, None]))
                self._settle(inside[block[first]], inside[others[second]], distances[first, second], 3)
                kept = np.concatenate([kept, block[self.kept_row[inside[block]] == inside[block]]])

    def result(self, names: list[str]) -> Duplicates:
        """What all passes found, of rows of groups of these names."""
        from scipy.cluster.hierarchy import DisjointSet

        kept_row = self.kept_row
        # What an earlier pass kept, a later one may have found alike to a better row.
        while (kept_row != kept_row[kept_row]).any():
            kept_row = kept_row[kept_row]
        # Rows that are alike, and rows of one name, are one group, which has the first of its names: a group
        # on both sides of the split would be trained on and measured by.
        groups = DisjointSet([*set(names), *set(kept_row.tolist())])
        for name, row in zip(names, kept_row.tolist(), strict=True):
            groups.merge(name, row)
        first: dict[str | int, str] = {}
        for name in sorted(set(names)):
            first.setdefault(groups[name], name)
        return Duplicates(kept_row, self.reason, self.distances, [first[groups[name]] for name in names])

    def _equal(self, rows: Rows, keys: NDArray[np.generic], reason: int) -> None:
        """Rows, the better ones first, of equal keys."""
        _, first, place = np.unique(keys, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[place] != np.arange(len(rows)))
        self.kept_row[rows[again]], self.reason[rows[again]] = rows[first[place[again]]], reason

    def _settle(self, rows: Rows, others: Rows, distances: NDArray[np.float32], reason: int) -> None:
        """Pairs of a row and a better one that are alike: all that there are of these rows."""
        for n in np.lexsort((distances, self.rank[rows])).tolist():
            row, other = rows[n], others[n]
            # Only a row that is itself kept may stand for another, or chains would join unlike rows.
            if self.kept_row[row] == row and self.kept_row[other] == other:
                self.kept_row[row], self.reason[row], self.distances[row] = other, reason, distances[n]


def _parts(count: int, size: int) -> list[Rows]:
    return [np.arange(start, min(start + size, count)) for start in range(0, count, size)]


class _FingerprintIndex:
    """Fingerprints of rows, by their places, as far as they are small: digests `keys`, hashes `(n, 8)`, and
    `coarse`, sums of colours of each four neighbouring pixels of a thumbnail `(n, 3 * SIDE**2 / 4)`."""

    def __init__(self, looks: Column, rows: Rows, config: DedupeConfig) -> None:
        self.looks, self.rows, self.bounds = looks, rows, (config.difference, config.detail)
        keys, hashes, coarse = [], [], []
        for some in _parts(len(rows), PAIRS):
            values = looks.read(rows[some]).numpy()
            keys += [hashlib.blake2b(value, digest_size=16).digest() for value in values]
            hashes.append(values[:, :8])
            colour = values[:, 8 : 8 + 3 * SIDE**2].reshape(-1, SIDE // 2, 2, SIDE // 2, 2, 3)
            coarse.append(colour.sum((2, 4), dtype=np.int16).reshape(len(values), -1))
        self.keys, self.hashes = np.array(keys, dtype="V16"), np.concatenate(hashes)
        self.coarse = np.concatenate(coarse)

    def alike(self, first: Rows, second: Rows) -> tuple[Rows, Rows, NDArray[np.float32]]:
        """Those of some pairs of places within both bounds, and how much of a bound they take up."""
        pairs = [(first[:0], second[:0], np.empty(0, np.float32))]
        for some in _parts(len(first), PAIRS):
            # Sums of four pixels are farther apart than four times the bound only if one of the pixels is.
            apart = np.abs(self.coarse[first[some]] - self.coarse[second[some]]).max(1)
            near = some[apart <= 4 * 255 * self.bounds[0]]
            looks = (self.looks.read(self.rows[places[near]]) for places in (first, second))
            left, right = (values[:, 8:].short() for values in looks)
            colour, detail = (left - right).abs().tensor_split([3 * SIDE**2], dim=1)
            used = [
                part.amax(1).numpy() / np.float32(255 * max(bound, 1e-6))
                for part, bound in zip((colour, detail), self.bounds, strict=True)
            ]
            share = np.maximum(*used)
            pairs.append((first[near][share <= 1], second[near][share <= 1], share[share <= 1]))
        places, others, shares = zip(*pairs, strict=True)
        return np.concatenate(places), np.concatenate(others), np.concatenate(shares)
