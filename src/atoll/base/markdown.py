"""Markdown from templates: every value is escaped as it is written, unless it is Markdown already."""

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
_PLAIN = re.compile(r"[A-Za-z][\w.+-]*")


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escape(value: Any) -> str:
    """A value as one line of text that Markdown, HTML and tables show as it is."""
    if isinstance(value, Markdown):
        return value
    line = " ".join(str(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # At the start of a line these would begin a heading or a list.
    return re.sub(r"^([#+-])", r"\\\1", _SPECIAL.sub(r"\\\1", line))


def code(value: Any) -> Markdown:
    """A value between backticks, which it cannot leave."""
    return Markdown("`" + " ".join(str(value).replace("`", "'").split()) + "`")


def quoted(value: Any) -> Markdown:
    """A value as a string of JSON, which Python and YAML read too."""
    return Markdown(json.dumps(value))


def metadata(value: Any) -> Markdown:
    """A value of a line of YAML: a plain word as it is, all else quoted."""
    return Markdown(value) if _PLAIN.fullmatch(str(value)) else quoted(str(value))


def table(rows: Sequence[Sequence[Any]], titles: Sequence[str]) -> Markdown:
    """A table of Markdown, its cells escaped."""
    lines = [titles, [Markdown("---")] * len(titles), *rows]
    return Markdown("\n".join("| " + " | ".join(map(escape, line)) + " |" for line in lines))


def render(template: str, *packages: str, **values: Any) -> str:
    """Text of a template; `packages` are searched for it and for those that it extends, in this order."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        finalize=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": code, "metadata": metadata, "quoted": quoted, "table": table}
    environment.filters["markdown"] = Markdown
    return environment.get_template(template).render(**values)
