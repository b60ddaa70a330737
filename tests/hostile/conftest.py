"""One finished campaign with its export, and a folder of pictures."""

from pathlib import Path

import pytest
from PIL import Image

from hostile.arena import Arena
from nursery import Nursery


@pytest.fixture(scope="session")
def templates(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return handed_over(whole, tmp_path_factory.mktemp("templates"))


def handed_over(whole: Path, folder: Path) -> dict[str, Path]:
    """Folders that a stranger might hand over, by name: a campaign, its export, a source, a new campaign."""
    from whole import run

    run("export", whole, "--to", folder / "export")
    source = folder / "source"
    source.mkdir()
    for number in range(4):
        Image.new("RGB", (16, 16), (number * 50, 0, 0)).save(source / f"g{number}.png")
        (source / f"g{number}.txt").write_text(f"picture {number}")
    run("new", folder / "fresh")
    return {"campaign": whole, "fresh": folder / "fresh", "export": folder / "export", "source": source}


@pytest.fixture
def arena(tmp_path: Path, templates: dict[str, Path], nursery: Nursery) -> Arena:
    return Arena(tmp_path / "arena", templates, nursery)
