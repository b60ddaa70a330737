"""Tables of values: columns with a name, a unit and a meaning; one CSV, one JSON and one text of each."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, SupportsFloat

from pydantic import BaseModel, Field, model_serializer, model_validator
from pydantic.fields import FieldInfo

from atoll.base import text as write
from atoll.base.config import Config
from atoll.base.text import NONE, printable, round_sig

Cell = float | int | str | None
FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": write.size,
    "FLOPs": write.flops,
    "share": write.percent,
    "s": write.duration,
    "ratio": write.ratio,
    "parameters": write.count,
    "operations": lambda value: f"{value:.2e}",
    "GiB": lambda value: f"{value / 2**30:.1f}",
}
"""Units that a terminal does not show in the head of a column, as each cell says its own."""


def finite(value: SupportsFloat) -> float | None:
    """A number that JSON can hold, else None."""
    number = float(value)
    return number if math.isfinite(number) else None


def ratio_of(value: float | None, base: float | None) -> float | None:
    """One number over another; None where there is none, or nothing to divide by."""
    return None if value is None or not base else value / base


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    unit: str = ""  # of `FORMATS`, or any other; empty for texts and plain numbers
    digits: int = 4  # significant ones that a terminal shows


def column(meaning: str = "", unit: str = "", default: Any = ..., digits: int = 4) -> Any:
    """A field of a typed row, what it means and its unit; without a meaning its docstring says it."""
    return Field(default, description=meaning or None, json_schema_extra={"unit": unit, "digits": digits})


def columns_of(record: type[BaseModel]) -> tuple[Column, ...]:
    """Columns of a typed row, one for each field; what they mean is for the documentation."""

    def column(name: str, field: FieldInfo) -> Column:
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        return Column(name, str(extra.get("unit", "")), int(str(extra.get("digits", 4))))

    return tuple(column(name, field) for name, field in record.model_fields.items())


@dataclass(frozen=True)
class Table:
    """Values in rows (typed records, or mappings by column name) and columns, which may be fewer."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Any]

    @classmethod
    def of(cls, record: type[BaseModel], rows: Iterable[BaseModel], name: str = "", title: str = "") -> Self:
        """A table of typed rows."""
        return cls(name, title, columns_of(record), list(rows))

    @classmethod
    def plain(cls, heads: Sequence[str], rows: Iterable[Sequence[Any]], digits: int = 4) -> Self:
        """A table of rows of cells, as many as there are heads."""
        columns = tuple(Column(head, digits=digits) for head in heads)
        return cls("", "", columns, [dict(zip(heads, row, strict=True)) for row in rows])

    @cached_property
    def names(self) -> list[str]:
        """Of the columns."""
        return [column.name for column in self.columns]

    @cached_property
    def cells(self) -> list[list[Any]]:
        """Values by row, in the order of the columns; None where a row has no such value."""
        return [
            [row.get(name) if isinstance(row, Mapping) else getattr(row, name, None) for name in self.names]
            for row in self.rows
        ]

    @property
    def records(self) -> list[dict[str, Any]]:
        """Rows as mappings by column name."""
        return [dict(zip(self.names, row, strict=True)) for row in self.cells]

    def to_csv(self) -> bytes:
        """As CSV with one line of names; what there is no value of is empty."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.names, *self.cells])
        return text.getvalue().encode()


class Tables(Config):
    """Typed tables of one JSON file: a field `name: tuple[Row, ...] | None` for each.

    In the file a table is `{"columns": [names], "rows": [[values]]}`. One that is None is left out.
    """

    @classmethod
    def record(cls, name: str) -> type[BaseModel]:
        """Type of the rows of a table."""
        annotation: Any = cls.model_fields[name].annotation
        rows = next(part for part in annotation.__args__ if part is not type(None))
        record: type[BaseModel] = rows.__args__[0]
        return record

    def present(self) -> dict[str, Table]:
        """The tables that there are, by name."""
        return {
            name: Table.of(self.record(name), rows, name)
            for name in type(self).model_fields
            if (rows := getattr(self, name)) is not None
        }

    @model_validator(mode="before")
    @classmethod
    def _unpacked(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping):
            return tree
        unpacked = dict(tree)
        for name, table in tree.items():
            if isinstance(table, Mapping):
                try:  # rows of another length would silently lose values
                    if table.keys() != {"columns", "rows"}:
                        raise TypeError
                    unpacked[name] = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
                except (TypeError, ValueError):
                    raise ValueError(f"the table {name} is not columns and rows of as many values") from None
        return unpacked

    @model_serializer
    def _packed(self) -> dict[str, Any]:
        return {name: {"columns": table.names, "rows": table.cells} for name, table in self.present().items()}


def text(table: Table) -> list[str]:
    """Lines for a terminal: the title where there is one, the heads, the rows; numbers on the right."""
    heads = [
        printable(column.name.replace("_", " "))
        + (f" [{column.unit}]" if column.unit and column.unit not in FORMATS else "")
        for column in table.columns
    ]
    cells = table.cells
    rows = [[*map(shown, row, table.columns)] for row in cells]
    left = [n for n in range(len(heads)) if not cells or any(isinstance(row[n], str) for row in cells)]
    return [*([table.title] if table.title else []), *write.columns([heads, *rows], left)]


def shown(value: Any, column: Column) -> str:
    """A cell as a person reads it, in its unit and without control characters."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.unit in FORMATS:
        return FORMATS[column.unit](value)
    return f"{value:,}" if isinstance(value, int) else round_sig(value, column.digits)
