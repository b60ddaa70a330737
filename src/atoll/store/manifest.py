"""Publishing: blobs first, then the manifest. What has no manifest does not exist."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.base.config import Config
from atoll.base.errors import StoreError
from atoll.base.hashing import sha256
from atoll.store.store import Absent, Damaged, Store


class FileEntry(Config):
    """One file as a manifest names it."""

    path: str
    """Key, relative to the folder that the manifest describes."""
    bytes: int
    """Size."""
    sha256: str
    """Hex digest of the bytes."""


def write_file(store: Store, prefix: str, path: str, data: bytes) -> FileEntry:
    """Write one blob below `prefix` and return the entry that names it."""
    store.put(f"{prefix}/{path}", data)
    return FileEntry(path=path, bytes=len(data), sha256=sha256(data))


def entry_of(store: Store, prefix: str, path: str) -> FileEntry:
    """The entry that names a blob as it is now, read a little at a time."""
    with store.path(f"{prefix}/{path}").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(path=path, bytes=file.tell(), sha256=digest)


def read_file(store: Store, prefix: str, entry: FileEntry) -> bytes:
    """Read one blob; `Damaged` unless its size and hash are what the entry says."""
    data = store.get(f"{prefix}/{entry.path}")
    check(data, entry, store, prefix)
    return data


def check_file(store: Store, prefix: str, entry: FileEntry) -> None:
    """Read through one blob, a little at a time; `Damaged` unless it is what the entry says."""
    key = f"{prefix}/{entry.path}"
    verify(store.path(key), entry, store.name(key))


def verify(path: Path, entry: FileEntry, name: str) -> None:
    """Hold a local file against its entry: the size first, then, a little at a time, the digest.

    Raises:
        Absent: it is missing.
        Damaged: it is torn, or its bytes are others.
        StoreError: it cannot be read.
    """
    try:
        size = path.stat().st_size
        if size == entry.bytes:
            with path.open("rb") as file:
                _check(size, hashlib.file_digest(file, "sha256").hexdigest(), entry, name)
    except FileNotFoundError:
        raise Absent(f"{name} is missing", "run the stage that writes it") from None
    except OSError as error:
        raise StoreError(f"cannot read {name}: {error.strerror}", "check its permissions") from None
    if size != entry.bytes:
        _check(size, "", entry, name)


def check(data: bytes, entry: FileEntry, store: Store, prefix: str) -> None:
    """Raise `Damaged` unless the bytes are those of the entry."""
    _check(len(data), sha256(data), entry, store.name(f"{prefix}/{entry.path}"))


def _check(size: int, digest: str, entry: FileEntry, name: str) -> None:
    if size != entry.bytes:
        raise Damaged(f"{name} has {size} bytes instead of {entry.bytes}", "it is torn: write it again")
    if digest != entry.sha256:
        raise Damaged(f"{name} does not match its SHA-256", "it is damaged: write it again")


def publish(
    store: Store, prefix: str, blobs: Mapping[str, bytes], name: str, content: Mapping[str, Any]
) -> None:
    """Write blobs, verify them, then create the manifest `name`, which must not exist yet.

    The manifest is `content` plus `files`, the list of entries.

    Raises:
        Conflict: somebody published here before.
        StoreError: a blob could not be written or reads back differently.
    """
    entries = [write_file(store, prefix, path, data) for path, data in blobs.items()]
    for entry in entries:
        data = store.get(f"{prefix}/{entry.path}")
        if data != blobs[entry.path]:  # a comparison costs a tenth of a hash
            check(data, entry, store, prefix)
    store.create_json(f"{prefix}/{name}", {**content, "files": [e.model_dump() for e in entries]})


def read_published(store: Store, prefix: str, name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The manifest `name` and all its blobs, verified.

    Raises:
        Absent: there is no manifest, or a blob is missing.
        Damaged: a blob is not what the manifest says.
    """
    content = store.get_json(f"{prefix}/{name}")
    entries = [FileEntry.parse(e, f"{prefix}/{name}") for e in content.get("files", [])]
    return content, {entry.path: read_file(store, prefix, entry) for entry in entries}
