"""One campaign that all tests of measuring share: trained, with milestones, pretraining and a monolith."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from atoll.campaign.folder import Campaign
from atoll.train.run import train_run
from helpers import Run, assembled
from helpers_extractors import save_dinov2, save_pictures

TOY: dict[str, Any] = {
    "data": {"ingest": {"heldout": 0.25, "test": 0.15, "glyphs": {"limit": 160}}},
    "train": {"milestones": 4, "previews": 0},
    "budget": {"pretrain": 0.25, "samples": 960},
    "sampling": {"routing": "top-1"},
    "compare": {"strategies": ["top-1", "full"], "components": 4, "extractor_size": 28, "threads": 1},
}


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An extractor."""
    return save_dinov2(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Pictures to judge, and to judge by."""
    base = tmp_path_factory.mktemp("pictures")
    return save_pictures(base / "made", 45), save_pictures(base / "real", 37, seed=1)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, net: Path) -> Path:
    """The campaign; nothing writes to it."""
    compare = {**TOY["compare"], "extractor": str(net)}
    folder = assembled(tmp_path_factory.mktemp("toy") / "c", {**TOY, "compare": compare})
    train_run(Campaign.open(folder), "monolith")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of its own for a test."""
    return Path(shutil.copytree(made, tmp_path / "c"))


@pytest.fixture
def staged(run: Run) -> Run:
    """A stage of the command by its name, with settings."""
    return lambda stage, folder, *settings: run(
        stage, folder, *(part for setting in settings for part in ("--set", setting))
    )


@pytest.fixture
def compare(staged: Run) -> Run:
    """`atoll compare` of a folder, with settings."""
    return lambda folder, *settings: staged("compare", folder, *settings)
