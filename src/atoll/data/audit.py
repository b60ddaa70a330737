"""Audit: does a data set hold what its manifest says? Read one file at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from atoll.base.errors import AtollError
from atoll.data.columns import Column
from atoll.data.dataset import SPLITS, DataSet
from atoll.data.images import ImageReader
from atoll.store.manifest import check_file


def audit(dataset: DataSet, progress: Callable[[int, int], None] | None = None) -> list[str]:
    """Check everything; what is wrong, in words, or nothing.

    Sizes and hashes of all files, rows against pictures and columns, ids (unique), and groups (each in
    one split). Damaged files are named and the rest is still checked.
    """
    problems: list[str] = []
    ids: set[str] = set()
    side_of_group: dict[str, int] = {}
    columns: list[Column] = []
    for name in dataset.column_names():
        with _noted(problems):
            columns.append(dataset.column(name))
    for shard in range(len(dataset.shards)):
        problems += _files(dataset, shard)
        for column in columns:
            with _noted(problems):
                column.tensors(shard)
        try:
            problems += _ids(dataset, shard, ids)
            if "split" in (column.meta.name for column in columns):
                problems += _groups(dataset, shard, side_of_group)
        except AtollError:
            pass  # the damaged file was named above
        if progress is not None:
            progress(shard + 1, len(dataset.shards))
    for column in columns:
        for name, entry in column.meta.extras.items():
            with _noted(problems, f"column {column.meta.name!r}, {name}: "):
                check_file(column.store, column.folder, entry)
    return problems


def _files(dataset: DataSet, shard: int) -> Iterator[str]:
    """Files of a shard, and their number of rows."""
    expected = dataset.shards[shard].rows
    for kind, entry in dataset.shards[shard].files.items():
        try:
            path = check_file(dataset.store, dataset.prefix, entry)
            rows = len(ImageReader(path)) if kind == "images" else dataset.shard_table(shard, ["id"]).num_rows
        except AtollError as error:
            yield str(error)
            continue
        if rows != expected:
            where = f"{dataset.store.name(dataset.prefix)}/{entry.path}"
            yield f"{where} holds {rows} rows; the manifest says {expected}"


@contextmanager
def _noted(problems: list[str], where: str = "") -> Iterator[None]:
    try:
        yield
    except AtollError as error:
        problems.append(f"{where}{error}")


def _ids(dataset: DataSet, shard: int, seen: set[str]) -> Iterator[str]:
    for name in dataset.shard_table(shard, ["id"]).column("id").to_pylist():
        if name in seen:
            yield f"the id {name!r} occurs more than once"
        seen.add(name)


def _groups(dataset: DataSet, shard: int, side: dict[str, int]) -> Iterator[str]:
    groups = dataset.shard_table(shard, ["group"]).column("group").to_pylist()
    rows = np.arange(dataset.bounds[shard], dataset.bounds[shard + 1])
    for group, value in zip(groups, dataset.column("split").read(rows).tolist(), strict=True):
        if value not in range(len(SPLITS)):
            yield f"a row of the group {group!r} has the split {value}"
        elif side.setdefault(group, value) != value:
            yield f"the group {group!r} lies in two splits"
