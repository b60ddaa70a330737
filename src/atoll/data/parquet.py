"""A source: parquet files in Hugging Face's image layout, read a few rows at a time."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.base.errors import DataError, first_line
from atoll.base.hashing import digest
from atoll.data.formats import Reject, clean
from atoll.data.records import Record, to_record
from atoll.data.settings import RowOptions

_BATCH = 32
"""Rows that are in memory at a time."""


class ParquetSource:
    """The rows of one parquet file, or of all parquet files below a folder in the order of their paths.

    A picture is a struct with `bytes`, or a binary column named `image`.

    Raises:
        DataError: there is no parquet file, one cannot be read, or one lacks a column.
    """

    def __init__(self, path: Path, options: RowOptions | None = None) -> None:
        if not path.exists():
            raise DataError(f"there is no {path}", "check the path")
        self.path = path
        self.files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not self.files:
            raise DataError(f"{path} holds no parquet files", "give a parquet file or a folder of them")
        columns, self._images, counts = [], [], []
        for file in self.files:
            reader = _open(file)
            columns.append((str(file), reader.schema_arrow.names))
            self._images.append(_image_column(reader.schema_arrow, file))
            counts.append(reader.metadata.num_rows)
        self.options = (options or RowOptions()).resolve(columns)
        self._starts = np.cumsum([0, *counts]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def describe(self) -> dict[str, Any]:
        """Name, fingerprint (sizes and footers of the files, the columns' names) and licence."""
        content = [[file.name, file.stat().st_size, _footer_hash(file)] for file in self.files]
        return {
            "name": clean(f"parquet {self.path.name}"),
            "fingerprint": digest([content, self.options.columns()]),
            "licence": self.options.licence,
        }

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        """The rows of some positions."""
        for number, file in enumerate(self.files):
            first, last = self._starts[number], self._starts[number + 1]
            low, high = max(start, first) - first, min(stop, last) - first
            if low < high:
                yield from self._file(file, self._images[number], low, high)

    def _file(self, file: Path, image: str, low: int, high: int) -> Iterator[Record | Reject]:
        place = clean(file.relative_to(self.path).as_posix() if self.path != file else file.name)
        names = [name for name in self.options.columns() if name is not None]
        reader = _open(file)
        try:
            for row, values in _rows(reader, [image, *names], low, high):
                picture = values.pop(image)
                data = picture.get("bytes") if isinstance(picture, dict) else picture
                yield to_record(values, self.options, f"{place}, row {row}", data, f"{place}-{row:08d}")
        except (pa.ArrowException, OSError) as error:
            what = f"cannot read {file}, rows {low} to {high}: {first_line(error)}"
            raise DataError(what, "the file is damaged: fetch it again") from None
        finally:
            reader.close()


def _rows(
    reader: pq.ParquetFile, names: list[str], low: int, high: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows `low` up to `high` with their numbers; only row groups that hold them are read."""
    counts = [reader.metadata.row_group(group).num_rows for group in range(reader.metadata.num_row_groups)]
    starts = np.cumsum([0, *counts]).tolist()
    groups = [group for group in range(len(counts)) if starts[group] < high and low < starts[group + 1]]
    row = starts[groups[0]]
    for batch in reader.iter_batches(_BATCH, row_groups=groups, columns=names):
        columns = {name: _values(batch.column(name)) for name in names}
        for index in range(batch.num_rows):
            if low <= row < high:
                yield row, {name: values[index] for name, values in columns.items()}
            row += 1
        if row >= high:
            return


def _values(column: pa.Array) -> list[Any]:
    """Python values; a string that is not UTF-8 is bytes, what Python has no value for is None."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except (OverflowError, ValueError):
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return b""
    except (OverflowError, ValueError):  # a date beyond the year 9999, say
        return None


def _open(file: Path) -> pq.ParquetFile:
    try:
        # Without pre-buffering, and with a small buffer, a row group is streamed and not held whole.
        reader = pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        names = reader.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = f"{file} is not a readable parquet file: {first_line(error)}"
        raise DataError(what, "fetch it again") from None
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{file} has two columns {twice!r}", "rename one of them")
    return reader


def _image_column(schema: pa.Schema, file: Path) -> str:
    types = {field.name: field.type for field in schema}
    binary = [name for name, kind in types.items() if kind in (pa.binary(), pa.large_binary())]
    structs = [
        name
        for name, kind in types.items()
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    ]
    if "image" in structs + binary:
        return "image"
    if len(structs) == 1:
        return str(structs[0])
    what = f"{file} has the columns {', '.join(schema.names)}, but no single one with pictures"
    raise DataError(what, "name the one with pictures `image`: a struct with `bytes`, or binary")


def _footer_hash(file: Path) -> str:
    """Hash of a parquet file's footer: schema, counts, and size and place of every column chunk."""
    with file.open("rb") as stream:
        stream.seek(-8, 2)
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(-8 - length, 2)
        return hashlib.sha256(stream.read(length)).hexdigest()
