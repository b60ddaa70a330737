"""Files that a manifest names: where they lie, and whether they are what it says.

Readers go through local paths and streamed hashes, not through obstore: they run in forked loader
workers, where obstore waits for ever for threads that were not forked, and on files larger than memory.
Files of a remote store are read from copies in the cache, which the main process fetches before it forks
(`DataSet.localise`).
"""

import json
import posixpath
from typing import TypeVar

from pydantic import Field

from atoll.base.config import Config
from atoll.base.errors import ConfigError, DataError, StoreError
from atoll.base.hashing import digest
from atoll.store.manifest import FileEntry, check_file
from atoll.store.store import Store

SCHEMA = 1
"""Version of `manifest.json` and `column.json`."""

Model = TypeVar("Model", bound=Config)


class Shard(Config):
    """Some rows of a data set and the files that hold them."""

    rows: int = Field(ge=1)
    """Number of rows."""
    files: dict[str, FileEntry]
    """`rows` (parquet) and, where the data set has pictures, `images` (tar); paths from the data set."""

    def content(self) -> str:
        """Digest of what the rows are: changes with any byte of a row or picture, not with their place."""
        return digest({kind: entry.sha256 for kind, entry in self.files.items()})


def join(prefix: str, path: str) -> str:
    """Key of a path relative to a folder of the store; the path may climb with `..`."""
    return posixpath.normpath(posixpath.join(prefix or ".", path))


def relative(prefix: str, key: str) -> str:
    """Path of a key relative to a folder of the store, climbing where needed."""
    return posixpath.relpath(join("/", key), join("/", prefix))


def is_valid(store: Store, prefix: str, entry: FileEntry) -> bool:
    """Whether the file of an entry is there, whole and undamaged."""
    try:
        check_file(store, prefix, entry)
    except StoreError:
        return False
    return True


def read_versioned(store: Store, key: str, model: type[Model]) -> Model:
    """Read a `manifest.json` or `column.json`.

    Raises:
        DataError: it was written under another schema version, or is not what it should be.
        StoreError: it is missing or is not JSON.
    """
    try:
        content = json.loads(_read(store, key))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise StoreError(f"{store.name(key)} is not valid JSON", "it is damaged: write it again") from None
    version = content.get("schema") if isinstance(content, dict) else None
    if version != SCHEMA:
        what = f"{store.name(key)} has schema version {version} instead of {SCHEMA}"
        raise DataError(what, "use the version of Atoll that wrote it, or write it again with this one")
    try:
        return model.parse({k: v for k, v in content.items() if k != "schema"}, store.name(key))
    except ConfigError as error:
        raise DataError(error.what, "it is damaged or of a newer Atoll: write it again") from None


def is_there(store: Store, key: str) -> bool:
    """Whether there is an object under this key."""
    return store.path(key).exists() if store.local is not None else store.exists(key)


def _read(store: Store, key: str) -> bytes:
    if store.local is None:
        return store.get(key)
    path = store.path(key)
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}", "run the stage that writes it") from None


def versioned(model: Config) -> dict[str, object]:
    """What `read_versioned` reads: the schema version, then the fields."""
    return {"schema": SCHEMA, **model.model_dump()}
