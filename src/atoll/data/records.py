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
    """

    id: str
    key: str
    image: bytes | Image.Image
    caption: str
    label: int | None = None
    group: str | None = None


class Source(Protocol):
    """Anything that can be ingested."""

    def describe(self) -> dict[str, Any]:
        """Plain data: `name`, `fingerprint` (changes when any row does), `licence`."""
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
    caption = instead if options.caption is None else row.get(options.caption)
    if caption is None:
        return Reject(key, "empty caption")
    if isinstance(caption, bytes):
        return Reject(key, "caption is not UTF-8")
    if not isinstance(caption, str):
        return Reject(key, "caption is not text", f"it is of type {type(caption).__name__}")
    if label is None:
        return Reject(key, "label is no integer", repr(value)[:100])
    name = row.get(options.id) if options.id else place
    if name is None or name == "":
        return Reject(key, "no id", f"column {options.id!r} is empty")
    group = row.get(options.group) if options.group else None
    return Record(
        id=str(name),
        key=key,
        image=image,
        caption=caption,
        label=label if label >= 0 else None,
        group=None if group is None else str(group),
    )


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
