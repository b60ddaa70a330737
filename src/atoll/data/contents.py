"""What a data set holds, read shard by shard, as far as it can be read: what is damaged is told."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from posixpath import join
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from atoll.base.errors import AtollError, DataError
from atoll.base.text import shorten, size
from atoll.data.columns import Progress
from atoll.data.dataset import MANIFEST, DataSet
from atoll.data.duplicates import COLUMN
from atoll.data.formats import IngestNote, Manifest, Shard, ShardNote
from atoll.store.manifest import FileEntry
from atoll.store.store import Store

COUNTED = 20_000
"""Captions that are looked at as the most frequent; how often these occur is exact."""


class Tally(Counter[float]):
    """How often numbers occur."""

    def quantile(self, share: float) -> float:
        """The number that this share of all lies below or at."""
        values = sorted(self)
        below = np.cumsum([self[value] for value in values])
        return values[int(np.searchsorted(below, share * below[-1]))]

    def add(self, values: Any) -> None:
        """Count numbers `(n,)`."""
        found, counts = np.unique(np.asarray(values), return_counts=True)
        for value, count in zip(found.tolist(), counts.tolist(), strict=True):
            self[value] += count


@dataclass
class ColumnFacts:
    """A column.

    Attributes:
        form: type and shape of a row's value, or what is wrong with the column.
        bytes: of its files; None where it cannot be read.
        producer: what made it, in words.
    """

    name: str
    form: str
    bytes: int | None = None
    producer: str = ""


@dataclass
class Contents:
    """What a data set holds.

    Attributes:
        dataset: itself; of an unfinished ingest the shards that there are.
        finished: whether the ingest is.
        splits: rows by name of the split, in words; empty without one.
        duplicates: rows that are left out, and how many rows one stands for at most; None where none
            were looked for.
        columns: all of them.
        problems: what cannot be read, in words.
        captions: how often the most frequent ones occur, the most frequent first.
        distinct: number of captions that differ.
        words: lengths of captions.
        widths, heights, aspects: of the source pictures; an aspect is width over height.
        licences, sources: rows by their licence and source.
        labels: number of class labels.
    """

    dataset: DataSet
    finished: bool
    splits: dict[str, int] = field(default_factory=dict)
    duplicates: tuple[int, int] | None = None
    columns: list[ColumnFacts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    captions: list[tuple[str, int]] = field(default_factory=list)
    distinct: int = 0
    words: Tally = field(default_factory=Tally)
    widths: Tally = field(default_factory=Tally)
    heights: Tally = field(default_factory=Tally)
    aspects: Tally = field(default_factory=Tally)
    licences: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    labels: int = 0

    def bytes(self, kind: str) -> int:
        """Of all files of a kind: `rows` or `images`."""
        entries = (shard.files.get(kind) for shard in self.dataset.shards)
        return sum(entry.bytes for entry in entries if entry is not None)


def contents(store: Store, rows: bool = True, progress: Progress | None = None) -> Contents:
    """Look at a data set, or at as much of it as an ingest has written.

    Args:
        store: where it is.
        rows: look at every row too.
        progress: told how many shards have been read, and how many there are.

    Raises:
        DataError: there is none, or its manifest cannot be read.
    """
    found = Contents(*_opened(store))
    _look_at_columns(found)
    if rows:
        _look_at_rows(found, progress)
    return found


def _opened(store: Store) -> tuple[DataSet, bool]:
    """The data set, and whether it is finished."""
    if store.exists(MANIFEST) or not store.exists("ingest.json"):
        return DataSet.open(store), True
    note = IngestNote.read(store, "ingest.json")
    keys = sorted(key for key in store.list("rows") if key.endswith(".json"))
    notes = [one for one in (ShardNote.read(store, key) for key in keys) if one.rows]
    if not notes:
        raise DataError(f"the ingest into {store.location} has no shard yet", "wait for the first")
    rejects = Counter(reject.reason for one in notes for reject in one.rejects)
    manifest = Manifest(
        identity=note.identity,
        source={"name": "an unfinished ingest"},
        mode=note.mode,
        rejects=dict(sorted(rejects.items())),
        rows=sum(one.rows for one in notes),
        shards=[Shard(rows=one.rows, files=one.files) for one in notes],
    )
    return DataSet(store, "", manifest), False


def _look_at_columns(found: Contents) -> None:
    dataset = found.dataset
    for name in dataset.column_names():
        try:
            column = dataset.column(name)
            entries = [*column.meta.shards, *column.meta.extras.values()]
            found.problems += _absent(dataset.store, column.folder, name, entries)
            shape = "x".join(map(str, column.meta.shape)) or "scalar"
            size = sum({entry.path: entry.bytes for entry in entries}.values())
            form = f"{column.meta.dtype} {column.meta.kind} {shape}"
            found.columns.append(ColumnFacts(name, form, size, _made_by(column.meta.producer)))
            if name == "split":
                values = column.read(np.arange(len(dataset))).numpy()
                out = dataset.weights == 0
                words = ("to train on", "held out", "to test")
                counts = np.bincount(values[~out], minlength=len(words)).tolist()
                found.splits = {**dict(zip(words, counts, strict=True)), "of weight 0": int(out.sum())}
            if name == COLUMN:
                counts = np.bincount(column.read(np.arange(len(dataset))).numpy(), minlength=len(dataset))
                found.duplicates = int((counts == 0).sum()), int(counts.max())
        except (AtollError, ValueError) as error:
            found.columns = [one for one in found.columns if one.name != name]
            found.columns.append(ColumnFacts(name, f"damaged: {error}"))


def _absent(store: Store, folder: str, name: str, entries: list[FileEntry]) -> Iterable[str]:
    """Files that a column names and that are not there."""
    there = {store.name(key) for key in store.list(folder)} if entries else set()
    for entry in entries:
        key = join(folder, entry.path)
        # Files of a union lie elsewhere.
        if store.name(key) not in there and not (".." in entry.path and store.exists(key)):
            yield f"column {name!r}: {store.name(key)} is missing"


def _made_by(producer: dict[str, Any]) -> str:
    """A producer in words: its name and what is short of the rest."""
    plain = {key: value for key, value in producer.items() if isinstance(value, str | int | float | bool)}
    name = str(plain.pop("name", "not named"))
    rest = ", ".join(f"{key} {str(value)[:12]}" for key, value in sorted(plain.items()))
    return f"{name} ({rest})"[:160] if rest else name


def _look_at_rows(found: Contents, progress: Progress | None) -> None:
    dataset, hashes, frequent = found.dataset, [np.empty(0, np.uint64)], Counter[str]()
    licence = str(dataset.manifest.source.get("licence", "not stated"))
    labels: set[int] = set()
    for shard in range(len(dataset.shards)):
        try:
            table = dataset.shard_table(shard)
            captions = table["caption"].cast(pa.string()).fill_null("").to_pylist()
            labels.update(table["label"].drop_null().unique().to_pylist())
            _measure(found, table)
        except (AtollError, KeyError, pa.ArrowException) as error:
            found.problems.append(f"shard {shard}: {error}")
            continue
        hashes.append(np.array([_hash(text) for text in captions], np.uint64))
        frequent.update(captions)
        if len(frequent) > 2 * COUNTED:
            frequent = Counter(dict(frequent.most_common(COUNTED)))
        for name, tally, usual in (("licence", found.licences, licence), ("source", found.sources, "")):
            if usual or name in table.column_names:
                values = table[name].to_pylist() if name in table.column_names else [usual] * len(table)
                tally.update(value or "not stated" for value in values)
        if progress is not None:
            progress(shard + 1, len(dataset.shards))
    found.labels = len(labels)
    values, counts = np.unique(np.concatenate(hashes), return_counts=True)
    found.distinct = len(values)
    exact = [(text, _count(values, counts, _hash(text))) for text, _ in frequent.most_common(200)]
    found.captions = sorted(exact, key=lambda pair: (-pair[1], pair[0]))[:12]


def _measure(found: Contents, table: pa.Table) -> None:
    width, height = (table[name].fill_null(0).to_numpy() for name in ("width", "height"))
    found.widths.add(width)
    found.heights.add(height)
    found.aspects.add(np.round(width / np.maximum(height, 1), 2))
    words = pc.list_value_length(pc.utf8_split_whitespace(table["caption"].fill_null("")))
    found.words.add(words.to_numpy())


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _count(values: NDArray[np.uint64], counts: NDArray[np.int64], value: int) -> int:
    return int(counts[np.searchsorted(values, np.uint64(value))])


def lines(found: Contents) -> list[str]:
    """What a data set holds, in lines."""
    manifest, dataset = found.dataset.manifest, found.dataset
    pixels = f", {manifest.size} px {manifest.mode}" if manifest.size else ""
    source = shorten(str(manifest.source.get("name")).split(", "))
    told = [f"{dataset.store.location}: {len(dataset):,} rows of {source}{pixels}"]
    if found.splits:
        parts = [f"{count:,} {name}" for name, count in found.splits.items() if count]
        told.append(f"  {', '.join(parts)}")
    if found.duplicates:
        told.append(
            f"  {found.duplicates[0]:,} show what another shows; one stands for {found.duplicates[1]:,}"
        )
    try:
        buckets = dataset.buckets
    except AtollError:
        buckets = None  # the problems below name the file
    if buckets is not None:
        sizes, counts = np.unique(buckets, axis=0, return_counts=True)
        pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
        told += [f"  {count:,} of {width}x{height} px" for (width, height), count in pairs]
    told += [f"  {count:,} left out: {name} (rejects.jsonl)" for name, count in manifest.rejects.items()]
    if found.words:
        told += _of_rows(found)
    for one in found.columns:
        by = f", {size(one.bytes)}, by {one.producer}" if one.bytes is not None else ""
        told.append(f"  column {one.name}: {one.form}{by}")
    told += [f"  problem: {problem}" for problem in found.problems]
    return told


def _plain(text: str) -> str:
    """A text of unknown origin, which may not move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)[:80]


def _of_rows(found: Contents) -> list[str]:
    """What the rows are, in lines."""
    total, told = sum(found.widths.values()), []
    for name, counts in (("licence", found.licences), ("source", found.sources)):
        shown = [f"{_plain(value)} {count:,}" for value, count in counts.most_common(12)]
        more = f" and {len(counts) - 12} more" if len(counts) > 12 else ""
        told += [f"  {name}: {', '.join(shown)}{more}"] if counts else []
    tallies = {"width": found.widths, "height": found.heights, "aspect": found.aspects}
    sizes = [
        f"{name} {min(one):g} to {max(one):g}, median {one.quantile(0.5):g}" for name, one in tallies.items()
    ]
    told.append(f"  source pictures: {'; '.join(sizes)}")
    words = found.words
    told.append(
        f"  captions: {found.distinct:,} distinct of {total:,}; {min(words):g} to {max(words):g} words,"
        f" median {words.quantile(0.5):g}"
    )
    told += [f"  class labels: {found.labels:,}"] if found.labels else []
    told += [f"    {count:,} times {text[:80]!r}" for text, count in found.captions[:5] if count > 1]
    kinds = [f"{name} {size(found.bytes(kind))}" for kind, name in (("rows", "rows"), ("images", "pictures"))]
    return [*told, f"  bytes: {', '.join(kinds)}"]
