"""What lies where in a tar of the WebDataset layout, found from its headers and kept in the cache folder."""

import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from atoll.base.errors import DataError, StoreError
from atoll.data.files import Files
from atoll.data.formats import clean
from atoll.store import cache

NOT_REGULAR, TWICE = -1, -2
"""In place of the size: what a file's header names is no regular file, or two files have this name."""
_LARGEST_HEADER = 2**20
_CHUNK = 2**20
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd")
_VERSION = 1

Place = tuple[int, int]
"""First byte and number of bytes of a file in its tar."""
Sample = tuple[str, dict[str, Place]]
"""Its name, and its files by the ending of their names in small letters."""


def count_samples(files: Files, name: str) -> int:
    """Number of samples of a tar; its headers are read unless they were before."""
    return int(next(iter(_lines(_kept(files, name)))))


def read_samples(files: Files, name: str) -> list[Sample]:
    """The samples of a tar, in the order of each one's first file."""
    return [tuple(json.loads(line)) for line in islice(_lines(_kept(files, name)), 1, None)]


def scan(file: BinaryIO, where: str) -> list[Sample]:
    """Find the samples of a tar and make sure that all of it is there; only headers are looked at.

    Raises:
        DataError: it is compressed, cut, damaged, or goes on after its end.
    """
    if file.read(6).startswith(_COMPRESSED):
        raise DataError(f"{where} is compressed, so its files cannot be found", "unpack it to a plain .tar")
    file.seek(0)
    samples: dict[str, dict[str, Place]] = {}
    fix, end = "fetch it again", 0
    try:
        with tarfile.open(fileobj=_Headers(file), mode="r:", errors="surrogateescape") as tar:  # type: ignore[call-overload]
            for member in _members(tar):
                _add(samples, member)
            end = tar.offset
    except (tarfile.TarError, ValueError, OverflowError, EOFError, RecursionError) as error:
        what = f"{where} is cut off or damaged after {len(samples):,} samples ({error})"
        raise DataError(what, fix) from None
    file.seek(end)
    blocks = file.read(2 * tarfile.BLOCKSIZE)
    if len(blocks) < 2 * tarfile.BLOCKSIZE or any(blocks):
        what = f"{where} is cut off or damaged: {len(samples):,} samples in, it does not end as tar files do"
        raise DataError(what, fix)
    if any(map(any, iter(lambda: file.read(_CHUNK), b""))):
        raise DataError(f"{where} goes on after its end, as joined tar files do", "give the single files")
    return [*samples.items()]


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    place = -1
    while (member := tar.next()) is not None:
        if member.offset_data <= place or member.size < 0:
            raise tarfile.ReadError("a header that leads backwards")
        place = member.offset_data
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header
        yield member


def _add(samples: dict[str, dict[str, Place]], member: tarfile.TarInfo) -> None:
    """Note one file, but for folders, hidden files and those without an ending."""
    folder, _, last = member.name.rpartition("/")
    stem, _, ending = last.partition(".")
    if member.isdir() or not stem or not ending:
        return
    place = (member.offset_data, member.size)
    if not member.isreg() or member.issparse():
        place = (0, NOT_REGULAR)
    members = samples.setdefault(clean(f"{folder}/{stem}" if folder else stem), {})
    ending = clean(ending.lower())
    members[ending] = (0, TWICE) if ending in members else place


class _Headers:
    """A file of which only so much is read at once as headers may have: a forged one claims terabytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """So many bytes, or those up to the end."""
        if not 0 <= size <= _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self._file.read(size)


def _kept(files: Files, name: str) -> Path:
    """The file that holds what was found: the number of samples, then a sample a line."""
    path = cache.place(files.where(name), ["tar", _VERSION, *files.states[name]]).with_suffix(".jsonl")
    if not path.exists():
        with files.open(name) as file:
            samples = scan(file, files.where(name))
        _write(path, [str(len(samples)), *(json.dumps(sample) for sample in samples)])
    return path


def _write(path: Path, lines: Iterable[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".part-", delete=False) as file:
            file.writelines(f"{line}\n" for line in lines)
        os.replace(file.name, path)
    except OSError as error:
        what = f"cannot write what a tar holds below {cache.folder()}: {error.strerror}"
        raise StoreError(what, "set ATOLL_CACHE to a folder with enough space") from None


def _lines(path: Path) -> Iterator[str]:
    with path.open() as file:
        yield from file
