"""One campaign that is cut into two clusters, of which every test has a copy."""

import shutil
from pathlib import Path

import pytest

from helpers import partitioned


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    folder = tmp_path_factory.mktemp("toy") / "c"
    partitioned(folder)
    return folder


@pytest.fixture
def campaign(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "c"))
