"""One campaign that is partitioned, and the same one trained in peace."""

import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest

from chaos.campaigns import CHANGES, ISLANDS
from helpers import environment, partitioned
from nursery import Fresh, Nursery


@pytest.fixture(scope="session")
def made(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both campaigns, made once by the worker that comes first, while others wait; nobody changes them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "chaos"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            partitioned(folder / "untouched", CHANGES)
            trained = Path(shutil.copytree(folder / "untouched", folder / "reference"))
            # The first island by a fresh interpreter: those that are forked must come to its bits.
            command = ["train", "expert", str(trained), "--expert", str(ISLANDS[0])]
            assert Fresh([sys.executable, "-m", "atoll", *command], env=environment()).wait() == 0
            for number in ISLANDS[1:]:
                assert nursery.train(trained, number).wait() == 0
            (folder / "made").touch()
    return folder


@pytest.fixture(scope="session")
def untouched(made: Path) -> Path:
    """A campaign that is partitioned and not trained."""
    return made / "untouched"


@pytest.fixture(scope="session")
def reference(made: Path) -> Path:
    """The same campaign, trained without disturbance."""
    return made / "reference"


@pytest.fixture
def copy(untouched: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untouched, tmp_path / "campaign"))
