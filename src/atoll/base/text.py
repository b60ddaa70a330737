"""Numbers as a person reads them, written in one way everywhere, and the words of a text."""

import math
import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import cache

Size = tuple[int, int]
"""Width and height in pixels."""
NONE = "–"
"""What stands where there is no number."""
_SHORT = ((1e9, "B"), (1e6, "M"), (1e3, "k"))
_DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
_SMALL_WORDS = (
    "a about above after against along an and any are as at be before behind below between both but "
    "by can could do does down during each either every for from had has have he her hers him his how "
    "i if in into is it its me might mine must my neither no nor not of off on onto or our out over "
    "per shall she should so some such than that the their them then there these they this those "
    "through to toward under until up upon us was we were what when where which while who whom whose "
    "why will with within without would yes you your"
)
NO_NOUNS = frozenset(_SMALL_WORDS.split())
"""English words that the dictionary does not know as other kinds of words."""


def sharing_sentence(pretrained: float, checkpoint: bool, origin: bool = False) -> str:
    """What experts share: a part of the training cost, a published checkpoint, another's start."""
    if pretrained:
        start = f"start from shared pretraining on all data ({pretrained:.0%} of the training cost) and then "
    else:
        start = "start from one checkpoint and then " if checkpoint else ""
        start = "continue from those of another campaign and then " if origin else start
    return f"The experts {start}train in isolation."


def many(number: int, noun: str, nouns: str = "") -> str:
    """`1 image`, `2,000 images`; `nouns` where the plural takes more than an s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    value = float(f"{value:.2e}")  # rounded before its unit is chosen: 999,700 is 1 M, and no 1e+03 k
    unit, name = next(((unit, name) for unit, name in units if value >= unit), (1.0, ""))
    return f"{value / unit:.3g} {name}"


def count(value: float | None) -> str:
    """Thousands, millions, billions: `12.3 k`, `1.2 M`; `999`."""
    return NONE if value is None else _scaled(value, _SHORT).rstrip()


def size(value: float | None) -> str:
    """Bytes in decimal units: `1.54 kB`, `3 GB`."""
    return NONE if value is None else f"{_scaled(value, (*_DECIMAL, (1e3, 'k')))}B"


def flops(value: float | None, like: float | None = None) -> str:
    """Operations in all, not per second: `1.27 TFLOPs`; in the unit of `like`, so that a column has one."""
    if value is None:
        return NONE
    scale = float(f"{value if like is None else like:.2e}")  # as in `_scaled`: 999,960 M is 1 T
    unit, name = next(((unit, name) for unit, name in _DECIMAL if scale >= unit), (1.0, ""))
    return f"{round_sig(value / unit) if name else f'{value:,.0f}'} {name}FLOPs"


def duration(seconds: float | None) -> str:
    """`1.6 s`, `42 s`, `3 min 05 s`, `2 h 07 min`, `4 d 03 h`."""
    if seconds is None:
        return NONE
    if 0 < seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def round_sig(value: float | None, digits: int = 3) -> str:
    """So many significant digits, and no exponent where it can be helped: `0.0616`, `617`, `12,300`."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    value = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share: `33.5%`."""
    return NONE if value is None else f"{100 * value:.{digits}f}%"


def ratio(value: float | None, digits: int = 2) -> str:
    """`0.87×`."""
    return NONE if value is None else f"{value:.{digits}f}×" if value < 100 else f"{value:,.0f}×"


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Lines of a table whose columns are as wide as they must be: those of `left` on the left, else right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{text:{'<' if n in left else '>'}{widths[n]}}" for n, text in enumerate(row)).rstrip()
        for row in rows
    ]


def printable(text: str) -> str:
    """The text without anything that a terminal would obey: what other machines and files say."""
    return "".join(c if c.isprintable() else "?" for c in text)


def shorten(names: Sequence[str], most: int = 8) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def parse_size(text: str) -> Size:
    """Width and height of `336x192`; `ValueError` for anything else."""
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise ValueError(f"{text[:40]!r} is no size: write width x height in pixels, such as 336x192")
    return int(match[1]), int(match[2])


@cache
def word_pattern() -> re.Pattern[str]:
    """Letters and digits, with their marks: without them Hindi would lose its vowels."""
    # Signs of less than 0xFE00, since those that follow select how a sign is drawn.
    marks = "".join(c for c in map(chr, range(0x300, 0xFE00)) if unicodedata.category(c) in ("Mn", "Mc"))
    letters = f"[^\\W_]+(?:[{marks}]+[^\\W_]*)*"
    return re.compile(f"{letters}(?:['’]{letters})*")


def words_of(text: str) -> list[str]:
    """Words of a text: letters and digits in any script, without case, hyphens or a possessive's end."""
    words = word_pattern().findall(unicodedata.normalize("NFC", text.casefold()))
    return [word[:-2] if word.endswith(("'s", "’s")) else word for word in words]
