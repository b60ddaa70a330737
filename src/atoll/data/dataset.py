"""A data set on disk: shards of rows, pictures and columns under one manifest that is written last."""

import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from pydantic import Field
from torch import Tensor

from atoll.base.config import Config
from atoll.base.errors import AtollError, DataError
from atoll.base.hashing import digest, digest_strings
from atoll.data.columns import Column, ColumnMeta, finish_column, read_meta, shard_bounds, write_column
from atoll.data.files import (
    Shard,
    is_there,
    join,
    read_versioned,
    relative,
    versioned,
)
from atoll.data.images import ImageReader
from atoll.store.manifest import FileEntry, check_file, read_file, write_file
from atoll.store.store import Store

Rows = NDArray[np.int64]
MANIFEST = "manifest.json"
ROWS = pa.schema(
    [
        ("id", pa.string()),
        ("caption", pa.string()),
        ("label", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("key", pa.string()),
        ("sha256", pa.string()),
        ("group", pa.string()),
    ]
)
"""Columns of `rows/*.parquet`; width and height are those of the source picture."""
SPLITS = ("train", "heldout")
"""Names of the values 0 and 1 of the column `split`."""


class Manifest(Config):
    """What `manifest.json` says besides the schema version."""

    identity: str
    """Digest of what the data set was made from and how; the same work makes the same identity."""
    source: dict[str, Any]
    """Where the rows come from: name, fingerprint, licence."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The settings of the ingest."""
    size: int | None = None
    """Height and width of the pictures in pixels; none where the data set has no pictures."""
    mode: Literal["rgb", "gray"] | None = None
    """Channels of the pictures."""
    rejects: dict[str, int] = Field(default_factory=dict)
    """Number of rows left out, by reason; `rejects.jsonl` names them."""
    rows: int
    """Number of rows."""
    shards: list[Shard] = Field(min_length=1)
    """Shards in order."""


class DataSet:
    """Rows with captions, pictures and columns, read-only but for new columns.

    Args:
        store: the store it lies in.
        prefix: its folder there, or "".
        manifest: its manifest; use `open` to read it.
    """

    def __init__(self, store: Store, prefix: str, manifest: Manifest) -> None:
        self.store, self.prefix, self.manifest = store, prefix, manifest
        self.shards = manifest.shards
        self.bounds: Rows = shard_bounds(self.shards)
        self._columns: dict[str, Column] = {}
        self._readers: OrderedDict[int, ImageReader] = OrderedDict()
        self._pictures: dict[str, Path] = {}

    @classmethod
    def open(cls, store: Store, prefix: str = "") -> "DataSet":
        """Open a finished data set.

        Raises:
            DataError: there is none, or it was written under another schema version.
        """
        key = join(prefix, MANIFEST)
        if not is_there(store, key):
            what = f"{store.name(prefix)} is not a data set (no {MANIFEST})"
            raise DataError(what, "run `atoll data ingest`")
        manifest = read_versioned(store, key, Manifest)
        if sum(shard.rows for shard in manifest.shards) != manifest.rows:
            raise DataError(
                f"{store.name(key)} contradicts itself", "it is damaged: write the data set again"
            )
        return cls(store, prefix, manifest)

    def __len__(self) -> int:
        return self.manifest.rows

    def __repr__(self) -> str:
        return f"DataSet({str(self.store.name(self.prefix))!r}, {len(self)} rows)"

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Columns of all rows (of `ROWS`; all of them without `columns`); every file is verified."""
        return pa.concat_tables([self.shard_table(i, columns) for i in range(len(self.shards))])

    def shard_table(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The same for one shard."""
        names = None if columns is None else list(columns)
        data = read_file(self.store, self.prefix, self.shards[shard].files["rows"])
        # Not through a file object of Python's: Arrow's threads may still hold one when Python takes itself
        # down, which aborts the process (apache/arrow#34314).
        return pq.read_table(pa.BufferReader(data), columns=names)

    @cached_property
    def ids(self) -> list[str]:
        """Ids of all rows in order."""
        ids: list[str] = self.table(["id"]).column("id").to_pylist()
        return ids

    @cached_property
    def id_hash(self) -> str:
        """Digest of the ids in order: what the order of training samples depends on."""
        return digest_strings(self.ids)

    @property
    def content(self) -> str:
        """Digest of the content of all rows, wherever their files lie."""
        return digest([shard.content() for shard in self.shards])

    def shard_of(self, row: int) -> int:
        """Number of the shard that holds a row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return int(np.searchsorted(self.bounds, row, side="right")) - 1

    def image(self, row: int) -> Image.Image:
        """The picture of a row, RGB or L; `DataError` where the data set has no pictures."""
        shard = self.shard_of(row)
        return self._reader(shard).read(row - int(self.bounds[shard]))

    def iter_images(self, shard: int) -> Iterator[Image.Image]:
        """The pictures of a shard in order."""
        return iter(self._reader(shard))

    def has_column(self, name: str) -> bool:
        """Whether there is a complete column of this name, made for these rows."""
        try:
            self.column(name)
        except AtollError:
            return False
        return True

    def producers(self) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What made the latents, and what made the text states, where there are any."""
        text = self.column("text").meta.producer if self.has_column("text") else None
        return self.column("latents").meta.producer, text

    def column(self, name: str) -> Column:
        """A complete column.

        Raises:
            DataError: there is none, or it was made for other rows or pictures.
        """
        if name not in self._columns:
            folder = join(self.prefix, f"columns/{name}")
            if not is_there(self.store, f"{folder}/column.json"):
                what = f"{self.store.name(self.prefix)} has no column {name!r}"
                raise DataError(what, "run the stage that writes it")
            meta = read_meta(self.store, folder)
            if meta.content != [shard.content() for shard in self.shards]:
                what = f"column {name!r} in {self.store.name(self.prefix)} was made for other rows"
                raise DataError(what, "run the stage that writes it again")
            self._columns[name] = Column(self.store, folder, meta, self.bounds)
        return self._columns[name]

    def column_names(self) -> list[str]:
        """Names of all complete columns."""
        folder = join(self.prefix, "columns")
        keys = [key.removeprefix(folder + "/") for key in self.store.list(folder)]
        return [key.removesuffix("/column.json") for key in keys if key.endswith("/column.json")]

    def localise(self, columns: Sequence[str]) -> None:
        """Verify every file of some columns and, of a remote store, fetch it: to be called before forking.

        Raises:
            DataError: a column is missing, or was made for other rows.
            StoreError: a file is missing, torn or damaged; names it.
        """
        for name in columns:
            self.column(name).localise()

    def forget(self, name: str) -> None:
        """Read a column anew when it is next asked for."""
        self._columns.pop(name, None)

    def split(self, name: str) -> Rows:
        """Row numbers of `train` or `heldout`, ascending."""
        if name not in SPLITS:
            raise DataError(f"there is no split {name!r}", f"use one of {', '.join(SPLITS)}")
        values = self.column("split").read(np.arange(len(self))).numpy()
        return np.flatnonzero(values == SPLITS.index(name)).astype(np.int64)

    def take(self, rows: ArrayLike) -> pa.Table:
        """Rows by number, in order; only the shards that hold them are read."""
        numbers = np.asarray(rows, dtype=np.int64)
        shards = np.searchsorted(self.bounds, numbers, side="right") - 1
        present, position = np.unique(shards, return_inverse=True)
        tables = [self.shard_table(shard) for shard in present.tolist()]
        starts = np.cumsum([0, *(table.num_rows for table in tables)])
        index = numbers - self.bounds[shards] + starts[position]
        return pa.concat_tables(tables).take(pa.array(index, pa.int64()))

    def _reader(self, shard: int) -> ImageReader:
        if shard not in self._readers:
            entry = self.shards[shard].files.get("images")
            if entry is None:
                raise DataError(
                    f"{self.store.name(self.prefix)} has no pictures", "use the one it was made from"
                )
            if entry.path not in self._pictures:
                self._pictures[entry.path] = check_file(self.store, self.prefix, entry)
            path = self._pictures[entry.path]
            reader = ImageReader(path)
            if len(reader) != self.shards[shard].rows:
                raise DataError(f"{path} holds {len(reader)} pictures for {self.shards[shard].rows} rows")
            self._readers[shard] = reader
            if len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)
        return self._readers[shard]


_OPEN_READERS = 64


def to_parquet(table: pa.Table) -> bytes:
    """Parquet bytes of rows; the same rows give the same bytes under one version of pyarrow."""
    sink = io.BytesIO()
    pq.write_table(table.cast(ROWS), sink, compression="zstd")
    return sink.getvalue()


def is_made(store: Store, prefix: str, identity: str, what: str) -> bool:
    """Whether a folder already holds the data set of this identity.

    Raises:
        DataError: it holds another one, which is never overwritten.
    """
    if not store.exists(join(prefix, MANIFEST)):
        return False
    if DataSet.open(store, prefix).manifest.identity == identity:
        return True
    fix = "choose another folder, or remove this one"
    raise DataError(f"{store.name(prefix)} holds a data set made from {what}", fix)


def create_manifest(dataset: DataSet) -> DataSet:
    """Declare a data set complete."""
    dataset.store.create_json(join(dataset.prefix, MANIFEST), versioned(dataset.manifest))
    return dataset


def write_subset(
    source: DataSet,
    rows: ArrayLike,
    store: Store,
    prefix: str,
    columns: Sequence[str],
    shard_rows: int = 1024,
) -> DataSet:
    """Write some rows, in the given order, and some columns as a data set of their own, without pictures.

    Killed and called again it continues; called again when it is finished it only verifies the columns.

    Args:
        source: where the rows come from.
        rows: row numbers of `source`.
        store: where the new data set goes.
        prefix: its folder there.
        columns: names of the columns to copy, with their extras.
        shard_rows: rows of a shard.

    Raises:
        DataError: there are no rows, a column is missing, or the folder holds a data set of other rows.
    """
    parts = _chunks(rows, shard_rows)
    if not parts:
        raise DataError(f"no rows of {source.store.name(source.prefix)} were chosen", "choose at least one")
    chosen = [source.column(name) for name in columns]
    made_of = {"subset": source.content, "rows": digest_strings(map(str, np.concatenate(parts).tolist()))}
    identity = digest({**made_of, "shard_rows": shard_rows})
    finished = is_made(store, prefix, identity, "other rows")
    if finished:
        dataset = DataSet.open(store, prefix)
    else:
        tables = _row_tables(source, parts)
        shards = [_write_rows(table, store, prefix, number) for number, table in enumerate(tables)]
        count = sum(shard.rows for shard in shards)
        origin = {**source.manifest.source, **made_of}
        dataset = DataSet(
            store, prefix, Manifest(identity=identity, source=origin, rows=count, shards=shards)
        )
    for column in chosen:
        _copy_column(column, dataset, parts)
    return dataset if finished else create_manifest(dataset)


def _row_tables(source: DataSet, parts: list[Rows]) -> Iterator[pa.Table]:
    """Rows of every part, as `source.take(part)` gives them, but every shard of `source` is read once."""
    rows = np.concatenate(parts)
    shards = np.searchsorted(source.bounds, rows, side="right") - 1
    order = np.argsort(shards, kind="stable")  # the rows, gathered shard by shard
    present, starts = np.unique(shards[order], return_index=True)
    gathered = [
        source.shard_table(shard).take(pa.array(rows[chosen] - source.bounds[shard], pa.int64()))
        for shard, chosen in zip(present.tolist(), np.split(order, starts[1:]), strict=True)
    ]
    table = pa.concat_tables(gathered)
    place = np.empty(len(rows), dtype=np.int64)
    place[order] = np.arange(len(rows))
    for part in np.split(place, np.cumsum([len(part) for part in parts])[:-1]):
        first, last = int(part.min()), int(part.max())  # of ascending rows, just these lie between
        near = table.slice(first, last - first + 1).combine_chunks()
        yield near.take(pa.array(part - first, pa.int64()))


def _write_rows(table: pa.Table, store: Store, prefix: str, number: int) -> Shard:
    entry = write_file(store, prefix or ".", f"rows/{number:05d}.parquet", to_parquet(table))
    return Shard(rows=table.num_rows, files={"rows": entry})


def _copy_column(column: Column, dataset: DataSet, parts: list[Rows]) -> None:
    """Copy a column for the row numbers of every shard."""

    def compute(shard: int) -> dict[str, Tensor]:
        if column.meta.kind == "fixed":
            return {"values": column.read(parts[shard])}
        values, mask = column.read_ragged(parts[shard])
        return {"values": values[mask], "lengths": mask.sum(1)}

    extras = {name: column.extra(name) for name in column.meta.extras}
    write_column(dataset, column.meta.name, column.meta.producer, compute, extras, column.meta.kind)


def union(store: Store, prefix: str, parts: Sequence[DataSet], columns: Sequence[str]) -> DataSet:
    """Write a data set that holds no rows itself, but names those of others in the same store, in order.

    Args:
        store: the store; every part must lie in it.
        prefix: folder of the new data set.
        parts: the data sets to join.
        columns: names of columns that all parts have, from the same producer.

    Raises:
        DataError: there are no parts, one lies elsewhere, a column is missing or differs between parts,
            or the folder holds another data set.
    """
    if not parts:
        raise DataError("a union needs at least one data set", "give the islands' data")
    folders = [_folder_in(store, part) for part in parts]
    shards = [
        shard.model_copy(update={"files": {k: _moved(f, prefix, folder) for k, f in shard.files.items()}})
        for part, folder in zip(parts, folders, strict=True)
        for shard in part.shards
    ]
    identity = digest({"union": [shard.model_dump() for shard in shards]})
    source = {**parts[0].manifest.source, "union": [part.manifest.identity for part in parts]}
    size, mode = parts[0].manifest.size, parts[0].manifest.mode
    manifest = Manifest(
        identity=identity, source=source, size=size, mode=mode, rows=sum(map(len, parts)), shards=shards
    )
    finished = is_made(store, prefix, identity, "other parts")
    for name in columns:
        _join_column(store, prefix, name, parts, folders)
    dataset = DataSet(store, prefix, manifest)
    return dataset if finished else create_manifest(dataset)


def _join_column(store: Store, prefix: str, name: str, parts: Sequence[DataSet], folders: list[str]) -> None:
    metas = [part.column(name).meta for part in parts]
    if any(_form(meta) != _form(metas[0]) for meta in metas):
        raise DataError(f"column {name!r} differs between the data sets", "write it again from one producer")
    here, there = join(prefix, f"columns/{name}"), [join(folder, f"columns/{name}") for folder in folders]
    shards = [_moved(f, here, at) for meta, at in zip(metas, there, strict=True) for f in meta.shards]
    joined = metas[0].model_copy(
        update={
            "max_length": max(meta.max_length for meta in metas),
            "content": [content for meta in metas for content in meta.content],
            "shards": shards,
            "extras": {key: _moved(f, here, there[0]) for key, f in metas[0].extras.items()},
        }
    )
    finish_column(store, here, joined)


def _form(meta: ColumnMeta) -> str:
    """What two columns must have in common to be one."""
    extras = {name: entry.sha256 for name, entry in meta.extras.items()}
    return digest([meta.kind, meta.dtype, meta.shape, meta.producer, extras])


def _moved(entry: FileEntry, here: str, there: str) -> FileEntry:
    """An entry of the folder `there`, as the folder `here` names it."""
    return entry.model_copy(update={"path": relative(here, join(there, entry.path))})


def _folder_in(store: Store, part: DataSet) -> str:
    """Folder of a data set as a key of `store`, which may be wider than the one it was opened in."""
    name = part.store.name(part.prefix)
    folder = store.key_of(name)
    if folder is None:
        raise DataError(f"{name} lies outside {store.location}", "join data sets of one store")
    return folder


def _chunks(rows: ArrayLike, size: int) -> list[Rows]:
    numbers = np.asarray(rows, dtype=np.int64)
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
