"""A data set on disk: shards of rows, pictures and columns under one manifest that is written last."""

import hashlib
import io
import tarfile
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from posixpath import join
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor

from atoll.base.errors import AtollError, DataError, first_line
from atoll.base.hashing import digest, digest_strings
from atoll.data.columns import Column, Compute, Extras, Kind, Rows, by_shard
from atoll.data.formats import ColumnMeta, Manifest
from atoll.data.job import ColumnJob, remove_others
from atoll.store.manifest import check_file, read_file
from atoll.store.store import Store

AHEAD = 64  # pictures that are decoded ahead: a batch or two, and at 1024 px 200 MB
MANIFEST, REJECTS = "manifest.json", "rejects.jsonl"
ROWS = pa.schema(
    [
        ("id", pa.string()),
        ("caption", pa.string()),
        ("label", pa.int64()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("key", pa.string()),
        ("sha256", pa.string()),
        ("group", pa.string()),
    ]
)
"""Columns of `rows/*.parquet`; width and height are those of the source picture."""
BUCKETS = ("bucket_width", "bucket_height", "crop_left", "crop_top")
"""Columns of rows that keep their aspect."""
OPTIONAL = pa.schema(
    [
        ("source", pa.string()),
        ("licence", pa.string()),
        ("captions", pa.list_(pa.string())),
        *((name, pa.int32()) for name in BUCKETS),
    ]
)
"""Columns that follow them where source or settings ask for them: which of several sources a row comes from,
its licence, and all its captions, of which the first is `caption`; of a row that keeps its aspect the width
and height of its picture, and where in the resized source picture it begins, all in pixels."""
SPLITS = ("train", "heldout", "test")
"""Names of the values 0, 1 and 2 of the column `split`."""
CAPTION = "caption"
"""Column of captions in place of those of the source: UTF-8, ragged."""
WEIGHTS = "weights"
"""Column of what rows count."""


class ImageReader:
    """The pictures of one shard by their number; the file is opened for each access, never held open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with tarfile.open(path, "r:") as tar:
                members = [m for m in tar if m.isfile() and m.name.endswith(".png")]
            self.places = np.array([(m.offset_data, m.size) for m in members], dtype=np.int64)
        except (tarfile.TarError, OSError, ValueError, OverflowError):
            raise DataError(f"{path} is not a readable tar file", "write the data set again") from None

    def read(self, index: int) -> Image.Image:
        """One picture, decoded."""
        offset, size = self.places[index].tolist()
        # Opened anew: workers that are forked would share one file and its position.
        with self.path.open("rb") as file:
            file.seek(offset)
            image = Image.open(io.BytesIO(file.read(size)), formats=["PNG"])
        image.load()
        return image


class DataSet:
    """Rows with captions, pictures and columns, read-only but for new columns."""

    def __init__(self, store: Store, prefix: str, manifest: Manifest) -> None:
        self.store, self.prefix, self.manifest = store, prefix, manifest
        self.shards = manifest.shards
        self.bounds: Rows = np.cumsum([0, *(shard.rows for shard in self.shards)], dtype=np.int64)
        self._columns: dict[str, Column] = {}
        self._readers: dict[int, ImageReader] = {}

    @classmethod
    def open(cls, store: Store, prefix: str = "") -> "DataSet":
        """Open a finished data set; `DataError` if there is none, or it cannot be read."""
        key = join(prefix, MANIFEST)
        if not store.exists(key):
            what = f"{store.name(prefix)} is not a data set (no {MANIFEST})"
            raise DataError(what, "run `atoll data ingest`")
        manifest = Manifest.read(store, key)
        if sum(shard.rows for shard in manifest.shards) != manifest.rows:
            fix = "it is damaged: write the data set again"
            raise DataError(f"{store.name(key)} contradicts itself", fix)
        return cls(store, prefix, manifest)

    @classmethod
    def find(cls, store: Store, prefix: str, identity: str, what: str) -> "DataSet | None":
        """The finished data set of this identity, if it is there.

        `DataError` where the folder holds another one, made from `what`, which is never overwritten.
        """
        if not store.exists(join(prefix, MANIFEST)):
            return None
        dataset = cls.open(store, prefix)
        if dataset.manifest.identity != identity:
            fix = "choose another folder, or remove this one"
            raise DataError(f"{store.name(prefix)} holds a data set made from {what}", fix)
        return dataset

    def finish(self) -> "DataSet":
        """Declare it complete: what has no manifest does not exist."""
        self.manifest = self.manifest.model_copy(update={"ids": self.id_hash})
        self.store.create_json(join(self.prefix, MANIFEST), self.manifest.to_json())
        return self

    def __len__(self) -> int:
        return self.manifest.rows

    def __repr__(self) -> str:
        return f"DataSet({str(self.store.name(self.prefix))!r}, {len(self)} rows)"

    def table(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Columns of all rows, all of them by default; every file is verified."""
        return pa.concat_tables([self.shard_table(i, columns) for i in range(len(self.shards))])

    def shard_table(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Columns of a shard's rows, with the captions of `atoll data caption` where there are any."""
        table = self.source_table(shard, columns)
        if CAPTION not in table.column_names or not self.is_written(CAPTION):
            return table
        start, end = self.bounds[shard : shard + 2].tolist()
        values, mask = self.column(CAPTION).read_ragged(np.arange(start, end), packed=True)
        text, ends = values.numpy().tobytes(), np.cumsum(mask.sum(1).numpy()).tolist()
        captions = [text[low:high].decode() for low, high in pairwise([0, *ends])]
        return table.set_column(table.column_names.index(CAPTION), CAPTION, pa.array(captions, pa.string()))

    def source_table(self, shard: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Columns of a shard's rows as they were ingested."""
        data = read_file(self.store, self.prefix, self.shards[shard].files["rows"])
        try:
            return read_parquet(data, columns)
        except (pa.ArrowException, OSError, ValueError, KeyError) as error:
            name = self.store.name(join(self.prefix, self.shards[shard].files["rows"].path))
            fix = "it is damaged: write the data set again"
            raise DataError(f"{name} is not readable parquet ({first_line(error)[:200]})", fix) from None

    def take(self, rows: ArrayLike) -> pa.Table:
        """Rows by number, in order; only the shards that hold them are read, each once."""
        parts = list(by_shard(self.bounds, np.asarray(rows, dtype=np.int64)))
        table = pa.concat_tables([self.shard_table(shard).take(pa.array(local)) for shard, _, local in parts])
        positions = np.concatenate([where for _, where, _ in parts])
        # Ascending rows, such as an island's, lie in order: their texts may be more than Arrow moves at once.
        return table if (np.diff(positions) > 0).all() else table.take(pa.array(np.argsort(positions)))

    @cached_property
    def ids(self) -> list[str]:
        """Ids of all rows in order."""
        ids: list[str] = self.table(["id"]).column("id").to_pylist()
        return ids

    @cached_property
    def id_hash(self) -> str:
        """Digest of the ids in order: what the order of training samples depends on."""
        shards = (self.shard_table(shard, ["id"]) for shard in range(len(self.shards)))
        return self.manifest.ids or digest_strings(chain.from_iterable(t["id"].to_pylist() for t in shards))

    @cached_property
    def labels(self) -> Tensor:
        """Class labels `(rows,)` int64; `DataError` where a row has none."""
        column = self.table(["label"]).column("label")
        if column.null_count:
            fix = "set condition to text or none, or ingest with data.ingest.label"
            raise DataError(f"{column.null_count} rows have no label", fix)
        return torch.from_numpy(column.to_numpy().astype(np.int64))

    @cached_property
    def buckets(self) -> Rows | None:
        """Width and height of every row's picture in pixels `(rows, 2)`; None where all are one square."""
        names = ["bucket_width", "bucket_height"]
        if not set(names) <= set(self.shard_table(0).column_names):
            return None
        table = self.table(names)
        return np.stack([table.column(name).to_numpy() for name in names], axis=1).astype(np.int64)

    @property
    def content(self) -> str:
        """Digest of the content of all rows, wherever their files lie."""
        return digest([shard.content() for shard in self.shards])

    def image(self, row: int) -> Image.Image:
        """The picture of a row, RGB or L; `DataError` where the data set has no pictures."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        shard = int(np.searchsorted(self.bounds, row, side="right")) - 1
        if shard not in self._readers:
            entry = self.shards[shard].files.get("images")
            if entry is None:
                fix = "use the one it was made from"
                raise DataError(f"{self.store.name(self.prefix)} has no pictures", fix)
            reader = ImageReader(check_file(self.store, self.prefix, entry))
            # Both files may be sound and not belong together: every picture would have another one's row.
            if len(reader.places) != self.shards[shard].rows:
                what = f"{reader.path} holds {len(reader.places)} pictures for {self.shards[shard].rows} rows"
                raise DataError(what, "write the data set again")
            self._readers[shard] = reader
        return self._readers[shard].read(row - int(self.bounds[shard]))

    def iter_images(
        self,
        shard: int,
        change: Callable[[Image.Image], Image.Image] = lambda picture: picture,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[Image.Image]:
        """The pictures of a shard in order, or of some numbers in it; threads read and change them ahead."""
        first, end = self.bounds[shard : shard + 2].tolist()
        self.image(first)  # one thread opens the file
        with ThreadPoolExecutor(torch.get_num_threads(), "decode") as pool:
            ahead = deque[Future[Image.Image]]()
            for number in range(end - first) if numbers is None else numbers:
                ahead.append(pool.submit(lambda row: change(self.image(row)), first + number))
                if len(ahead) > AHEAD:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)

    def is_written(self, name: str) -> bool:
        """Whether there is a complete column of this name; one that cannot be read counts too."""
        return self.store.exists(join(self.prefix, "columns", name, "column.json"))

    def has_column(self, name: str) -> bool:
        """Whether there is a complete column of this name, made for these rows."""
        try:
            self.column(name)
        except AtollError:
            return False
        return True

    def column(self, name: str) -> Column:
        """A complete column; `DataError` if there is none, or it was made for other rows or pictures."""
        if name not in self._columns:
            folder, place = join(self.prefix, "columns", name), self.store.name(self.prefix)
            if not self.is_written(name):
                raise DataError(f"{place} has no column {name!r}", "run the stage that writes it")
            meta = ColumnMeta.read(self.store, f"{folder}/column.json")
            if meta.content != [shard.content() for shard in self.shards]:
                what = f"column {name!r} in {place} was made for other rows"
                raise DataError(what, "run the stage that writes it again")
            self._columns[name] = Column(self.store, folder, meta, self.bounds)
        return self._columns[name]

    def column_names(self) -> list[str]:
        """Names of all complete columns."""
        folder = join(self.prefix, "columns")
        keys = [key.removeprefix(folder + "/") for key in self.store.list(folder)]
        return [key.removesuffix("/column.json") for key in keys if key.endswith("/column.json")]

    def producers(self, text: str = "text") -> tuple[dict[str, Any], dict[str, Any] | None]:
        """What made the latents, and what made this column of captions, where it is there."""
        by = self.column(text).meta.producer if self.has_column(text) else None
        return self.column("latents").meta.producer, by

    def forget(self, name: str) -> None:
        """Let a column be read anew, since it is about to be written."""
        self._columns.pop(name, None)
        # The cached properties would go on with what was there before.
        self.__dict__.pop({"split": "sides", WEIGHTS: "weights"}.get(name, ""), None)

    def write_column(
        self,
        name: str,
        producer: dict[str, Any],
        compute: Compute,
        extras: Extras | None = None,
        kind: Kind = "fixed",
    ) -> Column:
        """Compute a column, or find it; see `ColumnJob`."""
        ColumnJob(self, name, producer, compute, extras, kind).run()
        return self.column(name)

    def write_values(self, name: str, producer: dict[str, Any], values: NDArray[Any]) -> Column:
        """Write a column of values that are known, one of each row `(rows, *shape)`; see `write_column`."""
        parts = np.split(values, self.bounds[1:-1])
        return self.write_column(name, producer, lambda shard: {"values": torch.tensor(parts[shard])})

    def tidy(self) -> None:
        """Remove what a killed process left beside complete columns; a stage skips a column that is there."""
        self.store.sweep(self.prefix)
        for column in map(self.column, self.column_names()):
            remove_others(self.store, column.folder, column.meta)

    def localise(self, columns: Sequence[str], check: bool = True) -> None:
        """Fetch every file of some columns, of a remote store, and `check` it: to be called before forking.

        Forked workers share no connection with the parent, so they may only read what lies here already.
        """
        for name in columns:
            self.column(name).localise(check)

    def split(self, name: str) -> Rows:
        """Row numbers of `train`, `heldout` or `test` that count, ascending."""
        if name not in SPLITS:
            raise DataError(f"there is no split {name!r}", f"use one of {', '.join(SPLITS)}")
        # Weights may have been set since: what counts is asked every time.
        return np.flatnonzero((self.sides == SPLITS.index(name)) & (self.weights > 0)).astype(np.int64)

    @cached_property
    def sides(self) -> NDArray[np.int8]:
        """The split of every row, by its number in `SPLITS` `(rows,)`."""
        sides: NDArray[np.int8] = self.column("split").read(np.arange(len(self))).numpy()
        return sides

    @cached_property
    def weights(self) -> NDArray[np.float32]:
        """What every row counts `(rows,)`, 1 where the data set has no weights; 0 is out."""
        # Not `has_column`: with a column that cannot be read, rows that opted out would count again.
        if not self.is_written(WEIGHTS):
            return np.ones(len(self), dtype=np.float32)
        weights: NDArray[np.float32] = self.column(WEIGHTS).read(np.arange(len(self))).float().numpy()
        if weights.ndim != 1 or not (np.isfinite(weights).all() and (weights >= 0).all()):
            what = f"column {WEIGHTS!r} of {self.store.location} holds a weight that is negative or no number"
            raise DataError(what, "write it again: atoll concepts rebalance")
        return weights


def short_hashes(texts: Sequence[str]) -> NDArray[np.uint64]:
    """Hashes of 8 bytes `(n,)`; two texts may share one."""
    hashes = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(b"".join(hashes), dtype="<u8")


def row_schema(names: Collection[str]) -> pa.Schema:
    """`ROWS` and those of `OPTIONAL` that are named."""
    return pa.schema([*ROWS, *(field for field in OPTIONAL if field.name in names)])


def read_parquet(data: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """The table of a parquet file's bytes.

    They are copied into memory of Arrow's own: its threads may still hold the bytes when Python takes itself
    down, and giving back what is Python's then aborts the process (apache/arrow#34314).
    """
    sink = pa.BufferOutputStream()
    sink.write(data)
    return pq.read_table(pa.BufferReader(sink.getvalue()), columns=None if columns is None else list(columns))


def to_parquet(table: pa.Table) -> bytes:
    """Parquet bytes of rows; the same rows give the same bytes under one version of pyarrow."""
    sink = io.BytesIO()
    # One chunk, in the schema's own order: how the rows were gathered must not show in the bytes.
    pq.write_table(table.cast(row_schema(table.column_names)).combine_chunks(), sink, compression="zstd")
    return sink.getvalue()
