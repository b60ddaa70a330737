"""Data sets cut out of another one, and joined again: an island's rows, and what all islands hold."""

import posixpath
from collections.abc import Sequence
from posixpath import join
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.hashing import digest, digest_strings
from atoll.data.columns import Column
from atoll.data.dataset import DataSet, to_parquet
from atoll.data.formats import ColumnMeta, Manifest, Shard
from atoll.data.job import remove_others
from atoll.store.manifest import FileEntry, write_file
from atoll.store.store import Store

Key = TypeVar("Key")


def write_subset(
    source: DataSet,
    rows: ArrayLike,
    store: Store,
    prefix: str,
    columns: Sequence[str],
    shard_rows: int = 1024,
) -> DataSet:
    """Write some rows, in the given order, and some columns as a data set of their own, without pictures.

    Columns are copied with their extras. Killed and called again it continues; called again when it is
    finished it only verifies the columns. `DataError` where the folder holds a data set of other rows.
    """
    numbers = np.asarray(rows, dtype=np.int64)
    if not len(numbers):
        raise DataError(f"no rows of {source.store.name(source.prefix)} were chosen", "choose at least one")
    starts = range(0, len(numbers), shard_rows)
    copied = [source.column(name) for name in columns]
    origin = {"subset": source.content, "rows": digest_strings(map(str, numbers.tolist()))}
    identity = digest({**origin, "shard_rows": shard_rows})
    finished = DataSet.find(store, prefix, identity, "other rows")
    # Rows are written before columns, and the manifest last: what has none is written again.
    if finished is None:
        table, shards = source.take(numbers), []
        for number, start in enumerate(starts):
            part = table.slice(start, shard_rows)
            entry = write_file(store, prefix, f"rows/{number:05d}.parquet", to_parquet(part))
            shards.append(Shard(rows=part.num_rows, files={"rows": entry}))
        about = {**source.manifest.source, **origin}
        manifest = Manifest(identity=identity, source=about, rows=len(numbers), shards=shards)
        dataset = DataSet(store, prefix, manifest)
    for column in copied:

        def compute(shard: int, column: Column = column) -> dict[str, Tensor]:
            part = numbers[starts[shard] : starts[shard] + shard_rows]
            return {"values": column.read(part)} if column.meta.kind == "fixed" else column.take_ragged(part)

        extras = {name: column.extra(name) for name in column.meta.extras}
        meta = column.meta
        (finished or dataset).write_column(meta.name, meta.producer, compute, extras, meta.kind)
    return finished or dataset.finish()


def union(store: Store, prefix: str, parts: Sequence[DataSet], columns: Sequence[str]) -> DataSet:
    """Write a data set that holds no rows itself, but names those of others in the same store, in order."""
    if not parts:
        raise DataError("a union needs at least one data set", "give the islands' data")
    folders = []
    for part in parts:  # as a key of `store`, which may be wider than the one it was opened in
        name = part.store.name(part.prefix)
        folder = posixpath.relpath(name, store.location)
        if folder.split("/")[0] == "..":
            raise DataError(f"{name} lies outside {store.location}", "join data sets of one store")
        folders.append(folder)
    shards = [
        shard.model_copy(update={"files": _moved(shard.files, folder, prefix)})
        for part, folder in zip(parts, folders, strict=True)
        for shard in part.shards
    ]
    identity = digest({"union": [shard.model_dump() for shard in shards]})
    first = parts[0].manifest
    manifest = Manifest(
        identity=identity,
        source={**first.source, "union": [part.manifest.identity for part in parts]},
        size=first.size,
        mode=first.mode,
        rows=sum(map(len, parts)),
        shards=shards,
    )
    finished = DataSet.find(store, prefix, identity, "other parts")
    # A column's `column.json` names the shards of all parts.
    for name in columns:
        target, metas = join(prefix, "columns", name), [part.column(name).meta for part in parts]
        if any(_form(meta) != _form(metas[0]) for meta in metas):
            what = f"column {name!r} differs between the data sets"
            raise DataError(what, "write it again from one producer")
        sources = [join(folder, "columns", name) for folder in folders]
        joined = metas[0].model_copy(
            update={
                "max_length": max(meta.max_length for meta in metas),
                "content": [content for meta in metas for content in meta.content],
                "shards": [
                    entry
                    for meta, source in zip(metas, sources, strict=True)
                    for entry in _moved(dict(enumerate(meta.shards)), source, target).values()
                ],
                "extras": _moved(metas[0].extras, sources[0], target),
            }
        )
        store.put_json(f"{target}/column.json", joined.to_json())
        remove_others(store, target, joined)
    return finished or DataSet(store, prefix, manifest).finish()


def _form(meta: ColumnMeta) -> str:
    extras = {name: entry.sha256 for name, entry in meta.extras.items()}
    # Weights of islands that were written before and after rows opted out differ in these rows alone.
    producer = {key: value for key, value in meta.producer.items() if key != "out"}
    return digest([meta.kind, meta.dtype, meta.shape, producer, extras])


def _moved(entries: dict[Key, FileEntry], source: str, target: str) -> dict[Key, FileEntry]:
    """Entries of the folder `source`, as the folder `target` names them, climbing where needed."""
    moved = {}
    for key, entry in entries.items():
        path = posixpath.relpath(join("/", source, entry.path), join("/", target))
        moved[key] = entry.model_copy(update={"path": path})
    return moved
