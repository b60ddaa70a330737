"""Every hostile input ends in one line or is rightly accepted; nothing runs, nothing is written outside."""

import pytest

from hostile.arena import Arena
from hostile.inputs import ROWS, Row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_it_is_one_line(row: Row, arena: Arena) -> None:
    places = {name: str(arena / name) for name in ("campaign", "export", "fresh", "source")} | {
        "inside": str(arena.inside)
    }
    row.forge(arena)
    outcome = arena.run(
        *(part.format(**places) for part in row.argv), call=tuple(p.format(**places) for p in row.call)
    )
    outcome.check()
    if row.words:
        assert outcome.code == 2, outcome.said
        assert all(word in outcome.error for word in row.words), outcome.error
        assert len(outcome.error) < 600
    assert "SECRET" not in outcome.said
