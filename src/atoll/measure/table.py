"""Cells of the tables that measuring makes."""

import math

from torch import Tensor

Cell = float | int | str | None


def finite(value: Tensor | float) -> float | None:
    """A number that JSON can hold, else None."""
    number = float(value)
    return number if math.isfinite(number) else None


def number(value: Cell) -> float:
    """A cell that holds a number."""
    assert isinstance(value, int | float)
    return float(value)


def ratio_of(value: Cell, base: Cell) -> float | None:
    """One number over another; None where there is none, or nothing to divide by."""
    if value is None or not base:
        return None
    return number(value) / number(base)
