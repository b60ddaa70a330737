"""`atoll plan DIR --serve`: memory and speed by the number of experts on the device."""

import json
from pathlib import Path

import pytest

from helpers import command, refused


def test_a_server_is_sized_by_drawing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("plan", str(folder), "--serve", "--set", "batch=6")
    found = json.loads(command(capsys, *how, "--json").out)
    assert [row["experts"] for row in found] == [1, 2, 3]
    weights = [row["weights"] for row in found]
    assert weights == sorted(weights) and weights[2] * 2 == weights[0] * 3  # one place more is brought into
    assert found[0]["swaps"] > 0 and found[2]["swaps"] == 0
    for row in found:
        assert row["peak"] > row["weights"] and row["rows"] > row["pictures"] > 0
    assert "experts" in command(capsys, *how).out.splitlines()[1]
    refused(command(capsys, "plan", str(tmp_path), "--serve"), str(tmp_path))
    refused(command(capsys, "plan", str(folder), "--serve", "--set", "batch=0"), "batch")
