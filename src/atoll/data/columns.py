"""Columns: one named array per shard, row-aligned, memory-mapped, and never stale.

A fixed column holds `values (rows, *shape)` per shard. A ragged one (text states) holds `values (sum of
lengths, *shape)` and `lengths (rows,)`. `column.json` names the producer and the content of every shard of
rows, so a column of another encoder, or of rows or pictures that have changed, is made anew and never read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from posixpath import join
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from atoll.base.errors import AtollError, DataError
from atoll.base.hashing import digest
from atoll.data.formats import ColumnMeta, Shard, ShardNote
from atoll.store.manifest import FileEntry, check_file, is_whole, read_file, write_file
from atoll.store.store import Store
from atoll.store.tensors import read_tensors

Rows = NDArray[np.int64]
Kind = Literal["fixed", "ragged"]
Compute = Callable[[int], Mapping[str, Tensor]]
Extras = Mapping[str, Mapping[str, Tensor]]
Progress = Callable[[int, int], None]
MAPPED_SHARDS = 4096
"""Most shards that one column keeps mapped; Linux allows 65,530 maps a process."""


class _Mapped(NamedTuple):
    values: Tensor
    lengths: Rows  # empty for a fixed column
    starts: Rows


class Column:
    """One column of a data set, read by row number."""

    def __init__(self, store: Store, folder: str, meta: ColumnMeta, bounds: Rows) -> None:
        self.store, self.folder, self.meta, self.bounds = store, folder, meta, bounds
        self._mapped: dict[int, _Mapped] = {}
        self._paths: dict[int, Path] = {}
        self._extras: dict[str, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getstate__(self) -> dict[str, Any]:
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
        """Values `(n, *shape)` of a fixed column for any row numbers `(n,)`, in their order.

        Raises:
            IndexError: a row number is negative or too large.
            StoreError: a shard is missing or damaged (checked when it is first opened).
        """
        assert self.meta.kind == "fixed", f"column {self.meta.name} is ragged: use read_ragged"
        rows = _row_numbers(rows, len(self))
        parts = [(self._map(shard), where, local) for shard, where, local in by_shard(self.bounds, rows)]
        out = torch.empty((len(rows), *self.meta.shape), dtype=self.dtype)
        for mapped, where, local in parts:
            out[torch.from_numpy(where)] = _pick(mapped.values, local)
        return out

    def read_ragged(self, rows: ArrayLike, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Sequences of a ragged column for any row numbers `(n,)`, padded with zeros.

        Args:
            rows: row numbers.
            length: length L to pad to; longer sequences are cut. Without it, the longest of these rows.

        Returns:
            values `(n, L, *shape)` and the mask of what is real, bool `(n, L)`.

        Raises:
            IndexError: a row number is negative or too large.
            StoreError: a shard is missing or damaged (checked when it is first opened).
        """
        assert self.meta.kind == "ragged", f"column {self.meta.name} is fixed: use read"
        rows = _row_numbers(rows, len(self))
        parts = [(self._map(shard), where, local) for shard, where, local in by_shard(self.bounds, rows)]
        lengths = np.zeros(len(rows), dtype=np.int64)
        for mapped, where, local in parts:
            lengths[where] = mapped.lengths[local]
        longest = int(lengths.max(initial=0)) if length is None else length
        lengths = lengths.clip(max=longest)
        mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
        out = torch.zeros((len(rows), longest, *self.meta.shape), dtype=self.dtype)
        flat = out.flatten(0, 1)
        for mapped, where, local in parts:
            counts = lengths[where]
            position = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            source = np.repeat(mapped.starts[local], counts) + position
            target = np.repeat(where * longest, counts) + position
            flat[torch.from_numpy(target)] = _pick(mapped.values, source)
        return out, mask

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

    def localise(self) -> None:
        """Verify every file and, of a remote store, fetch it. Then reading needs local files only."""
        with ThreadPoolExecutor(max_workers=4) as pool:
            for _ in pool.map(self._path, range(len(self.meta.shards))):
                pass
        for name in self.meta.extras:
            self.extra(name)

    def _path(self, shard: int) -> Path:
        """Local file of a shard; its hash is checked the first time."""
        if shard not in self._paths:
            self._paths[shard] = check_file(self.store, self.folder, self.meta.shards[shard])
        return self._paths[shard]

    def tensors(self, shard: int) -> dict[str, Tensor]:
        """What a shard's file holds, as `column.json` says: `values`, and `lengths` of a ragged column.

        Raises:
            Damaged: it is not what the column's manifest says.
            DataError: its tensors are not what the column says of itself.
        """
        entry, meta = self.meta.shards[shard], self.meta
        where = self.store.name(join(self.folder, entry.path))
        tensors = read_tensors(self._path(shard), where, "values")
        rows = int(self.bounds[shard + 1] - self.bounds[shard])
        dtype, shape, longest = describe(tensors, meta.kind, rows, where)
        if (dtype, list(shape)) != (meta.dtype, meta.shape) or longest > meta.max_length:
            form = f"{dtype} of shape {list(shape)}"
            fix = "write the column again"
            raise DataError(f"{where} holds {form}; column.json says {meta.dtype} of shape {meta.shape}", fix)
        return tensors

    def _map(self, shard: int) -> _Mapped:
        """Map a shard into memory."""
        if shard not in self._mapped:
            if len(self._mapped) == MAPPED_SHARDS:
                del self._mapped[next(iter(self._mapped))]
            tensors = self.tensors(shard)
            lengths = tensors.get("lengths", torch.empty(0)).numpy().astype(np.int64)
            self._mapped[shard] = _Mapped(tensors["values"], lengths, lengths.cumsum() - lengths)
        return self._mapped[shard]


def write_column(
    store: Store,
    folder: str,
    shards: Sequence[Shard],
    producer: dict[str, Any],
    compute: Compute,
    extras: Extras,
    kind: Kind,
    progress: Progress | None,
) -> None:
    """Compute a column, or find it; see `DataSet.write_column`."""
    name, content = folder.rpartition("/")[2], [shard.content() for shard in shards]
    maker = {"kind": kind, "producer": producer}
    old = _column_of(store, folder, maker)
    store.sweep(folder)
    if old is not None and old.content == content and extras.keys() <= old.extras.keys():
        entries = [*old.shards, *old.extras.values()]
        if all(is_whole(store, folder, entry) for entry in entries):
            _remove_others(store, folder, old)  # a killed process may have left its notes
            return
    files, forms, longest = [], set(), 1
    for number, shard in enumerate(shards):
        identity = digest({**maker, "content": content[number]})
        entry = _kept_shard(store, folder, old, number, content[number], identity)
        if entry is None:
            entry = _write_shard(store, folder, number, shard.rows, kind, compute(number))
            note = ShardNote(identity=identity, rows=shard.rows, files={"values": entry})
            store.put_json(f"{folder}/{number:05d}.json", note.to_json())
        tensors = read_tensors(store.path(join(folder, entry.path)), store.name(join(folder, entry.path)))
        dtype, shape, length = describe(tensors, kind, shard.rows, store.name(join(folder, entry.path)))
        files.append(entry)
        forms.add((dtype, shape))
        longest = max(longest, length)
        if progress is not None:
            progress(number + 1, len(shards))
    if len(forms) != 1:
        raise DataError(f"column {name!r} has shards of different form: {sorted(forms)}")
    ((dtype, shape),) = forms
    meta = ColumnMeta(
        name=name,
        kind=kind,
        dtype=dtype,
        shape=list(shape),
        max_length=longest,
        producer=producer,
        content=content,
        shards=files,
        extras={key: _write_tensors(store, folder, key, tensors) for key, tensors in extras.items()},
    )
    finish_column(store, folder, meta)


def finish_column(store: Store, folder: str, meta: ColumnMeta) -> None:
    """Declare a column complete, and remove what its folder holds besides."""
    store.put_json(f"{folder}/column.json", meta.to_json())
    _remove_others(store, folder, meta)


def _remove_others(store: Store, folder: str, meta: ColumnMeta) -> None:
    named = {store.name(join(folder, entry.path)) for entry in [*meta.shards, *meta.extras.values()]}
    named.add(store.name(f"{folder}/column.json"))
    store.delete(*(key for key in store.list(folder) if store.name(key) not in named))


def _column_of(store: Store, folder: str, maker: dict[str, Any]) -> ColumnMeta | None:
    """The complete column of this maker that is there, if any; its shards may still be stale."""
    try:
        meta = ColumnMeta.read(store, f"{folder}/column.json")
    except AtollError:
        return None
    return meta if digest({"kind": meta.kind, "producer": meta.producer}) == digest(maker) else None


def _kept_shard(
    store: Store, folder: str, old: ColumnMeta | None, number: int, content: str, identity: str
) -> FileEntry | None:
    """The file of a shard that is there already, of this maker and for these rows."""
    if old is not None and (number, content) in enumerate(old.content):
        entry = old.shards[number]
        if is_whole(store, folder, entry):
            return entry
    note = ShardNote.find(store, f"{folder}/{number:05d}.json", identity)
    whole = note is not None and is_whole(store, folder, note.files["values"])
    return note.files["values"] if note is not None and whole else None


def _write_shard(
    store: Store, folder: str, number: int, rows: int, kind: Kind, tensors: Mapping[str, Tensor]
) -> FileEntry:
    """Check and write what was computed for a shard."""
    if "lengths" in tensors:
        tensors = {**tensors, "lengths": tensors["lengths"].to(torch.int32)}
    describe(tensors, kind, rows, f"column {folder.rpartition('/')[2]!r}, shard {number}")
    store.delete(f"{folder}/column.json")  # beside shards that it does not describe it would be a lie
    return _write_tensors(store, folder, f"{number:05d}", tensors)


def _write_tensors(store: Store, folder: str, name: str, tensors: Mapping[str, Tensor]) -> FileEntry:
    whole = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    return write_file(store, folder, f"{name}.safetensors", safetensors.torch.save(whole))


def describe(
    tensors: Mapping[str, Tensor], kind: Kind, rows: int, where: str
) -> tuple[str, tuple[int, ...], int]:
    """Type, shape and longest sequence of a shard's tensors; `DataError` unless they fit its rows."""
    expected = {"values"} if kind == "fixed" else {"values", "lengths"}
    if set(tensors) != expected:
        raise DataError(f"{where}: holds {sorted(tensors)} instead of {sorted(expected)}")
    values, longest, count = tensors["values"], 1, rows
    if kind == "ragged":
        lengths = tensors["lengths"]
        whole = lengths.shape == (rows,) and not lengths.dtype.is_floating_point and not lengths.is_complex()
        if not whole or int(lengths.min()) < 0:
            raise DataError(f"{where}: lengths of shape {tuple(lengths.shape)} for {rows} rows")
        longest, count = int(lengths.max()), int(lengths.sum())
    if values.ndim == 0 or values.shape[0] != count:
        raise DataError(f"{where}: values of shape {tuple(values.shape)} for {count} entries")
    return str(values.dtype).removeprefix("torch."), tuple(values.shape[1:]), longest


def by_shard(bounds: Rows, rows: Rows) -> Iterator[tuple[int, Rows, Rows]]:
    """For every shard concerned: its number, positions within `rows`, and row numbers within it."""
    shard = np.searchsorted(bounds, rows, side="right") - 1
    order = np.argsort(shard, kind="stable")
    for where in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1):
        if len(where):
            first = int(shard[where[0]])
            yield first, where, rows[where] - bounds[first]


def _pick(values: Tensor, index: Rows) -> Tensor:
    """`values[index]`; five times as fast on a few rows."""
    return values.index_select(0, torch.from_numpy(index))


def _row_numbers(rows: ArrayLike, count: int) -> Rows:
    array = np.asarray(rows)
    if array.size == 0:
        array = array.astype(np.int64)
    bad = array.ndim != 1 or array.dtype.kind not in "iu"
    if bad or (array.size and (array.min() < 0 or array.max() >= count)):
        raise IndexError(f"row numbers must be a list of integers between 0 and {count - 1}")
    return array.astype(np.int64, copy=False)
