"""Columns: one named array per shard, row-aligned, memory-mapped, and never stale.

A fixed column holds `values (rows, *shape)` per shard. A ragged one (text states) holds `values (sum of
lengths, *shape)` and `lengths (sequences,)`, and row n has sequence n. Where rows share sequences, or have
several to choose from, it also holds `choices (rows,)`, how many a row has, and `index (sum of choices,)`,
which they are. `column.json` names the producer and the content of every shard of rows, so a column of
another encoder, or of rows or pictures that have changed, is made anew and never read.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from posixpath import join
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import pad

from atoll.base.errors import DataError
from atoll.data.formats import ColumnMeta
from atoll.store.manifest import check_file, read_file
from atoll.store.store import Store
from atoll.store.tensors import read_tensors

Rows = NDArray[np.int64]
Kind = Literal["fixed", "ragged"]
Key = TypeVar("Key", bound=Hashable)
Compute = Callable[[int], Mapping[str, Tensor]]
Extras = Mapping[str, Mapping[str, Tensor]]
Bytes = NDArray[np.uint8]
Form = tuple[str, list[int], int]
"""Type and shape of a column's values, and its longest sequence."""
MAPPED_SHARDS = 4096
"""Most shards that one column keeps mapped; Linux allows 65,530 maps a process."""


class _Mapped(NamedTuple):
    values: Tensor
    bytes: Bytes  # of each value, in the same memory
    lengths: Rows  # empty for a fixed column
    starts: Rows
    choices: Rows  # sequences that rows choose from, row after row
    bounds: Rows  # of each row's part of it

    def sequences(self, rows: Rows, chances: NDArray[np.float32] | None) -> Rows:
        """The sequence of each row: the first of its own, or that which chance in [0, 1) falls on."""
        first, end = self.bounds[rows], self.bounds[rows + 1]
        if chances is None:
            return self.choices[first]
        # A chance of nearly 1 may round up to the end.
        return self.choices[np.minimum(first + (chances * (end - first)).astype(np.int64), end - 1)]


class Column:
    """One column of a data set, read by row number."""

    def __init__(self, store: Store, folder: str, meta: ColumnMeta, bounds: Rows) -> None:
        self.store, self.folder, self.meta, self.bounds = store, folder, meta, bounds
        self._mapped: dict[int, _Mapped] = {}  # in the order of mapping: the oldest goes first
        self._paths: dict[int, Path] = {}
        self._extras: dict[str, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getstate__(self) -> dict[str, Any]:
        # Maps of files are opened anew by the process that gets the column; their content would be copied.
        return {**self.__dict__, "_mapped": {}}

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        dtype = getattr(torch, self.meta.dtype, None)
        if not isinstance(dtype, torch.dtype):
            fix = "the column is damaged: write it again"
            raise DataError(f"{self.meta.dtype!r} is no type of numbers", fix)
        return dtype

    def read(self, rows: ArrayLike) -> Tensor:
        """Values `(n, *shape)` of a fixed column for any row numbers `(n,)`, in their order."""
        assert self.meta.kind == "fixed", f"column {self.meta.name} is ragged: use read_ragged"
        rows = _row_numbers(rows, len(self))
        parts = [(self._map(shard), where, local) for shard, where, local in by_shard(self.bounds, rows)]
        out = torch.empty((len(rows), *self.meta.shape), dtype=self.dtype)
        target = _bytes(out)  # numpy copies: torch would wake its threads for every few rows
        for mapped, where, local in parts:
            target[where] = mapped.bytes[local]
        return out

    def blocks(self, rows: Rows, size: int) -> Iterator[tuple[Rows, Tensor]]:
        """Row numbers and values of ascending rows, so many at a time; shards that lie behind are unmapped.

        Memory does not grow with rows or shards: pages of mapped files count as a process's own.
        """
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            yield block, self.read(block)
            # The shard of the last row may go on in the next block.
            last = int(np.searchsorted(self.bounds, block[-1], side="right")) - 1
            self._mapped = {last: self._mapped[last]}

    def read_ragged(
        self,
        rows: ArrayLike,
        length: int | None = None,
        draw: Callable[[], Tensor] | None = None,
        packed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Sequences `(n, L, *shape)` of a ragged column, padded with zeros, and the mask of what is real.

        Args:
            length: L; longer sequences are cut. Without it, the longest of these rows.
            draw: uniforms on [0, 1) `(n,)` that choose among the sequences of a row, asked for where there
                are several; without it, the first counts.
            packed: without padding, `(sum of lengths, *shape)`.
        """
        assert self.meta.kind == "ragged", f"column {self.meta.name} is fixed: use read"
        rows = _row_numbers(rows, len(self))
        parts = [(self._map(shard), where, local) for shard, where, local in by_shard(self.bounds, rows)]
        # Nothing is drawn where there is no choice: uniforms of every batch would cost more than the reading.
        several = any(len(mapped.choices) > len(mapped.bounds) - 1 for mapped, _, _ in parts)
        chances = draw().numpy() if draw is not None and several else None
        parts = [
            (mapped, where, mapped.sequences(local, None if chances is None else chances[where]))
            for mapped, where, local in parts
        ]
        lengths = np.zeros(len(rows), dtype=np.int64)
        for mapped, where, local in parts:
            lengths[where] = mapped.lengths[local]
        longest = int(lengths.max(initial=0)) if length is None else length
        lengths = lengths.clip(max=longest)
        mask, ends = torch.from_numpy(np.arange(longest) < lengths[:, None]), lengths.cumsum()
        out = torch.empty((int(lengths.sum()), *self.meta.shape), dtype=self.dtype)
        flat = _bytes(out)
        # One copy for each sequence: twice as fast as a gather of their elements, for tokens too.
        for mapped, where, local in parts:
            spans = mapped.starts[local], ends[where], lengths[where]
            for start, end, count in zip(*map(np.ndarray.tolist, spans), strict=True):
                flat[end - count : end] = mapped.bytes[start : start + count]
        return out if packed else padded(out, mask), mask

    def take_ragged(self, rows: ArrayLike) -> dict[str, Tensor]:
        """What a shard of these rows holds, with all sequences that they choose from."""
        rows = _row_numbers(rows, len(self))
        keys: list[list[tuple[int, int]]] = [[]] * len(rows)
        for shard, where, local in by_shard(self.bounds, rows):
            mapped = self._map(shard)
            for place, row in zip(where.tolist(), local.tolist(), strict=True):
                sequences = mapped.choices[mapped.bounds[row] : mapped.bounds[row + 1]].tolist()
                keys[place] = [(shard, sequence) for sequence in sequences]

        def sequence(key: tuple[int, int]) -> Tensor:
            mapped = self._map(key[0])
            start = int(mapped.starts[key[1]])
            return mapped.values[start : start + int(mapped.lengths[key[1]])]

        return ragged(keys, sequence)

    def lengths(self) -> Rows:
        """Elements of every stored sequence of a ragged column: one a row, unless rows share theirs."""
        return np.concatenate([self._map(shard).lengths for shard in range(len(self.meta.shards))])

    def extra(self, name: str) -> dict[str, Tensor]:
        """Named tensors that belong to the column and to no row; `DataError` if there are none so named."""
        if name not in self.meta.extras:
            what = f"column {self.meta.name!r} in {self.store.name(self.folder)} has no {name!r}"
            raise DataError(what, "write the column again with the encoder that provides it")
        if name not in self._extras:
            entry = self.meta.extras[name]
            data = read_file(self.store, self.folder, entry)
            self._extras[name] = read_tensors(data, self.store.name(join(self.folder, entry.path)))
        return self._extras[name]

    def localise(self, check: bool = True) -> None:
        """Fetch every file of a remote store, and `check` it. Then reading needs local files only."""
        # Fetching waits for the network and hashing leaves the interpreter's lock, so threads do.
        with ThreadPoolExecutor(max_workers=4) as pool:
            list(pool.map(lambda shard: self._path(shard, check), range(len(self.meta.shards))))
        for name in self.meta.extras:
            self.extra(name)

    def _path(self, shard: int, check: bool = True) -> Path:
        if shard not in self._paths:
            entry = self.meta.shards[shard]
            whole = check_file(self.store, self.folder, entry) if check else None
            self._paths[shard] = whole or self.store.path(join(self.folder, entry.path))
        return self._paths[shard]

    def tensors(self, shard: int) -> dict[str, Tensor]:
        """What a shard's file holds, verified: `values`, and `lengths` of a ragged column."""
        entry, meta = self.meta.shards[shard], self.meta
        where = self.store.name(join(self.folder, entry.path))
        tensors = read_tensors(self._path(shard), where, "values")
        rows = int(self.bounds[shard + 1] - self.bounds[shard])
        dtype, shape, longest = describe(tensors, meta.kind, rows, where)
        if (dtype, shape) != (meta.dtype, meta.shape) or longest > meta.max_length:
            form = f"{dtype} of shape {list(shape)}"
            fix = "write the column again"
            raise DataError(f"{where} holds {form}; column.json says {meta.dtype} of shape {meta.shape}", fix)
        return tensors

    def _map(self, shard: int) -> _Mapped:
        mapped = self._mapped.get(shard)
        if mapped is None:
            tensors = self.tensors(shard)
            values = tensors["values"]
            lengths = tensors.get("lengths", torch.empty(0)).numpy().astype(np.int64)
            index, bounds = np.arange(len(lengths)), np.arange(len(lengths) + 1)  # row n has sequence n
            if "index" in tensors:
                index = tensors["index"].numpy().astype(np.int64)
                bounds = np.concatenate([[0], tensors["choices"].numpy().astype(np.int64).cumsum()])
            starts = lengths.cumsum() - lengths
            self._mapped[shard] = mapped = _Mapped(values, _bytes(values), lengths, starts, index, bounds)
            # Batches and a validation are read by two threads, so it may be more than one that is too many.
            for oldest in list(self._mapped)[:-MAPPED_SHARDS]:
                self._mapped.pop(oldest, None)
        return mapped


def padded(values: Tensor, mask: Tensor) -> Tensor:
    """Sequences `(n, L, *shape)` of packed elements by their mask `(n, L)`; the host waits for no GPU."""
    place = torch.where(mask, mask.flatten().cumsum(0).view_as(mask) - 1, len(values))
    # By `pad`, as autocast to bf16, in which a run validates, concatenates no half.
    return pad(values, (0, 0) * (values.ndim - 1) + (0, 1))[place]


def some_rows(rows: Rows, most: int, drawn: torch.Generator | None = None) -> Rows:
    """At most so many of some rows, evenly spread, in their order; or drawn by chance, ascending."""
    if drawn is not None:
        return np.sort(rows[torch.randperm(len(rows), generator=drawn)[:most].numpy()])
    return rows[np.linspace(0, len(rows) - 1, min(len(rows), most)).astype(np.int64)]


def ragged(keys: Sequence[Sequence[Key]], sequence: Callable[[Key], Tensor]) -> dict[str, Tensor]:
    """Tensors of a ragged shard in which every sequence stands once.

    `keys` name the sequences that each row chooses from, one at least; `sequence` gives `(length, *shape)`.
    """
    every = [key for row in keys for key in row]
    distinct = list(dict.fromkeys(every))  # in order of first use, so that equal rows give equal bytes
    parts = [sequence(key) for key in distinct]
    tensors = {"values": torch.cat(parts), "lengths": torch.tensor(list(map(len, parts)))}
    if len(distinct) == len(every) == len(keys):
        return tensors  # each row has one of its own: an index would say what the row's number says
    places = {key: place for place, key in enumerate(distinct)}
    choices = torch.tensor(list(map(len, keys)))
    return {**tensors, "index": torch.tensor([places[key] for key in every]), "choices": choices}


def describe(tensors: Mapping[str, Tensor], kind: Kind, rows: int, where: str) -> Form:
    """Type, shape and longest sequence of a shard's tensors; `DataError` unless they fit its rows."""
    expected = {"values"} if kind == "fixed" else {"values", "lengths"}
    expected |= {"index", "choices"} if kind == "ragged" and "index" in tensors else set()
    if set(tensors) != expected:
        raise DataError(f"{where}: holds {sorted(tensors)} instead of {sorted(expected)}")
    values, longest, count = tensors["values"], 1, rows
    if kind == "ragged":
        lengths, shared = tensors["lengths"], "index" in tensors
        if not _are_counts(lengths, None if shared else rows):
            raise DataError(f"{where}: lengths of shape {tuple(lengths.shape)} for {rows} rows")
        longest, count = int(lengths.max()), int(lengths.sum())
        if shared:  # every row has a sequence, and every sequence is there
            index, choices = tensors["index"], tensors["choices"]
            fits = _are_counts(choices, rows) and int(choices.min()) > 0
            if not (fits and _are_counts(index, int(choices.sum())) and int(index.max()) < len(lengths)):
                what = f"index and choices do not fit {rows} rows and {len(lengths)} sequences"
                raise DataError(f"{where}: {what}")
    if values.ndim == 0 or values.shape[0] != count:
        raise DataError(f"{where}: values of shape {tuple(values.shape)} for {count} entries")
    return str(values.dtype).removeprefix("torch."), list(values.shape[1:]), longest


def _are_counts(numbers: Tensor, count: int | None) -> bool:
    whole = not (numbers.dtype.is_floating_point or numbers.dtype.is_complex or numbers.dtype == torch.bool)
    size = numbers.ndim == 1 and len(numbers) > 0 and count in (None, len(numbers))
    return whole and size and int(numbers.min()) >= 0


def by_shard(bounds: Rows, rows: Rows) -> Iterator[tuple[int, Rows, Rows]]:
    """For every shard concerned: its number, positions within `rows`, and row numbers within it."""
    shard = np.searchsorted(bounds, rows, side="right") - 1
    order = np.argsort(shard, kind="stable")
    local, begin = (rows - bounds[shard])[order], 0
    for end in (np.flatnonzero(np.diff(shard[order], append=-1)) + 1).tolist():
        yield int(shard[order[begin]]), order[begin:end], local[begin:end]
        begin = end


def _bytes(values: Tensor) -> Bytes:
    """The bytes of each element `(n, bytes)`, in its own memory; numpy lacks some of torch's types."""
    flat: Bytes = values.reshape(len(values), math.prod(values.shape[1:])).view(torch.uint8).numpy()
    return flat


def _row_numbers(rows: ArrayLike, count: int) -> Rows:
    array = np.asarray(rows)
    if array.size == 0:
        array = array.astype(np.int64)
    bad = array.ndim != 1 or array.dtype.kind not in "iu"
    if bad or (array.size and (array.min() < 0 or array.max() >= count)):
        raise IndexError(f"row numbers must be a list of integers between 0 and {count - 1}")
    return array.astype(np.int64, copy=False)
