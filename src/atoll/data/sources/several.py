"""Open a source by what the user wrote, or several sources that follow one another."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from atoll.base.errors import DataError
from atoll.base.hashing import digest
from atoll.base.safe_parse import expanded
from atoll.data.decode import SUFFIXES
from atoll.data.formats import Reject
from atoll.data.settings import IngestConfig, SourceConfig, check_names
from atoll.data.sources.files import ENDINGS, find_files
from atoll.data.sources.folder import FolderSource
from atoll.data.sources.glyphs import GlyphSource
from atoll.data.sources.hub import PREFIX, open_hub
from atoll.data.sources.parquet import ParquetSource
from atoll.data.sources.record import Record, Source, spans
from atoll.data.sources.tar import TarSource
from atoll.store.location import is_url, without_secrets

KINDS = "a folder of captioned images, parquet or tar files, a folder or glob of them, or hf://datasets/..."
FIRST = 16
"""Rows of a source that are looked at before work begins."""


def open_source(text: str | Path, options: IngestConfig | Mapping[str, Any] | None = None) -> Source:
    """Open a source by what the user wrote.

    That is `glyphs`, a folder of images, parquet or tar files or a folder of them (on this machine or by the
    URL of an object store), or `hf://datasets/OWNER/NAME@REVISION`. `DataError` where there is none.
    """
    if not isinstance(options, IngestConfig):
        options = IngestConfig.parse(options or {}, "the options of the source")
    if text == "glyphs":
        if any(options.columns()):
            what = "the source glyphs has no columns"
            raise DataError(what, "leave out data.ingest.caption, group, label and id")
        return GlyphSource(options.glyphs)
    if str(text).startswith(PREFIX):
        return open_hub(str(text), options)
    path = text if is_url(text) else expanded(text)
    if not str(text) or not (isinstance(path, str) or path.exists() or path.name.endswith(ENDINGS)):
        raise DataError(f"there is no source {str(text)!r}", f"give `glyphs`, {KINDS}")
    parquet, tar = find_files(path, ".parquet"), find_files(path, ".tar")
    beside = {name.removesuffix(".tar") for name in tar.states}  # img2dataset puts a table beside each tar
    if parquet.states and not beside.issuperset(name.removesuffix(".parquet") for name in parquet.states):
        return ParquetSource(parquet, options)
    folder = path if isinstance(path, Path) and path.is_dir() else None
    # Images before tars: a folder of images often has the tar beside them that they were unpacked from.
    if folder and any(file.suffix.lower() in SUFFIXES for file in folder.rglob("[!.]*")):
        return FolderSource(folder, options)
    if tar.states:
        return TarSource(tar, options)
    if folder:
        return FolderSource(folder, options)  # says what it lacks
    raise DataError(f"{without_secrets(str(text))} is of unknown kind", f"give {KINDS}")


class SeveralSources(Source):
    """Named sources one after the other; every row tells its source and its licence.

    Ids begin with the source's name, so that equal ones of two sources stay apart. Groups are not changed:
    rows of one group lie in one split, whichever sources they come from.
    """

    def __init__(self, parts: Mapping[str, Source]) -> None:
        self.parts = dict(parts)
        self.counts = [len(source) for source in self.parts.values()]

    def __len__(self) -> int:
        return sum(self.counts)

    def describe(self) -> dict[str, Any]:
        parts = self._described
        columns = {column for about in parts.values() for column in about.get("columns", [])}
        content = [[name, about["fingerprint"], about["licence"]] for name, about in parts.items()]
        return {
            "name": ", ".join(parts),
            "fingerprint": digest(content),
            "licence": "; ".join(f"{name}: {about['licence']}" for name, about in parts.items()),
            "columns": sorted({"source", "licence", *columns}),
            "sources": parts,
        }

    @cached_property
    def _described(self) -> dict[str, dict[str, Any]]:
        return {name: source.describe() for name, source in self.parts.items()}

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        for number, low, high in spans(self.counts, start, stop):
            name = list(self.parts)[number]
            licence = self._described[name]["licence"]
            for item in self.parts[name].records(low, high):
                key = f"{name}: {item.key}"
                if isinstance(item, Reject):
                    yield Reject(key, item.reason, item.detail)
                else:
                    yield replace(
                        item, id=f"{name}-{item.id}", key=key, source=name, licence=item.licence or licence
                    )


def open_sources(named: str | Mapping[str, SourceConfig], options: IngestConfig) -> Source:
    """Open the source or the several sources of a campaign, and look at the first rows of each.

    Several take the options where they do not say otherwise. `DataError` also where none of a source's first
    rows can be used, or one has several captions and `captions` is off.
    """
    if isinstance(named, str):
        return _usable(open_source(named, options))
    check_names(named)
    sources = {}
    for name, settings in named.items():
        own = settings.model_dump(exclude={"source", "weight"}, exclude_defaults=True)
        # An empty text takes back what data.ingest says for all.
        empty = {key: None for key, value in own.items() if value == "" and key != "licence"}
        merged = options.model_copy(update=own | empty)
        if settings.source == "glyphs":  # they have no columns
            merged = IngestConfig(**own, glyphs=options.glyphs)
        try:
            sources[name] = _usable(open_source(settings.source, merged))
        except DataError as error:  # it names the settings of a single source
            texts = (error.what, error.fix or "")
            own_texts = (text.replace("data.ingest.", f"data.source.{name}.") for text in texts)
            raise DataError(*own_texts) from None
    return SeveralSources(sources)


REMEDIES = {
    "several captions": "set data.ingest.captions=true to keep all of them",
    "empty caption": "say with data.ingest.caption which column holds the captions, or set"
    " data.ingest.uncaptioned=true and run `atoll data caption`",
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
    reasons = Counter(reject.reason for reject in rejects)
    several = "several captions" in reasons
    if not rejects or (len(rejects) < len(items) and not several):
        return source
    reason = "several captions" if several else reasons.most_common(1)[0][0]
    fix = REMEDIES.get(reason)
    if fix is None:
        return source  # damage, not a matter of columns: the ingest names every row of it
    first = next(reject for reject in rejects if reject.reason == reason)
    detail = f", {first.detail}" if first.detail else ""
    name = source.describe()["name"]
    what = f"{reasons[reason]} of the first {len(items)} rows of {name} are no use: {reason}"
    raise DataError(f"{what} ({first.key}{detail})", fix)
