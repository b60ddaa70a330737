"""What a source of data is: numbered positions, each of which holds a row or says why it does not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from PIL import Image

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


@dataclass(frozen=True)
class Reject:
    """A position that holds no usable row.

    Attributes:
        key: where the source has it.
        reason: a few fixed words, by which rejects are counted.
        detail: what exactly.
    """

    key: str
    reason: str
    detail: str = ""


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


def clean(text: str) -> str:
    """The text with everything that UTF-8 cannot hold written as an escape."""
    return text.encode("utf-8", "backslashreplace").decode()


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
    if not image:
        return Reject(key, "no picture", "the row holds no bytes of a picture")
    label = row.get(options.label) if options.label else None
    number = _label(label)
    if options.caption is not None:
        caption = row.get(options.caption)
    else:  # the label stands for it; one that is no integer is rejected below
        caption = None if number == -1 else str(number)
    if caption is None:
        return Reject(key, "empty caption")
    if isinstance(caption, bytes):
        return Reject(key, "caption is not UTF-8")
    if not isinstance(caption, str):
        return Reject(key, "caption is not text", f"it is of type {type(caption).__name__}")
    if number is None:
        return Reject(key, "label is no integer", repr(label)[:100])
    name = row.get(options.id) if options.id else place
    group = row.get(options.group) if options.group else None
    if name is None or name == "":
        return Reject(key, "no id", f"column {options.id!r} is empty")
    return Record(
        str(name), key, image, caption, number if number >= 0 else None, None if group is None else str(group)
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


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "") or "no columns"
