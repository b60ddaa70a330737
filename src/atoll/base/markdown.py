"""Markdown from templates: every value is escaped as it is written, unless it is Markdown already."""

import json
import re
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from atoll.base.text import count

_SPECIAL = re.compile(r"([\\`*_\[\]|~])")
HUB_LICENCE = re.compile(
    r"mit|unlicense|unknown|apache-2\.0|mpl-2\.0|afl-3\.0|(a|l)?gpl-3\.0|gpl-2\.0|bsd(-[23]-clause)?|cc0-1\.0|pddl"
    r"|cc-by(-nc|-nc-sa)?-[234]\.0|cc-by-sa-[34]\.0|cc-by(-nc)?-nd-4\.0|odbl|odc-by|ofl-1\.1|cdla-permissive-2\.0"
    r"|openrail(\+\+)?|creativeml-openrail-m"
)
"""Licences by the hub's names; it refuses a card with any other."""


class Markdown(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escape(value: Any) -> str:
    """A value as one line of text that Markdown, HTML and tables show as it is."""
    if isinstance(value, Markdown):
        return value
    line = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    # At the start of a line these would begin a heading or a list.
    return re.sub(r"^([#+-])", r"\\\1", _SPECIAL.sub(r"\\\1", line))


def code(value: Any) -> Markdown:
    """A value between backticks, which it cannot leave."""
    return Markdown("`" + " ".join(str(value).replace("`", "'").split()) + "`")


def quoted(value: Any) -> Markdown:
    """A value as a string of JSON, which Python and YAML read too."""
    return Markdown(json.dumps(value))


def licence(value: Any) -> Markdown:
    """A licence in the hub's metadata: one that the hub knows, or `other` with this name."""
    name = re.sub(r"[^a-z0-9.+]+", "-", str(value or "unknown").lower()).strip("-")
    return Markdown(
        f"license: {name}" if HUB_LICENCE.fullmatch(name) else f"license: other\nlicense_name: {name}"
    )


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
    environment.filters |= {"code": code, "licence": licence, "quoted": quoted, "short": count}
    environment.filters["markdown"] = Markdown
    return environment.get_template(template).render(**values)
