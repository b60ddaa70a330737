"""A source: tar files of the WebDataset layout, such as img2dataset writes.

The files of one name up to its first dot are one sample: a picture, a text, `json` whose fields are columns,
`cls` and whatever else. They are found wherever they lie, and nothing is unpacked, unpickled or run.

A tar has no table of contents, so its headers are read once, from front to back, and what they say is kept in
the cache folder, by the tar's size and state. That also finds a tar that was cut: one that does not end as
tars do is refused as a whole, since readers that stop there lose the rest without a word.
"""

import json
import re
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from atoll.base.errors import DataError, StoreError
from atoll.base.safe_parse import read_json
from atoll.data.decode import SUFFIXES
from atoll.data.formats import Reject, clean
from atoll.data.settings import RowOptions
from atoll.data.sources.files import Files
from atoll.data.sources.folder import LARGEST
from atoll.data.sources.record import FilesSource, Record, to_record
from atoll.store import cache, local

LARGEST_TEXT = 16 * 2**20
"""Bytes above which a text or JSON file of a sample is not read."""
PROBED = 16
"""Samples of the first tar that tell which columns there are."""
NOT_REGULAR, TWICE = -1, -2
"""In place of the size: what a file's header names is no regular file, or two files have this name."""
_LOST = {NOT_REGULAR: "no regular file", TWICE: "duplicate name"}
_LARGEST_HEADER = 2**20
_DIGITS = re.compile(rb"\d{100}")
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")
_VERSION = 1

Span = tuple[int, int]
"""First byte and number of bytes of a file in its tar."""
Sample = tuple[str, dict[str, Span]]
"""Its name, and its files by the ending of their names in small letters."""


class TarSource(FilesSource):
    """The samples of tar files, in the order of the tars' names and of each sample's first file."""

    KIND = "tar"

    def __init__(self, files: Files, options: RowOptions | None = None) -> None:
        if not files.states:
            raise DataError(f"{files.root} holds no tar files", "give a .tar file or a folder of them")
        counts = []
        for name in files.states:
            with _index(files, name).open() as lines:
                counts.append(int(next(lines)))
        super().__init__(files, options or RowOptions(), counts)
        # Two: shards of an ingest go over the end of a tar, and one of a million samples takes a gigabyte.
        self._samples = lru_cache(maxsize=2)(self._read_samples)
        if not len(self):
            raise DataError(f"the tar files of {files.root} hold no samples", "give tars of captioned images")
        first = next(name for name, count in zip(files.states, counts, strict=True) if count)
        columns: dict[str, None] = {}
        with files.open(first) as file:
            for _, members in self._samples(first)[:PROBED]:
                row = _row(file, members, None)
                columns.update(dict.fromkeys(row if isinstance(row, dict) else ()))
        self.options = self.options.resolve([(files.where(first), [*columns])])

    def _read_samples(self, name: str) -> list[Sample]:
        with _index(self.files, name).open() as lines:
            return [tuple(json.loads(line)) for line in islice(lines, 1, None)]

    def read(self, number: int, low: int, high: int) -> Iterator[Record | Reject]:
        name = [*self.files.states][number]
        with self.files.open(name) as file:
            for sample in self._samples(name)[low:high]:
                yield self._record(file, name, sample)

    def _record(self, file: BinaryIO, tar: str, sample: Sample) -> Record | Reject:
        name, members = sample
        key, place = f"{clean(tar)}, {name}", f"{clean(tar).removesuffix('.tar')}/{name}"
        image = self.options.image
        pictures = [end for end in members if (end == image if image else f".{end}" in SUFFIXES)]
        for end, (_, size) in members.items():
            if size < 0:
                return Reject(key, _LOST[size], f"{name}.{end}")
        if not pictures:
            return Reject(key, "no picture", f"it has {', '.join(members)}")
        if len(pictures) > 1:
            return Reject(key, "several pictures", f"{', '.join(pictures)}: choose by data.ingest.image")
        if members[pictures[0]][1] > LARGEST:
            return Reject(key, "too large", f"{members[pictures[0]][1]:,} bytes")
        row = _row(file, members, self.options)
        if isinstance(row, str):
            return Reject(key, "unreadable row", row)
        return to_record(row, self.options, key, _content(file, members[pictures[0]]), place)


def _row(file: BinaryIO, members: dict[str, Span], options: RowOptions | None) -> dict[str, Any] | str:
    """Columns of a sample: fields of its JSON and its texts (bytes if not UTF-8), or why there are none.

    Only what the options name is read; without them everything, and a JSON that cannot be read has no fields.
    """
    names = None if options is None else [name for name in options.columns() if name is not None]
    row: dict[str, Any] = {}
    for end, span in members.items():
        if f".{end}" in SUFFIXES or (names is not None and end != "json" and end not in names):
            continue
        if end == "json" and names is not None and all(name in members for name in names):
            continue
        if span[1] > LARGEST_TEXT or span[1] < 0:
            if names is None:
                continue
            return f"{end} has {span[1]:,} bytes"
        data = _content(file, span)
        if end != "json":
            try:
                row[end] = data.decode("utf-8-sig")
            except UnicodeDecodeError:
                row[end] = data
            continue
        try:
            fields = read_json(data)
        except ValueError:
            fields = None
        if isinstance(fields, dict):
            row |= {name: value for name, value in fields.items() if name not in members}
        elif isinstance(fields, list):
            row["json"] = fields
        elif names is not None:
            return "json is no JSON object"
    return row


def _content(file: BinaryIO, span: Span) -> bytes:
    file.seek(span[0])
    return file.read(span[1])


def _index(files: Files, name: str) -> Path:
    """The file of the cache that says what lies where: the number of samples, then a sample a line."""
    path = cache.place(files.where(name), ["tar", _VERSION, *files.states[name]]).with_suffix(".jsonl")
    if path.exists():
        return path
    with files.open(name) as file:
        samples = scan(file, files.where(name))
    text = "".join(f"{line}\n" for line in (len(samples), *map(json.dumps, samples)))
    try:
        local.write(path, text.encode(), replace=True)  # whole, as processes of one ingest do it at once
    except OSError as error:
        what = f"cannot write what a tar holds below {cache.folder()}: {error.strerror}"
        raise StoreError(what, "set ATOLL_CACHE to a folder with enough space") from None
    return path


def scan(file: BinaryIO, where: str) -> list[Sample]:
    """Find the samples of a tar and make sure that all of it is there; only headers are looked at."""
    if file.read(6).startswith(_COMPRESSED):
        raise DataError(f"{where} is compressed, so its files cannot be found", "unpack it to a plain .tar")
    file.seek(0)
    samples: dict[str, dict[str, Span]] = {}
    fix, end, last_offset = "fetch it again", 0, -1
    try:
        with tarfile.open(fileobj=_Headers(file), mode="r:", errors="surrogateescape") as tar:  # type: ignore[call-overload]
            while (member := tar.next()) is not None:
                # A forged size can lead back to the same header, which would be read for ever.
                if member.offset_data <= last_offset or member.size < 0:
                    raise tarfile.ReadError("a header that leads backwards")
                last_offset = member.offset_data
                tar.members.clear()  # it would keep every header
                # All but folders, hidden files and those without an ending.
                folder, _, last = member.name.rpartition("/")
                stem, _, ending = last.partition(".")
                if not member.isdir() and stem and ending:
                    span = (member.offset_data, member.size)
                    if not member.isreg() or member.issparse():
                        span = (0, NOT_REGULAR)
                    members = samples.setdefault(clean(f"{folder}/{stem}" if folder else stem), {})
                    ending = clean(ending.lower())
                    members[ending] = (0, TWICE) if ending in members else span
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        what = f"{where} is cut off or damaged after {len(samples):,} samples ({error})"
        raise DataError(what, fix) from None
    # To Python's tarfile a damaged header and the end of a file are both just the end of the tar.
    file.seek(end)
    blocks = file.read(2 * tarfile.BLOCKSIZE)
    if len(blocks) < 2 * tarfile.BLOCKSIZE or any(blocks):
        what = f"{where} is cut off or damaged: {len(samples):,} samples in, it does not end as tar files do"
        raise DataError(what, fix)
    if any(map(any, iter(lambda: file.read(2**20), b""))):
        raise DataError(f"{where} goes on after its end, as joined tar files do", "give the single files")
    return [*samples.items()]


class _Headers:
    """A file of which only so much is read at once as headers may have: a forged one claims terabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        data = self._file.read(size)
        if _DIGITS.search(data):  # before a pattern of tarfile's, which takes ever longer for them
            raise tarfile.ReadError("a header of digits")
        return data
