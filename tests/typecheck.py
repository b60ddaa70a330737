"""The run-time check of types that `conftest.py` hooks into the packages of mathematics."""

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.door import is_bearable
from beartype.roar import BeartypeException


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, passing over the hints it refuses (`Self` in a lone method, protocols known to mypy only).

    jaxtyping calls this with functions it made for the purpose, so changing their annotations is safe.
    """
    hints = function.__annotations__
    function.__annotations__ = {name: hint if _checkable(hint) else Any for name, hint in hints.items()}
    checked: Callable[..., Any] = beartype(function)
    return checked


def _checkable(hint: Any) -> bool:
    try:
        is_bearable(None, hint)
    except BeartypeException:
        return False
    return True
