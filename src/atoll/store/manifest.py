"""Files that a manifest names by size and hash. What has no manifest does not exist.

Large files are read through local paths, a little at a time; a remote store's are copies in `store.cache`.
"""

from collections.abc import Iterable
from pathlib import Path
from posixpath import join
from typing import Annotated

from pydantic import AfterValidator, Field

from atoll.base.config import Config
from atoll.base.errors import StoreError
from atoll.base.format import File
from atoll.base.hashing import sha256
from atoll.base.safe_parse import NormalPath
from atoll.store.store import Absent, Damaged, Store, regular


class FileEntry(Config):
    """One file as a manifest names it."""

    path: NormalPath
    """Key, relative to the folder that the manifest describes."""
    bytes: int = Field(ge=0, le=2**60)
    """Size."""
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    """Hex digest of the bytes."""


def _of_one_folder(entries: list[FileEntry]) -> list[FileEntry]:
    paths = [entry.path for entry in entries]
    outside = [path for path in paths if path.startswith("../")]
    if outside or len(set(paths)) < len(paths):
        raise ValueError(f"{outside[0]!r} leads out of the folder" if outside else "a path is named twice")
    return entries


OwnFiles = Annotated[list[FileEntry], AfterValidator(_of_one_folder)]
"""Files of the very folder that a manifest describes. Only a union of data sets names files of others."""


class Published(File):
    """A manifest that is written after the files it names, and never again."""

    files: OwnFiles = []
    """The files, relative to the manifest's folder."""


def write_file(store: Store, prefix: str, path: str, data: bytes) -> FileEntry:
    """Write one file below `prefix` and return the entry that names it."""
    store.put(join(prefix, path), data)
    return named_entry(path, data)


def write_blocks(store: Store, prefix: str, path: str, blocks: Iterable[bytes]) -> FileEntry:
    """Write one file below `prefix` block by block, held against what the store has; see `Store.write`."""
    size, hashed = store.write(join(prefix, path), blocks)
    return FileEntry(path=path, bytes=size, sha256=hashed)


def named_entry(path: str, data: bytes) -> FileEntry:
    """The entry of a file of these bytes."""
    return FileEntry(path=path, bytes=len(data), sha256=sha256(data))


def entry_of(store: Store, prefix: str, path: str) -> FileEntry:
    """The entry that names a file as it is now, read a little at a time."""
    file = store.path(join(prefix, path))
    return FileEntry(path=path, bytes=file.stat().st_size, sha256=sha256(file))


def read_file(store: Store, prefix: str, entry: FileEntry) -> bytes:
    """All bytes of a file; `Damaged` unless its size and hash are what the entry says."""
    key = join(prefix, entry.path)
    data = store.get(key)
    verify(data, entry, store.name(key))
    return data


def check_file(store: Store, prefix: str, entry: FileEntry) -> Path:
    """Read through a file; its local path, or `Damaged` unless it is what the entry says."""
    key = join(prefix, entry.path)
    path = store.path(key)
    try:
        verify(path, entry, store.name(key))
    except StoreError:
        if store.local is not None:
            raise
        # The cached copy may be damaged where the object is not: fetch it anew once before it is believed.
        path.unlink(missing_ok=True)
        path = store.path(key)
        verify(path, entry, store.name(key))
    return path


def is_whole(store: Store, prefix: str, entry: FileEntry) -> bool:
    """Whether the file of an entry is there and undamaged."""
    try:
        check_file(store, prefix, entry)
    except StoreError:
        return False
    return True


def is_there(store: Store, prefix: str, entry: FileEntry) -> bool:
    """As `is_whole`; of a remote store's file only the size counts, so that it need not be fetched."""
    if store.local is not None:
        return is_whole(store, prefix, entry)
    try:
        return store.size(join(prefix, entry.path)) == entry.bytes
    except StoreError:
        return False


def verify(source: Path | bytes, entry: FileEntry, name: str) -> None:
    """Hold a local file, or its bytes, against an entry; `Absent` or `Damaged` where they do not fit."""
    try:
        size = len(source) if isinstance(source, bytes) else regular(source).stat().st_size
        # The size costs nothing, a digest reads gigabytes: a torn file is told apart at once.
        digest = sha256(source) if size == entry.bytes else ""
    except FileNotFoundError:
        raise Absent(f"{name} is missing", "run the stage that writes it") from None
    except OSError as error:
        raise StoreError(f"cannot read {name}: {error.strerror}", "check its permissions") from None
    if size != entry.bytes:
        raise Damaged(f"{name} has {size} bytes instead of {entry.bytes}", "it is torn: write it again")
    if digest != entry.sha256:
        raise Damaged(f"{name} does not match its SHA-256", "it is damaged: write it again")
