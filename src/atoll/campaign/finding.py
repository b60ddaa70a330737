"""Tables that other packages leave for a campaign's report, which shows them without knowing more."""

from typing import Self

from pydantic import model_validator

from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.store.store import Store

FOLDER = "reports/findings"


class Finding(File):
    """`reports/findings/*.json`: one table of the report page."""

    FORMAT, PLACE, ERROR = "atoll/finding", f"{FOLDER}/*.json", DataError
    REMEDY = "remove the file, or make it again"

    title: str
    """What it is about."""
    text: str
    """What the numbers mean, and the command that made them."""
    columns: list[str]
    """Heads of the columns; the first names the row."""
    rows: list[list[str | int | float | None]]
    """Cells, as many as there are columns."""

    @model_validator(mode="after")
    def _is_table(self) -> Self:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError("a row has another number of cells than there are columns")
        return self

    def write(self, store: Store, name: str) -> None:
        """Leave it for the report under this name."""
        store.put_json(f"{FOLDER}/{name}.json", self.to_json())


def findings(store: Store) -> list[Finding]:
    """All tables that were left, by their files' names."""
    keys = [key for key in store.list(FOLDER) if key.endswith(".json")]
    return [Finding.read(store, key) for key in sorted(keys)]
