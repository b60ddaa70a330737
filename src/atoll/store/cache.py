"""Local copies of remote objects, for readers that map files into memory.

A copy is named by what identifies the bytes: URL, key, entity tag, size and time of change. A changed
object therefore never meets a stale copy. The folder may be removed at any time.
"""

import fcntl
import hashlib
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atoll.base.errors import StoreError
from atoll.base.safe_parse import expanded
from atoll.store import ranges

_PROCESS = uuid.uuid4().hex  # objects in memory are this process's own
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


def folder() -> Path:
    """Where copies are kept: `ATOLL_CACHE`, or `~/.cache/atoll`."""
    return expanded(os.environ.get("ATOLL_CACHE") or "~/.cache/atoll").absolute()


def fetch(url: str, meta: Any, read: ranges.Fetch) -> Path:
    """A local file with the bytes of an object of this `meta`, unless its copy is there."""
    path = place(url, [meta["e_tag"], meta["size"], meta["last_modified"].timestamp()])
    if _is_whole(path, meta):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Of the processes of a machine that want one object the first fetches it; the others find it then.
        with (path.parent / ".lock").open("wb") as lock:
            with suppress(OSError):  # where a file system has no locks, each fetches it
                fcntl.flock(lock, fcntl.LOCK_EX)
            if _is_whole(path, meta):  # another process fetched it meanwhile
                return path
            part = path.with_name(f".part-{uuid.uuid4().hex}")  # not `tempfile`'s, which nobody else may read
            try:
                with part.open("wb") as file:
                    ranges.parts(read, int(meta["size"]), lambda at, data: os.pwrite(file.fileno(), data, at))
                if not _is_whole(part, meta):
                    raise StoreError(f"{url} arrived torn", "run the command again")
                # Renamed last: who does not wait for the lock sees all of it or nothing.
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot write a local copy of {url} below {folder()}: {error.strerror}"
        raise StoreError(problem, "set ATOLL_CACHE to a folder with enough space") from None
    return path


def _is_whole(path: Path, meta: Any) -> bool:
    try:
        return path.stat().st_size == int(meta["size"])
    except OSError:
        return False


def place(url: str, content: Sequence[Any]) -> Path:
    """Where a copy of a file, or what was found in it, is kept; `content` changes whenever the file does."""
    where = [_PROCESS] if url.startswith("memory://") else [os.environ.get(name, "") for name in _ENDPOINTS]
    name = hashlib.sha256(repr([*where, url, *content]).encode()).hexdigest()
    return folder() / name[:2] / f"{name[2:34]}-{Path(url).name}"
