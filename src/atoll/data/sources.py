"""Where data comes from: `glyphs`, folders of captioned images, parquet, tar, and data sets of the hub."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.base.safe_parse import expanded
from atoll.data.files import ENDINGS, find_files
from atoll.data.folder import SUFFIXES, FolderSource
from atoll.data.formats import Reject
from atoll.data.glyphs import GlyphSource
from atoll.data.hub import PREFIX, open_hub
from atoll.data.parquet import ParquetSource
from atoll.data.records import Record, Source
from atoll.data.settings import SourceConfig, SourceOptions, check_names
from atoll.data.tar import TarSource
from atoll.store.location import is_url, without_secrets

KINDS = (
    "a folder of captioned images, parquet or tar files, a folder or pattern of them, or hf://datasets/..."
)
FIRST = 16
"""Rows of a source that are looked at before work begins."""


def open_source(text: str | Path, options: SourceOptions | Mapping[str, Any] | None = None) -> Source:
    """Open a source by what the user wrote.

    Args:
        text: `glyphs`, a folder of images, parquet or tar files or a folder of them (on this machine or by
            the URL of an object store), or `hf://datasets/OWNER/NAME@REVISION`.
        options: `SourceOptions` (an `IngestConfig` is one), or plain data for them.

    Raises:
        DataError: there is no such source, or it cannot be read as one.
        ConfigError: the options are wrong.
    """
    if not isinstance(options, SourceOptions):
        options = SourceOptions.parse(options or {}, "the options of the source")
    if text == "glyphs":
        if any(options.columns()):
            raise DataError(
                "the source glyphs has no columns", "leave out data.ingest.caption, group, label and id"
            )
        return GlyphSource(options.glyphs)
    if str(text).startswith(PREFIX):
        return open_hub(str(text), options)
    path = text if is_url(text) else expanded(text)
    is_there = isinstance(path, str) or path.exists() or path.name.endswith(ENDINGS)
    if not str(text) or not is_there:
        raise DataError(f"there is no source {str(text)!r}", f"give `glyphs`, {KINDS}")
    parquet = find_files(path, ".parquet")
    if parquet.states:
        return ParquetSource(parquet, options)
    folder = path if isinstance(path, Path) and path.is_dir() else None
    if folder and any(one.suffix.lower() in SUFFIXES for one in folder.rglob("*")):
        return FolderSource(folder, options)
    tar = find_files(path, ".tar")
    if tar.states:
        return TarSource(tar, options)
    if folder:
        return FolderSource(folder, options)  # tells what it lacks
    raise DataError(f"{without_secrets(str(text))} is of unknown kind", f"give {KINDS}")


class SeveralSources:
    """Named sources one after the other; every row tells its source and its licence.

    Ids begin with the source's name, so that equal ones of two sources stay apart. Groups are not changed:
    rows of one group lie in one split, whichever sources they come from.
    """

    def __init__(self, parts: Mapping[str, Source]) -> None:
        check_names(parts)
        self.parts = dict(parts)
        self._ends = [*accumulate(len(source) for source in self.parts.values())]

    def __len__(self) -> int:
        return self._ends[-1]

    def describe(self) -> dict[str, Any]:
        """What all parts say together; `sources` has each one's."""
        parts = self._parts
        columns = {column for about in parts.values() for column in about.get("columns", [])}
        return {
            "name": ", ".join(parts),
            "fingerprint": digest(
                [[name, about["fingerprint"], about["licence"]] for name, about in parts.items()]
            ),
            "licence": "; ".join(f"{name}: {about['licence']}" for name, about in parts.items()),
            "columns": sorted({"source", "licence", *columns}),
            "sources": parts,
        }

    @cached_property
    def _parts(self) -> dict[str, dict[str, Any]]:
        """What each part says."""
        return {name: source.describe() for name, source in self.parts.items()}

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        """The rows of some positions."""
        names, first = list(self.parts), bisect_right(self._ends, start)
        for number in range(first, len(names)):
            name, before = names[number], self._ends[number] - len(self.parts[names[number]])
            if before >= stop:
                return
            source, licence = self.parts[name], self._parts[name]["licence"]
            for item in source.records(max(start - before, 0), min(stop - before, len(source))):
                key = f"{name}: {item.key}"
                if isinstance(item, Reject):
                    yield Reject(key, item.reason, item.detail)
                else:
                    yield replace(
                        item, id=f"{name}-{item.id}", key=key, source=name, licence=item.licence or licence
                    )


def open_sources(named: str | Mapping[str, SourceConfig], options: SourceOptions) -> Source:
    """Open the source or the several sources of a campaign, and look at the first rows of each.

    Args:
        named: as `open_source` takes it, or settings by name.
        options: of a single source; several take them where they do not say otherwise.

    Raises:
        DataError: as `open_source`; none of a source's first rows can be used, or one has several captions
            and `captions` is off.
    """
    if isinstance(named, str):
        return _usable(open_source(named, options))
    check_names(named)
    sources = {}
    for name, one in named.items():
        try:
            sources[name] = _usable(open_source(one.source, _options(one, options)))
        except DataError as error:  # it names the settings of a single source
            told = (
                text.replace("data.ingest.", f"data.source.{name}.") for text in (error.what, error.fix or "")
            )
            raise DataError(*told) from None
    return SeveralSources(sources)


def _options(one: SourceConfig, options: SourceOptions) -> SourceOptions:
    own = one.model_dump(exclude={"source", "weight"}, exclude_defaults=True)
    if one.source == "glyphs":  # they have no columns
        return SourceOptions(**own, glyphs=options.glyphs)
    empty = {name: None for name, value in own.items() if value == "" and name != "licence"}
    return options.model_copy(update=own | empty)


REMEDIES = {
    "several captions": "set data.ingest.captions=true to keep all of them",
    "empty caption": "say with data.ingest.caption which column holds the captions",
    "caption is not text": "say with data.ingest.caption which column holds the captions",
    "caption is not UTF-8": "say with data.ingest.caption which column holds the captions",
    "label is no integer": "say with data.ingest.label which column holds integers",
    "no id": "say with data.ingest.id which column holds ids, or leave it out",
    "no picture": "say with data.ingest.image which column holds the pictures",
    "several pictures": "say with data.ingest.image which of them counts",
}
"""Which setting to change when first rows are rejected, by reason."""


def _usable(source: Source) -> Source:
    """The source; refused if its columns are taken for what they are not, before hours are spent on it."""
    items = list(source.records(0, min(FIRST, len(source))))
    rejects = [item for item in items if isinstance(item, Reject)]
    lists = [reject for reject in rejects if reject.reason == "several captions"]
    if not rejects or (len(rejects) < len(items) and not lists):
        return source
    reason = "several captions" if lists else Counter(r.reason for r in rejects).most_common(1)[0][0]
    fix = REMEDIES.get(reason)
    if fix is None:
        return source  # damage, not a matter of columns: the ingest names every row of it
    first = next(reject for reject in rejects if reject.reason == reason)
    count = sum(reject.reason == reason for reject in rejects)
    detail = f", {first.detail}" if first.detail else ""
    what = f"{count} of the first {len(items)} rows of {source.describe()['name']} are no use: {reason}"
    raise DataError(f"{what} ({first.key}{detail})", fix)
