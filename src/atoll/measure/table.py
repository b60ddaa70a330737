"""Tables of measured values, for JSON and CSV."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Cell = float | int | str | None
Record = Mapping[str, Cell]
"""A row by column."""
Row = dict[str, Any]
"""A model's row of a comparison."""


@dataclass(frozen=True)
class Table:
    """A table for JSON and CSV.

    Attributes:
        columns: their names.
        rows: one value per column; None where there is none.
    """

    columns: tuple[str, ...]
    rows: list[list[Cell]]

    def to_json(self) -> dict[str, Any]:
        """`{"columns": [...], "rows": [[...], ...]}`."""
        return {"columns": list(self.columns), "rows": self.rows}

    def records(self) -> list[dict[str, Cell]]:
        """Rows as mappings."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    @classmethod
    def joined(cls, tables: Sequence["Table"]) -> "Table":
        """Tables of the same columns, one after the other."""
        assert len({table.columns for table in tables}) == 1
        return cls(tables[0].columns, [row for table in tables for row in table.rows])

    def led_by(self, column: str, value: Cell) -> "Table":
        """The same with one more column in front, of one value."""
        return Table((column, *self.columns), [[value, *row] for row in self.rows])


def to_csv(columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> bytes:
    """A table as CSV; what there is no value of is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue().encode()


def finite(value: Tensor | float) -> float | None:
    """A number that JSON can hold, else None."""
    number = float(value)
    return number if math.isfinite(number) else None


def number(value: Cell) -> float:
    """A cell that holds a number."""
    assert isinstance(value, int | float)
    return float(value)


def ratio_of(value: Cell, base: Cell) -> float | None:
    """One number over another; None where there is none, or nothing to divide by."""
    if value is None or not base:
        return None
    return number(value) / number(base)
