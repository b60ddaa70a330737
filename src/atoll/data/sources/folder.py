"""A source: a folder of image files with captions or class labels beside them.

They stand in `metadata.jsonl` or `metadata.csv` (the layout of Hugging Face's imagefolder, in any
subfolder, with file names relative to it); where there is no such file, captions stand in `NAME.txt` beside
`NAME.png`. Tables are read here and not by a library: one bad line is one reject, never the end.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import lexists, realpath
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any

from atoll.base.errors import DataError
from atoll.base.safe_parse import read_json, unreadable
from atoll.base.text import many
from atoll.data.decode import SUFFIXES, BadImageError
from atoll.data.formats import Reject, clean
from atoll.data.settings import RowOptions
from atoll.data.sources.record import Record, Source, to_record

METADATA = ("metadata.jsonl", "metadata.csv")
LARGEST = 512 * 2**20
"""Bytes above which an image file is not read."""

Row = dict[str, Any] | str
"""A row of a metadata file by column, or why a line is none."""


@dataclass(frozen=True)
class _Entry:
    path: Path
    key: str
    row: dict[str, Any] | None
    """None where the caption lies in a text file."""


class FolderSource(Source):
    """The images below a folder, in the order of their paths; `DataError` where they or captions lack."""

    def __init__(self, folder: Path, options: RowOptions | None = None) -> None:
        if not folder.is_dir():
            what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
            raise DataError(what, "give a folder of images with captions")
        self.folder, self.options = folder, options or RowOptions()
        files, linked = list[Path](), list[Path]()
        for base, folders, names in os.walk(folder, onerror=unreadable):
            # In place: os.walk goes on from this very list, and not into links.
            folders[:] = [name for name in folders if not name.startswith(".")]
            linked += [path for name in folders if (path := Path(base, name)).is_symlink()]
            files += [Path(base, name) for name in names if not name.startswith(".")]
        files.sort()
        images = [path for path in files if path.suffix.lower() in SUFFIXES]
        if not images:
            raise DataError(f"{folder} holds no images", f"known are {', '.join(sorted(SUFFIXES))}")
        tables = [path for path in files if path.name in METADATA]
        self._entries = self._from_tables(tables, images) if tables else self._from_texts(images)
        fix = "put the folder itself there"
        self._entries += [Reject(self._key(path), "linked folder", fix) for path in sorted(linked)]

    def __len__(self) -> int:
        return len(self._entries)

    def describe(self) -> dict[str, Any]:
        state = list[list[Any]]()  # paths, sizes, times of change and captions
        for entry in self._entries:
            if isinstance(entry, Reject):  # it counts among the positions that shards are made of
                state.append([entry.key, entry.reason])
            elif entry.row is None:
                state.append([entry.key, _stat(entry.path), *_stat(entry.path.with_suffix(".txt"))])
            else:
                state.append([entry.key, _stat(entry.path), clean(repr(sorted(entry.row.items())))])
        return self.options.described(clean(f"folder {self.folder.name}"), state)

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        for entry in self._entries[start:stop]:
            yield entry if isinstance(entry, Reject) else self._read(entry)

    def _read(self, entry: _Entry) -> Record | Reject:
        try:
            image = self._content(entry.path)
            if entry.row is not None:
                return to_record(entry.row, self.options, entry.key, image, entry.key)
            caption = self._content(entry.path.with_suffix(".txt")).decode("utf-8-sig")
        except BadImageError as error:
            return Reject(entry.key, error.reason)
        except FileNotFoundError:
            return Reject(entry.key, "missing file")
        except UnicodeDecodeError:
            return Reject(entry.key, "caption is not UTF-8")
        except OSError as error:
            return Reject(entry.key, "unreadable", error.strerror or str(error))
        kept = self.options.model_dump(include={"captions", "uncaptioned", "licence"})
        return to_record({"text": caption}, RowOptions(caption="text", **kept), entry.key, image, entry.key)

    def _check(self, path: Path) -> int:
        """Size of a file of the folder; a pipe may never end, a link may lead to secrets."""
        # `Path.resolve` raises where links lead in a circle.
        if not Path(realpath(path)).is_relative_to(realpath(self.folder)):
            raise BadImageError("link out of the folder")
        state = path.stat()
        if not S_ISREG(state.st_mode):
            raise BadImageError("no regular file")
        return state.st_size

    def _content(self, path: Path) -> bytes:
        if self._check(path) > LARGEST:
            raise BadImageError("too large")
        return path.read_bytes()

    def _from_texts(self, images: list[Path]) -> list[_Entry | Reject]:
        if self.options.group or self.options.label or self.options.id or self.options.licence_column:
            what = f"{self.folder} has no {' or '.join(METADATA)}, so there are no columns to choose from"
            raise DataError(what, "leave out data.ingest.group, label, id and licence_column")
        if not self.options.uncaptioned and not any(path.with_suffix(".txt").exists() for path in images):
            made = "set data.ingest.uncaptioned=true and describe them with `atoll data caption`"
            fix = f"write {METADATA[0]} (file_name, text) or NAME.txt beside each image, or {made}"
            raise DataError(f"{self.folder} holds {many(len(images), 'image')} but no captions", fix)
        return [self._beside(path) for path in images]

    def _from_tables(self, tables: list[Path], images: list[Path]) -> list[_Entry | Reject]:
        folders = [table.parent for table in tables]
        if len(set(folders)) < len(folders):
            raise DataError(f"{folders[0]} holds both {' and '.join(METADATA)}", "keep one of them")
        entries: list[_Entry | Reject] = []
        columns = []
        for table in tables:
            try:
                self._check(table)
            except (BadImageError, OSError) as error:
                reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
                raise DataError(f"{table} is not read: {reason}", "put the file itself there") from None
            rows = _read_jsonl(table) if table.suffix == ".jsonl" else _read_csv(table)
            readable = [row for _, row in rows if isinstance(row, dict)][:100]
            names = list(dict.fromkeys(name for row in readable for name in row))
            if not readable:
                what = f"{table} holds no readable row"
                raise DataError(what, "write one row per image: file_name and text")
            if "file_name" not in names:
                what = f"{table} has the columns {', '.join(names)}, but not file_name"
                raise DataError(what, "name each row's image in file_name")
            columns.append((str(table), names))
            entries += [self._entry(table, number, row) for number, row in rows]
        self.options = self.options.resolve(columns)
        captioned = {entry.path for entry in entries if isinstance(entry, _Entry)}
        return entries + [self._beside(path) for path in images if path not in captioned]

    def _entry(self, table: Path, number: int, row: Row) -> _Entry | Reject:
        where = f"{self._key(table)}, line {number}"
        if isinstance(row, str):
            return Reject(where, "unreadable row", row)
        name = row.get("file_name")
        if not isinstance(name, str) or not name:
            return Reject(where, "missing file", "file_name is empty")
        parts = PurePosixPath(name).parts
        if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or not parts:
            return Reject(where, "unsafe path", repr(name)[:200])
        path = table.parent.joinpath(*parts)
        # What is there but no file, as a pipe or a link to itself, says so when it is read.
        exists = lexists(path)
        return _Entry(path, self._key(path), row) if exists else Reject(where, "missing file", name[:200])

    def _beside(self, path: Path) -> _Entry | Reject:
        # An image that no table names.
        if path.with_suffix(".txt").exists():
            return _Entry(path, self._key(path), None)
        if self.options.uncaptioned:
            return _Entry(path, self._key(path), {})
        return Reject(self._key(path), "no caption", "no row of a metadata file and no text file names it")

    def _key(self, path: Path) -> str:
        return clean(path.relative_to(self.folder).as_posix())


def _read_jsonl(path: Path) -> list[tuple[int, Row]]:
    rows: list[tuple[int, Row]] = []
    try:
        # Split as bytes: str.splitlines would cut captions at U+2028 and the like.
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        unreadable(error, path)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = read_json(line.decode())
            rows.append((number, row if isinstance(row, dict) else "not a JSON object"))
        except UnicodeDecodeError:
            rows.append((number, "not UTF-8"))
        except ValueError:
            rows.append((number, "not JSON"))
    return rows


def _read_csv(path: Path) -> list[tuple[int, Row]]:
    """Rows by line number; values that are not UTF-8 are bytes."""
    rows: list[tuple[int, Row]] = []
    before = csv.field_size_limit(LARGEST)  # of the whole process, hence put back
    try:
        # Spreadsheets put a byte-order mark first, which would else be part of the first column's name.
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            reader = csv.DictReader(file, strict=True)  # a stray quote would swallow the rows after it
            for row in reader:
                fields = {
                    name: value
                    if value is None or clean(value) == value
                    else value.encode("utf-8", "surrogateescape")
                    for name, value in row.items()
                    if name is not None
                }
                rows.append((reader.line_num, fields if None not in row else "more fields than columns"))
    except OSError as error:
        unreadable(error, path)
    except csv.Error as error:
        raise DataError(f"{path} is not readable CSV ({error})", "mend it or write metadata.jsonl") from None
    finally:
        csv.field_size_limit(before)
    return rows


def _stat(path: Path) -> list[int]:
    try:
        state = path.stat()
    except OSError:  # a link to nothing: the row is rejected when it is read
        return []
    return [state.st_size, state.st_mtime_ns]
