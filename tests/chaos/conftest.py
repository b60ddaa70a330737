"""One process that forks, one campaign that is partitioned, and the same one trained in peace."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.campaigns import CHANGES, ISLANDS
from helpers import environment, partitioned
from nursery import Fresh, Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("said")) as made:
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
    command = [sys.executable, "-m", "atoll", "train", "expert", str(folder), "--expert", str(ISLANDS[0])]
    assert Fresh(command, env=environment()).wait() == 0
    for number in ISLANDS[1:]:
        assert nursery.train(folder, number).wait() == 0
    return folder


@pytest.fixture
def copy(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "campaign"))
