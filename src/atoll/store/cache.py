"""Local copies of remote objects, for readers that map files into memory.

A copy is named by what identifies the bytes: URL, key, entity tag, size and time of change. A changed
object therefore never meets a stale copy. The folder may be removed at any time.
"""

import hashlib
import os
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import obstore

from atoll.base.errors import StoreError
from atoll.base.safe_parse import expanded

_CHUNK = 8 * 2**20  # bytes that are in memory at a time
_PROCESS = uuid.uuid4().hex  # objects in memory are this process's own
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")


def folder() -> Path:
    """Where copies are kept: `ATOLL_CACHE`, or `~/.cache/atoll`."""
    return expanded(os.environ.get("ATOLL_CACHE") or "~/.cache/atoll").absolute()


def fetch(objects: Any, key: str, url: str) -> Path:
    """A local file with an object's bytes, unless its copy is there; obstore's errors pass through."""
    meta = obstore.head(objects, key)
    path = _place(meta, url)
    if _is_whole(path, meta):
        return path
    result = obstore.get(objects, key)
    meta = result.meta  # the object may have changed since the first look
    path = _place(meta, url)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".part-", delete=False) as file:
            try:
                for chunk in result.stream(min_chunk_size=_CHUNK):
                    file.write(chunk)
                file.close()
                if not _is_whole(Path(file.name), meta):
                    raise StoreError(f"{url} arrived torn", "run the command again")
                # Renamed last: of several processes that fetch one object each sees all of it or nothing.
                os.replace(file.name, path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        if error.strerror is None:
            raise  # obstore's own kind
        problem = f"cannot write a local copy of {url} below {folder()}: {error.strerror}"
        raise StoreError(problem, "set ATOLL_CACHE to a folder with enough space") from None
    return path


def _is_whole(path: Path, meta: Any) -> bool:
    try:
        return path.stat().st_size == int(meta["size"])
    except OSError:
        return False


def _place(meta: Any, url: str) -> Path:
    return place(url, [meta["e_tag"], meta["size"], meta["last_modified"].timestamp()])


def place(url: str, content: Sequence[Any]) -> Path:
    """Where a copy of a file, or what was found in it, is kept; `content` changes whenever the file does."""
    where = [_PROCESS] if url.startswith("memory://") else [os.environ.get(name, "") for name in _ENDPOINTS]
    name = hashlib.sha256(repr([*where, url, *content]).encode()).hexdigest()
    return folder() / name[:2] / f"{name[2:34]}-{Path(url).name}"
