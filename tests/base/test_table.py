"""A table has one JSON, one CSV and one text, whatever its rows are."""

import pytest

from atoll.base.config import Config
from atoll.base.errors import ConfigError
from atoll.base.table import Column, Table, Tables, column, columns_of, text


class Row(Config):
    model: str
    """Whose."""
    loss: float | None = column(unit="nats", default=None, digits=3)
    """Cross-entropy."""
    seconds: float | None = column(unit="s", default=None)
    """Time."""


class Results(Tables):
    losses: tuple[Row, ...] | None = None
    """Losses by model."""


ROWS = (Row(model="router", loss=0.123456, seconds=125.0), Row(model="a, b"))
TABLE = Table.of(Row, ROWS, "losses", "Losses")
MAPPED = Table("losses", "Losses", columns_of(Row), [row.model_dump() for row in ROWS])


def test_a_field_is_a_column_with_unit_and_digits() -> None:
    assert TABLE.columns[1] == Column("loss", "nats", 3)


@pytest.mark.parametrize("table", [TABLE, MAPPED])
def test_typed_records_and_mappings_are_written_alike(table: Table) -> None:
    assert table.to_csv() == b'model,loss,seconds\nrouter,0.123456,125.0\n"a, b",,\n'
    assert text(table) == [
        "Losses",
        "model   loss [nats]     seconds",
        "router        0.123  2 min 05 s",
        "a, b              –           –",
    ]


def test_a_terminal_obeys_no_cell() -> None:
    table = Table("t", "", (Column("host\x1b[2J"),), [{"host\x1b[2J": "a\x1b[2J"}])
    assert "\x1b" not in "".join(text(table))


def test_typed_tables_come_back_and_empty_ones_keep_their_columns() -> None:
    tree = Results(losses=ROWS).model_dump(mode="json")
    assert tree["losses"]["columns"] == ["model", "loss", "seconds"]
    assert Results.parse(tree, "a file").losses == ROWS
    assert Results().model_dump() == {}
    assert Results(losses=()).present()["losses"].to_csv() == b"model,loss,seconds\n"


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        ({"columns": ["model"], "rows": [["a", 1]]}, "as many values"),
        ({"columns": None, "rows": [[1]]}, "as many values"),
        ({"columns": [["a"]], "rows": [1]}, "as many values"),
        ({"columns": ["model", "loss"], "rows": [["a", "much"]]}, "number"),
        ({"columns": ["model", "gain"], "rows": [["a", 1]]}, "gain"),
        ({"columns": ["loss"], "rows": [[1]]}, "model"),
        ({"rows": []}, "columns and rows"),
    ],
)
def test_a_table_of_other_columns_or_values_is_refused(table: object, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Results.parse({"losses": table}, "a file")
