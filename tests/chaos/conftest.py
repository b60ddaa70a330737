"""One process that forks, one campaign that is partitioned, and the same one trained in peace."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.campaigns import CHANGES, ISLANDS
from chaos.nursery import Nursery
from chaos.nursery import nursery as start_nursery
from helpers import atoll, environment, partitioned


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with start_nursery(tmp_path_factory.mktemp("said"), environment()) as made:
        yield made


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that is partitioned and not trained."""
    folder = tmp_path_factory.mktemp("chaos") / "campaign"
    partitioned(folder, CHANGES)
    return folder


@pytest.fixture(scope="session")
def reference(nursery: Nursery, untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same campaign, trained without disturbance; the first island by a fresh interpreter."""
    folder = Path(shutil.copytree(untouched, tmp_path_factory.mktemp("undisturbed") / "campaign"))
    done = atoll("train", "expert", folder, "--expert", str(ISLANDS[0]))
    assert done.returncode == 0, done.stderr
    for number in ISLANDS[1:]:
        assert nursery.train(folder, number).wait() == 0
    return folder


@pytest.fixture
def copy(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "campaign"))
