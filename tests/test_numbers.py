"""Numbers of the documentation against the JSONs of the benchmarks.

A paragraph or table under `<!-- numbers: a.json b.json -->` holds no number with decimals that is not,
rounded to as many, among the values of these files in `benchmarks/results/`.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import ROOT

PAGES = [
    "README.md",
    "examples/emoji/README.md",
    *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")),
]
MARK = re.compile(r"<!-- numbers: (?P<files>[\w. -]+) -->\n(?P<block>.+?)(?=\n\n|\Z)", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.,])\d+\.\d+(?![\w.])")


def leaves(tree: Any) -> Iterator[float]:
    """All numbers of a JSON tree; large ones in millions too."""
    if isinstance(tree, dict | list):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value)
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield from (abs(tree), abs(tree) / 1e6) if abs(tree) > 1e5 else (abs(tree),)


def wrong(block: str, values: set[float]) -> list[str]:
    """Numbers of a text that are none of the values, rounded as they are."""
    texts = NUMBER.findall(re.sub(r"\A\|.*\n\|-.*\n|`[^`]*`|\]\([^)]*\)", "", block))  # less a table's head
    return [text for text in texts if text not in {f"{v:.{len(text.split('.')[1])}f}" for v in values}]


def blocks() -> list[Any]:
    found = []
    for page in PAGES:
        for number, match in enumerate(MARK.finditer((ROOT / page).read_text())):
            found.append(pytest.param(match["files"].split(), match["block"], id=f"{page}-{number}"))
    return found


@pytest.mark.parametrize(("files", "block"), blocks())
def test_numbers_are_those_of_the_results(files: list[str], block: str) -> None:
    values = {
        v for file in files for v in leaves(json.loads((ROOT / "benchmarks/results" / file).read_text()))
    }
    assert NUMBER.search(block), "a mark over text without numbers"
    assert not wrong(block, values)


def test_a_wrong_number_is_found() -> None:
    assert (
        wrong(
            "| at 9.5 |\n|---|\n| `top-1 9.9` | 0.74 (0.73 to 0.76) | 399.1 |",
            {0.7421, 0.7349, 0.7551, 399.06},
        )
        == []
    )
    assert wrong("it has 0.75 and 1.0", {0.744, 1.04}) == ["0.75"]
    assert list(leaves({"a": [1, True, {"b": -2.5}], "c": "3"})) == [1, 2.5]


def test_the_tables_of_results_are_marked() -> None:
    for page in PAGES[:2]:
        text = (ROOT / page).read_text()
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        measured = [table for table in tables if len(NUMBER.findall(re.sub(r"`[^`]*`", "", table))) > 3]
        for table in measured:
            line = text[: text.index(table)].rstrip("\n").rsplit("\n", 1)[-1]
            assert line.startswith("<!-- numbers: "), f"{page}: {table[:80]}"
