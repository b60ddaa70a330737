"""Clusters by what rows say of themselves: class labels, or a user's column, such as who owns a row."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from atoll.base.errors import DataError, PartitionError, nearest
from atoll.data.dataset import DataSet
from atoll.data.settings import PartitionConfig


def values_of(dataset: DataSet, name: str) -> NDArray[np.str_]:
    """The values of every row `(rows,)`, as text, of a column of rows, or of one of numbers of the data set.

    Raises:
        DataError: there is no such column, it holds something else, or a row has no value.
    """
    known = dataset.row_columns()
    if name in known:
        column = dataset.table([name]).column(name)
        if not (pa.types.is_string(column.type) or pa.types.is_integer(column.type)):
            raise DataError(f"column {name!r} holds {column.type}", "choose one of words or whole numbers")
        missing = column.is_null().to_numpy() if column.null_count else np.zeros(len(column), bool)
        values = np.array(["" if one is None else str(one) for one in column.to_pylist()])
        missing |= values == ""
        if name == "label":
            missing |= np.char.startswith(values, "-")
    elif name in dataset.column_names():
        kept = dataset.column(name)
        if kept.meta.kind != "fixed" or kept.meta.shape or kept.dtype.is_floating_point:
            raise DataError(f"column {name!r} holds no whole number for each row", "choose another")
        values = kept.read(np.arange(len(dataset))).numpy().astype(np.str_)
        missing = np.zeros(len(values), bool)
    else:
        names = [*known, *dataset.column_names()]
        what = f"partition.column: {dataset.store.location} has no column {name!r}"
        raise DataError(what, nearest(name, names))
    if missing.any():
        count, first = int(missing.sum()), dataset.ids[int(missing.argmax())]
        fix = "give them one, or choose another column"
        raise DataError(f"{count:,} rows have no {name}, the first is {first!r}", fix)
    return values


def merge(values: NDArray[np.str_], masses: NDArray[np.floating], config: PartitionConfig) -> list[list[str]]:
    """Share out the values among K clusters.

    As many values as clusters are taken in order, numbers by size. More are merged: the heaviest first, each
    to the cluster that is emptiest for its capacity; clusters are then numbered by falling mass, unless
    capacities number them.

    Args:
        values: of the rows `(rows,)`.
        masses: of the rows `(rows,)`; 0 for those that are not trained on.
        config: K and capacities.

    Raises:
        PartitionError: there are fewer values than clusters.
    """
    names, owners = np.unique(values, return_inverse=True)
    weights, k = np.bincount(owners, masses, len(names)), config.k
    trained = int((weights > 0).sum())
    if trained < k:
        what = f"{config.column or 'label'} has {trained} values among the training rows for K = {k} clusters"
        raise PartitionError(
            what, f"lower partition.k to {max(trained, 1)}, or cut by another partition.column"
        )
    if len(names) == k and config.capacities is None:
        numbers = all(name.lstrip("-").isdecimal() for name in names.tolist())
        return [[name] for name in sorted(names.tolist(), key=int if numbers else str)]
    capacities = np.array(config.capacities or [1.0] * k)
    held, merged = np.zeros(k), [list[str]() for _ in range(k)]
    for number in np.argsort(-weights, kind="stable"):
        place = int(((held + weights[number]) / capacities).argmin())
        held[place] += weights[number]
        merged[place].append(str(names[number]))
    order = range(k) if config.capacities else np.argsort(-held, kind="stable").tolist()
    return [merged[place] for place in order]


def clusters_by(values: NDArray[np.str_], merged: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Cluster of every row by its value `(rows,)`; -1 for a value that none has."""
    known = {value: number for number, names in enumerate(merged) for value in names}
    names, owners = np.unique(values, return_inverse=True)
    numbers = np.array([known.get(name, -1) for name in names.tolist()], dtype=np.int64)
    return numbers[owners]
