"""Ingest: any source becomes a data set of square pictures, shard by shard, restartable.

Shard N holds what is usable of the positions `N * shard_rows` up to `(N + 1) * shard_rows` of the source,
so a shard depends on nothing but those (and on ids seen before). Until the manifest is written,
`ingest.json` names what is being ingested, and `rows/NNNNN.json` follows every finished shard.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pyarrow as pa
import torch
from PIL import Image

from atoll.base.config import Config
from atoll.base.errors import AtollError, DataError
from atoll.base.hashing import digest, sha256
from atoll.base.pictures import png
from atoll.base.rng import seed_of
from atoll.data.columns import write_column
from atoll.data.dataset import ROWS, DataSet, Manifest, create_manifest, is_made, to_parquet
from atoll.data.decode import BadImageError, decode, is_gray, square
from atoll.data.files import SCHEMA, Shard, is_valid, join, read_versioned, versioned
from atoll.data.images import ImageWriter, safe_id
from atoll.data.records import Record, Reject, Source, clean
from atoll.data.settings import IngestConfig
from atoll.store.manifest import FileEntry, write_file
from atoll.store.store import Store

Mode = Literal["rgb", "gray"]
Progress = Callable[[int, int], None]
_STATE, _REJECTS = "ingest.json", "rejects.jsonl"


class _State(Config):
    """`ingest.json`."""

    identity: str
    mode: Mode


class _Part(Config):
    """`rows/NNNNN.json`: what became of one shard's positions."""

    identity: str
    rows: int
    files: dict[str, FileEntry]
    rejects: list[dict[str, str]]


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
    about = source.describe()
    identity = digest({"source": about["fingerprint"], "config": config.model_dump(), "schema": SCHEMA})
    if is_made(store, prefix, identity, "another source or with other settings"):
        _forget(store, prefix)
        return DataSet.open(store, prefix)
    job = _Job(source, store, prefix, config, identity)
    count, size = len(source), config.shard_rows
    for number in range(-(-count // size)):
        job.shard(number)
        if progress is not None:
            progress(min((number + 1) * size, count), count)
    return job.finish(about)


class _Job:
    """An ingest on its way."""

    def __init__(
        self, source: Source, store: Store, prefix: str, config: IngestConfig, identity: str
    ) -> None:
        self.source, self.store, self.prefix, self.config = source, store, prefix or ".", config
        self.identity = identity
        self.mode = self._begin()
        self.parts: list[_Part] = []
        self.ids: set[str] = set()

    def _begin(self) -> Mode:
        """Take possession of the folder; the mode of the pictures."""
        key, where = join(self.prefix, _STATE), self.store.name(self.prefix)
        if self.store.exists(key):
            state = read_versioned(self.store, key, _State)
            if state.identity != self.identity:
                what = f"{where} holds an unfinished ingest of another source or with other settings"
                raise DataError(what, "finish it with those, or remove the folder")
            return state.mode
        if self.store.list(self.prefix):
            raise DataError(f"{where} is not empty and holds no data set", "choose an empty folder")
        mode = self.config.mode if self.config.mode != "auto" else _find_mode(self.source)
        self.store.create_json(key, versioned(_State(identity=self.identity, mode=mode)))
        return mode

    def shard(self, number: int) -> None:
        """Write one shard, or find it."""
        key = join(self.prefix, f"rows/{number:05d}.json")
        part = self._found(key)
        if part is None:
            part = self._write(number)
            self.store.put_json(key, versioned(part))
        self.parts.append(part)

    def _found(self, key: str) -> _Part | None:
        try:
            part = read_versioned(self.store, key, _Part)
        except AtollError:
            return None
        valid = all(is_valid(self.store, self.prefix, file) for file in part.files.values())
        if part.identity != self.identity or not valid:
            return None
        if part.rows:
            self.ids.update(self._dataset([part]).ids)
        return part

    def _write(self, number: int) -> _Part:
        rows: list[dict[str, Any]] = []
        rejects: list[Reject] = []
        writer = ImageWriter()
        start = number * self.config.shard_rows
        stop = min(start + self.config.shard_rows, len(self.source))
        for item in self.source.records(start, stop):
            done = item if isinstance(item, Reject) else self._row(item, writer)
            if isinstance(done, Reject):
                rejects.append(done)
            else:
                rows.append(done)
        files = {}
        if rows:
            table = to_parquet(pa.Table.from_pylist(rows, ROWS))
            files["images"] = write_file(self.store, self.prefix, f"images/{number:05d}.tar", writer.close())
            files["rows"] = write_file(self.store, self.prefix, f"rows/{number:05d}.parquet", table)
        named = [
            {"key": clean(r.key)[:1000], "reason": r.reason, "detail": clean(r.detail)[:500]} for r in rejects
        ]
        return _Part(identity=self.identity, rows=len(rows), files=files, rejects=named)

    def _row(self, record: Record, writer: ImageWriter) -> dict[str, Any] | Reject:
        """Add one record to the shard; its row, or why there is none."""
        name, caption = safe_id(record.id), clean_caption(record.caption)
        if caption is None:
            return Reject(record.key, "caption is not UTF-8")
        if not caption:
            return Reject(record.key, "empty caption")
        if name in self.ids:
            return Reject(record.key, "duplicate id", clean(record.id))
        try:
            image = decode(record.image) if isinstance(record.image, bytes) else record.image
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
        data = png(picture.convert("L" if self.mode == "gray" else "RGB"))
        writer.add(name, data, caption, fields)
        return {**fields, "caption": caption}

    def finish(self, about: dict[str, Any]) -> DataSet:
        """Write the rejects, the split and the manifest, and remove the notes."""
        rejects = [reject for part in self.parts for reject in part.rejects]
        counts = Counter(reject["reason"] for reject in rejects)
        if not any(part.rows for part in self.parts):
            self._discard()
            raise DataError(f"no usable rows in {about['name']} ({_reasons(rejects)})", "mend the source")
        lines = "".join(json.dumps(reject, ensure_ascii=False) + "\n" for reject in rejects)
        self.store.put(join(self.prefix, _REJECTS), lines.encode())
        dataset = self._dataset(
            [part for part in self.parts if part.rows], about, dict(sorted(counts.items()))
        )
        try:
            write_split(dataset, self.config.seed, self.config.heldout)
        except DataError as error:
            self._discard()
            if not rejects:
                raise
            what = f"{error.what}; {len(rejects)} of {len(self.source)} were rejected ({_reasons(rejects)})"
            raise DataError(what, f"{error.fix}, or mend the source") from None
        create_manifest(dataset)
        _forget(self.store, self.prefix)
        return dataset

    def _dataset(
        self, parts: list[_Part], about: dict[str, Any] | None = None, rejects: dict[str, int] | None = None
    ) -> DataSet:
        manifest = Manifest(
            identity=self.identity,
            source=about or {},
            config=self.config.model_dump(),
            size=self.config.size,
            mode=self.mode,
            rejects=rejects or {},
            rows=sum(part.rows for part in parts),
            shards=[Shard(rows=part.rows, files=part.files) for part in parts],
        )
        return DataSet(self.store, self.prefix, manifest)

    def _discard(self) -> None:
        """Remove what was written, so that the command can be run again with other settings."""
        ours = re.compile(r"(rows|images|columns/split)/[^/]+|" + re.escape(_REJECTS))
        folder = join(self.prefix, "") if self.prefix != "." else ""
        keys = [
            key
            for key in self.store.list(self.prefix)
            if ours.fullmatch(key.removeprefix(folder).lstrip("/"))
        ]
        self.store.delete(*keys, join(self.prefix, _STATE))


def write_split(dataset: DataSet, seed: int, heldout: float) -> None:
    """Write the column `split`, int8: 0 train, 1 held out.

    A group is held out if a hash of the seed and its name is small, so its rows stay together, and
    neither the order of rows nor other groups count. Where that leaves one side empty, the group
    nearest to the bound changes sides.

    Raises:
        DataError: there is only one group, so that one side must stay empty.
    """
    low, high = 1.0, 0.0
    for shard in range(len(dataset.shards)):
        places = [_place(seed, group) for group in set(_groups(dataset, shard))]
        low, high = min(low, *places), max(high, *places)
    bound = heldout
    if heldout > 0 and low == high:
        what = "all rows belong to one group, so none can be held out without leaving none to train on"
        raise DataError(what, "choose another column for group, or set heldout to 0")
    if heldout > 0:
        bound = min(max(heldout, math.nextafter(low, 1.0)), high)

    def compute(shard: int) -> dict[str, torch.Tensor]:
        held = [_place(seed, group) < bound for group in _groups(dataset, shard)]
        return {"values": torch.tensor(held).to(torch.int8)}

    settings = {"seed": seed, "heldout": heldout, "bound": bound}
    write_column(dataset, "split", {"name": "split", "hash": digest(settings), **settings}, compute)


def clean_caption(text: str) -> str | None:
    """The caption without control characters (but for tabs and newlines) and without space around it.

    None if it holds what UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return None
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", " ", text).strip()


def _groups(dataset: DataSet, shard: int) -> list[str]:
    groups: list[str] = dataset.shard_table(shard, ["group"]).column("group").to_pylist()
    return groups


def _place(seed: int, group: str) -> float:
    """Where a group lies in [0, 1)."""
    return seed_of(seed, f"split/{group}") / 2**63


def _find_mode(source: Source) -> Mode:
    """`gray` if the readable pictures from four places of the source have no colour."""
    found: Mode = "rgb"
    starts = sorted({len(source) * part // 4 for part in range(4)})
    for start in starts:
        for item in source.records(start, min(start + 16, len(source))):
            if isinstance(item, Record):
                try:
                    image = decode(item.image) if isinstance(item.image, bytes) else item.image
                except BadImageError:
                    continue
                if not is_gray(image):
                    return "rgb"
                found = "gray"
    return found


def _reasons(rejects: list[dict[str, str]]) -> str:
    """How many rows were rejected for which reason, and the first of them."""
    if not rejects:
        return "it is empty"
    counts = Counter(reject["reason"] for reject in rejects).most_common()
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts)
    return f"{reasons}; the first: {rejects[0]['key']}: {rejects[0]['detail']}"


def _bytes(image: bytes | Image.Image) -> bytes:
    """The bytes that stand for a picture: those of its file, or its pixels where there is no file."""
    if isinstance(image, bytes):
        return image
    return f"{image.mode} {image.width}x{image.height} ".encode() + image.tobytes()


def _forget(store: Store, prefix: str) -> None:
    """Remove the notes of an ingest that is finished."""
    if store.exists(join(prefix, _STATE)):
        notes = [key for key in store.list(join(prefix, "rows")) if key.endswith(".json")]
        store.delete(*notes, join(prefix, _STATE))
