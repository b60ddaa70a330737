"""What is in the data: concepts indexed, tagged, and counted in captions, pictures and both for every expert.

Only counts leave an island, and they add up: the counts of two data sets are those of both together.
"""

import os
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import add
from pathlib import Path
from posixpath import split
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from atoll.base.config import Config
from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.format import File
from atoll.base.part import Part
from atoll.base.safe_parse import read_text
from atoll.base.table import Table, column, text
from atoll.base.text import many, shorten
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import CONCEPTS, TOP_WORDS, ReportTable
from atoll.curate import concepts
from atoll.curate.concepts import IMAGE, PROBABILITIES, Match, Vocabulary, caption_hits, hits_of
from atoll.data.cluster_map import telling
from atoll.data.columns import Column, by_shard
from atoll.data.dataset import DataSet
from atoll.data.settings import features_column
from atoll.store.store import Store

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]
Kind = TypeVar("Kind", bound=File)
Count = Annotated[int, Field(ge=0, le=2**48)]
TABLES = ("text", "image", "both")
CHUNK = 1 << 16
"""Rows whose hits are in memory at once."""


class ConceptCounts(File):
    """`counts.json`: hits of every concept, by cluster."""

    FORMAT, PLACE, ERROR = "atoll/concept-counts", "reports/concepts/counts.json", DataError
    REMEDY = "run 'atoll concepts audit' again"

    vocabulary: str
    """Digest of the vocabulary."""
    concepts: tuple[str, ...] = Field(min_length=1)
    """Names, by number."""
    threshold: float | None
    """Probability from which a tag of a picture counts; None where pictures were not tagged."""
    rows: tuple[Count, ...] = Field(min_length=1)
    """Training rows of every cluster."""
    text: list[list[Count]]
    """Captions with the concept, by concept and cluster."""
    image: list[list[Count]] | None = None
    """Pictures with the concept; None where pictures were not tagged."""
    both: list[list[Count]] | None = None
    """Rows whose caption and picture have it."""
    comparable: tuple[Count, ...] = ()
    """Rows of every cluster with a concept in the caption and one in the picture."""
    misaligned: tuple[Count, ...] = ()
    """Those of them that have none in common."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        tables = [table for table in (self.text, self.image, self.both) if table is not None]
        # Two tables of pictures go with two counts of rows, where pictures were tagged.
        tagged = [] if self.threshold is None else [self.comparable, self.misaligned]
        long, wide = (self.concepts, *tables), (self.rows, *tagged, *chain(*tables))
        if len(tables) != 1 + len(tagged) or len({*map(len, long)}) + len({*map(len, wide)}) > 2:
            raise ValueError("tables do not fit concepts and clusters")
        return self

    def __add__(self, other: "ConceptCounts") -> "ConceptCounts":
        """Counts of both data sets; `DataError` where vocabulary, threshold or clusters differ."""
        # Numbers of concepts mean nothing under another vocabulary: sums would look right and be wrong.
        for name in ("vocabulary", "concepts", "threshold"):
            if getattr(self, name) != getattr(other, name):
                fix = "count both by one vocabulary and threshold"
                raise DataError(f"counts of another {name.rstrip('s')} cannot be added", fix)
        if len(self.rows) != len(other.rows):
            what = f"counts of {len(self.rows)} and {len(other.rows)} clusters cannot be added"
            raise DataError(what, "count both by one partition")

        def total(first: Any, second: Any) -> Any:  # pictures of neither were tagged, or of both
            both = first and np.add(first, second).tolist()
            return tuple(both) if isinstance(first, tuple) else both

        names = ("rows", "text", "image", "both", "comparable", "misaligned")
        return self.model_copy(update={n: total(getattr(self, n), getattr(other, n)) for n in names})

    @property
    def tables(self) -> dict[str, I64]:
        """Counts `(C, K)` of text, and of image and both where pictures were tagged; the last one decides."""
        return {name: self.table(name) for name in TABLES if getattr(self, name) is not None}

    def table(self, name: str = "text") -> I64:
        """Counts `(C, K)` of `text`, `image` or `both`."""
        return np.array(getattr(self, name), dtype=np.int64).reshape(len(self.concepts), len(self.rows))


def count(
    dataset: DataSet, vocabulary: Vocabulary, rows: I64, clusters: I64, k: int, threshold: float = 0.7
) -> ConceptCounts:
    """Count the hits of rows `(N,)` by their clusters `(N,)`, in pictures too if they were tagged."""
    text, image = caption_hits(dataset, vocabulary), hits_of(dataset, IMAGE, vocabulary)
    width = len(vocabulary)

    def pairs(column: Column, chunk: I64, likely: Column | None = None) -> I64:
        # A hit is one number, row * width + concept, so that sets of hits are sets of integers.
        values, mask = column.read_ragged(chunk)
        if likely is not None:
            mask = mask & (likely.read_ragged(chunk)[0] >= threshold)
        row = np.repeat(np.arange(len(chunk)), mask.sum(1).numpy())
        numbers: I64 = row * width + values[mask].numpy()
        return numbers

    tables = np.zeros((3, width * k), dtype=np.int64)  # text, image, both
    comparable, misaligned = np.zeros((2, k), dtype=np.int64)
    for chunk, homes in zip(chunks(rows), chunks(clusters), strict=True):
        hits = [pairs(text, chunk)]
        if image is not None:
            hits.append(pairs(image, chunk, dataset.column(PROBABILITIES)))
            hits.append(np.intersect1d(hits[0], hits[1], assume_unique=True))
            with_both = np.intersect1d(hits[0] // width, hits[1] // width)
            comparable += np.bincount(homes[with_both], minlength=k)
            misaligned += np.bincount(homes[np.setdiff1d(with_both, hits[2] // width)], minlength=k)
        for table, numbers in zip(tables, hits, strict=False):
            table += np.bincount(numbers % width * k + homes[numbers // width], minlength=width * k)
    counted: dict[str, Any] = dict(zip(TABLES, tables.reshape(3, width, k).tolist(), strict=True))
    counted |= {"comparable": tuple(comparable.tolist()), "misaligned": tuple(misaligned.tolist())}
    return ConceptCounts(
        vocabulary=vocabulary.hash,
        concepts=vocabulary.concepts,
        threshold=threshold if image is not None else None,
        rows=tuple(np.bincount(clusters, minlength=k).tolist()),
        **(counted if image is not None else {"text": counted["text"]}),
    )


def chunks(rows: I64) -> list[I64]:
    """Row numbers in parts whose hits fit into memory."""
    return [rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK)]


class Spread(Config):
    """How the counts of all concepts are spread, in captions (text), pictures (image) or both."""

    hits: str
    """What was counted."""
    absent: float = column(unit="share")
    """Concepts without any row."""
    median: float
    """Rows of the median concept."""
    top: float = column(unit="share")
    """Hits that the most frequent hundredth of the concepts has."""
    evenness: float = column(digits=2)
    """Mean over hits of how evenly a concept lies on the clusters: 0 where one has all, 1 as the rows do."""


def spread(hits: str, table: I64, rows: I64) -> Spread:
    """The spread of counts `(C, K)` over clusters of so many rows `(K,)`."""
    totals = table.sum(1)
    most, total = max(1, len(totals) // 100), max(1, int(totals.sum()))
    return Spread(
        hits=hits,
        absent=float((totals == 0).mean()),
        median=float(np.median(totals)),
        top=float(np.sort(totals)[::-1][:most].sum() / total),
        evenness=float((evenness(table, rows) * totals).sum() / total),
    )


def evenness(table: I64, rows: I64) -> F64:
    """Of every concept `(C,)`: 1 less the divergence of its clusters from the rows', over the largest.

    `1 - KL(p(k | concept) || p(k)) / ln(1 / min p(k))`: 1 where it lies on the clusters as all rows do, 0
    where the smallest has all of it; 1 where there is only one cluster, or no row.
    """
    # Held against the rows' own shares: clusters differ in size, and a large one has more of everything.
    prior = rows / max(1, rows.sum())
    if (rows > 0).sum() < 2:
        return np.ones(len(table))
    share = table / np.maximum(1, table.sum(1, keepdims=True))
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(share > 0, share * np.log(share / prior), 0.0)
    even: F64 = 1 - parts.sum(1) / -np.log(prior[prior > 0].min())
    return even


TABLE = ConceptCounts.PLACE.replace(".json", ".csv")


def index_stage(campaign: Campaign, path: Path | None, least: int, match: Match) -> None:
    """Fix the campaign's vocabulary and find its concepts in every caption."""
    dataset = campaign.dataset()
    if path is None:
        # Shard by shard: all captions of a large data set have more bytes than memory.
        parts = by_shard(dataset.bounds, dataset.split("train"))
        taken = (dataset.shard_table(n, ["caption"])["caption"].take(rows) for n, _, rows in parts)
        captions = chain.from_iterable(texts.to_pylist() for texts in taken)
        vocabulary = Vocabulary.of_captions(captions, least, match)
    else:
        vocabulary = Vocabulary.of_lines(read_text(path).splitlines(), path.name, match)
    column = concepts.index(dataset, vocabulary)
    campaign.store.put_json(Vocabulary.PLACE, vocabulary.to_json())
    say(f"{many(len(vocabulary), 'concept')} ({vocabulary.source}): {shorten(vocabulary.concepts)}")
    others = "; --vocabulary FILE names others" if path is None else ""
    say(f"  at most {int(column.lengths().max())} in a caption{others}")


def written(campaign: Campaign, kind: type[Kind]) -> Kind:
    """The campaign's vocabulary, counts or prompts; `DataError` before there are any."""
    if not campaign.store.exists(kind.PLACE):
        what = f"{campaign.store.location} has no {Path(kind.PLACE).stem}"
        raise DataError(what, kind.REMEDY.replace("again", "first"))
    return kind.read(campaign.store, kind.PLACE)


def tag_stage(campaign: Campaign, tagger: str, part: Part | None = None) -> None:
    """Find concepts in pictures, or a part of them, by `labels`, `linear`, `clip:NAME` or a table of tags."""
    dataset, vocabulary = campaign.dataset(), written(campaign, Vocabulary)
    if tagger == "labels":
        producer, hits = concepts.of_labels(dataset, vocabulary)
    elif tagger == "linear":
        features = features_column(campaign.config.partition.encoder)
        producer, hits = concepts.linear(dataset, vocabulary, features)
    elif tagger.startswith("clip:"):
        producer, hits = concepts.clip(dataset, vocabulary, tagger.removeprefix("clip:"))
    elif os.path.exists(tagger):  # pathlib's raises where the name is too long
        producer, hits = concepts.imported(dataset, vocabulary, Path(tagger))
    else:
        fix = "give labels, linear, clip:NAME, or a file of tags"
        raise ConfigError(f"there is no tagger or file {tagger!r}", fix)
    if (column := concepts.write_hits(dataset, vocabulary, producer, hits, part)) is not None:
        say(f"concepts in pictures by {producer['name']}: at most {int(column.lengths().max())} in one")


def audit_stage(campaign: Campaign, threshold: float) -> None:
    """Count the concepts of the training rows for every expert, and write the table."""
    dataset, partition = campaign.clustered()
    rows = dataset.split("train")
    vocabulary, homes = written(campaign, Vocabulary), partition.clusters[rows]
    counts = count(dataset, vocabulary, rows, homes, partition.k, threshold)
    if counts.image is None:
        say("pictures are not tagged with these concepts (atoll concepts tag): captions alone are counted")
    _write(campaign.store, counts)


def add_stage(paths: Sequence[str], out: str) -> None:
    """Add the counts of several islands' own data, each counted where it lies."""
    counts = (ConceptCounts.read(Store.open(place or "."), name) for place, name in map(split, paths))
    _write(Store.open(out, create=True), reduce(add, counts))


def _write(store: Store, counts: ConceptCounts) -> None:
    """Write `counts.json`, `counts.csv` and the report's table, and print what they say."""
    rows, tables = np.array(counts.rows), counts.tables
    # Rows with a concept in caption and picture decide, or in captions where pictures were not tagged.
    deciding = [*tables.values()][-1]

    # A line of the CSV for each concept, the rarest first: totals, evenness over experts, rows of each.
    even = evenness(deciding, rows)
    numbered = (f"expert_{number}" for number in range(len(rows)))
    heads = ("concept", *tables, "evenness", "best_expert", *numbered)
    lines = []
    for number in np.argsort(deciding.sum(1), kind="stable"):
        own = deciding[number].tolist()
        totals = (int(table[number].sum()) for table in tables.values())
        lines.append((counts.concepts[number], *totals, f"{even[number]:.4f}", max(own), *own))
    store.put(TABLE, Table.plain(heads, lines).to_csv())
    store.put_json(ConceptCounts.PLACE, counts.to_json())

    # Of every expert: rows, the share of the concepts that it ever sees, and those that tell its rows from
    # the others', by the z score of their share.
    columns, experts = ["expert", "rows", "sees", TOP_WORDS], list[list[Any]]()
    for number, (seen, own) in enumerate(zip(deciding.T, telling(deciding, rows), strict=True)):
        typical = ", ".join(counts.concepts[concept] for concept in own) or None
        experts.append([number, counts.rows[number], f"{(seen > 0).mean():.1%}", typical])
    about = f"Of {len(counts.concepts):,} concepts, those that an expert ever sees (atoll concepts audit)."
    report = ReportTable(title="Concepts of the experts", text=about, columns=columns, rows=experts)
    report.write(store, CONCEPTS)
    spreads = [spread(name, table, rows) for name, table in tables.items()]
    say("\n".join(text(Table.of(Spread, spreads, title=f"{len(counts.concepts):,} concepts"))))
    say("\n".join(text(Table.plain(columns, experts))))
    if counts.comparable:
        comparable, misaligned = sum(counts.comparable), sum(counts.misaligned)
        what = f"misaligned: {misaligned:,} of {comparable:,} rows with concepts in caption and picture have"
        say(f"{what} none in common ({misaligned / max(1, int(rows.sum())):.2%} of all training rows)")
    say(f"wrote {store.name(TABLE)} and .json")
