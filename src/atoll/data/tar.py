"""A source: tar files of the WebDataset layout, such as img2dataset writes.

The files of one name up to its first dot are one sample: a picture, a text, `json` whose fields are columns,
`cls` and whatever else. Samples are found by name, wherever their files lie in the tar. Nothing is unpacked,
unpickled or run: names are only compared.

A tar has no table of contents, so its headers are read once, from front to back, and what they say is kept in
the cache folder, by the tar's size and state. That also finds a tar that was cut: one that does not end as
tars do is refused as a whole, since readers that stop there lose the rest without a word.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from atoll.base.errors import DataError
from atoll.base.safe_parse import read_json
from atoll.data.files import Files
from atoll.data.folder import LARGEST, SUFFIXES
from atoll.data.formats import Reject, clean
from atoll.data.records import Record, to_record
from atoll.data.settings import RowOptions
from atoll.data.tar_index import NOT_REGULAR, TWICE, Place, Sample, count_samples, read_samples

LARGEST_TEXT = 16 * 2**20
"""Bytes above which a text or JSON file of a sample is not read."""
_LOST = {NOT_REGULAR: "no regular file", TWICE: "duplicate name"}
PROBED = 16
"""Samples of the first tar that tell which columns there are."""


class TarSource:
    """The samples of tar files, in the order of the tars' names and of each sample's first file.

    Raises:
        DataError: there is no tar, one is cut, damaged or compressed, or the first samples lack a column.
    """

    def __init__(self, files: Files, options: RowOptions | None = None) -> None:
        if not files.states:
            raise DataError(f"{files.root} holds no tar files", "give a .tar file or a folder of them")
        self.files, options = files, options or RowOptions()
        self._starts = np.cumsum([0, *(count_samples(files, name) for name in files.states)]).tolist()
        self._samples = lru_cache(maxsize=2)(partial(read_samples, files))
        if not len(self):
            raise DataError(f"the tar files of {files.root} hold no samples", "give tars of captioned images")
        self.options = self._resolved(options)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def describe(self) -> dict[str, Any]:
        """Name, fingerprint (names, sizes and times of change or entity tags of the tars) and licence."""
        named = self.files.root if self.files.is_whole else next(iter(self.files.states))
        content = [[name, *state] for name, state in self.files.states.items()]
        return self.options.described(clean(f"tar {PurePosixPath(named).name}"), clean(repr(content)))

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        """The samples of some positions."""
        for name, first, last in zip(self.files.states, self._starts[:-1], self._starts[1:], strict=True):
            low, high = max(start, first) - first, min(stop, last) - first
            if low < high:
                with self.files.open(name) as file:
                    for sample in self._samples(name)[low:high]:
                        yield self._record(file, name, sample)

    def _resolved(self, options: RowOptions) -> RowOptions:
        """Options with the caption's column, from the columns of the first samples."""
        name = next(name for name, stop in zip(self.files.states, self._starts[1:], strict=True) if stop)
        columns: dict[str, None] = {}
        with self.files.open(name) as file:
            for _, members in self._samples(name)[:PROBED]:
                row = _row(file, members, None)
                columns.update(dict.fromkeys(row if isinstance(row, dict) else ()))
        return options.resolve([(self.files.where(name), [*columns])])

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


def _row(file: BinaryIO, members: dict[str, Place], options: RowOptions | None) -> dict[str, Any] | str:
    """Columns of a sample: fields of its JSON and its texts (bytes if not UTF-8), or why there are none.

    Only what the options name is read; without them everything, and a JSON that cannot be read has no fields.
    """
    names = None if options is None else [name for name in options.columns() if name is not None]
    row: dict[str, Any] = {}
    for end, place in members.items():
        if f".{end}" in SUFFIXES or (names is not None and end != "json" and end not in names):
            continue
        if end == "json" and names is not None and all(name in members for name in names):
            continue
        if place[1] > LARGEST_TEXT or place[1] < 0:
            if names is None:
                continue
            return f"{end} has {place[1]:,} bytes"
        data = _content(file, place)
        if end != "json":
            row[end] = _text(data)
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


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data


def _content(file: BinaryIO, place: Place) -> bytes:
    file.seek(place[0])
    return file.read(place[1])
