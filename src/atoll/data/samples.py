"""Rows of a data set as a network sees them: latents and conditions."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import DataError
from atoll.data.columns import Column
from atoll.data.dataset import DataSet
from atoll.data.settings import ConditionKind
from atoll.networks.settings import DataShape

WEIGHTS = "weights"
"""Column of the weights that rows are drawn by."""


class Samples:
    """Some rows of a data set with the columns that training reads.

    Args:
        dataset: an ordinary data set with `latents` and, for text, `text`.
        rows: row numbers that count, such as one split.
        condition: what the network is conditioned on.
        shape: what networks are built for; text is padded to its length.

    Raises:
        DataError: the data set holds latents or text states of another shape.
    """

    def __init__(
        self, dataset: DataSet, rows: NDArray[np.int64], condition: ConditionKind, shape: DataShape
    ) -> None:
        self.dataset, self.rows, self.condition, self.shape = dataset, rows, condition, shape
        self._latents = dataset.column("latents")
        self._text = dataset.column("text") if condition == "text" else None
        self._labels = read_labels(dataset) if condition == "class" else None
        here = [self._latents.meta.shape, self._text.meta.shape if self._text is not None else [0]]
        if here != [[shape.channels, shape.size, shape.size], [shape.text_width]]:
            what = f"{dataset.store.name(dataset.prefix)} holds latents of {here[0]} and texts of {here[1]}"
            fix = "restore the file, or start a new campaign"
            raise DataError(f"{what}; the network was planned for others, {shape}", fix)

    def __len__(self) -> int:
        return len(self.rows)

    def latents(self, index: NDArray[np.int64]) -> Tensor:
        """Latents `(B, C, H, W)` float32 of samples by their number within these rows."""
        return self._latents.read(self.rows[index]).float()

    def conditions(self, index: NDArray[np.int64], draw: Callable[[], Tensor] | None = None) -> Condition:
        """Conditions of samples by their number within these rows.

        `draw` gives a uniform for each, to choose among several captions of a row; else the first counts.
        """
        rows = self.rows[index]
        if self._text is not None:
            states, mask = self._text.read_ragged(rows, self.shape.text_length, draw)
            return Condition(text=states.float(), mask=mask)
        if self._labels is not None:
            return Condition(labels=self._labels[torch.from_numpy(rows)])
        return Condition()

    def null(self) -> Condition:
        """The null condition: the stored encoding of "", the null label, or nothing. One row."""
        return self._null

    @cached_property
    def _null(self) -> Condition:
        if self._text is not None:
            states = _null_states(self._text).float()[None]
            return Condition(text=states, mask=torch.ones(states.shape[:2], dtype=torch.bool))
        if self._labels is not None:
            return Condition(labels=torch.tensor([self.shape.classes]))
        return Condition()


def _null_states(column: Column) -> Tensor:
    """Text states of "" `(L, D)`."""
    states = column.extra("null").get("values")
    if states is None or list(states.shape[1:]) != column.meta.shape or states.ndim != 2 or not len(states):
        what = f"{column.store.name(column.folder)} has no states of an empty text"
        raise DataError(what, "write it again: atoll data encode")
    return states


def weights_of(dataset: DataSet) -> NDArray[np.float32]:
    """Weights that rows are drawn by `(rows,)`; `DataError` where there are none, or one is no weight."""
    weights: NDArray[np.float32] = dataset.column(WEIGHTS).read(np.arange(len(dataset))).float().numpy()
    if weights.ndim != 1 or not (np.isfinite(weights).all() and (weights >= 0).all()):
        what = f"column {WEIGHTS!r} of {dataset.store.location} holds a weight that is negative or no number"
        raise DataError(what, "write it again: atoll concepts rebalance")
    return weights


def write_weights(dataset: DataSet, weights: NDArray[np.float32], producer: dict[str, Any]) -> None:
    """Write the column that `data.weighted=true` draws by."""

    def compute(shard: int) -> dict[str, Tensor]:
        return {"values": torch.from_numpy(weights[dataset.bounds[shard] : dataset.bounds[shard + 1]].copy())}

    dataset.write_column(WEIGHTS, producer, compute)


def weigh_sources(dataset: DataSet, weights: Mapping[str, float]) -> None:
    """Write the weights of several sources' rows, by name, unless others were written since."""
    if dataset.has_column(WEIGHTS) and dataset.column(WEIGHTS).meta.producer.get("name") != "sources":
        return
    names = dataset.table(["source"]).column("source").to_pylist()
    values = np.array([weights[name] for name in names], dtype=np.float32)
    write_weights(dataset, values, {"name": "sources", "weights": dict(weights)})


def read_labels(dataset: DataSet) -> Tensor:
    """Class labels `(rows,)` int64; `DataError` where a row has none."""
    column = dataset.table(["label"]).column("label")
    if column.null_count:
        raise DataError(
            f"{column.null_count} rows have no label", "set condition: text or none, or ingest labels"
        )
    return torch.from_numpy(column.to_numpy().astype(np.int64))


def data_shape(dataset: DataSet, condition: ConditionKind) -> DataShape:
    """What networks must fit, read from the columns."""
    latents = dataset.column("latents")
    if len(latents.meta.shape) != 3 or latents.meta.kind != "fixed":
        what = (
            f"{latents.store.name(latents.folder)} holds no latents, but values of shape {latents.meta.shape}"
        )
        raise DataError(what, "write it again: atoll data encode")
    channels, height, width = latents.meta.shape
    if height != width:
        raise DataError(f"latents of {height}x{width} are not square", "ingest square images")
    if condition == "text":
        column = dataset.column("text")
        null = _null_states(column)
        return DataShape(
            channels, height, int(null.shape[-1]), max(column.meta.max_length, int(null.shape[0]))
        )
    if condition == "class":
        return DataShape(channels, height, classes=int(read_labels(dataset).max()) + 1)
    return DataShape(channels, height)
