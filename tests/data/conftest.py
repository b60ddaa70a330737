"""Small real data sets for the tests of this folder."""

import json
from pathlib import Path

import pytest

from atoll.data.dataset import DataSet
from atoll.data.glyphs import GlyphSource
from atoll.data.ingest import ingest
from atoll.data.settings import GlyphOptions, IngestConfig
from atoll.store.store import Store
from helpers_data import encoded


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", create=True)


@pytest.fixture
def glyphs(store: Store) -> DataSet:
    """40 gray pictures of 8x8 in shards of 16, 16 and 8 rows."""
    config = IngestConfig(size=8, shard_rows=16, heldout=0.3)
    return ingest(GlyphSource(GlyphOptions(limit=40)), store, "glyphs", config)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six good images in Hugging Face's layout, two of them in a subfolder."""
    root = tmp_path / "images"
    (root / "more").mkdir(parents=True)
    rows = []
    for number in range(6):
        name = f"{'more/' if number > 3 else ''}{number}.{'jpg' if number % 2 else 'png'}"
        kind = "JPEG" if number % 2 else "PNG"
        (root / name).write_bytes(encoded(kind=kind, seed=number))
        rows.append(
            {"file_name": name, "text": f"picture {number}", "kind": number % 3, "who": f"g{number // 2}"}
        )
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root
