"""Numbers and names as a person reads them."""

import math
from typing import Any

from atoll.base.text import duration

NONE = "–"
LONGEST = 240
_UNITS = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))


def finite(value: Any) -> float | None:
    """A number that JSON and a chart can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def clean(value: Any) -> str:
    """Text of unknown origin as one line that can be encoded: no control characters, of bounded length."""
    text = "".join(c if c.isprintable() or c.isspace() else "\ufffd" for c in str(value))
    text = " ".join(text.encode("utf-8", "replace").decode().split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def clean_tree(value: Any) -> Any:
    """Plain data whose texts are clean and whose numbers are finite, or null."""
    if isinstance(value, dict):
        return {clean(key): clean_tree(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean_tree(item) for item in value]
    if isinstance(value, float):
        return finite(value)
    return clean(value) if isinstance(value, str) else value


def whole(value: float | None) -> str:
    """`12,345`."""
    return NONE if value is None else f"{value:,.0f}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits and no exponent where it can be helped: `0.0616`, `617`."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    value = float(f"{value:.{digits - 1}e}")
    exponent = math.floor(math.log10(abs(value)))
    if not -4 <= exponent < 7:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{max(0, digits - 1 - exponent)}f}"


def ratio(value: float | None) -> str:
    """`0.87×`."""
    return NONE if value is None else f"{value:.2f}×" if value < 100 else f"{value:,.0f}×"


def percent(value: float | None, digits: int = 1) -> str:
    """`33.5%`."""
    return NONE if value is None else f"{100 * value:.{digits}f}%"


def decimals(value: float | None, digits: int = 2) -> str:
    """`0.77`, `−0.03`: a number about 1."""
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


def flops(value: float | None, like: float | None = None) -> str:
    """`1.27 TFLOPs`: operations in all, not per second.

    Args:
        value: the number of operations.
        like: a number whose unit is used instead, so that a column has one unit.
    """
    if value is None:
        return NONE
    for size, letter in _UNITS:
        if (value if like is None else like) >= size:
            return f"{significant(value / size)} {letter}FLOPs"
    return f"{value:,.0f} FLOPs"


def seconds(value: float | None) -> str:
    """`1.6 s`, `42 s`, `3 min 05 s`."""
    if value is None:
        return NONE
    return f"{value:.1f} s" if value < 9.95 else duration(value)


def tick(value: float) -> str:
    """The label of a mark on an axis: `0.2`, `5k`, `1M`."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{unit}"
    return f"{value:.6g}"


def short_hash(value: Any) -> str:
    """The first 12 letters of a digest."""
    return str(value)[:12] if value else NONE
