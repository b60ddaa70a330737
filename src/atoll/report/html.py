"""What the templates of all pages share: where they lie, how numbers are written, and chips."""

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import BaseModel

from atoll.base import text
from atoll.base.table import Column, columns_of, shown
from atoll.base.text import NONE
from atoll.campaign.roles import BASELINE, RUNS
from atoll.report import charts, palette


def whole(value: float | None) -> str:
    """`12,345`."""
    return NONE if value is None else f"{value:,.0f}"


def decimals(value: float | None, digits: int = 2) -> str:
    """`0.77`, `−0.03`: a number about 1."""
    return NONE if value is None else f"{value:.{digits}f}".replace("-", "−")


def cell(row: Any, key: Any) -> str:
    """A value of a table's row, in the unit that a typed row has for it; text and markup stay as they are."""
    # Units are those of the CSV and of the terminal, so one number never has two forms.
    typed = isinstance(row, BaseModel)
    value = getattr(row, key) if typed else row[key]
    if isinstance(value, str):
        return value
    record: Any = type(row)
    return shown(value, _column(record, key) if typed else Column(""))


@cache
def _column(record: Any, name: str) -> Column:
    return next(column for column in columns_of(record) if column.name == name)


def chip(name: Any, style: str) -> Markup:
    """A name beside its colour."""
    return Markup('<span class="chip {}">{}</span>').format(style, name)


def served(expert: Any) -> str:
    """Whose samples a row is of: an expert's by its number, the baseline's, or all."""
    if expert == "all":
        return "All"
    return chip(RUNS[expert].title, expert) if expert == BASELINE else chip(f"Expert {expert}", f"e{expert}")


@cache
def environment() -> Environment:
    """The templates of all pages."""
    pages = Environment(
        loader=PackageLoader("atoll.report"),
        # Captions, names of hosts and settings come from elsewhere: nothing is markup unless it says so.
        autoescape=True,
        # A misspelled name would otherwise be an empty place on a page that nobody reads again.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    formats = {
        "whole": whole,
        "decimals": decimals,
        "significant": text.round_sig,
        "ratio": text.ratio,
        "percent": text.percent,
        "flops": text.flops,
        "time": text.duration,
        "size": text.size,
        "model": palette.model_name,
    }
    pages.filters |= formats
    # Formats are functions too, so that a table's columns can name them.
    pages.globals |= {"write": formats, "cell": cell, "chip": chip, "served": served}
    pages.globals["frame"] = (charts.LEFT, charts.RIGHT, charts.TOP, charts.BOTTOM)
    return pages
