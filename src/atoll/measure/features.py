"""Features of any number of pictures: their moments, and their rows in a file, so that memory stays flat."""

import itertools
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.base.errors import DataError
from atoll.measure.moments import F64, Moments

BLOCK = 2048
"""Rows that are worked on at once."""


class FeatureRows:
    """Features `(N, D)` float32 by number, in a temporary file that goes with the object.

    It is read and written, never mapped, so that its pages are no memory of this process.

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        # The object, not a `with`, owns the file.
        self._file = tempfile.TemporaryFile(prefix="atoll-features-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._there = np.zeros(0, dtype=bool)

    def __len__(self) -> int:
        """The largest number that was written, and one."""
        return len(self._there)

    @property
    def missing(self) -> int:
        """How many numbers below the largest have not been written."""
        return int((~self._there).sum())

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Numbers that have been written, ascending."""
        return np.flatnonzero(self._there)

    def write(self, numbers: ArrayLike, features: NDArray[np.floating]) -> None:
        """Write rows `(B, D)` under their numbers."""
        index = np.asarray(numbers, dtype=np.int64)
        rows = np.ascontiguousarray(features, dtype=np.float32)
        if rows.shape != (len(index), self.width):
            raise DataError(
                f"features of shape {rows.shape} for a width of {self.width}", "use one extractor"
            )
        if len(index) and (most := int(index.max()) + 1) > len(self):
            self._there = np.concatenate([self._there, np.zeros(most - len(self), dtype=bool)])
        for begin, end in _runs(index):
            _write(self._file.fileno(), rows[begin:end].data.cast("B"), int(index[begin]) * 4 * self.width)
        self._there[index] = True

    def read(self, numbers: ArrayLike) -> NDArray[np.float32]:
        """Rows `(B, D)` by number."""
        index = np.asarray(numbers, dtype=np.int64)
        found = np.empty((len(index), self.width), dtype=np.float32)
        assert self._there[index].all(), "rows that were never written"
        order = np.argsort(index, kind="stable")  # neighbours in the file are read together
        ordered = np.empty_like(found)
        for begin, end in _runs(index[order]):
            _read(
                self._file.fileno(),
                ordered[begin:end].data.cast("B"),
                int(index[order[begin]]) * 4 * self.width,
            )
        found[order] = ordered
        return found

    def blocks(
        self, numbers: NDArray[np.int64] | None = None, size: int = BLOCK
    ) -> Iterator[NDArray[np.float32]]:
        """Rows in blocks, all of them or those of some numbers."""
        index = np.arange(len(self)) if numbers is None else numbers
        for first in range(0, len(index), size):
            yield self.read(index[first : first + size])


def _runs(index: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Parts of an index that count up by one."""
    if not len(index):
        return
    cuts = np.flatnonzero(np.diff(index) != 1) + 1
    edges = [0, *cuts.tolist(), len(index)]
    yield from itertools.pairwise(edges)


def _write(file: int, data: memoryview, where: int) -> None:
    while len(data):
        done = os.pwrite(file, data, where)
        data, where = data[done:], where + done


def _read(file: int, data: memoryview, where: int) -> None:
    while len(data):
        done = os.preadv(file, [data], where)
        assert done, "a file of features that ends too early"
        data, where = data[done:], where + done


class FeatureSet:
    """Features of one set of pictures, taken in batch by batch, on one process or on many.

    Args:
        width: D.
        keep_rows: whether the rows are kept beside the moments, which kernels and neighbours need.

    Attributes:
        moments: count, mean and scatter.
        rows: the features themselves; None where they are not kept.
        scores: moments (D = 1) of a score of each picture, such as CLIP's.
    """

    def __init__(self, width: int, keep_rows: bool = False) -> None:
        self.moments, self.scores = Moments(width), Moments(1)
        self.rows = FeatureRows(width) if keep_rows else None

    @classmethod
    def of(cls, features: NDArray[np.floating]) -> "FeatureSet":
        """All of features `(N, D)`, rows kept."""
        made = cls(features.shape[1], keep_rows=True)
        made.add(features)
        return made

    @property
    def count(self) -> int:
        """Number of pictures."""
        return self.moments.count

    def add(
        self,
        features: NDArray[np.floating],
        numbers: Sequence[int] | None = None,
        scores: F64 | None = None,
    ) -> None:
        """Take in features `(B, D)`.

        Args:
            features: of a batch.
            numbers: of its pictures; by default those that come next.
            scores: `(B,)`, one for each picture.
        """
        self.moments.add(features)
        if self.rows is not None:
            first = len(self.rows)
            self.rows.write(range(first, first + len(features)) if numbers is None else numbers, features)
        if scores is not None:
            self.scores.add(scores[:, None])

    def merge(self, other: "FeatureSet") -> None:
        """Take in what another process has seen; numbers of pictures must not repeat."""
        self.moments.merge(other.moments)
        self.scores.merge(other.scores)
        if self.rows is not None and other.rows is not None:
            numbers = other.rows.numbers
            for first in range(0, len(numbers), BLOCK):
                part = numbers[first : first + BLOCK]
                self.rows.write(part, other.rows.read(part))

    def whole_rows(self) -> FeatureRows:
        """The rows of all pictures."""
        assert self.rows is not None and not self.rows.missing and len(self.rows) == self.count
        return self.rows
