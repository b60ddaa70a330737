"""What a source of data is: numbered positions, each of which holds a row or says why it does not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar, Protocol

from PIL import Image

from atoll.data.formats import Reject, clean
from atoll.data.settings import RowOptions
from atoll.data.sources.files import Files


@dataclass(frozen=True)
class Record:
    """One row of a source, not yet decoded."""

    id: str  # unique in the source; made safe as a file name by the ingest
    key: str  # where the source has it, for people: a path, a row number
    image: bytes | Image.Image  # of a file, or one that the source drew itself
    caption: str
    label: int | None = None  # 0 or larger
    group: str | None = None  # rows of one fall into the same split; without it, equal pictures do
    captions: tuple[str, ...] = ()  # all, `caption` first; empty where the source has one a row
    licence: str | None = None  # of this row, where the source has one for each
    source: str | None = None  # its name, of several
    uncaptioned: bool = False  # whether it is taken without a caption


class Source(Protocol):
    """Anything that can be ingested."""

    def describe(self) -> dict[str, Any]:
        """Plain data: `name`, `fingerprint` (changes when any row does), `licence`.

        `columns` names the optional ones (`dataset.OPTIONAL`) that every row has, where there are any.
        """
        ...

    def __len__(self) -> int:
        """Number of positions."""
        ...

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        """What the positions from `start` up to `stop` hold, one item each, in order."""
        ...


def spans(counts: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """For parts of so many positions each, those concerned: number, first position in it, and the end."""
    before = 0
    for number, count in enumerate(counts):
        low, high = max(start - before, 0), min(stop - before, count)
        if low < high:
            yield number, low, high
        before += count


class FilesSource(Source):
    """Rows of files one after the other: what parquet, tar and prepared data sets have in common."""

    KIND: ClassVar[str]

    def __init__(self, files: Files, options: RowOptions, counts: Sequence[int]) -> None:
        self.files, self.options, self.counts = files, options, counts

    def __len__(self) -> int:
        return sum(self.counts)

    def describe(self) -> dict[str, Any]:
        files = self.files  # a repository's go by its name, with the commit
        named = files.root if files.is_whole else next(iter(files.states))
        title = clean(files.title or f"{self.KIND} {PurePosixPath(named).name}")
        about = self.options.described(title, self.content())
        return {**about, "commit": files.commit} if files.commit else about

    def content(self) -> Any:
        """What the fingerprint covers: names, sizes and times of change or entity tags of the files."""
        return clean(repr([[name, *state] for name, state in self.files.states.items()]))

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        for number, low, high in spans(self.counts, start, stop):
            yield from self.read(number, low, high)

    def read(self, number: int, low: int, high: int) -> Iterator[Record | Reject]:
        """Rows `low` up to `high` of one file."""
        raise NotImplementedError


def to_record(
    row: Mapping[str, Any], options: RowOptions, key: str, image: bytes | None, place_id: str
) -> Record | Reject:
    """A row of a table as a record, or what is wrong with it; `place_id` is its id, if no column has one."""
    if not isinstance(image, bytes) or not image:
        return Reject(key, "no picture", "the row holds no bytes of a picture")
    row = {name: value for name, value in row.items() if value == value}  # NaN stands for nothing, as null
    # -1 where there is no label; None where the value is no integer of 32 bits: "4" and 4.0 are labels, and
    # 4.5 would be cut to one silently, as "1_2" be read as 12.
    value = row.get(options.label) if options.label else None
    label: int | None = -1
    if value is not None and value != "":
        try:
            number = int(value)
            exact = value == number or (isinstance(value, str | bytes) and "_" not in str(value))
            label = max(number, -1) if exact and abs(number) < 2**31 else None
        except (TypeError, ValueError, OverflowError):
            label = None
    # Without a caption the label stands for it; one that is no integer is rejected below.
    instead = None if label == -1 else str(label)
    caption = instead if options.caption is None else row.get(options.caption)
    captions = _captions(caption, options.captions)
    if options.uncaptioned and captions == "empty caption":
        captions = ("",)
    if isinstance(captions, str):
        typed = captions in ("caption is not text", "several captions")
        return Reject(key, captions, f"it is of type {type(caption).__name__}" if typed else "")
    if label is None:
        return Reject(key, "label is no integer", repr(value)[:100])
    name = row.get(options.id) if options.id else place_id
    if name is None or name == "":
        return Reject(key, "no id", f"column {options.id!r} is empty")
    group = row.get(options.group) if options.group else None
    licence = row.get(options.licence_column) if options.licence_column else None
    return Record(
        id=str(name),
        key=key,
        image=image,
        caption=captions[0],
        label=label if label >= 0 else None,
        group=None if group is None or group == "" else str(group),
        captions=captions if options.captions else (),
        licence=str(licence or options.licence) if options.licence_column else None,
        uncaptioned=options.uncaptioned,
    )


def _captions(value: Any, several: bool) -> tuple[str, ...] | str:
    """The captions that a value of a row holds, or why it holds none."""
    if value is None:
        return "empty caption"
    if isinstance(value, list) and not several:
        return "several captions"
    if isinstance(value, str) and several:
        value = value.splitlines()
    values = [text for text in value if text is not None] if isinstance(value, list) else [value]
    for text in values:
        if not isinstance(text, str):
            return "caption is not UTF-8" if isinstance(text, bytes) else "caption is not text"
    return tuple(text for text in values if text.strip() or not several) or "empty caption"
