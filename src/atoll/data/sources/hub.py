"""A source: a data set of the Hugging Face hub, or one on this machine's disk that is laid out like those.

The package `datasets` finds out what belongs to which subset and split. Parquet and tar files are then read
as those of any other place, a few rows at a time; image folders and Arrow files by `datasets` itself, which
prepares them in its cache first. What holds code or pickle is refused before it is read.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl

from atoll.base.console import say
from atoll.base.errors import DataError, StoreError, extra, first_line
from atoll.data.formats import Reject
from atoll.data.settings import RowOptions
from atoll.data.sources.files import Files, listed_files
from atoll.data.sources.folder import LARGEST
from atoll.data.sources.parquet import ParquetSource
from atoll.data.sources.record import FilesSource, Record, Source, to_record
from atoll.data.sources.tar import TarSource
from atoll.store.ranges import reader

PREFIX = "hf://"


def parse_name(text: str) -> tuple[str, str | None, str | None, str]:
    """Location, revision, config and split of `hf://datasets/OWNER/NAME@REVISION?config=CONFIG&split=SPLIT`.

    Or of `hf:///FOLDER?split=SPLIT`, which has no revision. `DataError` where it is neither.
    """
    form = "write hf://datasets/OWNER/NAME@REVISION?config=CONFIG&split=SPLIT, or hf:///FOLDER"
    path, _, query = text.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    config, split = options.pop("config", None), options.pop("split", "train")
    if options:
        raise DataError(f"{text} has the option {next(iter(options))!r}", form)
    if path.startswith("/"):
        return path, None, config, split
    named = re.fullmatch(r"datasets/([\w.-]+/[\w.-]+|[\w.-]+)(?:@([^@\s]+))?", path)
    if named is None:
        raise DataError(f"{text} names no data set of the hub", form)
    if named[2] is None:
        fix = f"write {PREFIX}{path}@COMMIT, so that it is the same data tomorrow"
        raise DataError(f"{text} names no revision", fix)
    return named[1], named[2], config, split


def open_hub(text: str, options: RowOptions) -> Source:
    """Open a data set by its `hf://` name; `DataError` where that fails, or its kind is not read."""
    location, revision, config, split = parse_name(text)
    commit = revision
    if commit is not None and not re.fullmatch("[0-9a-f]{40}", commit):
        # A branch moves: the commit that it is now is said, so that it can be pinned.
        from huggingface_hub import HfApi

        try:
            commit = str(HfApi().dataset_info(location, revision=commit).sha)
        except Exception as error:  # of several packages
            what = f"cannot look up {location}@{revision}: {first_line(error)[:300]}"
            raise DataError(what, "check the name, the network and HF_TOKEN, or name a commit") from None
        say(f"{location}@{revision} is now the commit {commit}: name that one, to go on with it later")
    if commit is None and not Path(location).is_dir():
        raise DataError(f"there is no folder {location}", "check the path")
    place = f"{location}@{commit}" if commit else location
    with extra("hub", "hf:// sources need the package datasets"):
        import datasets
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    # Without trust_remote_code: a repository that needs its own script is refused here.
    try:
        builder = datasets.load_dataset_builder(location, config, revision=commit)
    except Exception as error:  # of many packages
        what = f"datasets cannot open {place}: {first_line(error)[:300]}"
        raise DataError(what, "check its name, its revision and its layout") from None
    listed = builder.config.data_files or {}
    if split not in listed:
        have = ", ".join(map(str, listed)) or "none"
        raise DataError(f"{text} has no split {split!r}", f"write ?split=NAME with one of: {have}")
    files = _hub_files(place, listed[split]) if commit else listed_files(listed[split])
    # By the commit and not by the branch: it is what the data are.
    files = replace(files, title=f"hub {place}", commit=commit or "")
    match type(builder).__module__.rpartition(".")[2]:
        case "parquet":
            return ParquetSource(files, options)
        case "webdataset":
            return TarSource(files, options)
        case "arrow" | "imagefolder":
            return _Prepared(builder, split, files, options)
        case kind:
            fix = "give it as parquet, tar, arrow or an image folder"
            raise DataError(f"{text} is of the kind {kind!r}, which is not read", fix)


class _Prepared(FilesSource):
    """Rows that `datasets` has prepared in its cache: mapped into memory, never decoded by it."""

    def __init__(self, builder: Any, split: str, files: Files, options: RowOptions) -> None:
        from datasets import Image
        from datasets.config import DOWNLOADED_DATASETS_PATH, EXTRACTED_DATASETS_PATH
        from huggingface_hub.constants import HF_HUB_CACHE

        caches = DOWNLOADED_DATASETS_PATH, EXTRACTED_DATASETS_PATH, HF_HUB_CACHE
        self._roots = [Path(root) for root in (*caches, *([] if files.commit else [files.root]))]
        try:
            builder.download_and_prepare()
            rows = builder.as_dataset(split)
            for name in [name for name, kind in rows.features.items() if isinstance(kind, Image)]:
                # Undecoded: `datasets` would decode before our limits on bytes and pixels apply.
                rows = rows.cast_column(name, Image(decode=False))
        except Exception as error:  # of many packages
            what = f"datasets cannot prepare {files.root}: {first_line(error)[:300]}"
            raise DataError(what, "mend it, or fetch it again") from None
        self._rows, self._image = rows, options.image or "image"
        if self._image not in rows.column_names:
            what = f"{files.root} has the columns {', '.join(rows.column_names)}, but not {self._image!r}"
            raise DataError(what, "say with data.ingest.image which one holds the pictures")
        super().__init__(files, options.resolve([(files.root, rows.column_names)]), [len(rows)])

    def read(self, number: int, low: int, high: int) -> Iterator[Record | Reject]:
        for position in range(low, high):
            row, key = self._rows[position], f"row {position}"
            data = self._content(row[self._image])
            if isinstance(data, str):
                yield Reject(key, data)
            else:
                yield to_record(row, self.options, key, data, f"{position:08d}")

    def _content(self, picture: Any) -> bytes | str | None:
        """Bytes of a picture, None if there are none, or why they are not read."""
        if not isinstance(picture, dict):
            return picture if isinstance(picture, bytes) else None
        data, path = picture.get("bytes"), picture.get("path")
        if data is not None or not isinstance(path, str):
            return data if isinstance(data, bytes) else None
        # A row may name any file of this machine: only the data set's own are read.
        file = Path(path).resolve()
        if not any(file.is_relative_to(root.resolve()) for root in self._roots):
            return "unsafe path"
        try:
            return file.read_bytes() if file.is_file() and file.stat().st_size <= LARGEST else "too large"
        except OSError:
            return "missing file"


def _hub_files(place: str, urls: Sequence[str]) -> Files:
    """Files of a repository at a commit, by their paths in it."""
    from huggingface_hub import HfFileSystem

    base, system = f"datasets/{place}", HfFileSystem()
    foreign = next((url for url in urls if not url.startswith(f"{PREFIX}{base}/")), None)
    if foreign is not None:  # also a folder of this machine that has the repository's name
        raise DataError(f"{place} leads to a file of elsewhere: {foreign}", "give that place as the source")

    def ask(name: str, question: Callable[[str], Any]) -> Any:
        try:
            return question(f"{base}/{name}")
        except Exception as error:  # of several packages
            what = f"the hub does not give {place}/{name}: {first_line(error)[:300]}"
            raise StoreError(what, "run the command again") from None

    states = {}
    for name in [url.removeprefix(f"{PREFIX}{base}/") for url in urls]:
        info = ask(name, system.info)
        states[name] = (int(info["size"]), str(info.get("blob_id")))

    def opener(name: str, buffer: int) -> BinaryIO:
        def fetch(start: int, stop: int) -> bytes:
            return bytes(ask(name, lambda path: system.cat_file(path, start=start, end=stop)))

        return reader(fetch, states[name][0], buffer)

    return Files(place, states, opener)
