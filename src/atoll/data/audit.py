"""Audit: does a data set hold what its manifest says? Read one file at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from atoll.base.errors import AtollError
from atoll.data.columns import Column
from atoll.data.dataset import SPLITS, DataSet
from atoll.data.images import ImageReader
from atoll.store.manifest import check_file


def audit(dataset: DataSet) -> list[str]:
    """Check everything; what is wrong, in words, or nothing.

    Sizes and hashes of all files, rows against pictures and columns, ids (unique), and groups (each in
    one split). Damaged files are named and the rest is still checked.
    """
    problems: list[str] = []
    ids: set[str] = set()
    side_of_group: dict[str, int] = {}
    columns: list[Column] = []

    @contextmanager
    def noted(where: str = "") -> Iterator[None]:
        try:
            yield
        except AtollError as error:
            problems.append(f"{where}{error}")

    for name in dataset.column_names():
        with noted():
            columns.append(dataset.column(name))
    for number, shard in enumerate(dataset.shards):
        for kind, entry in shard.files.items():
            with noted():
                path = check_file(dataset.store, dataset.prefix, entry)
                is_table = kind == "rows"
                rows = len(dataset.shard_table(number, ["id"]) if is_table else ImageReader(path))
                if rows != shard.rows:
                    where = f"{dataset.store.name(dataset.prefix)}/{entry.path}"
                    problems.append(f"{where} holds {rows} rows; the manifest says {shard.rows}")
        for column in columns:
            with noted():
                column.tensors(number)
        try:
            for name in dataset.shard_table(number, ["id"]).column("id").to_pylist():
                if name in ids:
                    problems.append(f"the id {name!r} occurs more than once")
                ids.add(name)
            if "split" in (column.meta.name for column in columns):
                groups = dataset.shard_table(number, ["group"]).column("group").to_pylist()
                places = np.arange(dataset.bounds[number], dataset.bounds[number + 1])
                sides = dataset.column("split").read(places).tolist()
                for group, side in zip(groups, sides, strict=True):
                    if side not in range(len(SPLITS)):
                        problems.append(f"a row of the group {group!r} has the split {side}")
                    elif side_of_group.setdefault(group, side) != side:
                        problems.append(f"the group {group!r} lies in two splits")
        except AtollError:
            pass  # the damaged file was named above
    for column in columns:
        for name, entry in column.meta.extras.items():
            with noted(f"column {column.meta.name!r}, {name}: "):
                check_file(column.store, column.folder, entry)
    return problems
