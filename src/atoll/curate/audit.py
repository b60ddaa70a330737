"""What is in the data: the stages that index, tag and count concepts."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.base.console import Progress, say
from atoll.base.errors import ConfigError, DataError
from atoll.base.plain import read_lines
from atoll.campaign.finding import CONCEPTS, TOLD_BY, Finding
from atoll.campaign.folder import Campaign
from atoll.curate import image_hits, text_hits
from atoll.curate.counts import ConceptCounts, count, evenness, shape
from atoll.curate.vocabulary import Match, Vocabulary
from atoll.data.settings import features_column
from atoll.data.words import telling
from atoll.store.store import Store

COUNTS = ConceptCounts.PLACE
TABLE = COUNTS.replace(".json", ".csv")


def index_stage(campaign: Campaign, path: Path | None, least: int, match: Match) -> Vocabulary:
    """Fix the campaign's vocabulary and find its concepts in every caption.

    Args:
        campaign: with a data set.
        path: a text file of concepts, one a line; by default the nouns of the training captions.
        least: captions that such a noun stands in.
        match: how captions are searched.

    Raises:
        DataError: the file cannot be read, or holds a concept twice, or one that is none.
    """
    dataset = campaign.dataset()
    if path is None:
        captions = dataset.take(dataset.split("train"))["caption"].to_pylist()
        vocabulary = Vocabulary.of_captions(captions, least, match)
    else:
        vocabulary = Vocabulary.of_lines(read_lines(path), path.name, match)
    progress = Progress("concepts in captions", len(dataset.shards), unit="shards")
    column = text_hits.index(dataset, vocabulary, progress)
    campaign.store.put_json(Vocabulary.PLACE, vocabulary.to_json())
    say(f"{len(vocabulary):,} concepts ({vocabulary.source}); at most {column.meta.max_length} in a caption")
    return vocabulary


def vocabulary_of(campaign: Campaign) -> Vocabulary:
    """The campaign's vocabulary; `DataError` before there is one."""
    if not campaign.store.exists(Vocabulary.PLACE):
        raise DataError(f"{campaign.store.location} has no vocabulary", "run 'atoll concepts index' first")
    return Vocabulary.read(campaign.store, Vocabulary.PLACE)


def tag_stage(campaign: Campaign, tagger: str) -> None:
    """Find concepts in pictures.

    Args:
        campaign: indexed.
        tagger: `labels`, `linear`, `clip:NAME`, or a parquet or CSV file of tags.
    """
    dataset, vocabulary = campaign.dataset(), vocabulary_of(campaign)
    if tagger == "labels":
        about, hits = image_hits.of_labels(dataset, vocabulary)
    elif tagger == "linear":
        features = features_column(campaign.config.partition.encoder)
        about, hits = image_hits.linear(dataset, vocabulary, features)
    elif tagger.startswith("clip:"):
        about, hits = image_hits.clip(dataset, vocabulary, tagger.removeprefix("clip:"))
    elif Path(tagger).exists():
        about, hits = image_hits.imported(dataset, vocabulary, Path(tagger))
    else:
        raise ConfigError(
            f"there is no tagger or file {tagger!r}", "give labels, linear, clip:NAME, or a file of tags"
        )
    progress = Progress("concepts in pictures", len(dataset.shards), unit="shards")
    column = image_hits.write_hits(dataset, vocabulary, about, hits, progress)
    say(f"concepts in pictures by {about['name']}: at most {column.meta.max_length} in one")


def audit_stage(campaign: Campaign, threshold: float) -> None:
    """Count the concepts of the training rows for every expert, and write the table."""
    dataset, partition = campaign.clustered()
    rows = dataset.split("train")
    clusters = partition.clusters[rows]
    counts = count(dataset, vocabulary_of(campaign), rows, clusters, partition.k, threshold)
    if counts.image is None:
        say("pictures are not tagged with these concepts (atoll concepts tag): captions alone are counted")
    _write(campaign.store, counts)


def add_stage(paths: Sequence[str], out: str) -> None:
    """Add the counts of several islands' own data, each counted where it lies."""
    total: ConceptCounts | None = None
    for path in paths:
        folder, _, name = path.rpartition("/")
        counts = ConceptCounts.read(Store.open(folder or "."), name)
        total = counts if total is None else total + counts
    if total is None:
        raise ConfigError("there are no counts to add", "give files that 'atoll concepts audit' wrote")
    _write(Store.open(out, create=True), total)


def _write(store: Store, counts: ConceptCounts) -> None:
    store.put(TABLE, to_csv(counts))
    store.put_json(COUNTS, counts.to_json())
    _finding(counts).write(store, CONCEPTS)
    for line in summary(counts):
        say(line)
    say(f"wrote {store.name(TABLE)} and .json")


def _finding(counts: ConceptCounts) -> Finding:
    """What every expert sees, for the report."""
    rows, table = np.array(counts.rows), _deciding(counts)
    kinds = zip(counts.rows, table.T, telling(table, rows), strict=True)
    return Finding(
        title="Concepts of the experts",
        text=f"Of {len(counts.concepts):,} concepts, those that an expert ever sees (atoll concepts audit).",
        columns=["expert", "rows", "sees", TOLD_BY],
        rows=[
            [n, of, f"{(column > 0).mean():.1%}", ", ".join(counts.concepts[c] for c in chosen) or None]
            for n, (of, column, chosen) in enumerate(kinds)
        ],
    )


def _deciding(counts: ConceptCounts) -> NDArray[np.int64]:
    """Counts of rows with a concept in caption and picture; in captions where pictures were not tagged."""
    return counts.table("both" if counts.both is not None else "text")


def summary(counts: ConceptCounts) -> list[str]:
    """What the counts say, in lines."""
    rows, lines = np.array(counts.rows), []
    names = ("text", "image", "both") if counts.image is not None else ("text",)
    for name in names:
        of = shape(counts.table(name), rows)
        lines.append(
            f"{name:<6} {of.absent:>6.1%} of {of.concepts:,} concepts in no row, median {of.median:,.0f};"
            f" the most frequent 1 % have {of.top:.1%} of all hits; evenness over experts {of.spread:.2f}"
        )
    table = _deciding(counts)
    zero = (table == 0).mean(0)
    for number, chosen in enumerate(telling(table, rows)):
        words = ", ".join(counts.concepts[n] for n in chosen) or "nothing"
        lines.append(
            f"  expert {number}: {rows[number]:,} rows, sees {1 - zero[number]:.1%} of the concepts;"
            f" told by {words}"
        )
    if counts.comparable:
        comparable, misaligned = sum(counts.comparable), sum(counts.misaligned)
        share = misaligned / max(1, int(rows.sum()))
        lines.append(
            f"misaligned: {misaligned:,} of {comparable:,} rows with concepts in caption and picture have"
            f" none in common ({share:.2%} of all rows)"
        )
    return lines


def to_csv(counts: ConceptCounts) -> bytes:
    """A row for each concept, the rarest first: totals, evenness over experts, rows of each expert."""
    names = [name for name in ("text", "image", "both") if getattr(counts, name) is not None]
    tables = {name: counts.table(name) for name in names}
    deciding = tables[names[-1]]
    even = evenness(deciding, np.array(counts.rows))
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(
        ["concept", *names, "evenness", "best_expert", *(f"expert_{n}" for n in range(len(counts.rows)))]
    )
    for number in np.argsort(deciding.sum(1), kind="stable"):
        row = deciding[number]
        totals = [int(tables[name][number].sum()) for name in names]
        writer.writerow([counts.concepts[number], *totals, f"{even[number]:.4f}", int(row.max()), *row])
    return lines.getvalue().encode()
