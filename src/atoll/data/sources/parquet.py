"""A source: parquet files in Hugging Face's image layout, read a few rows at a time."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from atoll.base.errors import DataError, first_line
from atoll.data.formats import Reject, clean
from atoll.data.settings import RowOptions
from atoll.data.sources.files import Files
from atoll.data.sources.record import FilesSource, Record, to_record

_BATCH = 32
"""Rows that are in memory at a time."""
_BUFFER = 2**20
"""Bytes of a column that are read at a time."""


class ParquetSource(FilesSource):
    """The rows of parquet files, in the order of the files' names.

    A picture is a struct with `bytes`, or a binary column named `image`. Of remote files footers and the row
    groups that are asked for are read, and nothing is kept on disk.
    """

    KIND = "parquet"

    def __init__(self, files: Files, options: RowOptions | None = None) -> None:
        if not files.states:
            raise DataError(f"{files.root} holds no parquet files", "give a parquet file or a folder of them")
        options = options or RowOptions()
        columns, self._images, counts = [], [], []
        for name in files.states:
            with _opened(files, name) as reader:
                schema = reader.schema_arrow
                columns.append((files.where(name), schema.names))
                self._images.append(_image_column(schema, files.where(name), options.image))
                counts.append(reader.metadata.num_rows)
        super().__init__(files, options.resolve(columns), counts)

    def content(self) -> Any:
        """Names, sizes and digests: a time of change would make a copy another data set."""
        # The footer has schema, counts, and size and place of every column chunk, so pictures need no look.
        # A label that is put right leaves all that as it was: what rows take beside pictures is read, unless
        # a commit stands for it.
        named = tuple(f"{name}." for name in self.options.columns() if name and not self.files.commit)
        about = list[list[Any]]()
        for name, (size, _) in self.files.states.items():
            hashed = hashlib.sha256()
            with self.files.open(name, _BUFFER) as stream:
                footer = pq.read_metadata(stream)
                # A parquet file ends with its footer, the footer's length in four bytes, and `PAR1`.
                spans = [(size - 8 - footer.serialized_size, footer.serialized_size)]
                for group, column in product(range(footer.num_row_groups), range(footer.num_columns)):
                    chunk = footer.row_group(group).column(column)
                    if f"{chunk.path_in_schema}.".startswith(named):
                        start = chunk.dictionary_page_offset or chunk.data_page_offset
                        spans.append((start, chunk.total_compressed_size))
                for start, count in spans:
                    for place in range(max(start, 0), min(start + count, size), _BUFFER):
                        stream.seek(place)
                        hashed.update(stream.read(min(_BUFFER, start + count - place)))
            about.append([Path(name).name, size, hashed.hexdigest()])
        return about

    def read(self, number: int, low: int, high: int) -> Iterator[Record | Reject]:
        name, image = [*self.files.states][number], self._images[number]
        place, names = clean(name), [column for column in self.options.columns() if column is not None]
        try:
            with _opened(self.files, name) as reader:
                for row, values in _rows(reader, [image, *names], low, high):
                    picture = values.pop(image)
                    data = picture.get("bytes") if isinstance(picture, dict) else picture
                    yield to_record(values, self.options, f"{place}, row {row}", data, f"{place}-{row:08d}")
        except (pa.ArrowException, OSError) as error:
            what = f"cannot read {self.files.where(name)}, rows {low} to {high}: {first_line(error)}"
            raise DataError(what, "the file is damaged: fetch it again") from None


def _rows(
    reader: pq.ParquetFile, names: list[str], low: int, high: int
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows `low` up to `high` with their numbers; only row groups that hold them are read."""
    counts = [reader.metadata.row_group(group).num_rows for group in range(reader.metadata.num_row_groups)]
    starts = np.cumsum([0, *counts]).tolist()
    groups = [group for group in range(len(counts)) if starts[group] < high and low < starts[group + 1]]
    row = starts[groups[0]]
    # Without Arrow's threads: they may hold a file of Python's when Python ends, which aborts the process.
    for batch in reader.iter_batches(_BATCH, row_groups=groups, columns=names, use_threads=False):
        columns = {name: _values(batch.column(name)) for name in names}
        for index in range(batch.num_rows):
            if low <= row < high:
                yield row, {name: values[index] for name, values in columns.items()}
            row += 1
        if row >= high:
            return


def _values(column: pa.Array) -> list[Any]:
    """Python values; a string that is not UTF-8 is bytes, what Python has no value for is None."""
    with suppress(OverflowError, ValueError):
        values: list[Any] = column.to_pylist()
        return values
    values = []
    for scalar in column:  # one by one: the other rows of the batch are sound
        try:
            values.append(scalar.as_py())
        except UnicodeDecodeError:
            values.append(b"")
        except (OverflowError, ValueError):  # a date beyond the year 9999, say
            values.append(None)
    return values


@contextmanager
def _opened(files: Files, name: str) -> Iterator[pq.ParquetFile]:
    with files.open(name, _BUFFER) as file:
        try:
            # Without pre-buffering, and with a small buffer, a row group is streamed and not held whole.
            reader = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER)
            names = reader.schema_arrow.names
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            what = f"{files.where(name)} is not a readable parquet file: {first_line(error)}"
            raise DataError(what, "fetch it again") from None
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{files.where(name)} has two columns {twice!r}", "rename one of them")
        yield reader


def _image_column(schema: pa.Schema, file: str, named: str | None) -> str:
    types = {field.name: field.type for field in schema}
    binary = [name for name, kind in types.items() if kind in (pa.binary(), pa.large_binary())]
    struct_types = {name: kind for name, kind in types.items() if pa.types.is_struct(kind)}
    structs = [name for name, kind in struct_types.items() if kind.get_field_index("bytes") >= 0]
    if (named or "image") in structs + binary:
        return named or "image"
    if named is None and len(structs) == 1:
        return str(structs[0])
    lack = "no single one with pictures" if named is None else f"{named!r} holds no pictures"
    fix = "say with data.ingest.image which one holds the pictures: a struct with `bytes`, or binary"
    raise DataError(f"{file} has the columns {', '.join(schema.names)}, but {lack}", fix)
