"""A source: parquet files in Hugging Face's image layout, read a few rows at a time."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.data.records import Record, Reject, clean, to_record
from atoll.data.settings import RowOptions

_BATCH = 32
"""Rows that are in memory at a time."""


class ParquetSource:
    """The rows of one parquet file, or of all parquet files below a folder in the order of their paths.

    A picture is a struct with `bytes`, or a binary column named `image`.

    Args:
        path: the file or folder.
        options: which columns mean what.

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
        self.options = (options or RowOptions()).resolve_all(columns)
        self._starts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def describe(self) -> dict[str, Any]:
        """Name, fingerprint (sizes and footers of the files, the columns' names) and licence."""
        named = [self.options.caption, self.options.group, self.options.label, self.options.id]
        content = [[file.name, file.stat().st_size, _footer_hash(file)] for file in self.files]
        return {
            "name": clean(f"parquet {self.path.name}"),
            "fingerprint": digest([content, named]),
            "licence": self.options.licence,
        }

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        """The rows of some positions."""
        for number, file in enumerate(self.files):
            first = int(self._starts[number])
            low, high = max(start - first, 0), min(stop, int(self._starts[number + 1])) - first
            if low < high:
                yield from self._file(number, file, low, high)

    def _file(self, number: int, file: Path, low: int, high: int) -> Iterator[Record | Reject]:
        options, image = self.options, self._images[number]
        names = [n for n in (options.caption, options.group, options.label, options.id) if n is not None]
        reader = _open(file)
        try:
            for row, values in _rows(reader, [image, *names], low, high):
                place = f"{clean(file.relative_to(self.path).as_posix() if self.path != file else file.name)}"
                picture = values.pop(image)
                data = picture.get("bytes") if isinstance(picture, dict) else picture
                yield to_record(values, options, f"{place}, row {row}", data, f"{place}-{row:08d}")
        except (pa.ArrowException, OSError) as error:
            what = f"cannot read {file}, rows {low} to {high}: {str(error).strip().splitlines()[0]}"
            raise DataError(what, "the file is damaged: fetch it again") from None
        finally:
            reader.close()


def _rows(
    reader: pq.ParquetFile, names: list[str], low: int, high: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows `low` up to `high` with their numbers; only row groups that hold them are read."""
    first = 0
    for group in range(reader.metadata.num_row_groups):
        count = reader.metadata.row_group(group).num_rows
        if first < high and low < first + count:
            row = first
            for batch in reader.iter_batches(_BATCH, row_groups=[group], columns=names):
                skipped = min(max(low - row, 0), batch.num_rows)
                taken = batch.slice(skipped, max(min(high - row, batch.num_rows) - skipped, 0))
                columns = {name: _values(taken.column(name)) for name in names}
                for index in range(taken.num_rows):
                    yield row + skipped + index, {name: values[index] for name, values in columns.items()}
                row += batch.num_rows
                if row >= high:
                    break
        first += count


def _values(column: pa.Array) -> list[Any]:
    """Python values; a string that is not UTF-8 stays bytes."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return b""


def _open(file: Path) -> pq.ParquetFile:
    try:
        # Without pre-buffering, and with a small buffer, a row group is streamed and not held whole.
        return pq.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
    except (pa.ArrowException, OSError) as error:
        what = f"{file} is not a readable parquet file: {str(error).strip().splitlines()[0]}"
        raise DataError(what, "fetch it again") from None


def _image_column(schema: pa.Schema, file: Path) -> str:
    structs = [
        field.name
        for field in schema
        if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
    ]
    binary = [
        field.name
        for field in schema
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
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
