"""What the page writes of texts and numbers that `base/text.py` does not know."""

import math
from typing import Any

from atoll.base.text import NONE

LONGEST = 240


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


def decimals(value: float | None, digits: int = 2) -> str:
    """`0.77`, `−0.03`: a number about 1."""
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


def tick(value: float) -> str:
    """The label of a mark on an axis: `0.2`, `5k`, `1M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.6g}{name}"
    return f"{value:.6g}"
