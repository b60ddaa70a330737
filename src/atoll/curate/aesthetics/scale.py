"""What scores are of: a tree of dimensions with levels and words, and pictures that people scored by it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from importlib import resources
from pathlib import Path
from typing import Self

import pyarrow as pa
import torch
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor

from atoll.base.config import Config
from atoll.base.errors import DataError
from atoll.base.safe_parse import LARGEST_YAML, read_text, read_yaml
from atoll.curate.concepts import read_tables
from atoll.data.dataset import DataSet
from atoll.data.decode import open_picture

HEADS = ("language model", "regression", "MetaVoter")
"""What scores the whole, beside the expert head's own."""
MEAN = HEADS[-1]
HUMAN = "human"
"""Name of the scale that comes with Atoll."""


class Dimension(Config):
    """One of the things that are scored."""

    name: str
    parent: str | None = None
    """The dimension that it is a part of; the whole has none."""
    sensitive: bool = False
    """Whether it describes a person, so that rows are not chosen by it unless a flag says so."""


class Scale(Config):
    """Dimensions, levels and words; a YAML file."""

    questions: tuple[str, ...] = ("Rate the aesthetics of this picture.",)
    """Of which one is drawn for each picture in training; the first asks for scores."""
    every: str = " from different dimensions"
    """Put before the end of a question that asks for every dimension."""
    answer: str = "The aesthetics of the picture is {level}"
    """To a question for the whole; ends with the level."""
    levels: dict[str, float] = {"bad": 0.0, "poor": 0.25, "fair": 0.5, "good": 0.75, "excellent": 1.0}
    """Words, and the score that each stands for."""
    dimensions: tuple[Dimension, ...] = Field(max_length=256)
    """In the order of the scores."""

    @model_validator(mode="after")
    def _is_tree(self) -> Self:
        names = self.names
        if len(set(names)) != len(names):
            raise ValueError("a dimension stands twice")
        if taken := {"id", "image", "group", "score", "scores", *HEADS} & {*names}:
            raise ValueError(f"{min(taken)!r} is another column of labels or scores")
        parents = {d.name: d.parent for d in self.dimensions}
        for name, parent in parents.items():
            if parent is not None and parent not in parents:
                raise ValueError(f"{name!r} is a part of {parent!r}, which is no dimension")
        try:
            TopologicalSorter({name: [p] for name, p in parents.items() if p is not None}).prepare()
        except CycleError as error:
            raise ValueError(f"the tree has a cycle at {error.args[1][0]!r}") from None
        if sum(parent is None for parent in parents.values()) != 1:
            raise ValueError("exactly one dimension has no parent: the whole")
        worth = sorted(self.levels.values())
        if len(set(worth)) < max(2, len(worth)) or worth[0] < 0 or worth[-1] > 1:
            raise ValueError("levels are two or more, each with a score of its own from 0 to 1")
        if not self.questions or not self.answer.endswith("{level}"):
            raise ValueError("there must be a question, and an answer that ends with {level}")
        return self

    @classmethod
    def load(cls, name: str) -> "Scale":
        """`human`, or a YAML file."""
        if name == HUMAN:
            text = resources.files(__package__).joinpath("human.yaml").read_text(encoding="utf-8")
        else:
            text = read_text(Path(name), LARGEST_YAML)
        return cls.parse(read_yaml(text, name), name)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the dimensions."""
        return tuple(d.name for d in self.dimensions)

    @cached_property
    def root(self) -> int:
        """Number of the whole."""
        return next(n for n, d in enumerate(self.dimensions) if d.parent is None)

    @cached_property
    def parts(self) -> list[list[int]]:
        """Of every dimension the numbers of its parts; none for a leaf."""
        return [
            [n for n, part in enumerate(self.dimensions) if part.parent == whole.name]
            for whole in self.dimensions
        ]

    @cached_property
    def upwards(self) -> list[int]:
        """Numbers of all dimensions, parts before the wholes."""
        order = TopologicalSorter(dict(enumerate(self.parts)))
        return list(order.static_order())

    @property
    def words(self) -> list[str]:
        """Of the levels, from worst to best."""
        return sorted(self.levels, key=lambda word: self.levels[word])

    @property
    def worth(self) -> Tensor:
        """Scores of the levels `(L,)`, rising."""
        return torch.tensor([self.levels[word] for word in self.words])

    def level(self, scores: Tensor) -> Tensor:
        """Number of the level of scores in [0, 1], all levels being of equal width; -1 for NaN."""
        # NaN has no integer: what the cast gives differs between machines. A score of 1 ends the last level.
        level = (scores.nan_to_num(0) * len(self.levels)).long().clamp(0, len(self.levels) - 1)
        return level.where(~scores.isnan(), torch.tensor(-1))

    def question(self, number: int, whole: bool) -> str:
        """A question, for the whole or for every dimension."""
        text = self.questions[number % len(self.questions)]
        end = len(text.rstrip("?.!"))
        return text if whole else text[:end] + self.every + text[end:]

    def answers(self, levels: list[int]) -> str:
        """The answer to a question for every dimension, without those whose level is unknown (-1)."""
        known = [(n, name, level) for n, (name, level) in enumerate(zip(self.names, levels, strict=True), 1)]
        return "\n".join(f"{n}. {name} : {self.words[level]}" for n, name, level in known if level >= 0)


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
    """Labels of a parquet, CSV or JSON-lines file, brought from `bounds` to 0 and 1.

    A table with `image`, paths relative to it, or `id` of the data set's rows; with `score` of the whole,
    `scores` of all dimensions in a list, or columns named as dimensions; if it has `group`, rows of one group
    stay together. `DataError` names what is missing, of wrong length, out of bounds or unknown.
    """
    table = pa.concat_tables(read_tables(path, lists=True))

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
    if not 0 < abs(high - low) < math.inf:  # NaN is refused too
        raise DataError(f"--range {low:g} {high:g} is none", "give the worst and the best score")
    wrong = known & ((scores < min(bounds)) | (scores > max(bounds)))  # the best may be the lowest
    if wrong.any():
        row, number = (int(place) for place in wrong.nonzero()[0])
        what = f"{path}, row {row}: {scale.names[number]} is {float(scores[row, number]):g}"
        raise DataError(f"{what}, not from {low:g} to {high:g}", "say --range WORST BEST, or correct it")
    if not known.any(1).all():
        row = int((~known.any(1)).nonzero()[0])
        fix = "give score, scores or a dimension, or leave it out"
        raise DataError(f"{path}, row {row} has no score", fix)
    groups = table["group"].to_pylist() if "group" in table.column_names else names
    return Labels(names, (scores - low) / (high - low), [str(group) for group in groups], opened)


def _number(value: object, path: Path, row: int) -> float:
    if value is None:
        return math.nan
    # Python counts True as an integer.
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isinf(value):
        raise DataError(f"{path}, row {row}: {value!r} is no score", "give numbers")
    return float(value)
