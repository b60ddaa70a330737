"""Every hostile input ends in one line or is rightly accepted; nothing runs, nothing is written outside."""

from pathlib import Path

import pytest

from hostile.arena import Arena
from hostile.inputs import ROWS, Row
from nursery import Nursery

CASES = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * row.slow) for row in ROWS]


@pytest.mark.parametrize("row", CASES)
def test_it_is_one_line(row: Row, templates: dict[str, Path], nursery: Nursery, tmp_path: Path) -> None:
    named = " ".join((*row.argv, *row.call))
    needed = {name: folder for name, folder in templates.items() if f"{{{name}}}" in named}
    arena = Arena(tmp_path / "arena", needed, nursery)
    places = {name: str(arena / name) for name in ("campaign", "export", "fresh", "source")}
    places["inside"] = str(arena.inside)
    row.forge(arena)
    argv, call = (tuple(part.format(**places) for part in parts) for parts in (row.argv, row.call))
    outcome = arena.run(*argv, call=call)
    outcome.check()
    if row.words:
        assert outcome.code == 2, outcome.said
        assert all(word in outcome.error for word in row.words), outcome.error
        assert len(outcome.error) < 600
    assert "SECRET" not in outcome.said
