"""A source: a data set of the Hugging Face hub, or one on this machine's disk that is laid out like those.

The package `datasets` finds out what belongs to which subset and split. Parquet and tar files are then read
as those of any other place, a few rows at a time; image folders and Arrow files by `datasets` itself, which
prepares them in its cache first. What holds code or pickle is refused before it is read.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError, StoreError, first_line
from atoll.data.files import Files, listed_files
from atoll.data.folder import LARGEST
from atoll.data.formats import Reject, clean
from atoll.data.parquet import ParquetSource
from atoll.data.records import Record, Source, to_record
from atoll.data.settings import RowOptions
from atoll.data.tar import TarSource
from atoll.store.ranges import reader

PREFIX = "hf://"
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Name:
    """What `hf://datasets/OWNER/NAME@REVISION?config=CONFIG&split=SPLIT` or `hf:///FOLDER?split=SPLIT` names.

    Attributes:
        place: OWNER/NAME, or the absolute path of a folder.
        revision: a commit, branch or tag; None for a folder.
        config: the subset; None for the only one.
        split: of it.
    """

    place: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, text: str) -> "Name":
        """`DataError` where it is none, or names no revision."""
        form = "write hf://datasets/OWNER/NAME@REVISION?config=CONFIG&split=SPLIT, or hf:///FOLDER"
        path, _, query = text.removeprefix(PREFIX).partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        config, split = options.pop("config", None), options.pop("split", "train")
        if options:
            raise DataError(f"{text} has the option {next(iter(options))!r}", form)
        if path.startswith("/"):
            return cls(path, None, config, split)
        named = re.fullmatch(r"datasets/([\w.-]+/[\w.-]+|[\w.-]+)(?:@([^@\s]+))?", path)
        if named is None:
            raise DataError(f"{text} names no data set of the hub", form)
        if named[2] is None:
            fix = f"write {PREFIX}{path}@COMMIT, so that it is the same data tomorrow"
            raise DataError(f"{text} names no revision", fix)
        return cls(named[1], named[2], config, split)


def open_hub(text: str, options: RowOptions) -> Source:
    """Open a data set by its `hf://` name.

    Raises:
        DataError: there is none, it is of a kind that is not read, or it cannot be reached.
        ConfigError: the package `datasets` is not installed.
    """
    name = Name.parse(text)
    commit = None if name.revision is None else _commit(name.place, name.revision)
    if commit is None and not Path(name.place).is_dir():
        raise DataError(f"there is no folder {name.place}", "check the path")
    builder = _builder(name, commit)
    kind = type(builder).__module__.rpartition(".")[2]
    files = builder.config.data_files or {}
    if name.split not in files:
        have = ", ".join(map(str, files)) or "none"
        raise DataError(f"{text} has no split {name.split!r}", f"write ?split=NAME with one of: {have}")
    place = f"{name.place}@{commit}" if commit else name.place
    found = _hub_files(place, files[name.split]) if commit else listed_files(files[name.split])
    inner: Source
    if kind == "parquet":
        inner = ParquetSource(found, options)
    elif kind == "webdataset":
        inner = TarSource(found, options)
    elif kind in ("arrow", "imagefolder"):
        inner = _Prepared(builder, name.split, found, options)
    else:
        fix = "give it as parquet, tar, arrow or an image folder"
        raise DataError(f"{text} is of the kind {kind!r}, which is not read", fix)
    return _Named(inner, clean(f"hub {place}"), commit)


class _Named:
    """A source under the name of its repository; `commit` is part of what it is."""

    def __init__(self, inner: Source, name: str, commit: str | None) -> None:
        self._inner, self._name, self._commit = inner, name, commit
        self.records = inner.records

    def __len__(self) -> int:
        return len(self._inner)

    def describe(self) -> dict[str, Any]:
        """As the files' own, with the commit."""
        about = self._inner.describe()
        commit = {"commit": self._commit} if self._commit else {}
        return {**about, "name": self._name, **commit}


class _Prepared:
    """Rows that `datasets` has prepared in its cache: mapped into memory, never decoded by it."""

    def __init__(self, builder: Any, split: str, files: Files, options: RowOptions) -> None:
        from datasets import Image
        from datasets.config import DOWNLOADED_DATASETS_PATH, EXTRACTED_DATASETS_PATH
        from huggingface_hub.constants import HF_HUB_CACHE

        self.files = files
        self._roots = [Path(one) for one in (DOWNLOADED_DATASETS_PATH, EXTRACTED_DATASETS_PATH, HF_HUB_CACHE)]
        self._roots += [] if "@" in files.root else [Path(files.root)]
        try:
            builder.download_and_prepare()
            rows = builder.as_dataset(split)
            pictures = [name for name, kind in rows.features.items() if isinstance(kind, Image)]
            for name in pictures:
                rows = rows.cast_column(name, Image(decode=False))
        except Exception as error:  # of many packages
            what = f"datasets cannot prepare {files.root}: {first_line(error)[:300]}"
            raise DataError(what, "mend it, or fetch it again") from None
        self._rows, self._image = rows, options.image or "image"
        if self._image not in rows.column_names:
            what = f"{files.root} has the columns {', '.join(rows.column_names)}, but not {self._image!r}"
            raise DataError(what, "say with data.ingest.image which one holds the pictures")
        self.options = options.resolve([(files.root, rows.column_names)])

    def __len__(self) -> int:
        return len(self._rows)

    def describe(self) -> dict[str, Any]:
        """Fingerprint of the names and states of the files."""
        content = clean(repr([[name, *state] for name, state in self.files.states.items()]))
        return self.options.described("", content)

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        """The rows of some positions."""
        for number in range(start, min(stop, len(self))):
            row = self._rows[number]
            key = f"row {number}"
            data = self._content(row[self._image])
            if isinstance(data, str):
                yield Reject(key, data)
            else:
                yield to_record(row, self.options, key, data, f"{number:08d}")

    def _content(self, picture: Any) -> bytes | str | None:
        """Bytes of a picture, None if there are none, or why they are not read."""
        if not isinstance(picture, dict):
            return picture if isinstance(picture, bytes) else None
        data, path = picture.get("bytes"), picture.get("path")
        if data is not None or not isinstance(path, str):
            return data if isinstance(data, bytes) else None
        file = Path(
            path
        ).resolve()  # a row may name any file of this machine: only the data set's own are read
        if not any(file.is_relative_to(root.resolve()) for root in self._roots):
            return "unsafe path"
        try:
            return file.read_bytes() if file.is_file() and file.stat().st_size <= LARGEST else "too large"
        except OSError:
            return "missing file"


def _datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError("hf:// sources need the package datasets", "pip install 'atoll[hub]'") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


def _commit(repository: str, revision: str) -> str:
    """The commit that a revision is now; one that is no commit is told, so that it can be pinned."""
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi

    try:
        commit = str(HfApi().dataset_info(repository, revision=revision).sha)
    except Exception as error:  # of several packages
        what = f"cannot look up {repository}@{revision}: {first_line(error)[:300]}"
        raise DataError(what, "check the name, the network and HF_TOKEN, or name a commit") from None
    say(f"{repository}@{revision} is now the commit {commit}: name that one, to go on with it later")
    return commit


def _builder(name: Name, commit: str | None) -> Any:
    try:
        return _datasets().load_dataset_builder(name.place, name.config, revision=commit)
    except ConfigError:
        raise
    except Exception as error:  # of many packages
        what = f"datasets cannot open {name.place}{f'@{commit}' if commit else ''}: {first_line(error)[:300]}"
        raise DataError(what, "check its name, its revision and its layout") from None


def _hub_files(place: str, urls: Sequence[str]) -> Files:
    """Files of a repository at a commit, by their paths in it."""
    from huggingface_hub import HfFileSystem

    base, system = f"datasets/{place}", HfFileSystem()
    foreign = next((url for url in urls if not url.startswith(f"{PREFIX}{base}/")), None)
    if foreign is not None:  # also a folder of this machine that has the repository's name
        raise DataError(f"{place} leads to a file of elsewhere: {foreign}", "give that place as the source")
    names = [url.removeprefix(f"{PREFIX}{base}/") for url in urls]
    states = {}
    for name in names:
        about = _asked(lambda name=name: system.info(f"{base}/{name}"), f"{place}/{name}")  # type: ignore[misc]
        states[name] = (int(about["size"]), str(about.get("blob_id")))

    def opener(name: str, buffer: int) -> BinaryIO:
        def fetch(start: int, stop: int) -> bytes:
            where = f"{base}/{name}"
            return bytes(_asked(lambda: system.cat_file(where, start=start, end=stop), f"{place}/{name}"))

        return reader(fetch, states[name][0], buffer)

    return Files(place, states, opener)


def _asked(question: Callable[[], Any], about: str) -> Any:
    """An answer of the hub; `StoreError` where there is none, whatever the client makes of it."""
    try:
        return question()
    except Exception as error:  # of several packages
        what = f"the hub does not give {about}: {first_line(error)[:300]}"
        raise StoreError(what, "run the command again") from None
