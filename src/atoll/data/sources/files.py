"""The files of a source, by name: on this machine's disk, in an object store, or wherever they are opened."""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import BinaryIO

from atoll.base.errors import DataError
from atoll.base.safe_parse import files_below
from atoll.store.location import is_url
from atoll.store.ranges import BUFFER
from atoll.store.store import Store

State = tuple[int, str]
ENDINGS = (".parquet", ".tar")
"""How the names of files end that a URL can name; other URLs name folders."""
MOST_NAMES = 100_000
"""Names that braces may stand for."""


@dataclass(frozen=True)
class Files:
    """Some files below a folder or URL."""

    root: str
    states: dict[str, State]  # size, and what changes whenever the file does, in the order of names
    opener: Callable[[str, int], BinaryIO]  # by name, for reads of about so many bytes at a time
    is_whole: bool = True  # whether they are all of the folder, and not one file or those of a pattern
    title: str = ""  # of the repository that they are of, with `commit`
    commit: str = ""

    def open(self, name: str, buffer: int = BUFFER) -> BinaryIO:
        """A file, seekable; `DataError` or `StoreError` if it is gone or another one than it was."""
        return self.opener(name, buffer)

    def where(self, name: str) -> str:
        """The whole name of a file, for messages."""
        return f"{self.root.rstrip('/')}/{name}"


def is_here(name: str) -> bool:
    """Whether this machine has a file or folder of this name, or files of all that its pattern asks for."""
    path = Path(name)
    return path.exists() or all(any(path.parent.glob(one)) for one in _expanded(path.name))


def find_files(location: str | Path, suffix: str) -> Files:
    """The files with this suffix that a location names, hidden ones left out; there may be none.

    It is a file, a folder, or a pattern of files, on this machine or by URL: `{00..99}` and `{a,b}` name
    files that all have to be there (else `DataError`), `*`, `?` and `[ab]` stand for whatever is there.
    """
    text = str(location)
    folder, _, last = text.rpartition("/")
    if is_url(text):
        named = last.endswith(ENDINGS)
        store = Store.open(folder if named else text)
        present = store.states()
        names = _chosen(store.location, [*present], _expanded(last) if named else None, suffix)
        states = {name: present[name] for name in names}

        def open_remote(name: str, buffer: int) -> BinaryIO:
            return store.reader(name, states[name], buffer)

        return Files(store.location, states, open_remote, not named)
    path, wanted = Path(text), None
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in files_below(path, (suffix,))]
    else:
        # A file that is there is meant as it is called, even where its name looks like a pattern.
        wanted = [path.name] if path.exists() else _expanded(path.name)
        if not path.parent.is_dir():
            raise DataError(f"there is no {path}", "check the path")
        path = path.parent
        names = [file.name for file in path.iterdir()]
    names = [name for name in _chosen(str(path), names, wanted, suffix) if (path / name).is_file()]
    return _local_files(path, names, wanted is None)


def listed_files(paths: Sequence[str]) -> Files:
    """Files of this machine by their paths."""
    root = Path(os.path.commonpath([Path(path).absolute().parent for path in paths]))
    return _local_files(root, [Path(path).absolute().relative_to(root).as_posix() for path in paths])


def _local_files(root: Path, names: Sequence[str], is_whole: bool = True) -> Files:
    states = {name: _state(root / name) for name in names}

    def open_local(name: str, _: int) -> BinaryIO:
        try:
            # Positions of rows were taken from the file as it was: of another one they would be wrong rows.
            if _state(root / name) != states[name]:
                raise DataError(f"{root / name} changed while it was read", "run the command again")
            return (root / name).open("rb")
        except OSError as error:
            raise DataError(f"cannot read {root / name}: {error.strerror}", "check it") from None

    return Files(str(root), states, open_local, is_whole)


def _chosen(root: str, names: list[str], wanted: list[str] | None, suffix: str) -> list[str]:
    """Names of this suffix in order: all but hidden ones, or those that are wanted."""
    # By parts, as paths are: in plain text `a-b/x` would come before `a/x`, as `-` comes before `/`.
    names = sorted((n for n in names if n.lower().endswith(suffix)), key=lambda name: name.split("/"))
    if wanted is None:
        return [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    chosen: dict[str, None] = {}
    for pattern in wanted:
        # A pattern's `*` matches a "/" here, and in no folder of this machine.
        level = [name for name in names if name.count("/") == pattern.count("/")]
        matching = [name for name in level if name == pattern or fnmatchcase(name, pattern)]
        if not matching and pattern.endswith(suffix):
            raise DataError(f"{root} holds no {pattern}", "fetch it, or name only what is there")
        chosen.update(dict.fromkeys(matching))
    return [*chosen]


def _expanded(pattern: str) -> list[str]:
    """Braces written out: `{00..12}` by number, as wide as its first bound, and `{a,b}` by name."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [[part] if number % 2 == 0 else [*_alternatives(part)] for number, part in enumerate(parts)]
    count = math.prod(map(len, choices))  # before `product`: three braces of 10^5 names would fill memory
    if count > MOST_NAMES:
        raise DataError(f"{pattern} names {count:,} files", "give their folder, or use '*'")
    return ["".join(names) for names in product(*choices)]


def _alternatives(text: str) -> Iterator[str]:
    bounds = re.fullmatch(r"(\d{1,9})\.\.(\d{1,9})", text)
    if bounds is None:
        yield from text.split(",")
        return
    first, last = int(bounds[1]), int(bounds[2])
    if last - first >= MOST_NAMES:
        raise DataError(f"{{{text}}} names {last - first + 1:,} files", "give their folder, or use '*'")
    yield from (f"{number:0{len(bounds[1])}d}" for number in range(first, last + 1))


def _state(path: Path) -> State:
    state = path.stat()
    return state.st_size, str(state.st_mtime_ns)
