"""Ingest: any source becomes a data set of pictures of one size, or of a few, shard by shard, restartable.

Shard N holds what is usable of the positions `N * shard_rows` up to `(N + 1) * shard_rows` of the source,
so a shard depends on nothing but those. Until the manifest is written, `ingest.json` names what is being
ingested, and `rows/NNNNN.json` follows every finished shard.
"""

import hashlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from posixpath import join
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from atoll.base.errors import DataError
from atoll.base.hashing import digest, sha256
from atoll.base.pictures import png
from atoll.base.text import Size
from atoll.data.buckets import Placement, choose, cropped, place
from atoll.data.columns import Progress
from atoll.data.dataset import BUCKETS, MANIFEST, REJECTS, DataSet, row_schema, to_parquet
from atoll.data.decode import BadImageError, decode, is_gray, square
from atoll.data.formats import IngestNote, Manifest, Mode, Reject, Shard, ShardNote, clean
from atoll.data.images import ImageWriter, safe_id
from atoll.data.records import Record, Source
from atoll.data.settings import IngestConfig
from atoll.data.split import write_split
from atoll.data.workers import Stage, work_together
from atoll.store.lease import LeaseConfig
from atoll.store.manifest import FileEntry, write_once
from atoll.store.store import Absent, Conflict, Store

_NOTE = "ingest.json"
_OWN = re.compile(r"(rows|images)/\d{5,}\.(json|parquet|tar)|claims/(.*\.json|probe-[0-9a-f]+)")


def ingest(
    source: Source,
    store: Store,
    prefix: str,
    config: IngestConfig,
    progress: Progress | None = None,
    lease: LeaseConfig | None = None,
) -> DataSet:
    """Write a data set, or find it finished, or continue where an earlier call was killed.

    Args:
        source: where the rows come from.
        store: where the data set goes.
        prefix: its folder there, or "".
        config: settings.
        progress: told how many of the source's positions are done, and how many there are.
        lease: given, any number of processes that call this at the same time share the work.

    Raises:
        DataError: no row is usable, the rows have one group only, or the folder holds something else:
            a data set of another source or other settings is never overwritten.
    """
    store.sweep(prefix)
    about = source.describe()
    identity = digest({"source": about["fingerprint"], "config": config.plain(), "schema": 1})
    stage = _Ingest(source, store, prefix, config, identity, about, progress)
    dataset = stage.done()
    if dataset is None:
        stage.begin()
        dataset = work_together(stage, lease)
    stage.tidy(dataset)
    return dataset


class _Ingest(Stage[DataSet]):
    """An ingest on its way, as a stage that several processes may work at.

    A shard knows of no other, so ids that repeat across shards are settled when all are there: of the rows of
    one id the first is kept, and the shards of the others are written again without them.
    """

    def __init__(
        self,
        source: Source,
        store: Store,
        prefix: str,
        config: IngestConfig,
        identity: str,
        about: dict[str, Any],
        progress: Progress | None,
    ) -> None:
        count = -(-len(source) // config.shard_rows)
        super().__init__(store, prefix, join(prefix, "rows"), [identity] * count)
        self.source, self.config, self.identity = source, config, identity
        self.about, self.progress = about, progress
        kept = BUCKETS if config.buckets is not None else ()
        self.schema = row_schema([*about.get("columns", []), *kept])
        self.mode: Mode = "rgb"
        self.buckets: list[Size] = []

    def begin(self) -> None:
        """Take possession of the folder, and find mode and sizes of the pictures."""
        key, where = join(self.folder, _NOTE), self.store.name(self.folder)
        if not self.store.exists(key):
            claims = join(self.folder, "claims/")  # a worker that was killed leaves its own
            held = [key for key in self.store.list(self.folder) if not key.startswith(claims)]
            if held and not any(self.store.exists(join(self.folder, one)) for one in (_NOTE, MANIFEST)):
                raise DataError(f"{where} is not empty and holds no data set", "choose an empty folder")
            mode = self.config.mode if self.config.mode != "auto" else _find_mode(self.source)
            buckets = find_buckets(self.source, self.config)
            first = IngestNote(identity=self.identity, mode=mode, buckets=buckets)
            with suppress(Conflict):  # another process has the same idea
                self.store.create_json(key, first.to_json())
        try:
            note = IngestNote.read(self.store, key)
        except Absent:  # just now finished elsewhere
            return self.begin()
        if note.identity != self.identity:
            what = f"{where} holds an unfinished ingest of another source or with other settings"
            raise DataError(what, "finish it with those, or remove the folder")
        self.mode, self.buckets = note.mode, note.buckets

    def done(self) -> DataSet | None:
        """The finished data set."""
        return DataSet.find(self.store, self.folder, self.identity, "another source or with other settings")

    def report(self, left: int) -> None:
        """Tell how many positions are done."""
        if self.progress is not None:
            total = len(self.source)
            self.progress(min((len(self.identities) - left) * self.config.shard_rows, total), total)

    def owns(self) -> bool:
        """Whether the folder is still this ingest's."""
        return IngestNote.read(self.store, join(self.folder, _NOTE)).identity == self.identity

    def make(self, number: int, seen: ShardNote | None, untouched: Callable[[], bool]) -> ShardNote | None:
        """Write the files of a shard, over others only if it is `untouched`; None if it is not."""
        if not self.owns():  # finished or given up elsewhere
            return None
        return self._made(number, seen.taken if seen else [], untouched)

    def _made(self, number: int, taken: Sequence[str], may_replace: Callable[[], bool]) -> ShardNote | None:
        rows: list[dict[str, Any]] = []
        rejects: list[Reject] = []
        convert = _Converter(self.config, self.mode, self.buckets, self.schema.names, taken)
        start = number * self.config.shard_rows
        stop = min(start + self.config.shard_rows, len(self.source))
        for item in self.source.records(start, stop):
            row = item if isinstance(item, Reject) else convert(item)
            if isinstance(row, Reject):
                rejects.append(row)
            else:
                rows.append(row)
        files: dict[str, FileEntry] = {}
        blobs = {}
        if rows:
            blobs["images"] = f"images/{number:05d}.tar", convert.writer.close()
            blobs["rows"] = f"rows/{number:05d}.parquet", to_parquet(pa.Table.from_pylist(rows, self.schema))
        for kind, (path, data) in blobs.items():
            entry = write_once(self.store, self.folder, path, data, may_replace)
            if entry is None:
                return None
            files[kind] = entry
        return ShardNote(
            identity=self.identity,
            rows=len(rows),
            files=files,
            rejects=rejects,
            tried=convert.tried,
            taken=list(taken),
        )

    def put_together(self, notes: list[ShardNote]) -> DataSet | None:
        """Settle the ids, write the rejects, the split and the manifest."""
        self._settle(notes)
        rejects = [reject for note in notes for reject in note.rejects]
        filled = [note for note in notes if note.rows]
        if not filled:
            self._discard()
            what = f"no usable rows in {self.about['name']} ({_reasons(rejects)})"
            raise DataError(what, "mend the source")
        lines = "".join(json.dumps(reject.to_json(), ensure_ascii=False) + "\n" for reject in rejects)
        self.store.put(join(self.folder, REJECTS), lines.encode())
        counts = Counter(reject.reason for reject in rejects)
        dataset = self._dataset(filled, source=self.about, rejects=dict(sorted(counts.items())))
        if (done := self.done()) is not None:  # finished elsewhere, and perhaps split anew since
            return done
        try:
            write_split(dataset, self.config)
        except DataError as error:
            self._discard()
            if not rejects:
                raise
            what = f"{error.what}; {len(rejects)} of {len(self.source)} were rejected ({_reasons(rejects)})"
            raise DataError(what, f"{error.fix}, or mend the source") from None
        with suppress(Conflict):  # a process that was thought dead has finished too
            dataset.finish()
        return self.done()

    def _settle(self, notes: list[ShardNote]) -> None:
        """Write those shards again that hold ids of earlier ones; memory is 8 bytes a row."""
        hashes = [_hashes([*self._ids(note), *note.tried]) for note in notes]
        values, counts = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]), return_counts=True)
        again, seen = values[counts > 1], set[str]()
        for number, note in enumerate(notes):
            suspect = np.isin(hashes[number], again)
            if not suspect.any():
                continue
            ids = self._ids(note)
            some = [one for one, chosen in zip([*ids, *note.tried], suspect, strict=True) if chosen]
            if taken := sorted(seen.intersection(some)):
                # First the note: should this process end, whoever finds torn files knows what they hold.
                self.store.put_json(self.key(number), note.model_copy(update={"taken": taken}).to_json())
                made = self._made(number, taken, lambda: True)
                assert made is not None
                notes[number] = made
                self.store.put_json(self.key(number), made.to_json())
            seen.update({*some}.intersection(ids))

    def _ids(self, note: ShardNote) -> list[str]:
        return self._dataset([note]).ids if note.rows else []

    def _dataset(self, notes: list[ShardNote], **fields: Any) -> DataSet:
        manifest = Manifest(
            **{"source": {}, **fields},
            identity=self.identity,
            config=self.config.plain(keep=("test",)),
            size=self.config.size,
            mode=self.mode,
            rows=sum(note.rows for note in notes),
            shards=[Shard(rows=note.rows, files=note.files) for note in notes],
        )
        return DataSet(self.store, self.folder, manifest)

    def _discard(self) -> None:
        """Empty the folder, as it was before, so that the command can be run again with other settings."""
        self.store.delete(*self.store.list(self.folder))

    def tidy(self, dataset: DataSet) -> None:
        """Remove notes, claims, and files of shards that were written again and are empty now."""
        if self.store.exists(join(self.folder, _NOTE)):  # first: then nobody believes that the folder is his
            self.store.delete(join(self.folder, _NOTE))
        named = {entry.path for shard in dataset.shards for entry in shard.files.values()}
        parts = [
            key for part in ("rows", "images", "claims") for key in self.store.list(join(self.folder, part))
        ]
        paths = [posixpath.relpath(key, self.folder or ".") for key in parts]
        self.store.delete(
            *(join(self.folder, path) for path in paths if _OWN.fullmatch(path) and path not in named)
        )


class _Converter:
    """Turns records into the rows and pictures of one shard."""

    def __init__(
        self,
        config: IngestConfig,
        mode: Mode,
        buckets: Sequence[Size],
        columns: Sequence[str],
        taken: Sequence[str],
    ) -> None:
        self.config, self.mode, self.buckets, self.columns = config, mode, buckets, columns
        self.ids = set(taken)
        self.tried: list[str] = []
        self.writer = ImageWriter()

    def __call__(self, record: Record) -> dict[str, Any] | Reject:
        """Add one record to the shard; its row, or why there is none."""
        name = safe_id(record.id)
        cleaned = [clean_caption(one) for one in record.captions or (record.caption,)]
        captions = [one for one in cleaned if one]
        if None in cleaned:
            return Reject(record.key, "caption is not UTF-8")
        if not captions:
            return Reject(record.key, "empty caption")
        if name in self.ids:
            return Reject(record.key, "duplicate id", record.id)
        picture = self._picture(record)
        if isinstance(picture, Reject):
            self.tried.append(name)
            return picture
        image, small, where = picture
        self.ids.add(name)
        source_hash = sha256(_bytes(record.image))
        fields: dict[str, Any] = {
            "id": name,
            "label": record.label,
            "width": image.width,
            "height": image.height,
            "key": clean(record.key),
            "sha256": source_hash,
            "group": clean(record.group) if record.group is not None else source_hash,
            **(where.fields() if where is not None else {}),
        }
        optional = {
            "source": record.source,
            "licence": None if record.licence is None else clean(record.licence),
            "captions": captions,
        }
        fields |= {name: value for name, value in optional.items() if name in self.columns}
        self.writer.add(name, png(small.convert("L" if self.mode == "gray" else "RGB")), captions[0], fields)
        return {**fields, "caption": captions[0]}

    def _picture(self, record: Record) -> tuple[Image.Image, Image.Image, Placement | None] | Reject:
        """The picture as it is, as the data set has it, and how it came so; or why there is none."""
        try:
            image, buckets = _picture(record), self.config.buckets
            where = None if buckets is None else place(image.size, self.buckets, buckets)
        except BadImageError as error:
            return Reject(record.key, error.reason, error.detail)
        small = square(image, self.config.size) if where is None else cropped(image, where)
        if self.mode == "gray" and self.config.mode == "auto" and not is_gray(small):
            return Reject(record.key, "colour in a gray data set", "set data.ingest.mode to rgb or gray")
        return image, small, where


def clean_caption(text: str) -> str | None:
    """The caption without control characters (but for tabs and newlines) and without space around it.

    None if it holds what UTF-8 cannot.
    """
    if clean(text) != text:
        return None
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", " ", text).strip()


def _find_mode(source: Source) -> Mode:
    """`gray` if the readable pictures from four places of the source have no colour."""
    mode: Mode = "rgb"
    starts = sorted({len(source) * part // 4 for part in range(4)})
    for start in starts:
        for item in source.records(start, min(start + 16, len(source))):
            try:
                if isinstance(item, Record) and not is_gray(_picture(item)):
                    return "rgb"
            except BadImageError:
                continue
            mode = "gray" if isinstance(item, Record) else mode
    return mode


def find_buckets(source: Source, config: IngestConfig) -> list[Size]:
    """Sizes of the pictures that are to keep their aspect; none of squares. Reads the source once."""
    if config.buckets is None:
        return []
    return choose(source.records(0, len(source)), config.sizes(), config.buckets)


def _picture(record: Record) -> Image.Image:
    return decode(record.image) if isinstance(record.image, bytes) else record.image


def _bytes(image: bytes | Image.Image) -> bytes:
    """The bytes that stand for a picture: those of its file, or its pixels where there is no file."""
    if isinstance(image, bytes):
        return image
    return f"{image.mode} {image.width}x{image.height} ".encode() + image.tobytes()


def _reasons(rejects: list[Reject]) -> str:
    """How many rows were rejected for which reason, and the first of them."""
    if not rejects:
        return "it is empty"
    counts = Counter(reject.reason for reject in rejects).most_common()
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
    return f"{reasons}; the first: {rejects[0].key}: {rejects[0].detail}"


def _hashes(ids: Sequence[str]) -> NDArray[np.uint64]:
    """Hashes of ids `(n,)`; two ids may share one."""
    found = [hashlib.blake2b(one.encode(), digest_size=8).digest() for one in ids]
    return np.frombuffer(b"".join(found), dtype=np.uint64)
