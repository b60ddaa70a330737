"""Concepts by number, the words that stand for them, and the captions and pictures that hold them.

Hits in captions are one column of the data set, hits in pictures two: numbers and probabilities of what a
tagger saw. Any tagger's tags can be imported; a CLIP of transformers and a linear tagger on the features that
the partition made anyway are built in. What is likelier than a threshold counts, and the threshold is chosen
when counting, since that of one tagger says nothing about another's.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import chain, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray
from pyarrow import csv
from pyarrow.parquet import ParquetFile
from torch import Tensor

from atoll.base.console import Progress
from atoll.base.errors import ConfigError, DataError, extra, first_line
from atoll.base.format import File
from atoll.base.hashing import digest, sha256
from atoll.base.part import Part
from atoll.base.safe_parse import read_bytes, read_json, unreadable
from atoll.base.text import NO_NOUNS, words_of
from atoll.data.columns import Column, Compute
from atoll.data.dataset import CAPTION, DataSet
from atoll.data.job import ColumnJob
from atoll.encoders.vision import ClipEncoder, extractor

Match = Literal["phrase", "words"]
MOST_FORMS = 256
"""Ways to write one concept, beyond which only its last word is inflected."""
LONGEST = 200
MOST_BYTES = 2**32
"""Of a table of JSON lines."""
TAG = np.dtype([("row", "i8"), ("concept", "i4"), ("probability", "f4")])
COMMON = 0.8
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
    def of_captions(cls, captions: Iterable[str], least: int, match: Match = "phrase") -> "Vocabulary":
        """The nouns, in singular, of so many captions at least and not of nearly all, common ones first."""
        counts, total = Counter[str](), 0
        for caption in captions:
            total += 1
            counts.update({noun for word in words_of(caption) for noun in nouns(word)})
        # Ties by name: a set's order of strings changes with each process, and the order gives the numbers.
        frequent = sorted((-count, noun) for noun, count in counts.items() if count >= least)
        everywhere = [noun for count, noun in frequent if -count > COMMON * total]
        chosen = tuple(noun for _, noun in frequent[len(everywhere) :])
        if not chosen:
            what = "every noun stands in nearly all" if frequent else f"no noun stands in {least} captions"
            raise DataError(what, "lower --least, or give --vocabulary FILE")
        source = f"nouns in {least} captions or more"
        if everywhere:
            source += f"; left out, as in over {COMMON:.0%} of captions: {', '.join(everywhere)}"
        return cls(concepts=chosen, match=match, source=source)

    def __len__(self) -> int:
        return len(self.concepts)

    @property
    def hash(self) -> str:
        """Digest of everything that hits depend on."""
        return digest({"concepts": list(self.concepts), "match": self.match, "words": 2})

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


def package(name: str) -> Any:
    """A package of the extra `concepts`; `ConfigError` without it."""
    with extra("concepts", f"concepts need the package {name}"):
        return import_module(name)


@lru_cache(maxsize=1 << 18)
def lemmas(word: str) -> tuple[str, ...]:
    """Singulars that a noun may be a form of; itself where the dictionary of English says nothing."""
    if not (word.isascii() and word.isalpha()):  # the package would cut it at an accent
        return (word,)
    return tuple(lemma for lemma in package("lemminflect").getLemma(word, upos="NOUN") if lemma) or (word,)


@lru_cache(maxsize=1 << 18)
def nouns(word: str) -> tuple[str, ...]:
    """The lemmas of a word that may be a noun; none for other words of English, and for numbers."""
    if word.isdigit() or len(word) == 1 or word in NO_NOUNS:
        return ()
    if word.isascii() and word.isalpha():
        known = package("lemminflect").getAllLemmas(word)
        if known and not {"NOUN", "PROPN"} & known.keys():
            return ()
    return (word,) if word in lemmas(word) else lemmas(word)


def forms(word: str) -> frozenset[str]:
    """Singular and plural of a noun, of every noun that it may be."""
    ascii_lemmas = [lemma for lemma in lemmas(word) if lemma.isascii() and lemma.isalpha()]
    plurals = (package("lemminflect").getInflection(lemma, tag="NNS") for lemma in ascii_lemmas)
    return frozenset({word, *lemmas(word)}.union(*plurals))


TEXT = "concepts-text"


class Finder:
    """Finds the concepts of a vocabulary in captions, with one automaton (Aho and Corasick 1975).

    A caption holds a concept if it holds a form of each of its units, at the ends of words.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        numbers_of: dict[str, list[int]] = defaultdict(list)
        for number, units in enumerate(vocabulary.units):
            for text in sorted(set().union(*units)):
                numbers_of[text].append(number)
        self._automaton = package("ahocorasick").Automaton()
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


def index(dataset: DataSet, vocabulary: Vocabulary) -> Column:
    """Write (or find) the column of the concepts in every caption: their numbers, int32, ragged."""
    finder = Finder(vocabulary)

    def compute(shard: int) -> dict[str, Tensor]:
        return ragged(map(finder, dataset.shard_table(shard, ["caption"]).column("caption").to_pylist()))

    producer = {"vocabulary": vocabulary.hash, "concepts": len(vocabulary)}
    if dataset.has_column(CAPTION):  # new captions hold other concepts
        producer["captions"] = digest(dataset.column(CAPTION).meta.producer)
    return dataset.write_column(TEXT, producer, compute, kind="ragged")


def ragged(rows: Iterable[Collection[float]], dtype: DTypeLike = np.int32) -> dict[str, Tensor]:
    """A shard of a ragged column of numbers."""
    lists = list(rows)
    values = np.fromiter(chain.from_iterable(lists), dtype)
    lengths = torch.tensor(list(map(len, lists)), dtype=torch.int32)
    return {"values": torch.from_numpy(values), "lengths": lengths}


def hits_of(dataset: DataSet, name: str, vocabulary: Vocabulary) -> Column | None:
    """A column of hits; None where there is none of this vocabulary."""
    column = dataset.column(name) if dataset.has_column(name) else None
    return column if column and column.meta.producer.get("vocabulary") == vocabulary.hash else None


def caption_hits(dataset: DataSet, vocabulary: Vocabulary) -> Column:
    """Concepts in captions; `DataError` where captions were not searched for these."""
    if (column := hits_of(dataset, TEXT, vocabulary)) is None:
        what = f"the captions of {dataset.store.location} are not searched for these concepts"
        raise DataError(what, "run 'atoll concepts index' again")
    return column


IMAGE, PROBABILITIES = "concepts-image", "concepts-image-probabilities"
PLAIN = "a photo."
FLOOR = 0.1
"""Probability below which a tag is not kept."""
Hits = Callable[[int], list[dict[int, float]]]
"""Of a shard's number, for every row the concepts' probabilities by their numbers."""
Tagger = dict[str, Any]
"""What tags depend on."""


def write_hits(
    dataset: DataSet, vocabulary: Vocabulary, tagger: Tagger, hits: Hits, part: Part | None = None
) -> Column | None:
    """Write (or find) both columns, or one part of them; the second is returned when it is there.

    `tagger` is plain data that changes whenever the hits would.
    """
    producer = {"vocabulary": vocabulary.hash, "concepts": len(vocabulary), "tagger": tagger, "floor": FLOOR}

    # A cache of more shards would hold a whole data set.
    @lru_cache(maxsize=1)
    def kept(shard: int) -> list[dict[int, float]]:
        return [{n: p for n, p in sorted(row.items()) if p >= FLOOR} for row in hits(shard)]

    columns: dict[str, Compute] = {
        PROBABILITIES: lambda shard: ragged((row.values() for row in kept(shard)), np.float32),
        IMAGE: lambda shard: ragged(kept(shard)),
    }
    jobs = [ColumnJob(dataset, name, producer, compute, None, "ragged") for name, compute in columns.items()]
    left = [job for job in jobs if job.result() is None]
    for job in left:
        job.begin()
    # Both columns shard by shard, so that every picture is looked at once.
    own = range(len(dataset.shards)) if part is None else range(part.number, len(dataset.shards), part.total)
    progress = Progress("concepts in pictures", len(own), unit="shards")
    for done, shard in enumerate(own if left else (), 1):
        for job in left:
            job.write_shards([shard])
        progress(done)
    for job in jobs:
        if part is None:
            job.run()
        else:
            job.write_part(part)
    return dataset.column(IMAGE) if part is None else None


def imported(dataset: DataSet, vocabulary: Vocabulary, path: Path) -> tuple[Tagger, Hits]:
    """Tags of a table: `id` of the row, `concept`, and `probability` (1 where there is none)."""
    # Rows and concepts that this data set does not know are passed over: a tagger's file may cover more.
    row_of = {id_: row for row, id_ in enumerate(dataset.ids)}
    parts, line, strangers = list[NDArray[Any]](), 0, 0
    for table in read_tables(path, "id", "concept"):
        if "probability" not in table.column_names:
            table = table.append_column("probability", pa.repeat(1.0, len(table)))
        columns = (table[name].to_pylist() for name in ("id", "concept", "probability"))
        known = list[tuple[int, int, float]]()
        for id_, name, value in zip(*columns, strict=True):
            # NaN compares false with everything, so it is refused too.
            if not isinstance(value, int | float) or not 0 <= value <= 1:
                raise DataError(f"{path}, row {line}: probability {value!r}", "give numbers from 0 to 1")
            row, number, line = row_of.get(str(id_)), vocabulary.number(str(name)), line + 1
            strangers += row is None
            if row is not None and number is not None:
                known.append((row, number, value))
        parts.append(np.array(known, TAG))
    if strangers == line:
        raise DataError(f"{path} tags no row of {dataset.store.location}", "give the tags of this data set")
    tags = np.concatenate(parts)
    tags = tags[np.lexsort((tags["probability"], tags["row"]))]
    bounds, ends = dataset.bounds.tolist(), np.searchsorted(tags["row"], dataset.bounds)

    def hits(shard: int) -> list[dict[int, float]]:
        of_row: list[dict[int, float]] = [{} for _ in range(*bounds[shard : shard + 2])]
        for row, number, probability in tags[slice(*ends[shard : shard + 2])].tolist():
            of_row[row - bounds[shard]][number] = probability  # the largest comes last
        return of_row

    return {"name": "imported", "tags": sha256(path), "other rows": strangers}, hits


def read_tables(path: Path, *needed: str, lists: bool = False) -> Iterator[pa.Table]:
    """A parquet, CSV or JSON-lines file in parts: columns of texts, numbers and, with `lists`, their lists.

    Of a parquet file one part is in memory. `DataError` where it is none of them, holds no rows, or lacks a
    column, or has two of one name.
    """
    count, formats = 0, "parquet, CSV or JSON lines"
    if not path.is_file():
        read_bytes(path)  # says why: of a pipe Arrow would wait for a writer
    try:
        if path.suffix.lower() == ".csv":
            # Names of digits, such as 000000012, are names.
            texts = dict.fromkeys(("id", "concept", "image", "group"), pa.string())
            options = csv.ConvertOptions(column_types=texts)
            parts = csv.read_csv(path, convert_options=options).to_batches()
        elif path.suffix.lower() in (".json", ".jsonl"):
            # Not by pyarrow, which deep lines crash.
            rows = [read_json(line) for line in read_bytes(path, MOST_BYTES).splitlines() if line.strip()]
            every = dict.fromkeys(name for row in rows for name in row)
            parts = pa.table({name: [row.get(name) for row in rows] for name in every}).to_batches()
        else:
            parts = ParquetFile(path).iter_batches()
        for part in parts:
            if len({*part.schema.names}) < part.num_columns:
                raise ValueError("two columns have one name")
            fields = [field for field in part.schema if lists or not pa.types.is_nested(field.type)]
            kinds = {field.name: getattr(field.type, "value_type", field.type) for field in fields}
            plain = pa.types.is_primitive, pa.types.is_string, pa.types.is_large_string
            names = [name for name, kind in kinds.items() if any(test(kind) for test in plain)]
            table = pa.Table.from_batches([part]).select(names)
            table.validate(full=True)
            for name in needed:
                if name not in names:
                    raise DataError(f"{path} has no column {name!r} of texts or numbers", "name it so")
            count += len(table)
            yield table
    except (pa.ArrowException, ValueError, TypeError, AttributeError, OverflowError, OSError) as error:
        if isinstance(error, OSError) and error.strerror:
            unreadable(error, path)
        raise DataError(f"{path} is no {formats} ({first_line(error)[:120]})", f"give {formats}") from None
    if not count:
        raise DataError(f"{path} holds no rows", f"give {formats} with rows")


def numeric(table: pa.Table) -> list[str]:
    """Names of a table's columns of numbers."""
    kinds = ((field.name, field.type) for field in table.schema)
    return [name for name, kind in kinds if pa.types.is_integer(kind) or pa.types.is_floating(kind)]


def of_labels(dataset: DataSet, vocabulary: Vocabulary) -> tuple[Tagger, Hits]:
    """Class labels: the concept of label N is the vocabulary's Nth."""
    labels, bounds = dataset.labels, dataset.bounds
    if int(labels.max()) >= len(vocabulary):
        what = f"label {int(labels.max())} for {len(vocabulary)} concepts"
        raise DataError(what, "give a vocabulary of the classes' names, in the labels' order")

    def hits(shard: int) -> list[dict[int, float]]:
        return [{int(label): 1.0} for label in labels[int(bounds[shard]) : int(bounds[shard + 1])]]

    return {"name": "labels"}, hits


def linear(
    dataset: DataSet, vocabulary: Vocabulary, features: str, epochs: int = 20, least: int = 5
) -> tuple[Tagger, Hits]:
    """A linear tagger on features, fitted to captions of training rows, for concepts in `least` of them."""
    column, text = dataset.column(features), caption_hits(dataset, vocabulary)

    def unit(rows: ArrayLike) -> Tensor:
        # Unit variance, not unit length: the learning rate then fits features of any width.
        values = column.read(rows).float()
        normal: Tensor = torch.nn.functional.normalize(values, dim=1) * values.shape[1] ** 0.5
        return normal

    torch.manual_seed(0)  # the tagger is named by its settings, so they must decide its tags
    train = dataset.split("train")
    count = torch.bincount(text.read_ragged(train, packed=True)[0], minlength=len(vocabulary))
    seen = torch.where(count >= least)[0]
    if not len(seen):
        raise DataError(f"no concept is in {least} captions", "use a tagger that was trained elsewhere")
    place = torch.full((len(vocabulary),), -1)
    place[seen] = torch.arange(len(seen))
    network = torch.nn.Linear(int(column.meta.shape[0]), len(seen))
    torch.nn.init.zeros_(network.weight)
    prior = (count[seen] / len(train)).clamp(max=0.99)
    # From the concepts' own frequencies on: from zero, the first epochs would only learn that most are rare.
    network.bias.data = torch.log(prior / (1 - prior))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for rows in np.array_split(np.random.default_rng(0).permutation(train), max(1, len(train) // 512)):
            values, mask = text.read_ragged(rows)
            target = torch.zeros(len(rows), len(seen))
            where = torch.arange(len(rows))[:, None].expand_as(values)
            there = mask & (place[values.long()] >= 0)
            target[where[there], place[values[there].long()]] = 1
            loss = torch.nn.functional.binary_cross_entropy_with_logits(network(unit(rows)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    bounds = dataset.bounds

    @torch.inference_mode()
    def hits(shard: int) -> list[dict[int, float]]:
        likely = network(unit(np.arange(bounds[shard], bounds[shard + 1]))).sigmoid()
        return [dict(zip(seen[p >= FLOOR].tolist(), p[p >= FLOOR].tolist(), strict=True)) for p in likely]

    settings = {"name": "linear", "features": column.meta.producer, "epochs": epochs, "least": least}
    settings |= {"hits": text.meta.producer, "train": sha256(train.tobytes())}
    return {**settings, "rows": dataset.id_hash, "concepts seen": len(seen)}, hits


def clip(dataset: DataSet, vocabulary: Vocabulary, name: str) -> tuple[Tagger, Hits]:
    """A CLIP of transformers, by folder or hub name.

    The probability of a concept is that of "a photo of a CONCEPT." against "a photo." alone, so it does not
    depend on the other concepts: the logistic function of the difference of their cosines by CLIP's scale.
    """
    encoder = extractor(name)
    if not isinstance(encoder, ClipEncoder):
        raise ConfigError(f"{name!r} is no CLIP", "give the folder or hub name of one")
    prompts = [PLAIN, *(f"a photo of a {concept}." for concept in vocabulary.concepts)]
    parts = [encoder.texts(prompts[first : first + 256]) for first in range(0, len(prompts), 256)]
    texts = torch.nn.functional.normalize(torch.cat(parts), dim=1)
    network: Any = encoder.network
    scale = float(network.logit_scale.exp())

    def hits(shard: int) -> list[dict[int, float]]:
        pictures = encoder.encode(list(dataset.iter_images(shard, encoder.sized)))
        cosines = torch.nn.functional.normalize(pictures, dim=1) @ texts.T
        likely = (scale * (cosines[:, 1:] - cosines[:, :1])).sigmoid()
        return [{int(n): float(row[n]) for n in torch.where(row >= FLOOR)[0]} for row in likely]

    return {"name": f"clip {name}", "weights": encoder.producer(), "prompts": [PLAIN, prompts[1]]}, hits
