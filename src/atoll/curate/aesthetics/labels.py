"""Pictures with scores that people gave: a table, a row for each picture."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from atoll.base.errors import DataError
from atoll.curate.aesthetics.scale import Scale
from atoll.curate.image_hits import read_table
from atoll.data.dataset import DataSet
from atoll.data.decode import open_picture


@dataclass
class Labels:
    """Labelled pictures."""

    names: list[str]
    scores: Tensor
    """Of every dimension `(R, N)` in [0, 1], NaN where unknown; of the whole alone for some rows."""
    groups: list[str]
    """Rows of one group are never on both sides of a split."""
    open: Callable[[int], Image.Image]

    def __len__(self) -> int:
        return len(self.names)

    def whole_only(self, root: int) -> Tensor:
        """Whether of a row only the whole is scored `(R,)`."""
        return self.scores.isnan().sum(1) == self.scores.shape[1] - (~self.scores[:, root].isnan()).long()


def read_labels(
    path: Path, scale: Scale, bounds: tuple[float, float] = (0.0, 1.0), dataset: DataSet | None = None
) -> Labels:
    """Labels of a parquet, CSV or JSON-lines file.

    Args:
        path: a table with `image`, paths relative to it, or `id` of the data set's rows; with `score` of the
            whole, `scores` of all dimensions in a list, or columns named as dimensions; if it has `group`,
            rows of one group stay together.
        bounds: worst and best score of the table, brought to 0 and 1.
        dataset: whose ids the table names.

    Raises:
        DataError: no such columns, a list of wrong length, a score out of bounds, an unknown picture.
    """
    table = read_table(path)

    # The pictures, by a path or by the row of a data set.
    if "image" in table.column_names:
        names = [str(name) for name in table["image"].to_pylist()]

        def opened(row: int) -> Image.Image:
            return open_picture(path.parent / names[row])

    elif "id" in table.column_names and dataset is not None:
        names = [str(id_) for id_ in table["id"].to_pylist()]
        rows = {id_: row for row, id_ in enumerate(dataset.ids)}
        if unknown := [id_ for id_ in names if id_ not in rows]:
            what = f"{path}: {len(unknown):,} rows, {unknown[0]!r} first, are not in {dataset.store.location}"
            raise DataError(what, "give the scores of this data set")

        def opened(row: int) -> Image.Image:
            return dataset.image(rows[names[row]])

    else:
        fix = "give paths in 'image', or 'id' with the campaign of the rows"
        raise DataError(f"{path} does not say which pictures it scores", fix)

    # The scores; columns by name go before the list of all.
    scores = torch.full((len(names), len(scale.names)), math.nan)
    if "scores" in table.column_names:
        for row, given in enumerate(table["scores"].to_pylist()):
            if given is None:
                continue
            if not isinstance(given, list) or len(given) != len(scale.names):
                what = f"{len(given) if isinstance(given, list) else type(given).__name__} scores"
                raise DataError(f"{path}, row {row}: {what} for {len(scale.names)} dimensions", "give all")
            scores[row] = torch.tensor([_number(value, path, row) for value in given])
    columns = {name: number for number, name in enumerate(scale.names)} | {"score": scale.root}
    for name in columns.keys() & set(table.column_names):
        given = torch.tensor([_number(value, path, row) for row, value in enumerate(table[name].to_pylist())])
        scores[:, columns[name]] = torch.where(given.isnan(), scores[:, columns[name]], given)
    (low, high), known = bounds, ~scores.isnan()
    wrong = known & ((scores < low) | (scores > high))
    if wrong.any():
        row, number = (int(place) for place in wrong.nonzero()[0])
        what = f"{path}, row {row}: {scale.names[number]} is {float(scores[row, number]):g}"
        raise DataError(f"{what}, not from {low:g} to {high:g}", "say --range WORST BEST, or correct it")
    if not known.any(1).all():
        row = int((~known.any(1)).nonzero()[0])
        raise DataError(
            f"{path}, row {row} has no score", "give score, scores or a dimension, or leave it out"
        )
    groups = table["group"].to_pylist() if "group" in table.column_names else names
    return Labels(names, (scores - low) / (high - low), [str(group) for group in groups], opened)


def _number(value: object, path: Path, row: int) -> float:
    if value is None:
        return math.nan
    # Python counts True as an integer.
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isinf(value):
        raise DataError(f"{path}, row {row}: {value!r} is no score", "give numbers")
    return float(value)
