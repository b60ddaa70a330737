"""One served model for all tests of this folder; nobody writes into it."""

import base64
import io
from pathlib import Path

import pytest
from PIL import Image

from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import CONCEPTS, TOP_WORDS, ReportTable
from atoll.store.store import Store
from helpers import assembled, train_run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three experts, router and monolith, of class labels, and what is known of one cluster."""
    settings = {"partition": {"k": 3}, "budget": {"samples": 320}}
    made = assembled(tmp_path_factory.mktemp("served") / "letters", settings)
    train_run(Campaign.open(made), "monolith")
    rows: list[list[str | int | float | None]] = [[0, 40, "digits"], [1, 36, None]]
    found = ReportTable(title="Concepts", text="", columns=["expert", "rows", TOP_WORDS], rows=rows)
    found.write(Store.open(made), CONCEPTS)
    return made


def pixels(picture: str) -> bytes:
    """Of a picture in base64."""
    return Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB").tobytes()
