"""Tables that other packages leave for a campaign's report, which shows them without knowing more."""

from typing import Self

from pydantic import Field, model_validator

from atoll.base.errors import DataError
from atoll.base.format import File
from atoll.store.store import Store

Cell = str | int | float | None
FOLDER = "reports/findings"
CONCEPTS, SCORES, TOP_WORDS = "concepts", "scores", "top words"
"""Two tables with a row for each cluster, and the column of the first that says what is in it. What says it
in the second is its first column of numbers."""


class ReportTable(File):
    """`reports/findings/*.json`: one table of the report page."""

    FORMAT, PLACE, ERROR = "atoll/finding", f"{FOLDER}/*.json", DataError
    REMEDY = "remove the file, or make it again"

    title: str = Field(description="What it is about.")
    text: str = Field(description="What the numbers mean, and the command that made them.")
    columns: list[str] = Field(description="Heads of the columns; the first names the row.")
    rows: list[list[Cell]] = Field(description="Cells, as many as there are columns.")

    @model_validator(mode="after")
    def _is_table(self) -> Self:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError("a row has another number of cells than there are columns")
        return self

    def write(self, store: Store, name: str) -> str:
        """Leave it for the report under this name; where it lies."""
        store.put_json(key := f"{FOLDER}/{name}.json", self.to_json())
        return key


def findings(store: Store) -> list[ReportTable]:
    """All tables that were left, by their files' names."""
    keys = [key for key in store.list(FOLDER) if key.endswith(".json")]
    return [ReportTable.read(store, key) for key in sorted(keys)]


def of_clusters(store: Store) -> dict[int, str]:
    """What was found in the rows of clusters: telling concepts and mean score, where anything was."""
    findings: dict[int, list[str]] = {}
    for name in (CONCEPTS, SCORES):
        if not store.exists(key := f"{FOLDER}/{name}.json"):
            continue
        table = ReportTable.read(store, key)
        concepts = TOP_WORDS in table.columns
        head, column = (TOP_WORDS, table.columns.index(TOP_WORDS)) if concepts else ("mean score", 1)
        for row in table.rows:
            number = str(row[0]).removeprefix("cluster ")  # the last row is of all clusters
            if number.isdecimal() and len(row) > column and row[column] is not None:
                findings.setdefault(int(number), []).append(f"{head} {row[column]}")
    return {number: "; ".join(words) for number, words in sorted(findings.items())}
