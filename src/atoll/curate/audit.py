"""What is in the data: the stages that index, tag and count concepts."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np

from atoll.base.config import Config
from atoll.base.console import Progress, say
from atoll.base.errors import ConfigError, DataError
from atoll.base.safe_parse import read_lines
from atoll.base.table import Column as TableColumn
from atoll.base.table import Table, measured, text
from atoll.base.text import many, shorten
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import CONCEPTS, TOP_WORDS, ReportTable
from atoll.curate import image_hits, text_hits
from atoll.curate.counts import ConceptCounts, Spread, count, evenness, spread
from atoll.curate.vocabulary import Match, Vocabulary
from atoll.data.cluster_map import telling
from atoll.data.settings import features_column
from atoll.store.store import Store

COUNTS = ConceptCounts.PLACE
TABLE = COUNTS.replace(".json", ".csv")


def index_stage(campaign: Campaign, path: Path | None, least: int, match: Match) -> Vocabulary:
    """Fix the campaign's vocabulary and find its concepts in every caption.

    Args:
        path: a text file of concepts, one a line; by default the nouns of the training captions.
        least: captions that such a noun stands in.
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
    say(f"{many(len(vocabulary), 'concept')} ({vocabulary.source}): {shorten(vocabulary.concepts)}")
    say(
        f"  at most {column.meta.max_length} in a caption"
        + "; --vocabulary FILE names others" * (path is None)
    )
    return vocabulary


def vocabulary_of(campaign: Campaign) -> Vocabulary:
    """The campaign's vocabulary; `DataError` before there is one."""
    if not campaign.store.exists(Vocabulary.PLACE):
        raise DataError(f"{campaign.store.location} has no vocabulary", "run 'atoll concepts index' first")
    return Vocabulary.read(campaign.store, Vocabulary.PLACE)


def tag_stage(campaign: Campaign, tagger: str) -> None:
    """Find concepts in pictures by `labels`, `linear`, `clip:NAME`, or a parquet or CSV file of tags."""
    dataset, vocabulary = campaign.dataset(), vocabulary_of(campaign)
    if tagger == "labels":
        producer, hits = image_hits.of_labels(dataset, vocabulary)
    elif tagger == "linear":
        features = features_column(campaign.config.partition.encoder)
        producer, hits = image_hits.linear(dataset, vocabulary, features)
    elif tagger.startswith("clip:"):
        producer, hits = image_hits.clip(dataset, vocabulary, tagger.removeprefix("clip:"))
    elif Path(tagger).exists():
        producer, hits = image_hits.imported(dataset, vocabulary, Path(tagger))
    else:
        fix = "give labels, linear, clip:NAME, or a file of tags"
        raise ConfigError(f"there is no tagger or file {tagger!r}", fix)
    progress = Progress("concepts in pictures", len(dataset.shards), unit="shards")
    column = image_hits.write_hits(dataset, vocabulary, producer, hits, progress)
    say(f"concepts in pictures by {producer['name']}: at most {column.meta.max_length} in one")


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
    counts = []
    for path in paths:
        folder, _, name = path.rpartition("/")
        counts.append(ConceptCounts.read(Store.open(folder or "."), name))
    _write(Store.open(out, create=True), reduce(add, counts))


class Expert(Config):
    """What one expert sees."""

    expert: int
    """Number of the cluster."""
    rows: int
    """Its training rows."""
    sees: float = measured(unit="share", digits=3)
    """Concepts that it ever sees."""
    typical: str | None
    """Concepts that tell its rows from the others', by the z score of their share."""


def _write(store: Store, counts: ConceptCounts) -> None:
    """Write `counts.json`, `counts.csv` and the report's table, and print what they say."""
    rows, tables = np.array(counts.rows), counts.tables
    # Rows with a concept in caption and picture decide, or in captions where pictures were not tagged.
    deciding = [*tables.values()][-1]

    # A line of the CSV for each concept, the rarest first: totals, evenness over experts, rows of each.
    even = evenness(deciding, rows)
    heads = (
        *("concept", *tables, "evenness", "best_expert"),
        *(f"expert_{number}" for number in range(len(rows))),
    )
    lines = []
    for number in np.argsort(deciding.sum(1), kind="stable"):
        own = deciding[number].tolist()
        totals = (int(table[number].sum()) for table in tables.values())
        cells = (counts.concepts[number], *totals, f"{even[number]:.4f}", max(own), *own)
        lines.append(dict(zip(heads, cells, strict=True)))
    store.put(TABLE, Table("counts", "", tuple(map(TableColumn, heads)), lines).to_csv())
    store.put_json(COUNTS, counts.to_json())

    experts = [
        Expert(
            expert=number,
            rows=size,
            sees=float((column > 0).mean()),
            typical=", ".join(counts.concepts[c] for c in chosen) or None,
        )
        for number, (size, column, chosen) in enumerate(
            zip(counts.rows, deciding.T, telling(deciding, rows), strict=True)
        )
    ]
    ReportTable(
        title="Concepts of the experts",
        text=f"Of {len(counts.concepts):,} concepts, those that an expert ever sees (atoll concepts audit).",
        columns=["expert", "rows", "sees", TOP_WORDS],
        rows=[[row.expert, row.rows, f"{row.sees:.1%}", row.typical] for row in experts],
    ).write(store, CONCEPTS)
    spreads = [spread(name, table, rows) for name, table in tables.items()]
    say("\n".join(text(Table.of(Spread, spreads, title=f"{len(counts.concepts):,} concepts"))))
    say("\n".join(text(Table.of(Expert, experts))))
    if counts.comparable:
        comparable, misaligned = sum(counts.comparable), sum(counts.misaligned)
        say(
            f"misaligned: {misaligned:,} of {comparable:,} rows with concepts in caption and picture have"
            f" none in common ({misaligned / max(1, int(rows.sum())):.2%} of all rows)"
        )
    say(f"wrote {store.name(TABLE)} and .json")
