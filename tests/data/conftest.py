"""Small real data sets for the tests of this folder."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from atoll.data.dataset import DataSet
from atoll.data.glyphs import GlyphSource
from atoll.data.ingest import ingest
from atoll.data.settings import GlyphOptions, IngestConfig
from atoll.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", create=True)


@pytest.fixture
def glyphs(store: Store) -> DataSet:
    """40 gray pictures of 8x8 in shards of 16, 16 and 8 rows."""
    config = IngestConfig(size=8, shard_rows=16, heldout=0.3)
    return ingest(GlyphSource(GlyphOptions(limit=40)), store, "glyphs", config)


def encoded(size: tuple[int, int] = (20, 12), kind: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    """A file with a noise picture."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def picture() -> Callable[..., bytes]:
    return encoded


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
