"""Audit: does a data set hold what its manifest says? Read one file at a time."""

from collections.abc import Callable, Iterator

import numpy as np
import safetensors.torch

from atoll.base.errors import AtollError, DataError
from atoll.data.columns import Column, describe
from atoll.data.dataset import SPLITS, DataSet
from atoll.data.files import join
from atoll.data.images import ImageReader
from atoll.store.manifest import FileEntry, check_file


def audit(dataset: DataSet, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Check everything; what is wrong, in words, or nothing.

    Sizes and hashes of all files, rows against pictures and columns, ids (unique), and groups (each in
    one split). Damaged files are named and the rest is still checked.
    """
    problems: list[str] = []
    seen: set[str] = set()
    side: dict[str, int] = {}
    columns, broken = _columns(dataset)
    problems += broken
    split = next((column for column in columns if column.meta.name == "split"), None)
    for shard in range(len(dataset.shards)):
        problems += _shard(dataset, shard)
        for column in columns:
            problems += _column_shard(column, shard, dataset.shards[shard].rows)
        try:
            problems += _ids(dataset, shard, seen)
            problems += _groups(dataset, shard, split, side) if split is not None else []
        except AtollError:
            pass  # the damaged file was named above
        if progress is not None:
            progress(shard + 1, len(dataset.shards))
    for column in columns:
        for name, entry in column.meta.extras.items():
            problems += [f"column {column.meta.name!r}, {name}: {text}" for text in _file(column, entry)]
    return problems


def _columns(dataset: DataSet) -> tuple[list[Column], list[str]]:
    columns, broken = [], []
    for name in dataset.column_names():
        try:
            columns.append(dataset.column(name))
        except AtollError as error:
            broken.append(str(error))
    return columns, broken


def _shard(dataset: DataSet, shard: int) -> Iterator[str]:
    """Files of a shard, and their number of rows."""
    entry = dataset.shards[shard]
    for kind, file in entry.files.items():
        try:
            path = check_file(dataset.store, dataset.prefix, file)
            rows = len(ImageReader(path)) if kind == "images" else dataset.shard_table(shard, ["id"]).num_rows
        except AtollError as error:
            yield str(error)
            continue
        if rows != entry.rows:
            name = dataset.store.name(join(dataset.prefix, file.path))
            yield f"{name} holds {rows} rows; the manifest says {entry.rows}"


def _column_shard(column: Column, shard: int, rows: int) -> Iterator[str]:
    entry = column.meta.shards[shard]
    try:
        path = check_file(column.store, column.folder, entry)
    except AtollError as error:
        yield str(error)
        return
    where = f"{column.store.name(column.folder)}/{entry.path}"
    try:
        dtype, shape, _ = describe(safetensors.torch.load_file(path), column.meta.kind, rows, where)
    except DataError as error:
        yield error.what
        return
    if (dtype, list(shape)) != (column.meta.dtype, column.meta.shape):
        yield (
            f"{where} holds {dtype} of shape {list(shape)}; column.json says {column.meta.dtype} of shape "
            f"{column.meta.shape}"
        )


def _file(column: Column, entry: FileEntry) -> Iterator[str]:
    try:
        check_file(column.store, column.folder, entry)
    except AtollError as error:
        yield str(error)


def _ids(dataset: DataSet, shard: int, seen: set[str]) -> Iterator[str]:
    for name in dataset.shard_table(shard, ["id"]).column("id").to_pylist():
        if name in seen:
            yield f"the id {name!r} occurs more than once"
        seen.add(name)


def _groups(dataset: DataSet, shard: int, split: Column, side: dict[str, int]) -> Iterator[str]:
    groups = dataset.shard_table(shard, ["group"]).column("group").to_pylist()
    rows = np.arange(dataset.bounds[shard], dataset.bounds[shard + 1])
    for group, value in zip(groups, split.read(rows).tolist(), strict=True):
        if value not in range(len(SPLITS)):
            yield f"a row of the group {group!r} has the split {value}"
        elif side.setdefault(group, value) != value:
            yield f"the group {group!r} lies in both splits"
