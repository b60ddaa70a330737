"""How often each concept stands in captions, pictures and both, for every expert.

Only counts leave an island, and they add up: the counts of two data sets are those of both together.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.curate.image_hits import COLUMN as IMAGE
from atoll.curate.image_hits import PROBABILITIES
from atoll.curate.text_hits import COLUMN as TEXT
from atoll.curate.vocabulary import Vocabulary
from atoll.data.columns import Column
from atoll.data.dataset import DataSet

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
CHUNK = 1 << 16
"""Rows whose hits are in memory at once."""


class ConceptCounts(File):
    """`counts.json`: hits of every concept, by cluster."""

    FORMAT, PLACE, ERROR = "atoll/concept-counts", "reports/concepts/counts.json", DataError
    REMEDY = "run 'atoll concepts audit' again"

    vocabulary: str
    """Digest of the vocabulary."""
    concepts: tuple[str, ...]
    """Names, by number."""
    threshold: float | None
    """Probability from which a tag of a picture counts; None where pictures were not tagged."""
    rows: tuple[int, ...]
    """Training rows of every cluster."""
    text: list[list[int]]
    """Captions with the concept, by concept and cluster."""
    image: list[list[int]] | None = None
    """Pictures with the concept; None where pictures were not tagged."""
    both: list[list[int]] | None = None
    """Rows whose caption and picture have it."""
    comparable: tuple[int, ...] = ()
    """Rows of every cluster with a concept in the caption and one in the picture."""
    misaligned: tuple[int, ...] = ()
    """Those of them that have none in common."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for table in (self.text, self.image, self.both):
            if table is None:
                continue
            if len(table) != len(self.concepts) or any(len(row) != len(self.rows) for row in table):
                raise ValueError("tables do not fit concepts and clusters")
            if any(count < 0 for row in table for count in row):
                raise ValueError("a count is negative")
        return self

    def __add__(self, other: "ConceptCounts") -> "ConceptCounts":
        """Counts of both data sets; `DataError` where vocabulary, threshold or clusters differ."""
        for what in ("vocabulary", "concepts", "threshold"):
            if getattr(self, what) != getattr(other, what):
                fix = "count both by one vocabulary and threshold"
                raise DataError(f"counts of another {what.rstrip('s')} cannot be added", fix)
        if len(self.rows) != len(other.rows):
            what = f"counts of {len(self.rows)} and {len(other.rows)} clusters cannot be added"
            raise DataError(what, "count both by one partition")
        names = ("rows", "text", "image", "both", "comparable", "misaligned")
        added = {name: _added(getattr(self, name), getattr(other, name)) for name in names}
        return self.model_copy(update=added)

    def table(self, what: str = "text") -> I64:
        """Counts `(C, K)` of `text`, `image` or `both`."""
        table = getattr(self, what)
        if table is None:
            raise DataError("pictures were not tagged", "run 'atoll concepts tag', then audit again")
        return np.array(table, dtype=np.int64).reshape(len(self.concepts), len(self.rows))


def _added(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return None
    total = (np.array(first, dtype=np.int64) + np.array(second, dtype=np.int64)).tolist()
    return tuple(total) if isinstance(first, tuple) else total


def count(
    dataset: DataSet, vocabulary: Vocabulary, rows: I64, clusters: I64, k: int, threshold: float = 0.7
) -> ConceptCounts:
    """Count the hits of some rows.

    Args:
        dataset: indexed by this vocabulary; pictures count if they were tagged by it.
        vocabulary: the concepts.
        rows: row numbers `(N,)`.
        clusters: cluster of each of them `(N,)`.
        k: number of clusters.
        threshold: probability from which a tag counts.

    Raises:
        DataError: captions were not searched for these concepts.
    """
    text, image = hits_of(dataset, TEXT, vocabulary), hits_of(dataset, IMAGE, vocabulary)
    if text is None:
        fix = "run 'atoll concepts index' again"
        raise DataError(f"the captions of {dataset.store.location} are not searched for these concepts", fix)
    size, width = len(vocabulary) * k, len(vocabulary)
    tables = {name: np.zeros(size, dtype=np.int64) for name in ("text", "image", "both")}
    comparable, misaligned = np.zeros(k, dtype=np.int64), np.zeros(k, dtype=np.int64)
    for first in range(0, len(rows), CHUNK):
        part, homes = rows[first : first + CHUNK], clusters[first : first + CHUNK]
        said = _pairs(text, part, width)
        tables["text"] += _counted(said, homes, width, k)
        if image is None:
            continue
        seen = _pairs(image, part, width, dataset.column(PROBABILITIES), threshold)
        shared = np.intersect1d(said, seen, assume_unique=True)
        tables["image"] += _counted(seen, homes, width, k)
        tables["both"] += _counted(shared, homes, width, k)
        told = np.intersect1d(said // width, seen // width)
        apart = np.setdiff1d(told, shared // width)
        comparable += np.bincount(homes[told], minlength=k)
        misaligned += np.bincount(homes[apart], minlength=k)
    listed = {name: table.reshape(width, k).tolist() for name, table in tables.items()}
    return ConceptCounts(
        vocabulary=vocabulary.hash,
        concepts=vocabulary.concepts,
        threshold=None if image is None else threshold,
        rows=tuple(np.bincount(clusters, minlength=k).tolist()),
        comparable=tuple(comparable.tolist()) if image else (),
        misaligned=tuple(misaligned.tolist()) if image else (),
        text=listed["text"],
        image=listed["image"] if image else None,
        both=listed["both"] if image else None,
    )


def hits_of(dataset: DataSet, name: str, vocabulary: Vocabulary) -> Column | None:
    """A column of hits; None where there is none of this vocabulary."""
    column = dataset.column(name) if dataset.has_column(name) else None
    return column if column and column.meta.producer.get("vocabulary") == vocabulary.hash else None


def _pairs(
    column: Column, rows: I64, width: int, probabilities: Column | None = None, threshold: float = 0.0
) -> I64:
    """`place * width + concept` of every hit, rising."""
    values, mask = column.read_ragged(rows)
    if probabilities is not None:
        mask = mask & (probabilities.read_ragged(rows)[0] >= threshold)
    place = np.repeat(np.arange(len(rows)), mask.sum(1).numpy())
    numbers: I64 = place * width + values[mask].numpy().astype(np.int64)
    return numbers


def _counted(pairs: I64, homes: I64, width: int, k: int) -> I64:
    """Counts `(C * K,)` of pairs by concept and the cluster of their row."""
    counted: I64 = np.bincount(pairs % width * k + homes[pairs // width], minlength=width * k)
    return counted


@dataclass(frozen=True)
class Shape:
    """How the counts of all concepts are spread.

    Attributes:
        concepts: how many there are.
        absent: share of them without any row.
        median: of the counts.
        top: share of all hits that the most frequent hundredth of the concepts has.
        spread: mean over hits of how evenly a concept lies on the clusters, from 0 (one has all of it) to 1
            (as the rows do).
    """

    concepts: int
    absent: float
    median: float
    top: float
    spread: float


def shape(table: I64, rows: I64) -> Shape:
    """The shape of counts `(C, K)` over clusters of so many rows `(K,)`."""
    totals = table.sum(1)
    falling = np.sort(totals)[::-1]
    most = max(1, len(totals) // 100)
    hits = max(1, int(totals.sum()))
    spread = float((evenness(table, rows) * totals).sum() / hits)
    absent = float((totals == 0).mean())
    return Shape(len(totals), absent, float(np.median(totals)), float(falling[:most].sum() / hits), spread)


def evenness(table: I64, rows: I64) -> F64:
    """Of every concept `(C,)`: 1 less the divergence of its clusters from the rows', over the largest.

    `1 - KL(p(k | concept) || p(k)) / ln(1 / min p(k))`: 1 where it lies on the clusters as all rows do, 0
    where the smallest has all of it; 1 where there is only one cluster, or no row.
    """
    prior = rows / max(1, rows.sum())
    if (rows > 0).sum() < 2:
        return np.ones(len(table))
    share = table / np.maximum(1, table.sum(1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(share > 0, share * np.log(share / prior), 0.0)
    even: F64 = 1 - parts.sum(1) / -np.log(prior[prior > 0].min())
    return even
