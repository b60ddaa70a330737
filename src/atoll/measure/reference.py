"""Statistics of a reference, saved and reused: what made them stands beside them and is checked."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from atoll.base.config import Config
from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.base.version import code_version
from atoll.measure.features import BLOCK, FeatureSet
from atoll.measure.moments import Moments
from atoll.store.manifest import FileEntry, check_file
from atoll.store.store import Store

SCHEMA = 1
ROWS = "-rows"


class Origin(Config):
    """What statistics were made from, and by what."""

    extractor: dict[str, Any]
    """Name, weights' hash, size and resize kernel of the extractor."""
    name: str
    """What the user called the reference."""
    data: str
    """Digest of the pictures."""
    split: str | None = None
    """Which rows of a data set; none for a folder."""
    count: int
    """Number of pictures."""
    size: tuple[int, int]
    """Width and height of the pictures, in pixels."""

    @property
    def key(self) -> str:
        """Names the statistics: other pictures or another extractor give another key."""
        return digest(self.model_dump(mode="json", exclude={"name": True, "extractor": {"name"}}))[:16]


def save(store: Store, prefix: str, made: FeatureSet, origin: Origin) -> str:
    """Write `NAME.safetensors` and, last, `NAME.json` below a folder; the key of the JSON.

    NAME is the origin's key, with `-rows` where the features themselves are kept: so those that are added
    later never replace a file that a JSON names.
    """
    name = origin.key + (ROWS if made.rows is not None else "")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "statistics.safetensors"
        _write(path, made)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        entry = FileEntry(path=f"{name}.safetensors", bytes=path.stat().st_size, sha256=found)
        store.put_file(f"{prefix}/{entry.path}", path)
    about = {"schema": SCHEMA, "code": code_version(), **origin.model_dump(mode="json")}
    rows = made.rows is not None
    store.put_json(f"{prefix}/{name}.json", {**about, "rows": rows, "files": [entry.model_dump()]})
    return f"{prefix}/{name}.json"


def saved(store: Store, prefix: str, origin: Origin, keep_rows: bool) -> str | None:
    """The key of the JSON of statistics that are there already, if they are; `keep_rows` as below."""
    names = (origin.key + ROWS, *(() if keep_rows else (origin.key,)))
    return next((key for name in names if store.exists(key := f"{prefix}/{name}.json")), None)


def origin_of(store: Store, key: str, extractor: dict[str, Any], keep_rows: bool) -> Origin:
    """What statistics were made from, by the key of their JSON.

    Args:
        store: where they lie.
        key: of the JSON.
        extractor: `producer()` of the one that sees the samples.
        keep_rows: whether every picture's features are needed, and not their moments alone.

    Raises:
        DataError: another schema version, another extractor, or no rows where they are needed.
    """
    about, name = store.get_json(key), store.name(key)
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise DataError(f"{name} has no statistics of schema {SCHEMA}", "make them again: atoll evaluate")
    origin = Origin.parse({field: about.get(field) for field in Origin.model_fields}, name)
    for what in ("hash", "size", "resize", "token"):  # the hash says which it is, whatever it was called
        theirs, own = origin.extractor.get(what), extractor.get(what)
        if theirs != own:
            names = f"{origin.extractor.get('name')}, {what} {_short(theirs)} instead of {_short(own)}"
            fix = "give the pictures, or statistics made by the same one"
            raise DataError(f"{name} was made by another extractor ({names})", fix)
    if keep_rows and not about.get("rows"):
        raise DataError(
            f"{name} holds moments only, which tell the Fréchet distance and nothing else",
            "give the pictures instead",
        )
    return origin


def load(store: Store, key: str, extractor: dict[str, Any], keep_rows: bool) -> tuple[FeatureSet, Origin]:
    """Statistics and what they were made from; the same arguments.

    Raises:
        DataError: as `origin_of`.
        StoreError: missing or damaged.
    """
    origin = origin_of(store, key, extractor, keep_rows)
    files, folder = store.get_json(key).get("files") or [{}], key.rpartition("/")[0] or "."
    entry = FileEntry.parse(files[0], store.name(key))
    check_file(store, folder, entry)
    return _read(store.path(f"{folder}/{entry.path}"), keep_rows), origin


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}…"


def _write(path: Path, made: FeatureSet) -> None:
    """A safetensors file, the rows block by block: 8 bytes of length, JSON of that length, the tensors."""
    tensors = made.moments.tensors()
    shapes = {name: ("I64" if name == "count" else "F64", tuple(t.shape)) for name, t in tensors.items()}
    if made.rows is not None:
        shapes["rows"] = ("F32", (len(made.whole_rows()), made.rows.width))
    header, begin = dict[str, Any](), 0
    for name, (dtype, shape) in shapes.items():
        end = begin + int(np.prod(shape)) * int(dtype[1:]) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor.numpy()).data)
        for block in made.rows.blocks() if made.rows is not None else ():
            file.write(block.data)


def _read(path: Path, keep_rows: bool) -> FeatureSet:
    with safe_open(path, "pt") as file:
        moments: dict[str, Tensor] = {name: file.get_tensor(name) for name in ("count", "mean", "scatter")}
        found = FeatureSet(len(moments["mean"]), keep_rows)
        found.moments = Moments.from_tensors(moments)
        if found.rows is not None:
            rows = file.get_slice("rows")
            for first in range(0, found.count, BLOCK):
                block: torch.Tensor = rows[first : first + BLOCK]
                found.rows.write(range(first, first + len(block)), block.numpy())
    return found
