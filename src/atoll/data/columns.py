"""Columns: one named array per shard, row-aligned, memory-mapped, and never stale.

A fixed column holds `values (rows, *shape)` per shard. A ragged one (text states) holds `values (sum of
lengths, *shape)` and `lengths (rows,)`. `column.json` is written last: it exists = the column is complete.
It names the producer and the content of every shard of rows, so a column made by another encoder, or
for rows or pictures that have changed since, is recomputed and never read.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import safetensors.torch
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from atoll.base.config import Config
from atoll.base.errors import AtollError, DataError
from atoll.base.hashing import digest
from atoll.data.files import Shard, is_valid, join, read_versioned, versioned
from atoll.store.manifest import FileEntry, check_file, read_file, write_file
from atoll.store.store import Store

if TYPE_CHECKING:
    from atoll.data.dataset import DataSet

Rows = NDArray[np.int64]
Kind = Literal["fixed", "ragged"]
Compute = Callable[[int], Mapping[str, Tensor]]
Extras = Mapping[str, Mapping[str, Tensor]]
MAPPED_SHARDS = 4096
"""Most shards that one column keeps mapped; Linux allows 65,530 maps a process."""


class ColumnMeta(Config):
    """What `column.json` says besides the schema version."""

    name: str
    """Name of the column and of its folder."""
    kind: Kind
    """`fixed`: one array of `shape` a row. `ragged`: a sequence of them a row."""
    dtype: str
    """Name of the torch dtype of `values`."""
    shape: list[int]
    """Shape of a row's value, or of one element of its sequence."""
    max_length: int
    """Longest sequence of a ragged column; 1 for a fixed one."""
    producer: dict[str, Any]
    """What computed the column: name, hash, constants such as the shift and scale of latents."""
    content: list[str]
    """Digest of the rows of every shard that the column was computed from."""
    shards: list[FileEntry]
    """Files in the order of the data set's shards; paths relative to the column's folder."""
    extras: dict[str, FileEntry]
    """Tensors that belong to the column and to no row, such as `null`, the text states of ""."""


class _Mapped(NamedTuple):
    values: Tensor
    lengths: Rows | None
    starts: Rows | None


class Column:
    """One column of a data set, read by row number.

    Args:
        store: the store.
        folder: the column's folder in the store.
        meta: its `column.json`.
        bounds: number of rows before each shard, and of all rows, `(shards + 1,)`.
    """

    def __init__(self, store: Store, folder: str, meta: ColumnMeta, bounds: Rows) -> None:
        self.store, self.folder, self.meta, self.bounds = store, folder, meta, bounds
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()
        self._paths: dict[int, Path] = {}
        self._extras: dict[str, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": OrderedDict()}

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return _dtype(self.meta.dtype)

    @property
    def max_length(self) -> int:
        """Longest sequence of a ragged column; 1 for a fixed one."""
        return self.meta.max_length

    def read(self, rows: ArrayLike) -> Tensor:
        """Values `(n, *shape)` of a fixed column for any row numbers `(n,)`, in their order.

        Raises:
            IndexError: a row number is negative or too large.
            StoreError: a shard is missing or damaged (checked when it is first opened).
        """
        assert self.meta.kind == "fixed", f"column {self.meta.name} is ragged: use read_ragged"
        rows = _row_numbers(rows, len(self))
        out = torch.empty((len(rows), *self.meta.shape), dtype=self.dtype)
        for shard, where, local in self._locate(rows):
            out[torch.from_numpy(where)] = _pick(self._map(shard).values, local)
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
        parts = list(self._locate(rows))
        lengths = np.zeros(len(rows), dtype=np.int64)
        for shard, where, local in parts:
            lengths[where] = self._sequences(shard)[0][local]
        longest = int(lengths.max(initial=0)) if length is None else length
        lengths = lengths.clip(max=longest)
        mask = torch.from_numpy(np.arange(longest) < lengths[:, None])
        out = torch.zeros((len(rows), longest, *self.meta.shape), dtype=self.dtype)
        flat = out.flatten(0, 1)
        for shard, where, local in parts:
            counts = lengths[where]
            position = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
            taken = np.repeat(self._sequences(shard)[1][local], counts) + position
            put = np.repeat(where * longest, counts) + position
            flat[torch.from_numpy(put)] = _pick(self._map(shard).values, taken)
        return out, mask

    def extra(self, name: str) -> dict[str, Tensor]:
        """Named tensors that belong to the column and to no row; `DataError` if there are none so named."""
        if name not in self.meta.extras:
            what = f"column {self.meta.name!r} in {self.store.name(self.folder)} has no {name!r}"
            raise DataError(what, "write the column again with the encoder that provides it")
        if name not in self._extras:
            data = read_file(self.store, self.folder, self.meta.extras[name])
            self._extras[name] = safetensors.torch.load(data)
        return self._extras[name]

    def path(self, entry: FileEntry) -> Path:
        """Local path of one of the column's files, unchecked."""
        return self.store.path(join(self.folder, entry.path))

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

    def _locate(self, rows: Rows) -> Iterator[tuple[int, Rows, Rows]]:
        """For every shard concerned: its number, positions within `rows`, and row numbers within it."""
        shard = np.searchsorted(self.bounds, rows, side="right") - 1
        order = np.argsort(shard, kind="stable")
        for where in np.split(order, np.flatnonzero(np.diff(shard[order])) + 1):
            if len(where):
                first = int(shard[where[0]])
                yield first, where, rows[where] - self.bounds[first]

    def _sequences(self, shard: int) -> tuple[Rows, Rows]:
        mapped = self._map(shard)
        assert mapped.lengths is not None
        assert mapped.starts is not None
        return mapped.lengths, mapped.starts

    def _map(self, shard: int) -> _Mapped:
        """Map a shard into memory."""
        if shard in self._mapped:
            self._mapped.move_to_end(shard)
            return self._mapped[shard]
        tensors = safetensors.torch.load_file(self._path(shard))  # lazy: pages are read when they are indexed
        lengths = tensors["lengths"].numpy().astype(np.int64) if "lengths" in tensors else None
        starts = None if lengths is None else lengths.cumsum() - lengths
        self._mapped[shard] = _Mapped(tensors["values"], lengths, starts)
        if len(self._mapped) > MAPPED_SHARDS:
            self._mapped.popitem(last=False)
        return self._mapped[shard]


def write_column(
    dataset: "DataSet",
    name: str,
    producer: dict[str, Any],
    compute: Compute,
    extras: Extras | Callable[[], Extras] | None = None,
    kind: Kind = "fixed",
) -> Column:
    """Compute a column, or find it: shards that are valid for this producer and these rows are kept.

    Every shard is followed by a small JSON file that says what it was computed from; when the column is
    complete, `column.json` says so for all shards and the small files go.

    Args:
        dataset: the data set; only its column folder is written.
        name: name of the column.
        producer: plain data that changes whenever the values would: name, hash, constants.
        compute: gives the tensors of a shard by its number: `values (rows, *shape)`, or for a ragged
            column `values (sum of lengths, *shape)` and `lengths (rows,)`.
        extras: tensors to keep beside the column, or a function that gives them, called only if needed.
        kind: `fixed` or `ragged`.

    Raises:
        DataError: the name is no folder name, or `compute` gave something else than promised.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name):
        raise DataError(f"{name!r} cannot name a column", "use letters, digits, '.', '_' and '-'")
    writing = _Writing(dataset, name, producer, kind)
    if not writing.is_complete(() if callable(extras) else tuple(extras or ())):
        files = [writing.shard(number, compute) for number in range(len(dataset.shards))]
        writing.finish(files, (extras() if callable(extras) else extras) or {})
    dataset.forget(name)
    return dataset.column(name)


def read_meta(store: Store, folder: str) -> ColumnMeta:
    """`column.json` of a folder; `DataError` or `StoreError` if there is no readable one."""
    return read_versioned(store, f"{folder}/column.json", ColumnMeta)


def finish_column(store: Store, folder: str, meta: ColumnMeta) -> None:
    """Declare a column complete, and remove what its folder holds besides."""
    store.put_json(f"{folder}/column.json", versioned(meta))
    named = [join(folder, entry.path) for entry in [*meta.shards, *meta.extras.values()]]
    store.delete(*(set(store.list(folder)) - {*named, join(folder, "column.json")}))


class _Part(Config):
    """The small file beside a shard of an unfinished column."""

    producer: str
    content: str
    file: FileEntry


class _Writing:
    """A column on its way: what is there and may be kept, and what is written."""

    def __init__(self, dataset: "DataSet", name: str, producer: dict[str, Any], kind: Kind) -> None:
        self.store, self.shards, self.name, self.kind = dataset.store, dataset.shards, name, kind
        self.producer, self.maker = producer, digest({"kind": kind, "producer": producer})
        self.folder = join(dataset.prefix, f"columns/{name}")
        self.old = self._old()

    def _old(self) -> ColumnMeta | None:
        """The complete column of this producer that is there, if any; its shards may still be stale."""
        try:
            meta = read_meta(self.store, self.folder)
        except AtollError:
            return None
        same = digest({"kind": meta.kind, "producer": meta.producer}) == self.maker
        return meta if same and len(meta.shards) == len(meta.content) else None

    def is_complete(self, extras: tuple[str, ...]) -> bool:
        """Whether everything is there, valid, of this producer and for these rows."""
        if self.old is None or self.old.content != [shard.content() for shard in self.shards]:
            return False
        files = [*self.old.shards, *self.old.extras.values()]
        return set(extras) <= set(self.old.extras) and all(
            is_valid(self.store, self.folder, f) for f in files
        )

    def shard(self, number: int, compute: Compute) -> FileEntry:
        """The file of one shard: the one that is there, or a new one."""
        kept = self._kept(number)
        if kept is not None:
            return kept
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in compute(number).items()}
        if "lengths" in tensors:
            tensors["lengths"] = tensors["lengths"].to(torch.int32)
        describe(tensors, self.kind, self.shards[number].rows, f"column {self.name!r}, shard {number}")
        # A column.json beside shards it does not describe would be a lie: it goes first.
        self.store.delete(f"{self.folder}/column.json")
        file = write_file(
            self.store, self.folder, f"{number:05d}.safetensors", safetensors.torch.save(tensors)
        )
        part = _Part(producer=self.maker, content=self.shards[number].content(), file=file)
        self.store.put_json(self._part_key(number), versioned(part))
        return file

    def finish(self, files: list[FileEntry], extras: Extras) -> None:
        """Write the extras, then `column.json`."""
        described = [self._inspect(number, file) for number, file in enumerate(files)]
        forms = {(dtype, shape) for dtype, shape, _ in described}
        if len(forms) != 1:
            raise DataError(f"column {self.name!r} has shards of different form: {sorted(forms)}")
        dtype, shape, _ = described[0]
        meta = ColumnMeta(
            name=self.name,
            kind=self.kind,
            dtype=dtype,
            shape=list(shape),
            max_length=max(longest for _, _, longest in described),
            producer=self.producer,
            content=[shard.content() for shard in self.shards],
            shards=files,
            extras={key: self._write_extra(key, tensors) for key, tensors in extras.items()},
        )
        finish_column(self.store, self.folder, meta)

    def _kept(self, number: int) -> FileEntry | None:
        content, candidates = self.shards[number].content(), []
        if self.old is not None and number < len(self.old.shards) and self.old.content[number] == content:
            candidates.append(self.old.shards[number])
        try:
            part = read_versioned(self.store, self._part_key(number), _Part)
            if part.producer == self.maker and part.content == content:
                candidates.append(part.file)
        except AtollError:
            pass
        return next((file for file in candidates if is_valid(self.store, self.folder, file)), None)

    def _part_key(self, number: int) -> str:
        return f"{self.folder}/{number:05d}.json"

    def _inspect(self, number: int, file: FileEntry) -> tuple[str, tuple[int, ...], int]:
        key = join(self.folder, file.path)
        tensors = safetensors.torch.load_file(self.store.path(key))
        return describe(tensors, self.kind, self.shards[number].rows, self.store.name(key))

    def _write_extra(self, key: str, tensors: Mapping[str, Tensor]) -> FileEntry:
        flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return write_file(self.store, self.folder, f"{key}.safetensors", safetensors.torch.save(flat))


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
        if lengths.shape != (rows,) or int(lengths.min()) < 0:
            raise DataError(f"{where}: lengths of shape {tuple(lengths.shape)} for {rows} rows")
        longest, count = int(lengths.max()), int(lengths.sum())
    if values.ndim == 0 or values.shape[0] != count:
        raise DataError(f"{where}: values of shape {tuple(values.shape)} for {count} entries")
    return str(values.dtype).removeprefix("torch."), tuple(values.shape[1:]), longest


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


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DataError(f"{name!r} is no type of numbers", "the column is damaged: write it again")
    return dtype


def shard_bounds(shards: list[Shard]) -> Rows:
    """Number of rows before each shard, and of all rows, `(shards + 1,)`."""
    return np.cumsum([0, *(shard.rows for shard in shards)], dtype=np.int64)
