import shutil
from pathlib import Path

import pytest

from report.campaigns import PROMPTS, Builder
from report.pages import Page


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path / "camp")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart; not to be written to."""
    path = tmp_path_factory.mktemp("finished") / "camp"
    Builder(path).whole()
    return path


@pytest.fixture
def whole(finished: Path, tmp_path: Path) -> Builder:
    """A copy of it, to be changed."""
    shutil.copytree(finished, tmp_path / "camp")
    return Builder(tmp_path / "camp")


@pytest.fixture
def swept(whole: Builder) -> Builder:
    """With two prompts, sweeps, pairs and a curve."""
    return whole.compare(PROMPTS[:1] + PROMPTS[2:3]).beyond()


@pytest.fixture(scope="session")
def page(finished: Path) -> Page:
    """The page of a finished quickstart."""
    return Page.of(Builder(finished))
