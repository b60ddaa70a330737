"""Rows of a data set as a network sees them: latents and conditions."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from atoll.base.condition import Condition
from atoll.base.errors import DataError
from atoll.data.columns import Column, Rows, padded
from atoll.data.dataset import DataSet
from atoll.data.settings import ConditionKind
from atoll.encoders.text import TextEncoder
from atoll.networks.settings import DataShape


class Samples:
    """Some rows of a data set, such as one split, with the columns that training reads.

    Text is padded to the length of `shape`. With an encoder the column `tokens` is read and encoded, as if
    `text` had been stored. `DataError` where latents or text states are of another shape.
    """

    def __init__(
        self,
        dataset: DataSet,
        rows: Rows,
        condition: ConditionKind,
        shape: DataShape,
        encoder: TextEncoder | None = None,
    ) -> None:
        self.encoder, text = encoder, "text" if encoder is None else "tokens"
        self.dataset, self.rows, self.condition, self.shape = dataset, rows, condition, shape
        self._latents = dataset.column("latents")
        self._text = dataset.column(text) if condition == "text" else None
        self._labels = dataset.labels if condition == "class" else None
        here = [self._latents.meta.shape, [0] if self._text is None else [null_states(self._text).shape[-1]]]
        # Data of an island are checked against the plan here, before hours of training: files may be swapped.
        if here != [[shape.channels, *([] if shape.sizes else [shape.size] * 2)], [shape.text_width]]:
            what = f"{dataset.store.name(dataset.prefix)} holds latents of {here[0]} and texts of {here[1]}"
            fix = "restore the file, or start a new campaign"
            raise DataError(f"{what}; the network was planned for others, {shape}", fix)
        self.buckets = None
        if shape.sizes:  # which of the sizes each row has
            sizes, _ = _sides(self._latents, dataset)
            equal = (sizes[:, None] == np.array(shape.sizes)).all(-1)
            if not equal.any(1).all():
                height, width = sizes[int(equal.any(1).argmin())].tolist()
                what = f"{dataset.store.location} holds latents of {width}x{height}"
                fix = "restore the file, or start a new campaign"
                raise DataError(f"{what}; the network was planned for others", fix)
            self.buckets = equal.argmax(1)[rows]

    def __len__(self) -> int:
        return len(self.rows)

    def by_shape(self, index: Rows, most: int) -> list[Rows]:
        """Numbers of samples, at most so many together whose latents have one shape; in their order."""
        of = np.zeros(len(index)) if self.buckets is None else self.buckets[index]
        shapes = (index[of == bucket] for bucket in np.unique(of))
        return [shape[n : n + most] for shape in shapes for n in range(0, len(shape), most)]

    def latents(self, index: Rows) -> Tensor:
        """Latents `(B, C, H, W)` float32 of samples of one shape by their number within these rows."""
        rows = self.rows[index]
        if self.buckets is None:
            return self._latents.read(rows).float()
        (bucket,) = set(self.buckets[index].tolist())
        height, width = self.shape.sizes[bucket]
        # Stored as sequences of elements with C numbers each, since rows of one column must agree in shape.
        values, _ = self._latents.read_ragged(rows, height * width, packed=True)
        values = values.view(len(rows), height * width, -1)
        return values.transpose(1, 2).reshape(len(rows), -1, height, width).float()

    def conditions(self, index: Rows, draw: Callable[[], Tensor] | None = None) -> Condition:
        """Conditions of samples by their number within these rows.

        `draw` gives a uniform for each, to choose among several captions of a row; else the first counts.
        """
        return self.whole(self.stored(index, draw)).widened()

    def stored(self, index: Rows, draw: Callable[[], Tensor] | None = None) -> Condition:
        """The same as they lie in the columns: `text` is all states or tokens `(sum of lengths, ...)`."""
        rows = self.rows[index]
        if self._text is not None:
            # Those of several encoders are equally long, and before them stands a pooled vector.
            length = None if self.shape.pooled_width else self.shape.text_length
            text, mask = self._text.read_ragged(rows, length, draw, packed=True)
            if self.encoder is not None:  # it is asked for no more than the longest text
                mask = mask[:, : int(mask.any(0).sum())]
            if bool(mask.all()):  # found here, as a GPU would have to be waited for
                return Condition(text=text.view(*mask.shape, *text.shape[1:]))
            return Condition(text=text, mask=mask)
        if self._labels is not None:
            return Condition(labels=self._labels[torch.from_numpy(rows)])
        return Condition()

    def whole(self, cond: Condition) -> Condition:
        """What `stored` gave, on any device: states `(B, L, D)`, in the column's own type of numbers."""
        if cond.text is None:
            return cond
        states, mask = cond.text if cond.mask is None else padded(cond.text, cond.mask), cond.mask
        if self.encoder is not None:
            real = Condition(text=states, mask=mask).real
            # Half, as stored states are: training must not depend on whether they were precomputed.
            states = self.encoder.encode_tokens(states, real).half()
            if missing := 0 if self.shape.pooled_width else self.shape.text_length - states.shape[1]:
                states, mask = pad(states, (0, 0, 0, missing)), pad(real, (0, missing))
        return Condition.of_text(states, mask, self.shape.pooled_width, self.shape.guidance)

    @cached_property
    def null(self) -> Condition:
        """The null condition: the encoding of "" as it is stored, the null label, or nothing. One row."""
        if self._text is not None:
            states = null_states(self._text)[None]
            return Condition.of_text(states, None, self.shape.pooled_width, self.shape.guidance)
        if self._labels is not None:
            return Condition(labels=torch.tensor([self.shape.classes]))
        return Condition()


def _sides(latents: Column, dataset: DataSet) -> tuple[Rows, int]:
    """H and W of the latents of every row `(rows, 2)`, and how many pixels a side of one element covers."""
    if dataset.buckets is None:
        what = f"{dataset.store.location} has latents of several shapes, and rows that do not tell which"
        raise DataError(what, "write the data set again")
    # No file says how many pixels a latent covers; the largest picture and the longest row of latents do.
    factor = math.isqrt(int(dataset.buckets.prod(1).max()) // max(1, latents.meta.max_length))
    sides = dataset.buckets[:, ::-1] // max(1, factor)
    if factor < 1 or not np.array_equal(sides.prod(1), latents.lengths()):
        what = f"{latents.store.name(latents.folder)} holds no latents of these pictures"
        raise DataError(what, "write it again: atoll data encode")
    return sides, factor


def null_states(column: Column) -> Tensor:
    """Text states of "" `(L, D)` of a column of captions; `DataError` if it has none."""
    states = column.extra("null").get("values")
    shape = [] if states is None or column.meta.name == "tokens" else list(states.shape[1:])
    if states is None or states.ndim != 2 or not len(states) or column.meta.shape != shape:
        what = f"{column.store.name(column.folder)} has no states of an empty text"
        raise DataError(what, "write it again: atoll data encode")
    return states


def data_shape(
    dataset: DataSet, condition: ConditionKind, text: str = "text", guidance: bool = False
) -> DataShape:
    """What networks must fit, read from the columns; `text` is that of captions, `guidance` the settings'."""
    latents = dataset.column("latents")
    ragged = latents.meta.kind == "ragged"
    if len(latents.meta.shape) != (1 if ragged else 3):
        what = f"{latents.store.name(latents.folder)} holds no latents"
        fix = "write it again: atoll data encode"
        raise DataError(f"{what}, but values of shape {latents.meta.shape}", fix)
    if ragged:
        sides, factor = _sides(latents, dataset)
        sizes = tuple((int(h), int(w)) for w, h in np.unique(sides[:, ::-1], axis=0))
        shape = DataShape(latents.meta.shape[0], max(1, (dataset.manifest.size or 0) // factor), sizes=sizes)
    else:
        channels, height, width = latents.meta.shape
        if height != width:
            what = f"latents of {height}x{width} are not square"
            raise DataError(what, "ingest square pictures, or with data.ingest.buckets")
        shape = DataShape(channels, height)
    if condition == "text":
        column = dataset.column(text)
        # One length for all batches: another shape would compile the network anew.
        (length, width), pooled = null_states(column).shape, int(column.meta.producer.get("pooled", 0))
        length = length - -(-pooled // width) if pooled else max(column.meta.max_length, length)
        return replace(shape, text_width=width, text_length=length, pooled_width=pooled, guidance=guidance)
    if condition == "class":
        classes, seen = int(dataset.labels.max()) + 1, len(dataset.labels.unique())
        if classes > 1000 * seen:  # every network has an embedding of each number up to the largest
            what = f"{dataset.store.location} has {seen:,} class labels, the largest of them {classes - 1:,}"
            raise DataError(what, "number them from 0")
        return replace(shape, classes=classes)
    return shape
