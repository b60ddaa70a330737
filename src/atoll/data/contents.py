"""What a data set holds, and whether that is what its manifest says; read shard by shard.

Damage is named, and the rest is still counted or checked.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from posixpath import join
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.base.console import Progress
from atoll.base.errors import AtollError, DataError
from atoll.base.text import printable, shorten, size
from atoll.data.columns import Column
from atoll.data.dataset import MANIFEST, SPLITS, DataSet, ImageReader, short_hashes
from atoll.data.formats import IngestNote, Manifest, Shard, ShardNote
from atoll.data.weights import DUPLICATES
from atoll.store.manifest import check_file
from atoll.store.store import Store

COUNTED = 20_000
"""Captions that are looked at as the most frequent; how often these occur is exact."""


class Histogram(Counter[float]):
    """How often numbers occur."""

    def quantile(self, share: float) -> float:
        """The number that this share of all lies below or at."""
        values = sorted(self)
        below = np.cumsum([self[value] for value in values])
        return values[int(np.searchsorted(below, share * below[-1]))]

    @property
    def span(self) -> str:
        """The smallest, the largest and the median."""
        return f"{min(self):g} to {max(self):g}, median {self.quantile(0.5):g}"

    def add(self, values: Any) -> None:
        """Count numbers `(n,)`."""
        numbers, counts = np.unique(np.asarray(values), return_counts=True)
        self.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))


@dataclass
class ColumnFacts:
    """A column, in words."""

    name: str
    form: str  # type and shape of a row's value, or what is wrong with the column
    bytes: int | None = None  # of its files; None where it cannot be read
    producer: str = ""


@dataclass
class Contents:
    """What a data set holds."""

    dataset: DataSet  # of an unfinished ingest with the shards that there are
    finished: bool
    splits: dict[str, int] = field(default_factory=dict)  # rows by the split's name
    duplicates: tuple[int, int] | None = None  # rows left out, and most that one stands for
    columns: list[ColumnFacts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # what cannot be read
    captions: list[tuple[str, int]] = field(default_factory=list)  # the most frequent ones, and how often
    distinct: int = 0  # captions that differ
    words: Histogram = field(default_factory=Histogram)  # of a caption
    widths: Histogram = field(default_factory=Histogram)  # of the source pictures
    heights: Histogram = field(default_factory=Histogram)
    aspects: Histogram = field(default_factory=Histogram)  # width over height
    licences: Counter[str] = field(default_factory=Counter)  # rows by licence
    sources: Counter[str] = field(default_factory=Counter)
    labels: int = 0  # class labels that differ

    def bytes(self, kind: str) -> int:
        """Of all files of a kind: `rows` or `images`."""
        return sum(shard.files[kind].bytes for shard in self.dataset.shards if kind in shard.files)


def contents(store: Store, rows: bool = True) -> Contents:
    """Look at a data set, or at as much of it as an ingest has written; at every row too, if `rows`."""
    if store.exists(MANIFEST) or not store.exists("ingest.json"):
        summary = Contents(DataSet.open(store), finished=True)
    else:
        note = IngestNote.read(store, "ingest.json")
        keys = sorted(key for key in store.list("rows") if key.endswith(".json"))
        shards = [shard for shard in (ShardNote.read(store, key) for key in keys) if shard.rows]
        if not shards:
            raise DataError(f"the ingest into {store.location} has no shard yet", "wait for the first")
        rejects = Counter(reject.reason for shard in shards for reject in shard.rejects)
        manifest = Manifest(
            identity=note.identity,
            source={"name": "an unfinished ingest"},
            mode=note.mode,
            rejects=dict(sorted(rejects.items())),
            rows=sum(shard.rows for shard in shards),
            shards=[Shard(rows=shard.rows, files=shard.files) for shard in shards],
        )
        summary = Contents(DataSet(store, "", manifest), finished=False)
    for name in summary.dataset.column_names():
        try:
            _look_at_column(summary, name)
        except (AtollError, ValueError) as error:
            summary.columns = [column for column in summary.columns if column.name != name]
            summary.columns.append(ColumnFacts(name, f"damaged: {error}"))
    if rows:
        _look_at_rows(summary)
    return summary


def _look_at_column(summary: Contents, name: str) -> None:
    dataset = summary.dataset
    store, column = dataset.store, dataset.column(name)
    meta, folder = column.meta, column.folder
    entries = [*meta.shards, *meta.extras.values()]
    present = {store.name(key) for key in store.list(folder)}
    for entry in entries:
        # Files of a union lie elsewhere, so that the folder does not list them.
        key = join(folder, entry.path)
        if store.name(key) not in present and not (".." in entry.path and store.exists(key)):
            summary.problems.append(f"column {name!r}: {store.name(key)} is missing")

    # The producer in words: its name, and what is short of the rest.
    short = {k: v for k, v in meta.producer.items() if isinstance(v, str | int | float | bool) and v != ""}
    producer = str(short.pop("name", name))
    rest = ", ".join(f"{key} {str(value)[:12]}" for key, value in sorted(short.items()))
    producer = f"{producer} ({rest})"[:160] if short else producer
    form = f"{meta.dtype} {meta.kind} {'x'.join(map(str, meta.shape)) or 'scalar'}"
    # By path: islands' columns in a union may name one file of extras several times.
    total = sum({entry.path: entry.bytes for entry in entries}.values())
    summary.columns.append(ColumnFacts(name, form, total, producer))

    if name == "split":
        values, out = dataset.sides, dataset.weights == 0
        words = ("to train on", "held out", "to test")
        counts = np.bincount(values[~out], minlength=len(words)).tolist()
        summary.splits = {**dict(zip(words, counts, strict=True)), "of weight 0": int(out.sum())}
    if name == DUPLICATES:
        counts = np.bincount(column.read(np.arange(len(dataset))).numpy(), minlength=len(dataset))
        summary.duplicates = int((counts == 0).sum()), int(counts.max())


def _look_at_rows(summary: Contents) -> None:
    dataset, hashes, frequent = summary.dataset, [np.empty(0, np.uint64)], Counter[str]()
    licence = str(dataset.manifest.source.get("licence", "not stated"))
    labels: set[int] = set()
    progress = Progress("rows", len(dataset.shards), unit="shards")
    for shard in range(len(dataset.shards)):
        try:
            table = dataset.shard_table(shard)
            captions = table["caption"].cast(pa.string()).fill_null("")
            labels.update(table["label"].drop_null().unique().to_pylist())
            width, height = (table[name].fill_null(0).to_numpy() for name in ("width", "height"))
        except (AtollError, KeyError, pa.ArrowException) as error:
            summary.problems.append(f"shard {shard}: {error}")
            continue
        summary.widths.add(width)
        summary.heights.add(height)
        summary.aspects.add(np.round(width / np.maximum(height, 1), 2))
        summary.words.add(pc.list_value_length(pc.utf8_split_whitespace(captions)).to_numpy())
        # All captions of a large data set are too many for memory: 8 bytes of each count them exactly, and
        # the texts are kept of those that have been frequent so far.
        hashes.append(short_hashes(captions.to_pylist()))
        frequent.update(_counts(captions))
        if len(frequent) > 2 * COUNTED:
            frequent = Counter(dict(frequent.most_common(COUNTED)))
        for name, counter, usual in (("licence", summary.licences, licence), ("source", summary.sources, "")):
            if name in table.column_names:
                values = table[name].fill_null("not stated")
                counter.update(_counts(pc.if_else(pc.equal(values, ""), "not stated", values)))
            elif usual:
                counter[usual] += len(table)
        progress(shard + 1)
    summary.labels = len(labels)
    values, counts = np.unique(np.concatenate(hashes), return_counts=True)
    summary.distinct = len(values)
    texts = [text for text, _ in frequent.most_common(200)]
    # The texts' counts may have lost shards in which they were rare; the hashes have all.
    exact = counts[np.searchsorted(values, short_hashes(texts))].tolist()
    summary.captions = sorted(zip(texts, exact, strict=True), key=lambda pair: (-pair[1], pair[0]))[:12]


def _counts(texts: pa.ChunkedArray) -> dict[str, int]:
    counted = pc.value_counts(texts)
    return dict(zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True))


def lines(summary: Contents) -> list[str]:
    """What a data set holds, in lines."""
    dataset, manifest = summary.dataset, summary.dataset.manifest
    pixels = f", {manifest.size} px {manifest.mode}" if manifest.size else ""
    source = shorten(str(manifest.source.get("name")).split(", "))
    shown = [f"{dataset.store.location}: {len(dataset):,} rows of {source}{pixels}"]
    if summary.splits:
        shown.append("  " + ", ".join(f"{count:,} {name}" for name, count in summary.splits.items() if count))
    if summary.duplicates:
        rows, most = summary.duplicates
        shown.append(f"  {rows:,} show what another shows; one stands for {most:,}")
    with suppress(AtollError):  # the problems below name the file
        if dataset.buckets is not None:
            sizes, counts = np.unique(dataset.buckets, axis=0, return_counts=True)
            pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
            shown += [f"  {count:,} of {width}x{height} px" for (width, height), count in pairs]
    shown += [f"  {count:,} left out: {name} (rejects.jsonl)" for name, count in manifest.rejects.items()]
    if summary.words:
        for name, counter in (("licence", summary.licences), ("source", summary.sources)):
            values = [f"{printable(value)[:80]} {count:,}" for value, count in counter.most_common()]
            shown += [f"  {name}: {shorten(values, 12)}"] if counter else []
        widths, heights, aspects = summary.widths, summary.heights, summary.aspects
        shown += [
            f"  source pictures: width {widths.span}; height {heights.span}; aspect {aspects.span}",
            f"  captions: {summary.distinct:,} distinct of {sum(widths.values()):,}; words"
            f" {summary.words.span}",
        ]
        shown += [f"  class labels: {summary.labels:,}"] if summary.labels else []
        shown += [f"    {count:,} times {text[:80]!r}" for text, count in summary.captions[:5] if count > 1]
        shown.append(f"  bytes: rows {size(summary.bytes('rows'))}, pictures {size(summary.bytes('images'))}")
    for column in summary.columns:
        by = f", {size(column.bytes)}, by {column.producer}" if column.bytes is not None else ""
        shown.append(f"  column {column.name}: {column.form}{by}")
    return shown + [f"  problem: {problem}" for problem in summary.problems]


def audit(dataset: DataSet) -> list[str]:
    """Check everything; what is wrong, in words, or nothing.

    Sizes and hashes of all files, rows against pictures and columns, ids (unique), and groups (each in
    one split). Damaged files are named and the rest is still checked.
    """
    problems: list[str] = []
    ids: set[str] = set()
    side_of_group: dict[str, int] = {}
    columns: list[Column] = []

    @contextmanager
    def noted(where: str = "") -> Iterator[None]:
        try:
            yield
        except AtollError as error:
            problems.append(f"{where}{error}")

    for name in dataset.column_names():
        with noted():
            columns.append(dataset.column(name))
    for number, shard in enumerate(dataset.shards):
        for kind, entry in shard.files.items():
            with noted():
                path = check_file(dataset.store, dataset.prefix, entry)
                held = dataset.shard_table(number, ["id"]) if kind == "rows" else ImageReader(path).places
                if len(held) != shard.rows:
                    where = f"{dataset.store.name(dataset.prefix)}/{entry.path}"
                    problems.append(f"{where} holds {len(held)} rows; the manifest says {shard.rows}")
        for column in columns:
            with noted():
                values = column.tensors(number)["values"]
                if values.is_floating_point() and not bool(values.isfinite().all()):
                    problems.append(f"column {column.meta.name!r}, shard {number} holds NaN or infinity")
        with suppress(AtollError):  # a damaged file was named above
            for name in dataset.shard_table(number, ["id"]).column("id").to_pylist():
                if name in ids:
                    problems.append(f"the id {name!r} occurs more than once")
                ids.add(name)
            if "split" in (column.meta.name for column in columns):
                groups = dataset.shard_table(number, ["group"]).column("group").to_pylist()
                places = np.arange(dataset.bounds[number], dataset.bounds[number + 1])
                for group, side in zip(groups, dataset.column("split").read(places).tolist(), strict=True):
                    if side not in range(len(SPLITS)):
                        problems.append(f"a row of the group {group!r} has the split {side}")
                    elif side_of_group.setdefault(group, side) != side:
                        problems.append(f"the group {group!r} lies in two splits")
    for column in columns:
        for name, entry in column.meta.extras.items():
            with noted(f"column {column.meta.name!r}, {name}: "):
                check_file(column.store, column.folder, entry)
    return problems
