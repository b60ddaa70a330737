"""What rows count: the column `weights`. Weight 0 means out; data without the column count every row as 1."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.base.hashing import digest
from atoll.data.columns import Rows
from atoll.data.dataset import WEIGHTS, DataSet

DUPLICATES, OPTED_OUT = "duplicate_of", "opted_out"
"""Columns that name rows that are out for good, whatever a filter or a rebalance weighs them with."""
PLAIN = ("dedupe", "opt-out")
"""Names of weights that are 1 for all rows but those."""
B1 = NDArray[np.bool_]
F32 = NDArray[np.float32]


def out_for_good(dataset: DataSet, found: B1 | None = None) -> B1:
    """Whether each row is a duplicate, or one of `found` in their place, or opted out `(rows,)`."""
    rows = np.arange(len(dataset))
    out = np.zeros(len(rows), dtype=bool) if found is None else found.copy()
    if found is None and dataset.is_written(DUPLICATES):
        out |= dataset.column(DUPLICATES).read(rows).numpy() != rows
    if dataset.is_written(OPTED_OUT):
        out |= dataset.column(OPTED_OUT).read(rows).numpy() != 0
    return out


def candidates(dataset: DataSet) -> Rows:
    """Training rows that a filter or a rebalance weighs, those of weight 0 too, ascending.

    Not `split("train")`: what an earlier filter took out, another one may take back in.
    """
    return np.flatnonzero((dataset.sides == 0) & ~out_for_good(dataset)).astype(np.int64)


def write_weights(dataset: DataSet, producer: dict[str, Any], values: F32, found: B1 | None = None) -> None:
    """Write what rows count `(rows,)`; rows that are out for good count 0, whatever their value."""
    out = out_for_good(dataset, found)
    # A column of an equal producer is not written again, so it has to name the rows that are out.
    gone = {"out": digest(np.flatnonzero(out).tolist())} if out.any() else {}
    dataset.write_values(WEIGHTS, {**producer, **gone}, np.where(out, 0, values).astype(np.float32))


def opt_out(dataset: DataSet, rows: B1) -> None:
    """Take rows out for good `(rows,)`, beside those that are out."""
    if dataset.is_written(OPTED_OUT):
        rows = rows | (dataset.column(OPTED_OUT).read(np.arange(len(dataset))).numpy() != 0)
    dataset.write_values(OPTED_OUT, {"name": OPTED_OUT, "rows": digest(np.flatnonzero(rows).tolist())}, rows)
    write_weights(dataset, producer_of(dataset) or {"name": "opt-out"}, dataset.weights)


def producer_of(dataset: DataSet) -> dict[str, Any]:
    """What made the weights, but for the rows that are out for good; empty where there are none."""
    if not dataset.is_written(WEIGHTS):
        return {}
    return {key: value for key, value in dataset.column(WEIGHTS).meta.producer.items() if key != "out"}


def weigh_sources(dataset: DataSet, weights: Mapping[str, float], found: B1 | None = None) -> None:
    """Write the weights of several sources' rows, by name, unless a filter or a rebalance wrote others."""
    if producer_of(dataset).get("name", "sources") not in ("sources", *PLAIN):
        return
    names = dataset.table(["source"]).column("source").to_pylist()
    values = np.array([weights[name] for name in names], dtype=np.float32)
    write_weights(dataset, {"name": "sources", "weights": dict(weights)}, values, found)


def leave_duplicates_out(dataset: DataSet, found: B1) -> str | None:
    """Give duplicates the weight 0; the name of the stage whose weights that replaced, if any."""
    by = producer_of(dataset)
    # Not the weights as they are: an earlier search may have found other duplicates, which come back in.
    if by.get("name") == "sources":
        weigh_sources(dataset, by["weights"], found)
    elif found.any() or by:
        write_weights(dataset, {"name": "dedupe"}, np.ones(len(dataset), np.float32), found)
    return by["name"] if by.get("name", "dedupe") not in ("sources", *PLAIN) else None
