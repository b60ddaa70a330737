"""Pictures in a tar file of the WebDataset layout: written with bytes that depend on the pictures only."""

import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from atoll.base.errors import DataError
from atoll.base.hashing import sha256

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,94}")  # with ".json" 100 characters, the most USTAR holds


def safe_id(text: str) -> str:
    """An id that can name a file or a tar member: the text itself if it can, else its letters and a hash.

    WebDataset ends a member's key at the first dot, so an id has none.
    """
    if _SAFE.fullmatch(text):
        return text
    readable = re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:64]
    return f"{readable}-{sha256(text.encode('utf-8', 'surrogatepass'))[:16]}".lstrip("-")


class ImageWriter:
    """Collects the pictures of one shard; owner, mode and time of all members are fixed."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        # USTAR without owner and time: the same pictures give the same bytes, whoever wrote them, and when.
        self._tar = tarfile.open(fileobj=self._buffer, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def add(self, name: str, png: bytes, caption: str, fields: Mapping[str, Any]) -> None:
        """Add a picture as `name.png`, `name.txt` and `name.json`; the name is a safe id."""
        assert _SAFE.fullmatch(name), name
        self._member(f"{name}.png", png)
        self._member(f"{name}.txt", caption.encode())
        self._member(f"{name}.json", json.dumps(dict(fields), ensure_ascii=False, sort_keys=True).encode())

    def close(self) -> bytes:
        """The finished tar file."""
        self._tar.close()
        return self._buffer.getvalue()

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(data), 0o644, 0
        self._tar.addfile(info, io.BytesIO(data))


class ImageReader:
    """The pictures of one shard by their number; the file is opened for each access, never held open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with tarfile.open(path, "r:") as tar:
                members = [m for m in tar if m.isfile() and m.name.endswith(".png")]
        except (tarfile.TarError, OSError):
            raise DataError(f"{path} is not a readable tar file", "write the data set again") from None
        self._places = np.array([(m.offset_data, m.size) for m in members], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int) -> Image.Image:
        """One picture, decoded."""
        offset, size = self._places[index].tolist()
        # Opened anew: workers that are forked would share one file and its position.
        with self.path.open("rb") as file:
            file.seek(offset)
            image = Image.open(io.BytesIO(file.read(size)), formats=["PNG"])
        image.load()
        return image

    def __iter__(self) -> Iterator[Image.Image]:
        return (self.read(index) for index in range(len(self)))
