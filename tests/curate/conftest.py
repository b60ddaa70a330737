"""One campaign that is cut into two clusters, of which every test has a copy."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import Answer, command, partitioned

Said = Callable[..., Answer]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be written to."""
    folder = tmp_path_factory.mktemp("toy") / "c"
    partitioned(folder)
    return folder


@pytest.fixture
def campaign(made: Path, tmp_path: Path) -> Path:
    """A copy."""
    return Path(shutil.copytree(made, tmp_path / "c"))


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    """The command within this process: what a user would see."""
    return lambda *argv: command(capsys, *argv)
