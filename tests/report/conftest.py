from pathlib import Path

import pytest

from report.campaigns import Builder


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "camp")
