"""Where the bytes of a campaign live: one small interface over obstore.

Keys are POSIX paths relative to the store's root. A store can be narrowed to a folder, and a
narrowed store cannot name anything outside it: that is how an island sees its own folder only.
"""

import asyncio
import hashlib
import json
import os
import posixpath
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotSupportedError, PreconditionError
from obstore.store import LocalStore

from atoll.base.errors import StoreError, first_line
from atoll.base.hashing import sha256
from atoll.base.safe_parse import LARGEST, read_json
from atoll.store import cache, local, ranges
from atoll.store.location import IMPATIENT, PATIENT, connect, explain, local_path

_PROCESS = os.getpid()  # obstore's threads do not survive a fork: what waits for them waits for ever
COPIED_AT_ONCE = 5 * 2**30
"""Bytes that S3 copies in one request; larger objects go through this machine, part by part."""
_AT_ONCE = 4  # parts of an object that are sent at once, and in memory
_Failure = (BaseError, OSError, ValueError, NotImplementedError)  # what obstore raises


class Conflict(StoreError):
    """A key that was to be created exists already."""


class Absent(StoreError):
    """There is no such object or folder."""


class Damaged(StoreError):
    """Bytes are not those that were written."""


class Unsupported(StoreError):
    """The store cannot do what was asked."""


class Store:
    """A folder of objects that are written whole or not at all. Use `open`.

    `location` is the folder or URL, for messages and commands; `local` the local folder, if it is one.
    """

    def __init__(self, objects: Any, location: str, local: Path | None = None, prefix: str = "") -> None:
        self._objects, self._prefix = objects, prefix
        self.location, self.local = location, local

    @classmethod
    def open(cls, location: str | Path, *, create: bool = False) -> Self:
        """Open a folder or a URL as a store, with credentials from the environment.

        URLs are s3://BUCKET/PREFIX, gs://, az://, file:///PATH, and memory://NAME/PREFIX, which ends with the
        process. A missing folder is made if `create`, else it is `Absent`, as is an empty URL.
        """
        root = local_path(location)
        if root is None:
            return cls._open_url(str(location), create)
        try:
            if create:
                root.mkdir(parents=True, exist_ok=True)
            if not root.exists():
                raise Absent(f"there is no folder {root}", "check the path")
            if not root.is_dir():
                raise StoreError(f"{root} is a file", "give a folder")
        except (FileExistsError, NotADirectoryError):
            raise StoreError(f"{root} is a file or lies inside one", "give a folder") from None
        except OSError as error:
            problem = f"cannot use {root}: {error.strerror}"
            raise StoreError(problem, "give a folder you can write to") from None
        return cls(LocalStore(root), str(root), root)

    @classmethod
    def _open_url(cls, url: str, create: bool) -> Self:
        scheme, _, rest = url.partition("://")
        url = f"{scheme}://{posixpath.normpath('/' + rest).strip('/')}"
        # obstore takes the prefix of other URLs into the store itself.
        prefix = rest.partition("/")[2].strip("/") if scheme == "memory" else ""
        try:
            listed = next(iter(obstore.list(connect(url, IMPATIENT), prefix or None)), [])
        except _Failure as error:
            if isinstance(error, FileNotFoundError):
                raise Absent(f"there is no bucket for {url}", "make the bucket, or check the URL") from None
            raise _failed(f"cannot use {url}", error) from None
        if not listed and not create:
            raise Absent(f"there is nothing at {url}", "check the URL")
        return cls(connect(url, PATIENT), url, None, prefix)

    def sub(self, prefix: str) -> "Store":
        """The same store, narrowed to one of its folders (made if missing)."""
        clean = self._key(prefix)
        if self.local is not None:
            self._check_links(posixpath.join(clean, "-"))
            return type(self).open(self.local / clean, create=True)
        return type(self)(self._objects, self.name(clean), None, posixpath.join(self._prefix, clean))

    def name(self, key: str) -> str:
        """The whole name of an object or folder, for messages and commands."""
        clean = posixpath.normpath(key) if key else "."
        return self.location if clean == "." else f"{self.location.rstrip('/')}/{clean}"

    def get(self, key: str) -> bytes:
        """All bytes of an object; `Absent` if it is missing."""
        try:
            if self.local is not None:  # forked workers read too, and there obstore would wait for ever
                return regular(self.path(key)).read_bytes()
            result = obstore.get(self._objects, self._full(key))
            if (size := int(result.meta["size"])) <= ranges.PART:
                return bytes(result.bytes())
            return b"".join(ranges.parts(self._ranges(key, result.meta["e_tag"]), size, lambda _, data: data))
        except _Failure as error:
            raise self._unread(key, error) from None

    def put(self, key: str, data: bytes) -> None:
        """Write an object, atomically, over an older one if there is one."""
        self._put(key, data, "overwrite")

    def create(self, key: str, data: bytes) -> None:
        """Write an object only if its key is free; `Conflict` if it is not."""
        for pause in (*ranges.PAUSES, None):
            try:
                return self._put(key, data, "create")
            except StoreError as error:
                # A remote store's answer may be lost, and the retry then meets our own object: one of the
                # very same bytes is no conflict there. And of two writes under way at once S3 refuses one
                # (409), though the other may come to nothing.
                if self.local is not None or isinstance(error, Unsupported):
                    raise
                try:
                    if self.get(key) == data:
                        return None
                except StoreError as unread:
                    if pause and isinstance(error, Conflict) and isinstance(unread, Absent):
                        time.sleep(pause)
                        continue
                raise

    def _check_links(self, key: str) -> None:
        # Refuse to write or remove an object by way of a linked folder that leads out of the store.
        if self.local is not None:
            root, folder = os.path.realpath(self.local), os.path.realpath((self.local / key).parent)
            if os.path.commonpath((root, folder)) != root:
                fix = "put the folder itself there, or mount it there"
                raise StoreError(f"{self.name(posixpath.dirname(key))} is a link that leads to {folder}", fix)

    def check_folder(self, prefix: str) -> None:
        """Refuse a local folder with a link in it that leads out of the store: trackers write through it."""
        if self.local is not None:
            for path in (self.local / self._key(prefix)).rglob("*"):
                if path.is_symlink():
                    self._check_links(f"{path.relative_to(self.local)}/-")

    def write(self, key: str, blocks: Iterable[bytes]) -> tuple[int, str]:
        """Write an object of many blocks, atomically, over an older one; its size and SHA-256.

        Each of `ranges.PART` bytes, but for the last: memory never holds it all. `Damaged` unless the store
        then holds them: by its own MD5 of the parts, where it has one as S3 does, else by reading it again.
        """
        size, digest, tags = 0, hashlib.sha256(), list[bytes]()

        def hashed() -> Iterator[bytes]:
            nonlocal size
            for block in blocks:
                size += len(block)
                digest.update(block)
                if self.local is None:
                    tags.append(hashlib.md5(block, usedforsecurity=False).digest())
                yield block

        self._put(key, hashed(), "overwrite")
        try:
            if self.local is not None:
                again = sha256(self.path(key))
            else:
                # S3 makes it so of an object that was sent in parts.
                tag = f"{hashlib.md5(b''.join(tags), usedforsecurity=False).hexdigest()}-{len(tags)}"
                there = self._head(key)
                if (there["size"], (there["e_tag"] or "").strip('"')) == (size, tag):
                    return size, digest.hexdigest()
                file = self.reader(key, (there["size"], there["e_tag"]), ranges.PART)
                again = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        except OSError as error:
            raise self._unread(key, error) from None
        if again != digest.hexdigest():
            raise Damaged(f"{self.name(key)} reads back differently", "check the disk or the store")
        return size, again

    def _put(self, key: str, data: bytes | Path | Iterator[bytes], mode: Any) -> None:
        self._check_links(self._key(key))
        try:
            if self.local is None:
                options: Any = {"mode": mode, "chunk_size": ranges.PART, "max_concurrency": _AT_ONCE}
                obstore.put(self._objects, self._full(key), data, **options)
            elif not local.write(self.path(key), data, replace=mode == "overwrite"):
                raise AlreadyExistsError
        except AlreadyExistsError:
            raise Conflict(f"{self.name(key)} exists already") from None
        except _Failure as error:
            fix = "check free space and permissions"
            raise _failed(f"cannot write {self.name(key)}", error, fix) from None

    def copy(self, source: str, target: str) -> None:
        """Copy an object, atomically, over an older one; a remote one, up to a size, within its store."""
        if self.local is not None:  # obstore would make a hard link: damage to one would be damage to both
            if not self.exists(source):
                raise self._unread(source, FileNotFoundError())
            self._put(target, self.path(source), "overwrite")
            return
        try:
            if self.size(source) > COPIED_AT_ONCE:
                with ThreadPoolExecutor(1) as thread:  # where no event loop runs, whoever calls
                    names = self._full(source), self._full(target)
                    thread.submit(asyncio.run, _copy_in_parts(self._objects, *names)).result()
            else:
                obstore.copy(self._objects, self._full(source), self._full(target))
        except _Failure as error:
            if _is_absent(error):
                raise self._unread(source, error) from None
            raise _failed(f"cannot copy {self.name(source)} to {self.name(target)}", error) from None

    def exists(self, key: str) -> bool:
        """Whether there is an object under this key."""
        try:
            if self.local is not None:
                return self.path(key).is_file()
            self._head(key)
        except Absent:
            return False
        except OSError as error:  # a folder that may not be looked into
            raise self._unread(key, error) from None
        return True

    def size(self, key: str) -> int:
        """Bytes of an object; `Absent` if it is missing."""
        if self.local is None:
            return int(self._head(key)["size"])
        try:
            return self.path(key).stat().st_size
        except OSError as error:
            raise self._unread(key, error) from None

    def modified(self, key: str) -> float:
        """When an object was last written, in POSIX seconds by the store's own clock (S3: whole ones)."""
        return float(self._head(key)["last_modified"].timestamp())

    def _head(self, key: str) -> Any:
        try:
            return obstore.head(self._objects, self._full(key))
        except _Failure as error:
            raise self._unread(key, error) from None

    def list(self, prefix: str = "") -> list[str]:
        """Keys of all objects below a folder, sorted."""
        return [*self.states(prefix)]

    def states(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """Bytes and entity tag (or time of change) of all objects below a folder, by key, sorted."""
        full, cut = self._full(prefix), len(self._prefix) + 1 if self._prefix else 0
        # obstore asks again for what was refused, but not for a list of which half arrived.
        for pause in (*ranges.PAUSES, None):
            try:
                items = [item for chunk in obstore.list(self._objects, full or None) for item in chunk]
                break
            except _Failure as error:
                if pause is None or self.local is not None:
                    raise _failed(f"cannot list {self.name(prefix)}", error) from None
                time.sleep(pause)
        return {
            item["path"][cut:]: (int(item["size"]), str(item["e_tag"] or item["last_modified"]))
            for item in sorted(items, key=lambda item: str(item["path"]))
        }

    def delete(self, *keys: str) -> None:
        """Remove objects; missing ones are passed over."""
        for key in keys:
            self._check_links(self._key(key))
            try:
                obstore.delete(self._objects, self._full(key))
            except _Failure as error:
                if not _is_absent(error):
                    raise _failed(f"cannot remove {self.name(key)}", error) from None

    def sweep(self, prefix: str = "") -> None:
        """Remove what killed writers left below a folder; a remote store keeps no halves of objects."""
        if self.local is not None:
            local.sweep(self.path(prefix))

    def path(self, key: str) -> Path:
        """A local file with this object's bytes: itself, or of a remote object a copy (`store.cache`)."""
        if self.local is not None:
            return self.local / self._key(key)
        meta = self._head(key)
        return cache.fetch(self.name(key), meta, self._ranges(key, meta["e_tag"]))

    def reader(self, key: str, state: tuple[int, str | None], buffer: int = ranges.BUFFER) -> BinaryIO:
        """A remote object as a seekable file, read by ranges of `buffer` bytes.

        `state` is as `states` gave it: an object that changed since is `Damaged` when it is read.
        """
        size, tag = state
        return ranges.reader(self._ranges(key, tag), size, buffer)

    def _ranges(self, key: str, tag: str | None) -> ranges.Fetch:
        def fetch(start: int, stop: int) -> bytes:
            options: Any = {"range": (start, stop), **({"if_match": tag} if tag else {})}
            try:
                return bytes(obstore.get(self._objects, self._full(key), options=options).bytes())
            except PreconditionError:
                fix = "run the command again"
                raise Damaged(f"{self.name(key)} changed while it was read", fix) from None
            except _Failure as error:
                raise self._unread(key, error) from None

        return fetch

    def get_json(self, key: str) -> Any:
        """Plain data from a JSON object; `StoreError` if it is missing or is not JSON."""
        try:
            if self.size(key) > LARGEST:
                raise ValueError
            return read_json(self.get(key))
        except ValueError:
            fix = "it is damaged: restore or remove it"
            raise Damaged(f"{self.name(key)} is not valid JSON", fix) from None

    def put_json(self, key: str, value: Any) -> None:
        """Write plain data as readable JSON."""
        self.put(key, to_json(value))

    def create_json(self, key: str, value: Any) -> None:
        """Write plain data as readable JSON only if the key is free."""
        self.create(key, to_json(value))

    def _key(self, key: str) -> str:
        clean = posixpath.normpath(key) if key else ""
        if clean.startswith(("../", "/")) or clean == "..":
            raise StoreError(f"{key!r} leads out of {self.location}", "use a path inside it")
        return "" if clean == "." else clean

    def _full(self, key: str) -> str:
        if self.local is None and os.getpid() != _PROCESS:
            fix = "read local copies, which `DataSet.localise` fetches before the fork"
            raise StoreError(f"a forked process cannot reach {self.location}", fix)
        return posixpath.join(self._prefix, self._key(key)).rstrip("/")

    def _unread(self, key: str, error: BaseException) -> StoreError:
        if _is_absent(error):
            return Absent(f"{self.name(key)} is missing", "run the stage that writes it")
        return _failed(f"cannot read {self.name(key)}", error)


async def _copy_in_parts(objects: Any, source: str, target: str) -> None:
    parts = (await obstore.get_async(objects, source)).stream(min_chunk_size=ranges.PART)
    await obstore.put_async(objects, target, parts, chunk_size=ranges.PART)


def check_conditional_create(store: Store, prefix: str = "") -> None:
    """Make sure that of two writers who create the same object one is refused; a log depends on it."""
    if store.local is not None:
        return  # every file system that makes hard links refuses a second one of the same name
    key, fix = posixpath.join(prefix, f"probe-{uuid.uuid4().hex}"), "use a store with conditional writes"
    try:
        store.create(key, b"first")
    except Unsupported:
        raise StoreError(f"{store.location} refuses conditional writes (If-None-Match)", fix) from None
    try:
        store.create(key, b"second")
    except Conflict:
        return
    finally:
        store.delete(key)
    problem = "ignores conditional writes (If-None-Match): two processes could hold one run"
    raise StoreError(f"{store.location} {problem}", fix)


def to_json(value: Any) -> bytes:
    """Readable JSON with a final newline; refuses NaN, which is not JSON."""
    return (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def regular(path: Path) -> Path:
    """The path of a file; a pipe or device, which may never end, is refused."""
    if not S_ISREG(path.stat().st_mode):
        raise IsADirectoryError(f"{path} is no file")
    return path


def _is_absent(error: BaseException) -> bool:
    # Whether there is no such object: no such file, or a file where a folder would have to be.
    return isinstance(error, FileNotFoundError | NotADirectoryError) or "os error 20" in str(error)


def _failed(what: str, error: BaseException, fix: str = "check its permissions") -> StoreError:
    if isinstance(error, NotSupportedError | NotImplementedError) or "501 Not Implemented" in str(error):
        return Unsupported(f"{what}: it does not support this", "use another store")
    why, remedy = explain(error) or (getattr(error, "strerror", None) or first_line(error), fix)
    return StoreError(f"{what}: {why}", remedy)
