"""Concepts in captions, as a column of the data set: one pass over each shard."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from atoll.base.errors import ConfigError
from atoll.base.text import words_of
from atoll.curate.vocabulary import Vocabulary
from atoll.data.columns import Column, Progress
from atoll.data.dataset import DataSet

COLUMN = "concepts-text"


class Finder:
    """Finds the concepts of a vocabulary in captions, with one automaton (Aho and Corasick 1975).

    A caption holds a concept if it holds a form of each of its units, at the ends of words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        try:
            from ahocorasick import Automaton  # type: ignore[import-not-found]
        except ImportError:
            fix = "install the extra: pip install -e '.[concepts]' in the checkout"
            raise ConfigError("concepts need the package pyahocorasick", fix) from None
        numbers_of: dict[str, list[int]] = defaultdict(list)
        for number, units in enumerate(vocabulary.units):
            for text in sorted(set().union(*units)):
                numbers_of[text].append(number)
        self._automaton: Any = Automaton()
        # Between spaces, so that nothing is found within a word.
        for text, numbers in numbers_of.items():
            self._automaton.add_word(f" {text} ", tuple(numbers))
        self._automaton.make_automaton()
        self._units = vocabulary.units
        self._several = {number for number, units in enumerate(self._units) if len(units) > 1}

    def __call__(self, caption: str) -> list[int]:
        """Numbers of the concepts in a caption, rising."""
        text = f" {' '.join(words_of(caption))} "
        numbers = {number for _, numbers in self._automaton.iter(text) for number in numbers}
        if self._several:
            words = set(text.split())
            numbers = {n for n in numbers if n not in self._several or all(u & words for u in self._units[n])}
        return sorted(numbers)


def index(dataset: DataSet, vocabulary: Vocabulary, progress: Progress | None = None) -> Column:
    """Write (or find) the column of the concepts in every caption: their numbers, int32, ragged."""
    finder = Finder(vocabulary)

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return ragged(map(finder, dataset.shard_table(shard, ["caption"]).column("caption").to_pylist()))

    producer = {"vocabulary": vocabulary.hash, "concepts": len(vocabulary)}
    return dataset.write_column(COLUMN, producer, compute, kind="ragged", progress=progress)


def ragged(rows: Iterable[list[int]]) -> dict[str, torch.Tensor]:
    """A shard of a ragged column of numbers."""
    lists = list(rows)
    values = np.fromiter((number for numbers in lists for number in numbers), dtype=np.int32)
    lengths = torch.tensor(list(map(len, lists)), dtype=torch.int32)
    return {"values": torch.from_numpy(values), "lengths": lengths}
