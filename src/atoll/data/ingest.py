"""Ingest: any source becomes a data set of pictures of one size, or of a few, shard by shard, restartable.

Shard N holds what is usable of the positions `N * shard_rows` up to `(N + 1) * shard_rows` of the source,
so a shard depends on nothing but those. Until the manifest is written, `ingest.json` names what is being
ingested, and `rows/NNNNN.json` follows every finished shard.
"""

import io
import json
import math
import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress, pairwise
from posixpath import join
from typing import Any

import numpy as np
import pyarrow as pa

from atoll.base.errors import DataError
from atoll.base.hashing import digest, sha256
from atoll.base.pictures import png
from atoll.base.rng import seed_of
from atoll.base.text import Size, many
from atoll.data.dataset import BUCKETS, MANIFEST, REJECTS, DataSet, row_schema, short_hashes, to_parquet
from atoll.data.decode import BadImageError, cropped, decode, is_gray, merged, place, square, upright_size
from atoll.data.formats import IngestNote, Manifest, Mode, Reject, Shard, ShardNote, clean
from atoll.data.job import ShardedJob
from atoll.data.settings import IngestConfig
from atoll.data.sources.record import Record, Source
from atoll.store.manifest import named_entry
from atoll.store.store import Absent, Conflict, Store

_NOTE = "ingest.json"
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,94}")  # with ".json" 100 characters, the most USTAR holds
_OWN = re.compile(r"(rows|images)/\d{5,}\.(json|parquet|tar)")


class IngestJob(ShardedJob[DataSet]):
    """A data set on its way.

    `DataError` where no row is usable, the rows have one group only, or the folder holds something else: a
    data set of another source or other settings is never overwritten.

    A shard knows of no other, so ids that repeat across shards are settled when all are there: of the rows of
    one id the first is kept, and the shards of the others are written again without them.
    """

    def __init__(self, source: Source, store: Store, prefix: str, config: IngestConfig) -> None:
        store.sweep(prefix)
        self.about = source.describe()
        self.identity = digest({"source": self.about["fingerprint"], "config": config.model_dump()})
        self.source, self.config = source, config
        count = -(-len(source) // config.shard_rows)
        super().__init__(store, prefix, join(prefix, "rows"), [self.identity] * count, "ingest")
        kept = BUCKETS if config.buckets is not None else ()
        self.schema = row_schema([*self.about.get("columns", []), *kept])
        self.mode: Mode = "rgb"
        self.buckets: list[Size] = []

    def begin(self) -> None:
        """Take possession of the folder, and find mode and sizes of the pictures."""
        key, where = join(self.folder, _NOTE), self.store.name(self.folder)
        if not self.store.exists(key):
            # The note again, since another task may have begun meanwhile.
            known = (join(self.folder, MANIFEST), key)
            if self.store.list(self.folder) and not any(map(self.store.exists, known)):
                raise DataError(f"{where} is not empty and holds no data set", "choose an empty folder")
            mode = self.config.mode if self.config.mode != "auto" else _find_mode(self.source)
            buckets = list[Size]()
            if self.config.buckets is not None:
                counts, sizes = Counter[Size](), self.config.sizes()
                # The sizes that hold enough of the pictures, by the heads of all files: chosen once and
                # noted, so that shards which come later, or from other processes, have the same.
                for record in self.source.records(0, len(self.source)):
                    if isinstance(record, Record):
                        image = record.image
                        try:
                            size = upright_size(image) if isinstance(image, bytes) else image.size
                            place(size, sizes, self.config.buckets)
                        except BadImageError:
                            continue  # rejected, with its reason, when its shard is written
                        counts[size] += 1
                buckets = merged(counts, sizes, self.config.buckets.min_rows)
            first = IngestNote(identity=self.identity, mode=mode, buckets=buckets)
            with suppress(Conflict):  # the processes of several parts begin at the same time
                self.store.create_json(key, first.to_json())
        note = IngestNote.read(self.store, key)
        if note.identity != self.identity:
            what = f"{where} holds an unfinished ingest of another source or with other settings"
            raise DataError(what, "finish it with those, or remove the folder")
        self.mode, self.buckets = note.mode, note.buckets

    def result(self) -> DataSet | None:
        return DataSet.find(self.store, self.folder, self.identity, "another source or with other settings")

    def is_current(self) -> bool:
        try:
            return IngestNote.read(self.store, join(self.folder, _NOTE)).identity == self.identity
        except Absent:
            return False

    def make_shard(self, number: int, earlier: ShardNote | None) -> tuple[dict[str, bytes], ShardNote]:
        known = list(earlier.duplicate_ids) if earlier else []
        note = ShardNote(identity=self.identity, rows=0, files={}, duplicate_ids=known)
        rows, ids, buffer = list[dict[str, Any]](), set(note.duplicate_ids), io.BytesIO()
        start = number * self.config.shard_rows
        stop = min(start + self.config.shard_rows, len(self.source))
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for item in self.source.records(start, stop):
                row = item if isinstance(item, Reject) else self._convert(item, ids, note, tar)
                if isinstance(row, Reject):
                    note.rejects.append(row)
                else:
                    rows.append(row)
        if not rows:
            return {}, note
        images, table = f"images/{number:05d}.tar", f"rows/{number:05d}.parquet"
        blobs = {images: buffer.getvalue(), table: to_parquet(pa.Table.from_pylist(rows, self.schema))}
        files = {"images": named_entry(images, blobs[images]), "rows": named_entry(table, blobs[table])}
        return blobs, note.model_copy(update={"rows": len(rows), "files": files})

    def _convert(
        self, record: Record, ids: set[str], note: ShardNote, tar: tarfile.TarFile
    ) -> dict[str, Any] | Reject:
        """Add one record to the shard; its row, or why there is none."""
        name = safe_id(record.id)
        texts = record.captions or (record.caption,)
        if any(clean(text) != text for text in texts):
            return Reject(record.key, "caption is not UTF-8")
        # Without control characters, but for tabs and newlines.
        cleaned = [re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", " ", text).strip() for text in texts]
        captions = [text for text in cleaned if text]
        if not captions and not record.uncaptioned:
            return Reject(record.key, "empty caption")
        captions = captions or [""]
        if name in ids:
            return Reject(record.key, "duplicate id", record.id)
        size, mode, gray = self.config.size, self.config.mode, self.mode == "gray"
        try:
            data = record.image
            image = decode(data) if isinstance(data, bytes) else data
            if self.config.buckets is None:
                where, small = None, square(image, size)
            else:
                where = place(image.size, self.buckets, self.config.buckets)
                small = cropped(image, where)
            if gray and mode == "auto" and not is_gray(small):
                raise BadImageError("colour in a gray data set", "set data.ingest.mode to rgb or gray")
        except BadImageError as error:
            # An earlier shard may have this id: then that is the reason, whatever the picture is.
            note.rejected_ids.append(name)
            return Reject(record.key, error.reason, error.detail)
        ids.add(name)
        if not isinstance(data, bytes):  # drawn by the source: its pixels stand for the file
            data = f"{image.mode} {image.width}x{image.height} ".encode() + image.tobytes()
        source_hash = sha256(data)
        fields: dict[str, Any] = {
            "id": name,
            "label": record.label,
            "width": image.width,
            "height": image.height,
            "key": clean(record.key),
            "sha256": source_hash,
            "group": clean(record.group) if record.group is not None else source_hash,
        }
        if where is not None:
            fields |= dict(zip(BUCKETS, (*where.bucket, where.left, where.top), strict=True))
        optional = {
            "source": record.source,
            "licence": None if record.licence is None else clean(record.licence),
            "captions": captions,
        }
        fields |= {column: value for column, value in optional.items() if column in self.schema.names}
        about = json.dumps(fields, ensure_ascii=False, sort_keys=True)
        picture = png(small.convert("L" if gray else "RGB"))
        for ending, data in (("png", picture), ("txt", captions[0].encode()), ("json", about.encode())):
            # Without owner and time: the same pictures give the same bytes, whoever wrote them, and when.
            info = tarfile.TarInfo(f"{name}.{ending}")
            info.size, info.mode, info.mtime = len(data), 0o644, 0
            tar.addfile(info, io.BytesIO(data))
        return {**fields, "caption": captions[0]}

    def combine(self, notes: list[ShardNote]) -> DataSet:
        """Settle the ids, write the rejects, the split and the manifest."""
        self._reject_repeated_ids(notes)
        rejects = [reject for note in notes for reject in note.rejects]
        filled = [note for note in notes if note.rows]
        if not filled:
            # As it was before, so that the command can be run again with other settings.
            self.store.delete(*self.store.list(self.folder))
            what = f"no usable rows in {self.about['name']} ({_reasons(rejects)})"
            raise DataError(what, "mend the source")
        lines = "".join(json.dumps(reject.to_json(), ensure_ascii=False) + "\n" for reject in rejects)
        # Before the manifest, which says that all is there.
        self.store.put(join(self.folder, REJECTS), lines.encode())
        counts = Counter(reject.reason for reject in rejects)
        dataset = self._dataset(filled, source=self.about, rejects=dict(sorted(counts.items())))
        try:
            write_split(dataset, self.config)
        except DataError as error:
            self.store.delete(*self.store.list(self.folder))
            if not rejects:
                raise
            what = f"{error.what}; {len(rejects)} of {len(self.source)} were rejected ({_reasons(rejects)})"
            raise DataError(what, f"{error.fix}, or mend the source") from None
        with suppress(Conflict):  # the same command ran twice, and the other one has finished
            dataset.finish()
        return dataset

    def _reject_repeated_ids(self, notes: list[ShardNote]) -> None:
        """Write those shards again that hold ids of earlier ones."""
        # All ids of a large source are too many for memory. Hashes of 8 bytes a row find those that may
        # repeat; only the shards that hold such a hash are then read, and their ids compared as they are.
        hashes = [short_hashes([*self._ids(note), *note.rejected_ids]) for note in notes]
        values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]), return_counts=True)
        repeated, seen = values[counts > 1], set[str]()
        for number, note in enumerate(notes):
            suspect = np.isin(hashes[number], repeated)
            if not suspect.any():
                continue
            ids = self._ids(note)
            names = [*compress([*ids, *note.rejected_ids], suspect)]
            if known := sorted(seen.intersection(names)):
                # First the note, with the files of before: should this process end while it writes the new
                # ones, the next finds files that are not those of the note, and knows what to leave out.
                planned = note.model_copy(update={"duplicate_ids": known})
                self.store.put_json(self.key(number), planned.to_json())
                files, notes[number] = self.make_shard(number, planned)
                for path, data in files.items():
                    self.store.put(join(self.folder, path), data)
                self.store.put_json(self.key(number), notes[number].to_json())
            seen.update({*names}.intersection(ids))

    def _ids(self, note: ShardNote) -> list[str]:
        return self._dataset([note]).ids if note.rows else []

    def _dataset(self, notes: list[ShardNote], **fields: Any) -> DataSet:
        manifest = Manifest(
            **{"source": {}, **fields},
            identity=self.identity,
            config=self.config.model_dump(),
            size=self.config.size,
            mode=self.mode,
            rows=sum(note.rows for note in notes),
            shards=[Shard(rows=note.rows, files=note.files) for note in notes],
        )
        return DataSet(self.store, self.folder, manifest)

    def tidy(self, result: DataSet) -> None:
        """Remove notes, and files of shards that were written again and are empty now."""
        if self.store.exists(join(self.folder, _NOTE)):  # first: then nobody believes that the folder is his
            self.store.delete(join(self.folder, _NOTE))
        named = {entry.path for shard in result.shards for entry in shard.files.values()}
        keys = [key for part in ("rows", "images") for key in self.store.list(join(self.folder, part))]
        paths = [posixpath.relpath(key, self.folder or ".") for key in keys]
        self.store.delete(
            *(join(self.folder, path) for path in paths if _OWN.fullmatch(path) and path not in named)
        )


def safe_id(text: str) -> str:
    """An id that can name a file or a tar member: the text itself if it can, else its letters and a hash.

    WebDataset ends a member's key at the first dot, so an id has none.
    """
    if _SAFE.fullmatch(text):
        return text
    readable = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:64]
    return f"{readable}-{sha256(text.encode('utf-8', 'surrogatepass'))[:16]}".lstrip("-")


def write_split(dataset: DataSet, config: IngestConfig, groups: Sequence[str] | None = None) -> None:
    """Write the column `split`, int8: 0 train, 1 held out, 2 test.

    A group is kept from training if a hash of the seed and its name is small, so its rows stay together, and
    neither the order of rows nor other groups count; those of the smallest hashes are the test rows. So the
    training rows depend on `heldout + test` alone. Where that leaves no rows to train on, or none beside
    them, the group nearest to the bound changes sides.

    `groups` are names `(rows,)`, those of the column `group` by default; one alone is a `DataError`.
    """
    seed, share = config.seed, config.heldout + config.test
    places = np.empty(len(dataset))  # of the groups in [0, 1)
    for shard, (start, end) in enumerate(pairwise(dataset.bounds.tolist())):
        # A shard's names at a time: they take much more than these numbers.
        if groups is None:
            names = dataset.shard_table(shard, ["group"]).column("group").to_pylist()
        else:
            names = groups[start:end]
        places[start:end] = [seed_of(seed, f"split/{name}") / 2**63 for name in names]
    low, high = float(places.min()), float(places.max())
    bound = share
    if share > 0:
        if low == high:
            group = "give more images" if len(dataset) == 1 else "choose another data.ingest.group"
            what = f"{many(len(dataset), 'row')} of one group cannot be both held out and trained on"
            raise DataError(what, f"{group}, or set data.ingest.heldout and data.ingest.test to 0")
        # Both sides need a group: the bound moves just over the lowest, or down to the highest.
        bound = min(max(share, math.nextafter(low, 1.0)), high)
    # Test rows are the lowest of the held-out ones: so `heldout` may be cut up later, and what was trained on
    # stays trained on.
    test = min(config.test, bound) if config.heldout else bound
    if config.heldout and config.test and len(below := np.unique(places[places < bound])) > 1:
        test = min(max(test, math.nextafter(below[0], 1.0)), below[-1])  # each of the two gets a group
    sides = np.add(places < bound, places < test, dtype=np.int8)

    settings: dict[str, Any] = {"seed": seed, "heldout": config.heldout, "bound": bound}
    settings |= {"test": config.test} if config.test else {}
    if groups is not None:
        settings["rows"] = digest(list(groups))
    dataset.write_values("split", {"name": "split", "hash": digest(settings), **settings}, sides)


def _find_mode(source: Source) -> Mode:
    """`gray` if the readable pictures from four places of the source have no colour."""
    mode: Mode = "rgb"
    # From all over: sources are often sorted, and gray scans come first or last.
    for start in sorted({len(source) * part // 4 for part in range(4)}):
        for item in source.records(start, min(start + 16, len(source))):
            try:
                if isinstance(item, Record):
                    image = item.image
                    if not is_gray(decode(image) if isinstance(image, bytes) else image):
                        return "rgb"
                    mode = "gray"
            except BadImageError:
                continue
    return mode


def _reasons(rejects: list[Reject]) -> str:
    """How many rows were rejected for which reason, and the first of them."""
    if not rejects:
        return "it is empty"
    counts = Counter(reject.reason for reject in rejects).most_common()
    reasons = ", ".join(f"{reason}: {count}" for reason, count in counts)
    return f"{reasons}; the first: {': '.join(filter(None, (rejects[0].key, rejects[0].detail)))}"
