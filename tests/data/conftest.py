"""Small real data sets for the tests of this folder."""

import json
import shutil
from pathlib import Path

import pytest

from atoll.data.dataset import DataSet
from atoll.data.settings import GlyphOptions, IngestConfig
from atoll.data.sources.glyphs import GlyphSource
from atoll.store.store import Store
from helpers_data import encoded, ingest


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of `glyphs`, made once."""
    root, config = tmp_path_factory.mktemp("drawn"), IngestConfig(size=8, shard_rows=16, heldout=0.3)
    ingest(GlyphSource(GlyphOptions(limit=40)), Store.open(root), "glyphs", config)
    return root / "glyphs"


@pytest.fixture
def glyphs(drawn: Path, store: Store, tmp_path: Path) -> DataSet:
    """40 gray pictures of 8x8 in shards of 16, 16 and 8 rows."""
    shutil.copytree(drawn, tmp_path / "store/glyphs")
    return DataSet.open(store, "glyphs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six good images in Hugging Face's layout, two of them in a subfolder."""
    root = tmp_path / "images"
    (root / "more").mkdir(parents=True)
    rows = []
    for number in range(6):
        name = f"{'more/' if number > 3 else ''}{number}.{'jpg' if number % 2 else 'png'}"
        (root / name).write_bytes(encoded(kind="JPEG" if number % 2 else "PNG", seed=number))
        more = {"kind": number % 3, "who": f"g{number // 2}"}
        rows.append({"file_name": name, "text": f"picture {number}", **more})
    (root / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root
