"""What a source of data is: numbered positions, each of which holds a row or says why it does not."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

from atoll.data.formats import Reject
from atoll.data.settings import RowOptions


@dataclass(frozen=True)
class Record:
    """One row of a source, not yet decoded.

    Attributes:
        id: unique in the source; made safe as a file name by the ingest.
        key: where the source has it, for people: a path, a row number.
        image: the bytes of an image file, or a picture that the source drew itself.
        caption: as the source has it.
        label: class label, 0 or larger.
        group: rows of one group always fall into the same split; without it, equal pictures do.
        captions: all captions, the first of them `caption`; empty where the source has one a row.
        licence: of this row, where the source tells it.
        source: name of the source, of several.
    """

    id: str
    key: str
    image: bytes | Image.Image
    caption: str
    label: int | None = None
    group: str | None = None
    captions: tuple[str, ...] = ()
    licence: str | None = None
    source: str | None = None


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


def to_record(
    row: Mapping[str, Any], options: RowOptions, key: str, image: bytes | None, place: str
) -> Record | Reject:
    """A row of a table as a record, or what is wrong with it.

    Args:
        row: values by column.
        options: resolved options.
        key: where the row is, for people.
        image: bytes of the picture.
        place: the id, where no column holds it.
    """
    if not isinstance(image, bytes) or not image:
        return Reject(key, "no picture", "the row holds no bytes of a picture")
    value = row.get(options.label) if options.label else None
    label = _label(value)
    # Without a caption the label stands for it; one that is no integer is rejected below.
    instead = None if label == -1 else str(label)
    found = instead if options.caption is None else row.get(options.caption)
    captions = _captions(found, options.captions)
    if isinstance(captions, str):
        told = captions in ("caption is not text", "several captions")
        return Reject(key, captions, f"it is of type {type(found).__name__}" if told else "")
    if label is None:
        return Reject(key, "label is no integer", repr(value)[:100])
    name = row.get(options.id) if options.id else place
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
        group=None if group is None else str(group),
        captions=captions if options.captions else (),
        licence=str(licence or options.licence) if options.licence_column else None,
    )


def _captions(value: Any, several: bool) -> tuple[str, ...] | str:
    """The captions that a value of a row holds, or why it holds none."""
    if value is None:
        return "empty caption"
    if isinstance(value, list) and not several:
        return "several captions"
    if isinstance(value, str) and several:
        value = value.splitlines()
    values = [one for one in value if one is not None] if isinstance(value, list) else [value]
    for one in values:
        if not isinstance(one, str):
            return "caption is not UTF-8" if isinstance(one, bytes) else "caption is not text"
    filled = tuple(one for one in values if one.strip()) if several else tuple(values)
    return filled or "empty caption"


def _label(value: Any) -> int | None:
    """A class label, -1 where there is none; None if the value is no integer of 32 bits."""
    if value is None or value == "":
        return -1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    exact = not isinstance(value, float) or value == number
    return max(number, -1) if exact and abs(number) < 2**31 else None
