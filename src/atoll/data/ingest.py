"""Ingest: any source becomes a data set of square pictures, shard by shard, restartable.

Shard N holds what is usable of the positions `N * shard_rows` up to `(N + 1) * shard_rows` of the source,
so a shard depends on nothing but those (and on ids seen before). Until the manifest is written,
`ingest.json` names what is being ingested, and `rows/NNNNN.json` follows every finished shard.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from posixpath import join
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image

from atoll.base.errors import DataError
from atoll.base.hashing import digest, sha256
from atoll.base.pictures import png
from atoll.base.rng import seed_of
from atoll.data.columns import Progress
from atoll.data.dataset import LEFT_OUT, DataSet, row_schema, to_parquet
from atoll.data.decode import BadImageError, decode, is_gray, square
from atoll.data.formats import IngestNote, Manifest, Mode, Reject, Shard, ShardNote, clean
from atoll.data.images import ImageWriter, safe_id
from atoll.data.records import Record, Source
from atoll.data.settings import IngestConfig
from atoll.store.manifest import write_file
from atoll.store.store import Store

_NOTE, _REJECTS = "ingest.json", "rejects.jsonl"


def ingest(
    source: Source, store: Store, prefix: str, config: IngestConfig, progress: Progress | None = None
) -> DataSet:
    """Write a data set, or find it finished, or continue where an earlier call was killed.

    Args:
        source: where the rows come from.
        store: where the data set goes.
        prefix: its folder there, or "".
        config: settings.
        progress: told how many of the source's positions are done, and how many there are.

    Raises:
        DataError: no row is usable, the rows have one group only, or the folder holds something else:
            a data set of another source or other settings is never overwritten.
    """
    store.sweep(prefix)
    about = source.describe()
    identity = digest({"source": about["fingerprint"], "config": config.plain(), "schema": 1})
    finished = DataSet.find(store, prefix, identity, "another source or with other settings")
    if finished is not None:
        _remove_notes(store, prefix)
        return finished
    job = _Job(source, store, prefix, config, identity, row_schema(about.get("columns", [])))
    count, size = len(source), config.shard_rows
    for number in range(-(-count // size)):
        job.shard(number)
        if progress is not None:
            progress(min((number + 1) * size, count), count)
    return job.finish(about)


class _Job:
    """An ingest on its way."""

    def __init__(
        self,
        source: Source,
        store: Store,
        prefix: str,
        config: IngestConfig,
        identity: str,
        schema: pa.Schema,
    ) -> None:
        self.source, self.store, self.prefix, self.config = source, store, prefix, config
        self.schema = schema
        self.identity = identity
        self.mode = self._begin()
        self.shards: list[ShardNote] = []
        self.ids: set[str] = set()

    def _begin(self) -> Mode:
        """Take possession of the folder; the mode of the pictures."""
        key, where = join(self.prefix, _NOTE), self.store.name(self.prefix)
        if self.store.exists(key):
            note = IngestNote.read(self.store, key)
            if note.identity != self.identity:
                what = f"{where} holds an unfinished ingest of another source or with other settings"
                raise DataError(what, "finish it with those, or remove the folder")
            return note.mode
        if self.store.list(self.prefix):
            raise DataError(f"{where} is not empty and holds no data set", "choose an empty folder")
        mode = self.config.mode if self.config.mode != "auto" else _find_mode(self.source)
        self.store.create_json(key, IngestNote(identity=self.identity, mode=mode).to_json())
        return mode

    def shard(self, number: int) -> None:
        """Write one shard, or find it."""
        key = f"rows/{number:05d}.json"
        note = ShardNote.find(self.store, self.prefix, key, self.identity)
        if note is None:
            note = self._write(number)
            self.store.put_json(join(self.prefix, key), note.to_json())
        elif note.rows:
            self.ids.update(self._dataset([note]).ids)
        self.shards.append(note)

    def _write(self, number: int) -> ShardNote:
        rows: list[dict[str, Any]] = []
        rejects: list[Reject] = []
        writer = ImageWriter()
        start = number * self.config.shard_rows
        stop = min(start + self.config.shard_rows, len(self.source))
        for item in self.source.records(start, stop):
            row = item if isinstance(item, Reject) else self._row(item, writer)
            if isinstance(row, Reject):
                rejects.append(row)
            else:
                rows.append(row)
        files = {}
        if rows:
            table = to_parquet(pa.Table.from_pylist(rows, self.schema))
            files["images"] = write_file(self.store, self.prefix, f"images/{number:05d}.tar", writer.close())
            files["rows"] = write_file(self.store, self.prefix, f"rows/{number:05d}.parquet", table)
        return ShardNote(identity=self.identity, rows=len(rows), files=files, rejects=rejects)

    def _row(self, record: Record, writer: ImageWriter) -> dict[str, Any] | Reject:
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
        try:
            image = _picture(record)
        except BadImageError as error:
            return Reject(record.key, error.reason, error.detail)
        picture = square(image, self.config.size)
        if self.mode == "gray" and self.config.mode == "auto" and not is_gray(picture):
            return Reject(record.key, "colour in a gray data set", "set mode to rgb or gray")
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
        }
        optional = {
            "source": record.source,
            "licence": None if record.licence is None else clean(record.licence),
            "captions": captions,
        }
        fields |= {name: value for name, value in optional.items() if name in self.schema.names}
        data = png(picture.convert("L" if self.mode == "gray" else "RGB"))
        writer.add(name, data, captions[0], fields)
        return {**fields, "caption": captions[0]}

    def finish(self, about: dict[str, Any]) -> DataSet:
        """Write the rejects, the split and the manifest, and remove the notes."""
        rejects = [reject for note in self.shards for reject in note.rejects]
        filled = [note for note in self.shards if note.rows]
        if not filled:
            self._discard()
            raise DataError(f"no usable rows in {about['name']} ({_reasons(rejects)})", "mend the source")
        lines = "".join(json.dumps(reject.to_json(), ensure_ascii=False) + "\n" for reject in rejects)
        self.store.put(join(self.prefix, _REJECTS), lines.encode())
        counts = Counter(reject.reason for reject in rejects)
        dataset = self._dataset(filled, source=about, rejects=dict(sorted(counts.items())))
        try:
            write_split(dataset, self.config)
        except DataError as error:
            self._discard()
            if not rejects:
                raise
            what = f"{error.what}; {len(rejects)} of {len(self.source)} were rejected ({_reasons(rejects)})"
            raise DataError(what, f"{error.fix}, or mend the source") from None
        dataset.finish()
        _remove_notes(self.store, self.prefix)
        return dataset

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
        return DataSet(self.store, self.prefix, manifest)

    def _discard(self) -> None:
        """Empty the folder, as it was before, so that the command can be run again with other settings."""
        self.store.delete(*self.store.list(self.prefix))


def write_split(
    dataset: DataSet,
    config: IngestConfig,
    groups: Sequence[str] | None = None,
    kept: NDArray[np.bool_] | None = None,
) -> None:
    """Write the column `split`, int8: 0 train, 1 held out, 2 test, 3 left out.

    A group is kept from training if a hash of the seed and its name is small, so its rows stay together, and
    neither the order of rows nor other groups count; those of the smallest hashes are the test rows. So the
    training rows depend on `heldout + test` alone. Where that leaves no rows to train on, or none beside
    them, the group nearest to the bound changes sides.

    Args:
        dataset: whose rows.
        config: shares and seed.
        groups: of the rows; those of their column `group` by default.
        kept: whether a row is in any part `(rows,)`; all are by default.

    Raises:
        DataError: there is only one group, so that one side must stay empty.
    """
    seed, share = config.seed, config.heldout + config.test
    names = dataset.table(["group"]).column("group").to_pylist() if groups is None else groups
    places = [_places(seed, names[start:end]) for start, end in pairwise(dataset.bounds)]
    low, high = float(min(map(np.min, places))), float(max(map(np.max, places)))
    bound = share
    if share > 0:
        if low == high:
            rejects = sum(dataset.manifest.rejects.values())
            beside = f" ({rejects} others were rejected, see {_REJECTS})" if rejects else ""
            raise DataError(
                f"all {len(dataset)} rows{beside} belong to one group, so none can be held out without"
                " leaving none to train on",
                "choose another column for group, or set heldout and test to 0",
            )
        bound = min(max(share, math.nextafter(low, 1.0)), high)

    def compute(shard: int) -> dict[str, torch.Tensor]:
        sides = np.add(places[shard] < bound, places[shard] < config.test, dtype=np.int8)
        if kept is not None:
            sides[~kept[dataset.bounds[shard] : dataset.bounds[shard + 1]]] = LEFT_OUT
        return {"values": torch.from_numpy(sides)}

    settings: dict[str, Any] = {"seed": seed, "heldout": config.heldout, "bound": bound}
    settings |= {"test": config.test} if config.test else {}
    if groups is not None or kept is not None:
        settings["rows"] = digest([names, [] if kept is None else np.flatnonzero(kept).tolist()])
    dataset.write_column("split", {"name": "split", "hash": digest(settings), **settings}, compute)


def _places(seed: int, groups: Sequence[str]) -> NDArray[np.float64]:
    """Where groups lie in [0, 1)."""
    return np.array([seed_of(seed, f"split/{group}") / 2**63 for group in groups])


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


def _remove_notes(store: Store, prefix: str) -> None:
    if store.exists(join(prefix, _NOTE)):
        notes = [key for key in store.list(join(prefix, "rows")) if key.endswith(".json")]
        store.delete(*notes, join(prefix, _NOTE))
