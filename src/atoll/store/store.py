"""Where the bytes of a campaign live: one small interface over obstore.

Keys are POSIX paths relative to the store's root. A store can be narrowed to a folder, and a
narrowed store cannot name anything outside it: that is how an island sees its own folder only.
"""

import json
import posixpath
from pathlib import Path
from typing import Any, Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore

from atoll.base.errors import StoreError


class Conflict(StoreError):
    """A key that was to be created exists already."""


class Store:
    """A folder of objects that are written whole or not at all.

    Args:
        root: a local folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = LocalStore(root)

    @classmethod
    def open(cls, location: str | Path, *, create: bool = False) -> Self:
        """Open a folder as a store.

        Args:
            location: path of the folder.
            create: make the folder if it is missing; otherwise a missing folder is an error.

        Raises:
            StoreError: the folder is missing, is a file, or cannot be made.
        """
        if "://" in str(location):
            raise StoreError(
                f"{location} is a URL", "give a local folder; object stores are not supported yet"
            )
        root = Path(location).expanduser().absolute()
        try:
            if create:
                root.mkdir(parents=True, exist_ok=True)
            if not root.exists():
                raise StoreError(f"there is no folder {root}", "check the path")
            if not root.is_dir():
                raise StoreError(f"{root} is a file", "give a folder")
        except (FileExistsError, NotADirectoryError):
            raise StoreError(f"{root} is a file or lies inside one", "give a folder") from None
        except OSError as error:
            raise StoreError(
                f"cannot use {root}: {error.strerror}", "give a folder you can write to"
            ) from None
        return cls(root)

    def sub(self, prefix: str) -> "Store":
        """The same store, narrowed to one of its folders (made if missing)."""
        return type(self).open(self.root / self._key(prefix), create=True)

    def get(self, key: str) -> bytes:
        """All bytes of an object; `StoreError` if it is missing."""
        try:
            return bytes(obstore.get(self._store, self._key(key)).bytes())
        except (BaseError, OSError) as error:
            if _is_absent(error):
                raise StoreError(f"{self.root / key} is missing", "run the stage that writes it") from None
            raise StoreError(
                f"cannot read {self.root / key}: {_first_line(error)}", "check its permissions"
            ) from None

    def put(self, key: str, data: bytes) -> None:
        """Write an object, atomically, over an older one if there is one."""
        self._put(key, data, "overwrite")

    def create(self, key: str, data: bytes) -> None:
        """Write an object only if its key is free; `Conflict` if it is not."""
        self._put(key, data, "create")

    def _put(self, key: str, data: bytes, mode: Any) -> None:
        try:
            obstore.put(self._store, self._key(key), data, mode=mode)
        except AlreadyExistsError:
            raise Conflict(f"{self.root / key} exists already") from None
        except (BaseError, OSError) as error:
            fix = "check free space and permissions"
            raise StoreError(f"cannot write {self.root / key}: {_first_line(error)}", fix) from None

    def exists(self, key: str) -> bool:
        """Whether there is an object under this key."""
        try:
            obstore.head(self._store, self._key(key))
        except (BaseError, OSError) as error:
            if _is_absent(error):
                return False
            raise StoreError(
                f"cannot read {self.root / key}: {_first_line(error)}", "check its permissions"
            ) from None
        return True

    def modified(self, key: str) -> float:
        """When an object was last written, in POSIX seconds by the store's own clock."""
        try:
            return float(obstore.head(self._store, self._key(key))["last_modified"].timestamp())
        except (BaseError, OSError) as error:
            if _is_absent(error):
                raise StoreError(f"{self.root / key} is missing", "run the stage that writes it") from None
            raise StoreError(
                f"cannot read {self.root / key}: {_first_line(error)}", "check its permissions"
            ) from None

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the store, over an older one if there is one."""
        try:
            obstore.copy(self._store, self._key(source), self._key(target))
        except (BaseError, OSError) as error:
            raise StoreError(
                f"cannot copy {self.root / source}: {_first_line(error)}", "check free space and permissions"
            ) from None

    def list(self, prefix: str = "") -> list[str]:
        """Keys of all objects below a folder, sorted."""
        found = [
            item["path"] for chunk in obstore.list(self._store, self._key(prefix) or None) for item in chunk
        ]
        return sorted(found)

    def delete(self, *keys: str) -> None:
        """Remove objects; missing ones are passed over."""
        for key in keys:
            try:
                obstore.delete(self._store, self._key(key))
            except (BaseError, OSError) as error:
                if not _is_absent(error):
                    fix = "check its permissions"
                    raise StoreError(f"cannot remove {self.root / key}: {_first_line(error)}", fix) from None

    def path(self, key: str) -> Path:
        """A local file that holds this object's bytes, for readers that map files into memory."""
        return self.root / self._key(key)

    def get_json(self, key: str) -> Any:
        """Plain data from a JSON object; `StoreError` if it is missing or is not JSON."""
        try:
            return json.loads(self.get(key))
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise StoreError(
                f"{self.root / key} is not valid JSON", "it is damaged: restore or remove it"
            ) from None

    def put_json(self, key: str, value: Any) -> None:
        """Write plain data as readable JSON."""
        self.put(key, to_json(value))

    def create_json(self, key: str, value: Any) -> None:
        """Write plain data as readable JSON only if the key is free."""
        self.create(key, to_json(value))

    def _key(self, key: str) -> str:
        clean = posixpath.normpath(key) if key else ""
        if clean.startswith(("../", "/")) or clean == "..":
            raise StoreError(f"{key!r} leads out of {self.root}", "use a path inside it")
        return "" if clean == "." else clean


def to_json(value: Any) -> bytes:
    """Readable JSON with a final newline; refuses NaN, which is not JSON."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _is_absent(error: BaseException) -> bool:
    """Whether there is no such object: no such file, or a file where a folder would have to be."""
    return isinstance(error, FileNotFoundError) or "os error 20" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
