"""Numbers of the documentation are those of the results: each names the file, row and column that it is.

`tests/numbers.json` says which; `python tests/numbers_of.py` proposes for what is new.
"""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from helpers import ROOT
from numbers_of import NUMBER, PAGES, RECORD, SETTING, leaves, numbers, said, values

BLOCKS: dict[str, dict[str, list[str]]] = json.loads(RECORD.read_text())


def texts(page: str, text: str) -> dict[str, dict[str, list[str]]]:
    """Numbers of a page's marked blocks, by block and cell, and the files that may hold them."""
    found: dict[str, dict[str, list[str]]] = {}
    for block, _, cell, content in numbers(page, text):
        found.setdefault(block, {}).setdefault(cell, []).extend(NUMBER.findall(content))
    return found


def wrong(record: dict[str, list[str]], cells: dict[str, list[str]]) -> list[str]:
    """What is not the value that the record names, or is not named."""
    if record.keys() != cells.keys():
        return [f"not in both: {sorted(record.keys() ^ cells.keys())}"]
    return [
        f"{cell}: {text} is not {place}"
        for cell, found in cells.items()
        for text, place in zip(found, record[cell], strict=True)
        if place != SETTING and not said(text, values(place.partition(" | ")[0])[place])
    ]


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_the_results(page: str) -> None:
    found = texts(page, (ROOT / page).read_text())
    assert found.keys() == {block for block in BLOCKS if block.startswith(f"{page}: ")}
    assert [line for block, cells in found.items() for line in wrong(BLOCKS[block], cells)] == []
    for block, files, _, _ in numbers(page, (ROOT / page).read_text()):
        named = {place.partition(" | ")[0] for places in BLOCKS[block].values() for place in places}
        assert named - {SETTING} <= set(files), block


@pytest.mark.parametrize("page", ["README.md", "docs/results.md"])
def test_two_swapped_cells_are_found(page: str) -> None:
    """Any two neighbours in any row of any table, unless they are alike."""
    for block, cells in texts(page, (ROOT / page).read_text()).items():
        for one, other in pairwise(cells):
            if len(cells[one]) == len(cells[other]) and cells[one] != cells[other]:
                assert wrong(BLOCKS[block], cells | {one: cells[other], other: cells[one]}), (block, one)


def test_a_number_that_equals_another_value_is_found() -> None:
    """It once passed when it was any value of the file."""
    block = next(name for name in BLOCKS if name.startswith("docs/performance.md: Training"))
    cells = texts("docs/performance.md", (ROOT / "docs/performance.md").read_text())[block]
    (name, own), *_ = cells.items()
    for other in set(own) - {own[0]}:
        assert wrong(BLOCKS[block], cells | {name: [other, *own[1:]]})


def test_rows_are_named_by_case_and_metric() -> None:
    row: dict[str, Any] = {"case": "a", "metric": "b", "value": -2.5e6, "spread": [1, 2], "met": True}
    assert dict(leaves({"rows": [row]}, "f.json")) == {
        "f.json | rows | a | b | value": 2.5e6,
        "f.json | rows | a | b | value | millions": 2.5,
        "f.json | rows | a | b | spread | 0": 1,
        "f.json | rows | a | b | spread | 1": 2,
    }


def test_the_tables_of_results_are_marked() -> None:
    for page in PAGES[:2]:
        text = (ROOT / page).read_text()
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        measured = [table for table in tables if len(NUMBER.findall(re.sub(r"`[^`]*`", "", table))) > 3]
        for table in measured:
            line = text[: text.index(table)].rstrip("\n").rsplit("\n", 1)[-1]
            assert line.startswith("<!-- numbers: "), f"{page}: {table[:80]}"
