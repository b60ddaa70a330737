"""Which row a step sees: a pure function of (seed, epoch, hash of the row ids).

The cursor is the number of samples consumed, so a run may stop anywhere and go on with any number of
processes or micro-batches and see the same rows. The shuffle is a permutation computed per position, not
stored: a Feistel network over the smallest power of four that holds the rows, walked until it lands on
a row (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). It takes no memory and no library.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WINDOW = 4096
"""Positions that are computed at once: for a batch alone, calls of numpy would cost more than numbers."""
_ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)
_U64 = NDArray[np.uint64]


@dataclass(frozen=True)
class Order:
    """The order in which rows are seen."""

    rows: int  # of one epoch, repeated ones counted
    seed: int
    id_hash: str  # of the row ids, so another data set has another order
    # Where each row's places in an epoch end, of rows that are drawn by weight; else each has one.
    ends: NDArray[np.float64] | None = field(default=None, compare=False)

    @classmethod
    def weighted(cls, weights: NDArray[np.floating], seed: int, id_hash: str) -> "Order":
        """Rows in proportion to their weights, as evenly as can be: systematic resampling of every epoch.

        An epoch has as many rows as the weights sum to; one of weight 1 is seen once in it, one of weight 0.3
        in three epochs of ten. Weights are not negative, and some above 0.
        """
        ends = np.cumsum(weights, dtype=np.float64)
        rows = max(1, round(float(ends[-1])))
        by = hashlib.blake2b(ends.tobytes(), digest_size=16).hexdigest()
        return cls(rows, seed, f"{id_hash}/{by}", ends * (rows / ends[-1]))

    def at(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """Row numbers at some positions of the run (numbers of samples consumed before)."""
        # Windows no longer than an epoch, so that one lies in two epochs at most.
        window = min(WINDOW, self.rows)
        numbers, offsets = np.divmod(np.asarray(positions, dtype=np.int64), window)
        present, places = np.unique(numbers, return_inverse=True)
        if not len(present):
            return numbers
        return np.stack([_window(self, int(number), window) for number in present])[places, offsets]

    def permute(self, offsets: _U64, epoch: int) -> _U64:
        """Row numbers at some offsets within an epoch."""
        half = max(1, ((self.rows - 1).bit_length() + 1) // 2)
        text = f"{self.seed}/{epoch}/{self.id_hash}".encode()
        keys = np.frombuffer(hashlib.blake2b(text, digest_size=8 * _ROUNDS).digest(), dtype="<u8")
        values = _feistel(offsets, keys, half)
        # Cycle walking: a value beyond the rows is encrypted again. That keeps the map a permutation, and of
        # four values at most three are beyond, so a few rounds do.
        while (outside := values >= self.rows).any():
            values[outside] = _feistel(values[outside], keys, half)
        if self.ends is None:
            return values
        # One offset for a whole epoch: rows are then seen floor or ceil of their share, never more or less.
        start = int.from_bytes(hashlib.blake2b(text + b"/start", digest_size=6).digest(), "little") / 2**48
        places = np.searchsorted(self.ends, values.astype(np.float64) + start, side="right")
        return np.minimum(places, len(self.ends) - 1).astype(np.uint64)


class BucketOrder:
    """The order of rows of several shapes: each step is of one bucket, so of one shape in every process.

    Every bucket is an endless stream of its rows, permuted anew in each pass over them. By the end of epoch E
    it has had as many steps as E passes fill; what is left over, less than a step, comes first in the next
    one. The steps of an epoch, of all buckets, are shuffled. So after E epochs every row was seen E or E - 1
    times, unless its bucket has fewer rows than a step: then its passes come when they fill one.

    The cursor is the number of samples, as for `Order`, but a position has another row under another `batch`,
    which is that of all processes together. Buckets and weights, some above 0, are `(rows,)`.
    """

    def __init__(
        self,
        buckets: NDArray[np.int64],
        batch: int,
        seed: int,
        id_hash: str,
        weights: NDArray[np.floating] | None = None,
    ) -> None:
        self.batch, self.seed = batch, seed
        self.id_hash = f"{id_hash}/{hashlib.blake2b(buckets.tobytes(), digest_size=16).hexdigest()}"
        mass = np.ones(len(buckets)) if weights is None else np.asarray(weights, dtype=np.float64)
        self.members = [np.flatnonzero((buckets == n) & (mass > 0)) for n in np.unique(buckets[mass > 0])]
        self.masses = np.array([mass[rows].sum() for rows in self.members])
        self.streams = [
            Order(len(rows), seed, f"{self.id_hash}/{number}")
            if weights is None
            else Order.weighted(mass[rows], seed, f"{self.id_hash}/{number}")
            for number, rows in enumerate(self.members)
        ]

    def at(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """Row numbers at some positions of the run (numbers of samples consumed before)."""
        steps, places = np.divmod(np.asarray(positions, dtype=np.int64), self.batch)
        rows = np.empty(len(steps), dtype=np.int64)
        for step in np.unique(steps):
            here = steps == step
            bucket, turn = self._turn(int(step))
            rows[here] = self.members[bucket][self.streams[bucket].at(turn * self.batch + places[here])]
        return rows

    def steps_before(self, epoch: int) -> NDArray[np.int64]:
        """Steps that each bucket has had before an epoch."""
        return np.floor(epoch * self.masses / self.batch).astype(np.int64)

    def _turn(self, step: int) -> tuple[int, int]:
        """The bucket of a step, and how many steps of its stream come before."""
        # Whole steps of all buckets together lag behind by less than a step each, so the epoch is this or a
        # later one; starting one too early is safe, one too late would lose the step.
        epoch = max(0, int(step * self.batch / self.masses.sum()) - 1)
        before, after = self.steps_before(epoch), self.steps_before(epoch + 1)
        while after.sum() <= step:
            epoch, before, after = epoch + 1, after, self.steps_before(epoch + 2)
        count = int((after - before).sum())
        offset = np.array([step - before.sum()], dtype=np.uint64)
        shuffled = int(Order(count, self.seed, f"{self.id_hash}/steps").permute(offset, epoch)[0])
        ends = np.cumsum(after - before)
        bucket = int(np.searchsorted(ends, shuffled, side="right"))
        return bucket, int(after[bucket] - ends[bucket]) + shuffled


@lru_cache(maxsize=256)
def _window(order: Order, number: int, size: int) -> NDArray[np.int64]:
    """Row numbers of the positions from `number * size` on."""
    epochs, offsets = np.divmod(np.arange(number * size, (number + 1) * size), order.rows)
    rows = np.empty(size, dtype=np.int64)
    for epoch in np.unique(epochs):  # two at most: a window is no longer than an epoch
        inside = epochs == epoch
        rows[inside] = order.permute(offsets[inside].astype(np.uint64), int(epoch)).astype(np.int64)
    return rows


def _feistel(values: _U64, keys: _U64, half: int) -> _U64:
    """One pass over 2 * half bits; invertible whatever the round function is."""
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        # The finaliser of splitmix64.
        mixed = (right ^ key) * _MIX
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
    return (left << bits) | right
