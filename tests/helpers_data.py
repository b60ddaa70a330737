"""Pictures as files, and files in tars."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.data.dataset import DataSet
from atoll.data.formats import Reject
from atoll.data.ingest import IngestJob
from atoll.data.sources.record import Record, Source


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A file with a picture."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def encoded(size: tuple[int, int] = (20, 12), kind: str = "PNG", mode: str = "RGB", seed: int = 0) -> bytes:
    """A file with a noise picture."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels).convert(mode), kind)


def packed(members: Iterable[tuple[str, bytes]], **options: Any) -> bytes:
    """A tar of files by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def aspects(folder: Path, counts: dict[tuple[int, int], int]) -> Path:
    """A folder with so many pictures of each width and height, and captions that say which it is."""
    folder.mkdir(parents=True)
    names = {-1: "a green bar", 0: "a red square", 1: "one green bar"}
    for (width, height), count in counts.items():
        for number in range(count):
            name = folder / f"{width}x{height}-{number:03d}"
            name.with_suffix(".png").write_bytes(encoded((width, height), seed=number))
            name.with_suffix(".txt").write_text(names[(width > height) - (width < height)])
    return folder


def read(source: Source) -> tuple[list[Record], list[Reject]]:
    """All rows of a source, and all that are rejected."""
    items = list(source.records(0, len(source)))
    assert len(items) == len(source)
    return [r for r in items if isinstance(r, Record)], [r for r in items if isinstance(r, Reject)]


def ingest(*args: Any) -> DataSet:
    """Source, store, prefix and settings as a data set."""
    return IngestJob(*args).run()
