"""Concepts by number, the words that stand for them, and the captions that hold them."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Literal

import numpy as np
import torch

from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File
from atoll.base.hashing import digest
from atoll.base.text import NO_NOUNS, words_of
from atoll.data.columns import Column, Progress
from atoll.data.dataset import DataSet

Match = Literal["phrase", "words"]
MOST_FORMS = 256
"""Ways to write one concept, beyond which only its last word is inflected."""
LONGEST = 200
COMMON = 0.9
"""Share of captions above which a noun is no concept: it distinguishes no caption from another."""


class Vocabulary(File):
    """`vocabulary.json`: the concepts that are looked for, in the order of their numbers."""

    FORMAT, PLACE, ERROR = "atoll/vocabulary", "concepts/vocabulary.json", DataError
    REMEDY = "run 'atoll concepts index' again"

    concepts: tuple[str, ...]
    """As they were written."""
    match: Match = "phrase"
    """How captions are searched: the words of a concept side by side, or anywhere in the caption."""
    source: str
    """Where the concepts come from."""

    @classmethod
    def of_lines(cls, lines: Iterable[str], source: str, match: Match = "phrase") -> "Vocabulary":
        """Concepts, one a line, without empty lines, `_` being a space; `DataError` where one is none."""
        seen, concepts = dict[tuple[str, ...], int](), []
        for number, line in enumerate(lines, 1):
            concept = " ".join(line.replace("_", " ").split())
            if not concept:
                continue
            words, where = tuple(words_of(concept)), f"{source}, line {number}"
            if not words:
                raise DataError(f"{where}: {concept[:40]!r} holds no letters", "remove the line")
            if len(concept) > LONGEST:
                raise DataError(f"{where}: a concept of {len(concept):,} characters", "give one a line")
            if words in seen:
                again = f"{where}: {concept[:40]!r} is the concept of line {seen[words]} again"
                raise DataError(again, "remove one of them")
            seen[words] = number
            concepts.append(concept)
        if not concepts:
            raise DataError(f"{source} holds no concepts", "write one a line")
        return cls(concepts=tuple(concepts), match=match, source=source)

    @classmethod
    def of_captions(cls, captions: Collection[str], least: int, match: Match = "phrase") -> "Vocabulary":
        """The nouns, in singular, of so many captions at least and not of nearly all, common ones first."""
        counts: Counter[str] = Counter()
        for caption in captions:
            counts.update({noun for word in words_of(caption) for noun in nouns(word)})
        # Ties by name: a set's order of strings changes with each process, and the order gives the numbers.
        frequent = sorted((-count, noun) for noun, count in counts.items() if count >= least)
        chosen = tuple(noun for count, noun in frequent if -count <= COMMON * len(captions))
        if not chosen:
            known = (
                f"no noun stands in {least} captions" if not frequent else "every noun stands in nearly all"
            )
            raise DataError(known, "lower --least, or give --vocabulary FILE")
        source, everywhere = f"nouns in {least} captions or more", [n for _, n in frequent if n not in chosen]
        if everywhere:
            source += f"; left out, as in over {COMMON:.0%} of captions: {', '.join(everywhere)}"
        return cls(concepts=chosen, match=match, source=source)

    def __len__(self) -> int:
        return len(self.concepts)

    @property
    def hash(self) -> str:
        """Digest of everything that hits depend on."""
        return digest({"concepts": list(self.concepts), "match": self.match, "words": 1})

    @cached_property
    def units(self) -> list[tuple[frozenset[str], ...]]:
        """Of each concept what a caption must hold, all of it: per unit the texts of which one is enough."""

        def units_of(concept: str) -> tuple[frozenset[str], ...]:
            words = words_of(concept)
            each = [forms(word) for word in words]
            if self.match == "words":
                return tuple(each)
            # Of a long phrase only the last word is inflected: all ways to write it would fill the memory.
            if math.prod(map(len, each)) > MOST_FORMS:
                each = [*(frozenset([word]) for word in words[:-1]), each[-1]]
            return (frozenset(" ".join(way) for way in product(*each)),)

        return [units_of(concept) for concept in self.concepts]

    def number(self, name: str) -> int | None:
        """The concept that a tagger's name stands for, in singular or plural; None where there is none."""
        return self._numbers.get(" ".join(words_of(name.replace("_", " "))))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        known: dict[str, int] = {}
        # Backwards, so that a form of two concepts is that of the first.
        for number, units in reversed(list(enumerate(self.units))):
            if len(units) == 1:
                known |= dict.fromkeys(units[0], number)
        # A concept as it was written goes before a form of any other.
        return known | {" ".join(words_of(concept)): n for n, concept in enumerate(self.concepts)}


def lemminflect() -> Any:
    """The package of the lemmas; `ConfigError` without it."""
    try:
        import lemminflect as package  # type: ignore[import-untyped]
    except ImportError:
        fix = "install the extra: pip install -e '.[concepts]' in the checkout"
        raise ConfigError("concepts need the package lemminflect", fix) from None
    return package


@lru_cache(maxsize=1 << 18)
def lemmas(word: str) -> tuple[str, ...]:
    """Singulars that a noun may be a form of; itself where the dictionary of English says nothing."""
    if not (word.isascii() and word.isalpha()):  # the package would cut it at an accent
        return (word,)
    return tuple(lemma for lemma in lemminflect().getLemma(word, upos="NOUN") if lemma) or (word,)


@lru_cache(maxsize=1 << 18)
def nouns(word: str) -> tuple[str, ...]:
    """The lemmas of a word that may be a noun; none for other words of English, and for numbers."""
    if word.isdigit() or len(word) == 1 or word in NO_NOUNS:
        return ()
    if word.isascii() and word.isalpha():
        known = lemminflect().getAllLemmas(word)
        if known and not {"NOUN", "PROPN"} & known.keys():
            return ()
    return (word,) if word in lemmas(word) else lemmas(word)


def forms(word: str) -> frozenset[str]:
    """Singular and plural of a noun, of every noun that it may be."""
    ascii_lemmas = [lemma for lemma in lemmas(word) if lemma.isascii() and lemma.isalpha()]
    plurals = (lemminflect().getInflection(lemma, tag="NNS") for lemma in ascii_lemmas)
    return frozenset({word, *lemmas(word)}.union(*plurals))


TEXT = "concepts-text"


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
    return dataset.write_column(TEXT, producer, compute, kind="ragged", progress=progress)


def ragged(rows: Iterable[list[int]]) -> dict[str, torch.Tensor]:
    """A shard of a ragged column of numbers."""
    lists = list(rows)
    values = np.fromiter((number for numbers in lists for number in numbers), dtype=np.int32)
    lengths = torch.tensor(list(map(len, lists)), dtype=torch.int32)
    return {"values": torch.from_numpy(values), "lengths": lengths}
